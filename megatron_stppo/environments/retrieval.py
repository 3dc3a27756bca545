"""Retrievers: an embedded BM25 index, and a client for a /retrieve server in Search-R1's format.

`await retriever.search(query, topk)` returns documents, best first, or raises RetrievalError. The client
raises ToolAway if the server does not answer any request.
"""

import asyncio
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import httpx

from megatron_stppo.config import ConfigError
from megatron_stppo.data.values import jsonl_rows
from megatron_stppo.environments.base import ToolAway

# If JAX is installed, bm25s calls it while it is imported, and JAX then takes three quarters of the GPU's
# memory. An entry of None makes `import jax` fail, and bm25s uses numpy.
_jax = sys.modules.get("jax")
sys.modules["jax"] = None  # type: ignore[assignment]
import bm25s  # noqa: E402

if _jax is None:
    del sys.modules["jax"]
else:
    sys.modules["jax"] = _jax

MAX_QUERY = 1_000  # characters of a query; the rest is ignored
MAX_RESPONSE = 4 * 1024 * 1024  # bytes of a server's answer; longer answers are refused
BACKOFF = 0.1  # seconds, the longest wait before the first retry; doubles each time, with full jitter
SEARCH, PROBE = 0.6, 0.3  # shares of the environment's deadline for a search and for the probe after it
_WORD = re.compile(r"\w+")


class RetrievalError(RuntimeError):
    """The retriever failed; the episode's outcome is `error`.

    answered: whether the server has answered the query, so that another attempt would fail too.
    """

    def __init__(self, message: str, answered: bool = True) -> None:
        super().__init__(message)
        self.answered = answered


class RetrievalTimeout(RetrievalError):
    """The retriever did not answer in time; the episode's outcome is `timeout`."""


@dataclass(frozen=True)
class Document:
    """A retrieved document. Example: Document("17", "Gabon", "The capital of Gabon is Libreville.", 3.2)."""

    id: str
    title: str
    text: str
    score: float

    @classmethod
    def parse(cls, id: str, contents: str, score: float) -> Self:
        """Return the document for `contents`, which is '"Title"\\ntext' as in the wiki-18 corpus.

        Contents without a line break are all text.
        """
        title, line, text = contents.partition("\n")
        return cls(id, title.strip().strip('"'), text, score) if line else cls(id, "", contents, score)


class Retriever(Protocol):
    async def search(self, query: str, topk: int) -> list[Document]: ...


def words(text: str) -> list[str]:
    """Return the words of a text in lower case.

    Example: words("Port-au-Prince") == ["port", "au", "prince"].
    """
    return _WORD.findall(text.lower())


