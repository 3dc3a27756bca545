"""The environment with a real BM25 index, and with retrievers that fail as servers do."""

import asyncio
import time

import pytest

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import ConfigError, EnvironmentConfig, RetrievalConfig
from megatron_stppo.environments.base import ToolAway
from megatron_stppo.environments.retrieval import BM25Retriever, Document, RetrievalError, RetrievalTimeout
from megatron_stppo.environments.search import SearchEnvironment, factory, neutralise, render
from tests.environments.playing import played

TASK = Task("t", (Message("user", "capital of France? <answer>Paris</answer>"),), ("Paris",), "train", 0)


@pytest.fixture
def make(index):
    return factory(EnvironmentConfig(max_turns=2, retrieval=RetrievalConfig(index=index, topk=1)))


class Failing:
    """A retriever that raises, or sleeps, and never answers."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    async def search(self, query, topk):
        if self.error:
            raise self.error
        await asyncio.sleep(60)

    async def close(self):
        pass


def play(environment, *actions):
    return played(environment, TASK, *actions)


def test_a_search_is_answered_with_its_document_and_the_right_answer_scores_one(make):
    first, last = play(make(), "<search> France</search>", "<answer> Paris</answer>")
    document = "Doc 1(Title: France) France: capital Paris, largest neighbour Spain."
    assert first.observation == f"\n\n<information>{document}</information>\n\n"
    assert (first.reward, first.done, first.outcome) == (0.0, False, None)
    assert first.valid and first.tool_calls == 1
    assert (last.reward, last.done, last.outcome, last.detail) == (1.0, True, "ok", "Paris")


def test_a_wrong_answer_scores_nothing(make):
    (last,) = play(make(), "<answer>Madrid</answer>")
    assert (last.reward, last.done, last.outcome, last.tool_calls) == (0.0, True, "wrong", 0)


def test_an_invalid_action_is_corrected_and_uses_up_a_turn(make):
    first, second, last = play(
        make(), "no tag", "<search>Gabon</search>", "<answer>Paris</answer>", "unreached"
    )
    assert "invalid" in first.observation and not first.valid and not first.done and not first.tool_calls
    assert second.valid and "Libreville" in second.observation
    assert last.reward == 1.0


def test_a_search_while_the_tool_is_unavailable_uses_up_no_turn(make):
    environment = make()
    retriever, environment._retriever = environment._retriever, Failing(ToolAway("down"))

    async def episode():
        await environment.reset(TASK, 0)
        for _ in range(9):
            with pytest.raises(ToolAway):
                await environment.step("<search>France</search>")
        environment._retriever = retriever
        return [await environment.step("<search>France</search>") for _ in range(3)]

    assert [result.outcome for result in asyncio.run(episode())] == [None, None, "truncated"]


def test_after_max_turns_the_last_generation_cannot_search(make):
    results = play(make(), *["<search>France</search>"] * 5)
    assert len(results) == 3
    assert [r.tool_calls for r in results] == [1, 1, 0]
    assert (results[-1].done, results[-1].outcome, results[-1].reward) == (True, "truncated", 0.0)


def test_a_query_without_a_known_word_finds_nothing(make):
    (first,) = play(make(), "<search>zzz</search>")
    assert first.observation == "\n\n<information>Nothing found.</information>\n\n"


def test_reset_starts_over(make):
    environment = make()
    play(environment, *["no tag"] * 3)
    assert not play(environment, "no tag")[0].done


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RetrievalError("status 500\x1b[2J\nx"), "error"),
        (RetrievalTimeout("no answer"), "timeout"),
        (None, "timeout"),
    ],
)
def test_a_failing_retriever_is_an_outcome_and_not_a_wrong_answer(error, outcome):
    environment = SearchEnvironment(Failing(error), EnvironmentConfig(deadline=0.05))
    (last,) = play(environment, "<search>France</search>")
    assert (last.done, last.outcome, last.reward, last.tool_calls) == (True, outcome, 0.0, 1)
    assert "\x1b" not in last.detail and "\n" not in last.detail and last.detail.startswith("retrieval: ")


def test_a_bug_in_a_retriever_is_not_swallowed():
    environment = SearchEnvironment(Failing(ZeroDivisionError()), EnvironmentConfig())
    with pytest.raises(ZeroDivisionError):
        play(environment, "<search>France</search>")


def test_tags_in_documents_are_neutralised_and_other_text_stays():
    assert neutralise("a < b, <b>, <answers>") == "a < b, <b>, <answers>"
    assert neutralise("</information>< / Search ><ANSWER x>") == "‹/information>‹ / Search >‹ANSWER x>"
    assert neutralise("<|im_end|>\x1b[2J\x00") == "<|im_end|> [2J "


def test_neutralising_is_linear():
    start = time.process_time()
    neutralise("<" + " " * 10**6)
    neutralise("< " * 10**6)
    assert time.process_time() - start < 2.0


def test_documents_share_the_observation_limit():
    documents = [Document("", "t" * 10**6, "x" * 10**6, 1.0)] * 2
    assert render(documents, 100).count("x") == 100
    assert len(render(documents, 100)) < 700


@pytest.mark.parametrize(
    ("retrieval", "named"),
    [
        ({"kind": "bm25"}, "environment.retrieval.index"),
        ({"kind": "bm25", "index": "nowhere/index"}, "nowhere/index"),
        ({"kind": "http"}, "environment.retrieval.url"),
        ({"kind": "http", "url": "http://127.0.0.1:9/retrieve"}, "http://127.0.0.1:9/retrieve"),
        ({"kind": "http", "url": "not a url"}, "not a url"),
        ({"kind": "http", "url": "http://127.0.0.1:9", "token_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE"),
    ],
)
def test_an_unusable_retriever_gives_a_one_line_error(retrieval, named):
    with pytest.raises(ConfigError) as caught:
        factory(EnvironmentConfig(retrieval=RetrievalConfig(**retrieval)))
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_an_index_gives_a_one_line_error(tmp_path):
    (tmp_path / "params.index.json").write_text("{}")
    (tmp_path / "vocab.index.json").write_text("[")
    with pytest.raises(ConfigError, match="no BM25 index"):
        BM25Retriever(tmp_path)


@pytest.mark.parametrize("corpus", [[], [{"id": "0", "contents": " ..."}]])
def test_an_empty_corpus_is_refused(tmp_path, corpus):
    with pytest.raises(ConfigError, match="holds no document"):
        BM25Retriever.build(corpus, tmp_path / "index")
    assert not (tmp_path / "index").exists()
