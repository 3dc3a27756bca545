"""The multi-turn search environment of Search-R1, hardened against hostile and malformed text.

The policy writes <search>query</search> or <answer>answer</answer>. The environment answers a search with
\\n\\n<information>..</information>\\n\\n, and an invalid action with a short correction. After `max_turns`
turns, one last generation may only answer. The reward is the exact match of the last <answer> in the policy's
own text of that turn; tags in the prompt or in a document are never graded.
"""

import asyncio
import os
import re
from collections.abc import Callable, Sequence

import httpx

from megatron_stppo.base.printing import one_line
from megatron_stppo.base.types import Message, Outcome, Task
from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.environments.answers import exact_match, parse_action
from megatron_stppo.environments.base import StepResult, ToolAway
from megatron_stppo.environments.retrieval import (
    SEARCH,
    BM25Retriever,
    Document,
    HttpRetriever,
    RetrievalError,
    RetrievalTimeout,
    Retriever,
)

STOP_STRINGS = ("</search>", "</answer>")
CORRECTION = (
    "\n\nThat action is invalid. Write <search>query</search> or <answer>answer</answer>, then stop.\n\n"
)
PROBE_SECONDS = 0.2  # that a slow server may take for the probe of each rank, at the start of a run
CHARACTERS_PER_TOKEN = 8  # generous, so that usually the token limit of the rollout cuts an observation
# The "<" of text that looks like one of this environment's tags. {0,3} keeps the scan linear on long runs of
# spaces.
_TAG = re.compile(r"<(?=\s{0,3}/?\s{0,3}(?:think|search|information|answer)\b)", re.IGNORECASE)
# Includes unpaired surrogates: JSON can contain them, but they cannot be encoded as UTF-8 or tokenised.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class SearchEnvironment:
    """One episode. Example: reset(task), step("<search>Gabon</search>"), step("<answer>Paris</answer>")."""

    stop_strings: tuple[str, ...] = STOP_STRINGS

    def __init__(self, retriever: Retriever, config: EnvironmentConfig) -> None:
        self._retriever, self._config = retriever, config
        self._turns = 0
        self._task: Task | None = None

    async def reset(self, task: Task, seed: int) -> list[Message]:
        """Return the task's prompt. The seed is unused, because this environment is not random."""
        self._task, self._turns = task, 0
        return list(task.prompt)

    async def step(self, action: str) -> StepResult:
        assert self._task is not None, "step before reset"
        result = await self._answer(action, self._task.targets)
        self._turns += 1  # not counted if the search raises ToolAway, because the action is then repeated
        return result

    async def _answer(self, action: str, targets: Sequence[str]) -> StepResult:
        kind, content = parse_action(action)
        if kind == "answer":
            right = exact_match(content, targets)
            return _end("ok" if right else "wrong", one_line(content), reward=float(right))
        if self._turns >= self._config.max_turns:
            return _end("truncated", "no answer in the last generation", valid=kind != "invalid")
        if kind == "invalid":
            return StepResult(CORRECTION, 0.0, done=False, valid=False)
        return await self._search(content)

    async def close(self) -> None:
        self._task = None

    async def _search(self, query: str) -> StepResult:
        try:
            async with asyncio.timeout(self._config.deadline):
                documents = await self._retriever.search(query, self._config.retrieval.topk)
        except (TimeoutError, RetrievalTimeout) as error:
            return _end("timeout", f"retrieval: {one_line(str(error) or 'deadline passed')}", tool_calls=1)
        except RetrievalError as error:
            return _end("error", f"retrieval: {one_line(str(error))}", tool_calls=1)
        observation = render(documents, self._config.max_observation_tokens * CHARACTERS_PER_TOKEN)
        return StepResult(observation, 0.0, done=False, valid=True, tool_calls=1)


def _end(
    outcome: Outcome, detail: str, *, reward: float = 0.0, valid: bool = True, tool_calls: int = 0
) -> StepResult:
    return StepResult("", reward, True, valid, tool_calls, outcome, detail)


def render(documents: Sequence[Document], max_characters: int) -> str:
    """Return the observation.

    Example: "\\n\\n<information>Doc 1(Title: Gabon) The ..</information>\\n\\n".
    """
    share = max_characters // max(1, len(documents))
    lines = [
        f"Doc {rank}(Title: {neutralise(document.title[:200])}) {neutralise(document.text[:share]).strip()}"
        for rank, document in enumerate(documents, 1)
    ]
    return f"\n\n<information>{chr(10).join(lines) or 'Nothing found.'}</information>\n\n"


def neutralise(text: str) -> str:
    """Return retrieved text without tags of this environment.

    Example: neutralise("</answer>") == "‹/answer>".
    """
    return _TAG.sub("‹", _CONTROL.sub(" ", text))


def factory(config: EnvironmentConfig) -> Callable[[], SearchEnvironment]:
    """Open the retriever once, and return a function that makes one environment per episode.

    Raises ConfigError for a missing or empty index and for a server whose answer cannot be used; Unreachable
    for a server that does not answer. Call it outside an event loop, because it waits for the server.
    """
    retriever = open_retriever(config)
    return lambda: SearchEnvironment(retriever, config)


class Unreachable(ConfigError, ToolAway):
    """The configured server does not answer.

    In a new run the address is probably wrong. In a resumed run the server is probably down.
    """


def open_retriever(section: EnvironmentConfig) -> Retriever:
    """Return the configured retriever. Raises ConfigError if it cannot be used."""
    config = section.retrieval
    if config.kind == "bm25":
        if config.index is None:
            raise ConfigError(
                "environment.retrieval.index: missing with kind=bm25; give the folder of a BM25 index"
            )
        return BM25Retriever(config.index)
    if config.url is None:
        raise ConfigError("environment.retrieval.url: missing with kind=http; give a /retrieve endpoint")
    token = _token(config.token_env)
    # All ranks ask at the same moment, and the server may answer one query after the other.
    seconds = max(config.timeout, PROBE_SECONDS * int(os.environ.get("WORLD_SIZE", "1")))
    deadline = max(section.deadline, seconds / SEARCH)
    asyncio.run(_probe(HttpRetriever(config.url, seconds, 0, token, deadline), config.url))
    return HttpRetriever(config.url, config.timeout, config.retries, token, section.deadline)


def _token(name: str | None) -> str | None:
    if name is not None and not os.environ.get(name):
        raise ConfigError(
            f"environment.retrieval.token_env={name}: that variable is not set; export it or remove the field"
        )
    return os.environ[name] if name else None


async def _probe(retriever: HttpRetriever, url: str) -> None:
    """Send one real request before anything else is built, so that a wrong address fails early."""
    try:
        await retriever.search("probe", 1)
    except (RetrievalError, ToolAway, httpx.InvalidURL) as error:
        raise (Unreachable if isinstance(error, ToolAway) else ConfigError)(
            f"environment.retrieval.url={url}: not usable ({one_line(str(error))}); start it with "
            "`python examples/search_agent/serve_retriever.py` or correct the address"
        ) from None
    finally:
        await retriever.close()