def read_corpus(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows {"id", "contents"} of a .jsonl corpus.

    Raises ConfigError, which names the file, the row (counted from 1) and the remedy.
    """
    for where, row in jsonl_rows(path, "corpus"):
        if not isinstance(row, dict) or not isinstance(row.get("contents"), str) or "id" not in row:
            raise ConfigError(f"{where}: id is missing, or contents are not text; give both")
        yield row


class BM25Retriever:
    """BM25 over a memory-mapped index folder. The ranks of one node share its pages."""

    def __init__(self, folder: Path) -> None:
        """Open the index in `folder`. Raises ConfigError if there is no index or no document in it."""
        try:
            self._index = bm25s.BM25.load(folder, mmap=True, load_corpus=True)
            documents = len(self._index.corpus)
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise ConfigError(
                f"environment.retrieval.index={folder}: no BM25 index there; write one with "
                f"`megatron-stppo build-index CORPUS.jsonl {folder}`"
            ) from None
        if documents == 0:
            raise ConfigError(
                f"environment.retrieval.index={folder}: holds no document; write it again with "
                f"`megatron-stppo build-index CORPUS.jsonl {folder}`"
            )
        self._documents = documents

    @staticmethod
    def build(rows: Iterable[dict[str, str]], folder: Path) -> None:
        """Write an index of the rows {"id", "contents"} to `folder`.

        Raises ConfigError for a corpus without words and for a folder that cannot be written.
        """
        corpus = [{"id": str(row["id"]), "contents": str(row["contents"])} for row in rows]
        tokens = [words(row["contents"]) for row in corpus]
        if not any(tokens):
            raise ConfigError(
                f"corpus for {folder}: holds no document; give rows with an id and non-empty contents"
            )
        index = bm25s.BM25(backend="numpy")
        index.index(tokens, show_progress=False)
        try:
            index.save(folder, corpus=corpus, show_progress=False)
        except OSError as error:
            raise ConfigError(
                f"index={folder}: cannot be written ({error.strerror}); name another folder"
            ) from None

    def __len__(self) -> int:
        return self._documents

    def lookup(self, query: str, topk: int) -> list[Document]:
        """Return documents that share a word with the query, best first.

        Of equal scores the later one is first.
        """
        tokens = words(query[:MAX_QUERY])
        if not any(token in self._index.vocab_dict for token in tokens):
            return []
        rows, scores = self._index.retrieve(
            [tokens],
            k=min(topk, self._documents),
            show_progress=False,
            return_as="tuple",
            backend_selection="numpy",
        )
        return [
            Document.parse(row["id"], row["contents"], float(score))
            for row, score in zip(rows[0], scores[0], strict=True)
            if score > 0
        ]

    async def search(self, query: str, topk: int) -> list[Document]:
        return await asyncio.to_thread(self.lookup, query, topk)


class HttpRetriever:
    """Client of POST /retrieve: {"queries": [..], "topk", "return_scores"} -> {"result": [[..]]}.

    One attempt takes at most `timeout` seconds in all. After a connection failure, a timeout or a status of
    429 or 5xx, the request is repeated up to `retries` times. If all attempts fail, a probe with another
    query is sent. If the server answers the probe, only this query's episode fails (RetrievalError); if it
    does not, the server is unavailable (ToolAway). Search and probe together take at most `deadline` seconds.
    Proxies set in environment variables are ignored and redirects are refused, so that the token is sent to
    `url` only.
    """

    def __init__(
        self, url: str, timeout: float, retries: int, token: str | None = None, deadline: float = 30.0
    ) -> None:
        self._url, self._timeout, self._retries, self._deadline = url, timeout, retries, deadline
        # No compressed answers are requested, because a small one could unpack to gigabytes.
        self._headers = {"Accept-Encoding": "identity"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._clients: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}

    async def search(self, query: str, topk: int) -> list[Document]:
        try:
            return await self._ask(query, topk, self._retries, SEARCH)
        except RetrievalError as error:
            if error.answered:
                raise
            failure = error
        try:
            await self._ask("probe", 1, 0, PROBE)
        except RetrievalError as error:
            if not error.answered:
                raise ToolAway(f"retriever {self._url}: {failure}") from None
        raise failure

    async def _ask(self, query: str, topk: int, retries: int, share: float) -> list[Document]:
        """Return the documents. Raises RetrievalError after all retries, or after `share` of the deadline."""
        body = {"queries": [query[:MAX_QUERY]], "topk": topk, "return_scores": True}
        failure: RetrievalError = RetrievalTimeout(f"no answer within {share * self._deadline:g} s", False)
        with suppress(TimeoutError):
            async with asyncio.timeout(share * self._deadline):
                for attempt in range(retries + 1):
                    try:
                        async with asyncio.timeout(self._timeout):
                            return read_result(await self._post(body))[:topk]
                    except TimeoutError:
                        failure = RetrievalTimeout(f"no answer within {self._timeout:g} s", False)
                    except RetrievalError as error:
                        if error.answered:
                            raise
                        failure = error
                    if attempt < retries:
                        await asyncio.sleep(BACKOFF * 2**attempt * random.random())
        raise failure

    async def close(self) -> None:
        """Close the connections of the running event loop. The next search opens new ones."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    def _client(self) -> httpx.AsyncClient:
        """Return the client of the running event loop. Connections of closed loops are dropped."""
        loop = asyncio.get_running_loop()
        self._clients = {known: client for known, client in self._clients.items() if not known.is_closed()}
        if loop not in self._clients:
            # By default httpx makes 100 connections, and other searches wait for one until their timeout.
            # environment.concurrency limits the number of searches.
            self._clients[loop] = httpx.AsyncClient(
                headers=self._headers,
                timeout=self._timeout,
                limits=httpx.Limits(max_connections=None),
                trust_env=False,
                follow_redirects=False,
            )
        return self._clients[loop]

    async def _post(self, body: dict[str, Any]) -> bytes:
        received = bytearray()
        try:
            async with self._client().stream("POST", self._url, json=body) as response:
                if response.status_code != 200:
                    busy = response.status_code == 429 or response.status_code >= 500
                    raise RetrievalError(f"status {response.status_code}", answered=not busy)
                async for chunk in response.aiter_raw(65_536):
                    received += chunk
                    if len(received) > MAX_RESPONSE:
                        raise RetrievalError(f"answer exceeds {MAX_RESPONSE} bytes")
        except httpx.UnsupportedProtocol as error:
            raise RetrievalError(str(error)) from None
        except httpx.TransportError as error:
            raise RetrievalError(f"{type(error).__name__}: {error}", answered=False) from None
        return bytes(received)


def read_result(raw: bytes) -> list[Document]:
    """Return the documents of the first query.

    An entry is {"document", "score"}, or the document itself if the answer has no scores. Raises
    RetrievalError for any other format.
    """
    try:
        entries: Sequence[Any] = json.loads(raw)["result"][0]
        return [_document(entry) for entry in entries]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise RetrievalError('answer is not {"result": [[{"document": {"id", "contents"}}]]}') from None


def _document(entry: dict[str, Any]) -> Document:
    document = entry.get("document", entry)
    contents = document["contents"]
    if not isinstance(contents, str):
        raise TypeError("contents")
    return Document.parse(str(document.get("id", "")), contents, float(entry.get("score", 0.0)))
