"""The quickstart's builder at a small size: real facts, disjoint entities, answerable questions."""

import asyncio
import hashlib
import json
import sys
from pathlib import Path

import pytest

from megatron_stppo.config import EnvironmentConfig, RetrievalConfig
from megatron_stppo.data.tasks import read
from megatron_stppo.environments.search import factory

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))
import build
import facts
import questions
import trajectories

sys.path.pop(0)

TOKENS = 20_000
MODEL = Path(build.__file__).with_name("model")
DIGEST = "488472dfb760401728a603dd96d0c7549a4ec4e7c9be09dd981448afe395b3b8"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart") / "data"
    build.main(["--output", str(folder), "--tokens", str(TOKENS)])
    return folder


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_same_seed_gives_the_same_files_and_another_seed_gives_others(built, tmp_path):
    build.main(["--output", str(tmp_path / "again"), "--tokens", str(TOKENS)])
    build.main(["--output", str(tmp_path / "other"), "--tokens", str(TOKENS), "--seed", "1"])
    first, again, other = digests(built), digests(tmp_path / "again"), digests(tmp_path / "other")
    assert first == again
    assert {name for name in first if name.endswith(("l", "s")) and first[name] == other[name]} == {
        "corpus.jsonl",
        "index/corpus.jsonl",
    }


def test_a_second_build_does_not_change_the_folder(built, capsys):
    before = {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    build.main(["--output", str(built), "--tokens", str(TOKENS)])
    assert "already built" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in built.rglob("*")}


def test_the_model_of_the_repository_has_this_digest_and_the_tokenizer_of_the_built_files(built):
    """`make quickstart-model` makes another model; then this digest changes with it."""
    weights = MODEL / "model.safetensors"
    assert weights.stat().st_size < 1.5e6
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == DIGEST
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (MODEL / name).read_bytes() == (built / "model" / name).read_bytes()


def test_the_three_sets_of_entities_are_disjoint_and_cover_all():
    known = facts.entities()
    parts = questions.split(known, 0)
    names = [entity.name for part in parts.values() for entity in part]
    assert sorted(names) == sorted(entity.name for entity in known)
    assert len(set(names)) == len(names)


def test_no_demonstration_asks_about_an_entity_of_the_tasks(built):
    known = {entity.name: entity for entity in facts.entities()}
    tasks = rows(built / "train.jsonl") + rows(built / "evaluate.jsonl")
    texts = {task["prompt"][0]["content"] for task in tasks}
    asked = {name for name, entity in known.items() if texts & {q.text for q in questions.one_hop(entity)}}
    demonstrated = {
        segment["text"] for row in rows(built / "demonstrations.jsonl") for segment in row["segments"]
    }
    assert len(asked) > 150
    hops = [questions.Hop(known[name], fact) for name in asked for fact in known[name].facts]
    assert not {f"<search> {hop.query}</search>" for hop in hops} & demonstrated


def test_facts_are_those_of_the_packages():
    known = {entity.name: entity for entity in facts.entities()}
    assert known["Gabon"].value("capital") == "Libreville"
    assert known["Gabon"].value("largest neighbour") == "Cameroon"
    assert known["Gallium"].value("discovery place") == "France"
    assert known["Lesotho"].passage(known["Lesotho"].facts[0]) == "The capital of Lesotho is Maseru."
    assert "Burma" not in known


def test_nine_in_ten_questions_are_answered_by_searching_for_the_names_they_lead_to(built):
    """An oracle plays the real environment: its score is the maximum for a policy that searches."""
    known = {entity.name: entity for entity in facts.entities()}
    path = {
        question.text: question
        for entity in known.values()
        for question in questions.one_hop(entity) + questions.two_hop(entity, known)
    }
    config = EnvironmentConfig(max_turns=3, retrieval=RetrievalConfig(index=built / "index", topk=1))
    environment = factory(config)()

    async def play(task):
        (message,) = await environment.reset(task, 0)
        question = path[message.content]
        for hop in question.hops:
            observation = (await environment.step(f"<search> {hop.query}</search>")).observation
        if question.answer.value not in observation:
            return 0.0
        return (await environment.step(f"<answer> {question.answer.value}</answer>")).reward

    async def play_all():
        return [await play(task) for task in read(built / "evaluate.jsonl")]

    scores = asyncio.run(play_all())
    assert sum(scores) / len(scores) >= 0.9


def test_the_stages_and_shares_are_those_of_the_recipe(built):
    demonstrations = rows(built / "demonstrations.jsonl")
    stages = [row["stage"] for row in demonstrations]
    assert stages == sorted(stages, key=list(trajectories.STAGES).index)
    policy = [row for row in demonstrations if row["stage"] == "policy"]
    guesses = [row for row in policy if len(row["segments"]) == 1]
    assert len(guesses) / len(policy) == pytest.approx(trajectories.GUESS_SHARE, abs=0.15)
    assert all(len(row["segments"]) > 1 for row in demonstrations if row["stage"] == "skill")


def test_made_up_names_are_not_those_of_entities(built):
    known = facts.entities()
    queries = {questions.Hop(entity, fact).query for entity in known for fact in entity.facts}
    searches = [
        row["segments"][0]["text"][len("<search> ") : -len("</search>")]
        for row in rows(built / "demonstrations.jsonl")
        if len(row["segments"]) > 1
    ]
    made_up = sum(query not in queries for query in searches) / len(searches)
    assert made_up == pytest.approx(trajectories.MADE_UP_SHARE, abs=0.1)
