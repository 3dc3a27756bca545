"""The medical example's builder at a small size: real text, disjoint entries, questions a search answers."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.config.file import load
from megatron_stppo.data.demonstrations import Row, encode
from megatron_stppo.data.tasks import read
from megatron_stppo.environments.search import factory

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))
import build_choice
import entries
import extract

del sys.path[0]

EXAMPLE = Path(__file__).parent
PARTS = ("train", "evaluate")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("medical") / "data"
    build_choice.main(["--output", str(folder), "--tokens", "20000"])
    return folder


@pytest.fixture(scope="module")
def config(built):
    return load(EXAMPLE / "config.yaml", [f"environment.retrieval.index={built / 'index'}"])


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def options(question):
    return [line.partition(") ")[2] for line in question.splitlines()[1:]]


def test_an_entry_agrees_with_wordnet(tmp_path):
    """Three lines of data.noun: a root, a kind of it, and a kind of that one with an example of use."""
    path = tmp_path / "data.noun"
    path.write_text(
        "  1 This software and database is being provided to you, the LICENSEE, by  \n"
        "14299637 26 n 01 symptom 0 001 ~ 14320702 n 0000 | any sensation or change in bodily function  \n"
        "14320702 26 n 02 head_ache 0 cephalalgia 0 002 @ 14299637 n 0000 ~ 14324274 n 0000 | "
        'pain in the head (of any cause); "he had a bad head ache"  \n'
        "14324274 26 n 01 fish_ache 0 001 @ 14320702 n 0000 | an ache that fish give  \n"
    )
    root = extract.ROOTS["symptom"]
    nouns = extract.read(path)
    assert extract.below(root, nouns) == {"14320702", "14324274"}
    assert list(extract.entries(nouns)) == [
        {
            "id": "14320702",
            "category": "symptom",
            "name": "head ache",
            "gloss": "pain in the head (of any cause)",
        }
    ]


def test_the_bundled_entries_agree_with_wordnet_and_include_its_notice():
    known = {entry.name: entry for entry in entries.entries()}
    assert len(known) == len(entries.entries()) > 1500
    assert known["retinitis"] == entries.Entry("symptom", "retinitis", "inflammation of the retina")
    assert known["estazolam"].query == "a frequently prescribed sleeping pill"
    notice = (EXAMPLE / "LICENSE.wordnet").read_text()
    assert "WordNet 3.0 Copyright 2006 by Princeton University." in notice


def test_no_held_out_term_is_asked_or_offered_in_training(built):
    asked = {name: [row["prompt"][0]["content"] for row in rows(built / f"{name}.jsonl")] for name in PARTS}
    offered = {name: {term for text in texts for term in options(text)} for name, texts in asked.items()}
    real = {entry.name for entry in entries.entries()}
    shown = {
        term
        for row in rows(built / "demonstrations.jsonl")
        for term in options(row["prompt"][0]["content"])
        if term in real
    }
    assert len(offered["evaluate"]) > 200 and len(shown) > 100
    assert not offered["evaluate"] & offered["train"]
    assert not offered["evaluate"] & shown
    assert not offered["train"] & shown


def test_the_description_finds_the_right_option_and_its_position_is_uninformative(built, config):
    """An oracle plays the real environment. A fixed option is right in about a quarter of the questions."""
    environment = factory(config.environment)()
    tasks = read(built / "evaluate.jsonl")

    async def play(task):
        (message,) = await environment.reset(task, 0)
        description = message.content.splitlines()[0].removeprefix("Which term means ").rstrip("?")
        observation = (await environment.step(f"<search> {description}</search>")).observation
        found = [term for term in options(message.content) if f"(Title: {term})" in observation]
        return found, (await environment.step(f"<answer> {found[0]}</answer>")).reward

    async def play_all():
        return [await play(task) for task in tasks]

    played = asyncio.run(play_all())
    assert [(len(found), reward) for found, reward in played] == [(1, 1.0)] * len(tasks)
    places = [options(task.prompt[0].content).index(task.targets[0]) for task in tasks]
    for place in range(4):
        assert places.count(place) / len(places) == pytest.approx(0.25, abs=0.09)


def test_episodes_fit_into_the_configured_lengths(built, config):
    """Checks prompt, query, observation and answer of every question."""
    tokenizer = AutoTokenizer.from_pretrained(built / "model")
    known = {entry.name: entry for entry in entries.entries()}
    for name in PARTS:
        for row in rows(built / f"{name}.jsonl"):
            right = known[row["reward_model"]["ground_truth"]["target"][0]]
            texts = [f"<search> {right.query}</search>", build_choice.document(right)]
            segments = [{"text": text, "kind": "turn"} for text in texts]
            (ids,) = encode([Row(prompt=row["prompt"], segments=segments)], tokenizer)
            turn, observation = (len(tokenizer(text)["input_ids"]) for text in texts)
            assert len(ids) - turn - observation <= config.rollout.max_prompt_tokens
            assert turn <= config.rollout.max_turn_tokens
            assert observation <= config.environment.max_observation_tokens


def test_guesses_are_options_and_searches_copy_the_question(built):
    for row in rows(built / "demonstrations.jsonl"):
        question = row["prompt"][0]["content"]
        *search, answer = [segment["text"] for segment in row["segments"]]
        assert answer.removeprefix("<answer> ").removesuffix("</answer>") in options(question)
        if search:
            description = question.splitlines()[0].removeprefix("Which term means ").rstrip("?")
            assert search[0] == f"<search> {description}</search>"


def test_the_algorithm_is_st_ppo_without_a_setting_of_its_own(config):
    assert config.algorithm == AlgorithmConfig(preset="st_ppo")
