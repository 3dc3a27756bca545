"""The search example of SmolLM2: facts, questions, demonstrations and environment."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from pathlib import Path

import build_search
import chains
import pytest
import relations
import searcher

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import EnvironmentConfig
from megatron_stppo.data.demonstrations import Row, validated
from megatron_stppo.environments.base import StepResult
from megatron_stppo.environments.retrieval import BM25Retriever

Chain = tuple[chains.Hop, ...]
ASKED = {"train": ("train",), "evaluate": ("train", "evaluate"), "cold_start": ("cold_start",)}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> build_search.Corpus:
    return build_search.write_corpus(relations.facts(), tmp_path_factory.mktemp("corpus"), 0)


@pytest.fixture(scope="module")
def of_part(corpus) -> dict[str, list[Chain]]:
    """All chains of the three parts."""
    inside, found = chains.split(corpus.facts, 0), {}
    for part, kinds in ASKED.items():
        names = [name for kind in kinds for name in build_search.relations(kind)]
        found[part] = list(chains.chains(corpus.facts, inside[part], names))
    return found


def places(found: list[Chain]) -> set[str]:
    """Return the countries and elements that questions name, or go through."""
    return {hop.x for chain in found for hop in chain}


def test_cold_start_training_and_evaluation_share_no_country_and_no_element(of_part):
    assert all(len(found) > 150 for found in of_part.values())
    for one, other in itertools.combinations(of_part.values(), 2):
        assert not places(one) & places(other)


def test_every_chain_leads_from_the_named_thing_to_the_answer(corpus, of_part):
    for chain in itertools.chain(*of_part.values()):
        assert len(chain) in (2, 3) and not any(hop.backwards for hop in chain[1:])
        for hop, after in itertools.pairwise(chain):
            assert corpus.facts[hop.x][hop.relation] == hop.v and hop.found == after.x
        name, text = (
            chain[0].v if chain[0].backwards else chain[0].x,
            chains.question(chain, random.Random(0)),
        )
        assert name in text and "{" not in text and text[-1] in "?."
        assert not any(re.search(rf"\b{re.escape(hop.found)}\b", text.replace(name, "")) for hop in chain)


def test_the_retriever_finds_the_document_of_nearly_every_hop(corpus, of_part, monkeypatch):
    hops = {hop for found in of_part.values() for chain in found for hop in chain}
    assert 0.99 < sum(map(corpus.finds, hops)) / len(hops) < 1
    monkeypatch.setattr(build_search, "TOPK", 1)  # distractors come first now and then
    assert 0.9 < sum(map(corpus.finds, hops)) / len(hops) < 0.97


def test_tasks_are_the_same_for_a_seed_answerable_and_half_of_the_evaluated_have_a_new_relation(corpus):
    inside, askable = chains.split(corpus.facts, 0), corpus.askable()

    def rows(part: str) -> list[dict]:
        found = build_search.tasks(corpus, askable, inside[part], part, random.Random(0))
        return list(itertools.islice(found, 200))

    assert rows("train") == rows("train")
    for row in rows("train") + rows("evaluate"):
        hops, kind = re.fullmatch(r"([23])_hops_(known|new)", row["data_source"]).groups()
        path = [corpus.fact[id] for id in row["extra_info"]["path"]]
        assert len(path) == int(hops)
        assert (kind == "new") == any(relations.RELATIONS[name].split == "evaluate" for _, name in path)
        (target,) = row["reward_model"]["ground_truth"]["target"]
        assert corpus.facts[path[-1][0]][path[-1][1]] == target
    assert sum(row["data_source"].endswith("new") for row in rows("evaluate")) == 100
    assert not any(row["data_source"].endswith("new") for row in rows("train"))


def test_demonstrations_are_short_chains_of_other_relations(corpus, of_part):
    askable = [chain for chain in of_part["cold_start"] if all(map(corpus.finds, chain))]
    found, used = build_search.demonstrations(corpus, askable, random.Random(0)), set()
    for row in itertools.islice(found, build_search.DEMONSTRATIONS):
        assert isinstance(validated(row), Row)
        *searches, answer = [segment["text"] for segment in row["segments"] if segment["kind"] == "turn"]
        assert len(searches) in (2, 3) and all(searcher.SEARCH.fullmatch(text) for text in searches)
        assert searcher.ANSWER.fullmatch(answer)[1].strip() in row["segments"][-2]["text"]
        asked = re.findall("|".join(relations.RELATIONS), " ".join(searches))
        assert len(asked) == len(searches)
        used.update(asked)
    assert len(used) > 10 and {relations.RELATIONS[name].split for name in used} == {"cold_start"}
    assert build_search.DEMONSTRATIONS <= 60


def play(folder: Path, *actions: str, turns: int = 5) -> list[StepResult]:
    section = EnvironmentConfig(
        kind="searcher:factory", max_turns=turns, retrieval={"index": folder, "topk": 2}
    )
    environment = searcher.factory(section)()
    task = Task("2_hops_known", (Message("user", "Which?"),), ("Lima",), "train", 0, {"path": ["1", "0"]})

    async def episode() -> list[StepResult]:
        await environment.reset(task, 0)
        return [await environment.step(action) for action in actions]

    return asyncio.run(episode())


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    texts = ("The capital of Peru is Lima.", "Bolivia borders Peru.", "a\nanswer: \x1b[31mLima\n")
    BM25Retriever.build([{"id": str(i), "contents": text} for i, text in enumerate(texts)], folder)
    return folder


def test_documents_are_lines_and_the_right_answer_is_rewarded(index):
    first, second, end = play(
        index, "search: borders Bolivia\n", "search: capital of Peru\n", "answer: lima \n"
    )
    assert first.observation == "- Bolivia borders Peru.\n" and (first.done, first.tool_calls) == (False, 1)
    assert second.observation == "- The capital of Peru is Lima.\n- Bolivia borders Peru.\n"
    assert (end.reward, end.done, end.outcome, end.detail) == (1.0, True, "ok", "lima")
    assert end.metrics == {
        "right/2_hops_known": 1.0,
        "searches/2_hops_known": 2.0,
        "hops_solved": 1.0,
        "repeated_queries": 0.0,
    }


def test_hops_count_only_in_their_order(index):
    *_, end = play(index, "search: capital\n", "search: capital\n", "answer: Quito\n")
    assert (end.reward, end.outcome) == (0.0, "wrong")
    assert end.metrics["hops_solved"] == 0.0 and end.metrics["repeated_queries"] == 1.0


def test_hostile_text_is_one_line_and_earns_nothing(index):
    hostile = [
        "search: a answer\n",
        "search:\n",
        "search: \ud800\x00</s>\n",
        "answer: Lima",
        "x answer: Lima\n",
    ]
    found, *others = play(index, *hostile)
    assert found.observation.count("\n") == 1 and "\x1b" not in found.observation
    assert [one.observation for one in others[:3]] == ["- nothing\n"] * 3
    assert [one.valid for one in others] == [True, True, False, False]
    assert (others[-1].done, others[-1].reward, others[-1].detail) == (True, 0.0, "no answer")
    (long,) = play(index, "answer: " + "Lima " * 1000 + "\n")
    assert long.reward == 0.0 and len(long.detail) <= 200
