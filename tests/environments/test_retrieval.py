"""The client with real loopback servers that misbehave, and the server over real HTTP."""

import asyncio
import contextlib
import gzip
import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import uvicorn

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import ConfigError, EnvironmentConfig, RetrievalConfig
from megatron_stppo.environments.base import ToolAway
from megatron_stppo.environments.retrieval import (
    PROBE,
    SEARCH,
    BM25Retriever,
    Document,
    HttpRetriever,
    RetrievalError,
    RetrievalTimeout,
    read_corpus,
    read_result,
    words,
)
from megatron_stppo.environments.search import factory
from tests.environments.conftest import CORPUS
from tests.training.loop.canaries import Canary

SCRIPT = Path(__file__).parents[2] / "examples" / "search_agent" / "serve_retriever.py"
sys.path.insert(0, str(SCRIPT.parent))
from serve_retriever import create_app, listener_token, serve  # noqa: E402

del sys.path[0]

TASK = Task("t", (Message("user", "capital of Spain?"),), ("Madrid",), "train", 0)
ANSWER = json.dumps({"result": [[{"document": {"id": "7", "contents": '"T"\nx'}, "score": 2.5}]]}).encode()


def ask(*answers, timeout=5.0, retries=0, deadline=30.0):
    """Search at a server that answers request n with answers[n]. Return the result and the requests.

    An answer is bytes sent as they are, or a coroutine function of the stream writer.
    """

    seen = []

    async def answer_one(writer, request):
        seen.append(request)
        answer = answers[min(len(seen), len(answers)) - 1]
        await (answer(writer) if callable(answer) else write(writer, answer))

    async def search(client):
        try:
            return await client.search("q" * 5000, 3), seen
        except (RetrievalError, ToolAway) as error:
            return error, seen

    return asyncio.run(serving(answer_one, search, timeout, retries, "secret", deadline))


async def serving(answer, ask, *settings):
    """Return ask(client), with a server that calls answer(writer, (head, body)) for each request."""

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        request = head, json.loads(await reader.readexactly(length))
        with contextlib.suppress(ConnectionError):
            await answer(writer, request)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = HttpRetriever(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/retrieve", *settings)
    try:
        return await ask(client)
    finally:
        await client.close()
        server.close()


async def write(writer, answer):
    writer.write(answer)


def http(status, body=b"", header=b""):
    return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n%s\r\n%s" % (status, len(body), header, body)


def test_the_request_has_the_format_of_search_r1_and_the_token():
    found, [(head, body)] = ask(http(200, ANSWER))
    assert found == [Document("7", "T", "x", 2.5)]
    assert body == {"queries": ["q" * 1000], "topk": 3, "return_scores": True}
    assert b"POST /retrieve" in head and b"bearer secret" in head.lower()


def test_a_busy_server_is_retried_and_a_refusal_is_not():
    found, seen = ask(http(503), http(429), http(200, ANSWER), retries=2)
    assert found[0].id == "7" and len(seen) == 3
    error, seen = ask(http(401), retries=5)
    assert str(error) == "status 401" and len(seen) == 1


def test_retries_are_bounded_and_a_probe_then_detects_a_server_that_answers_no_request():
    error, seen = ask(http(500), retries=2)
    assert isinstance(error, ToolAway) and str(error).endswith("/retrieve: status 500")
    assert [body["queries"][0][:5] for _, body in seen] == ["qqqqq"] * 3 + ["probe"]


def test_a_query_that_fails_while_the_probe_succeeds_is_a_failure_of_the_episode():
    for answer in (http(200, ANSWER), http(401)):
        error, seen = ask(http(500), answer)
        assert type(error) is RetrievalError and str(error) == "status 500" and len(seen) == 2


def test_a_redirect_is_refused_because_it_would_reveal_the_token():
    error, seen = ask(http(307, header=b"Location: http://127.0.0.1:1/\r\n"))
    assert str(error) == "status 307" and len(seen) == 1


def test_a_silent_server_is_a_timeout():
    async def silent(writer):
        await asyncio.sleep(30)

    start = time.perf_counter()
    error, _ = ask(silent, http(200, ANSWER), timeout=1)
    assert isinstance(error, RetrievalTimeout) and time.perf_counter() - start < 10


def test_a_silent_server_counts_as_unavailable_before_the_environments_deadline():
    async def silent(writer):
        await asyncio.sleep(30)

    start = time.perf_counter()
    error, seen = ask(silent, timeout=20, retries=3, deadline=1)
    assert isinstance(error, ToolAway) and "no answer within 0.6 s" in str(error)
    assert SEARCH + PROBE < 1  # of the deadline
    assert time.perf_counter() - start < 10 and len(seen) == 2


def test_slowly_arriving_bytes_do_not_extend_the_timeout():
    async def drip(writer):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(600):
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.05)

    start = time.perf_counter()
    error, _ = ask(drip, http(200, ANSWER), timeout=1)  # the probe has this timeout too
    assert isinstance(error, RetrievalTimeout) and time.perf_counter() - start < 10


def test_a_gigabyte_is_refused_after_four_megabytes():
    sent = 0

    async def flood(writer):
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n")
        while sent < 2**30:
            writer.write(b"x" * 2**20)
            sent += 2**20
            await writer.drain()

    error, _ = ask(flood)
    assert "exceeds 4194304 bytes" in str(error)
    assert sent < 2**26


def test_a_compressed_answer_is_not_requested_and_not_unpacked():
    error, [(head, _)] = ask(http(200, gzip.compress(ANSWER), b"Content-Encoding: gzip\r\n"))
    assert b"accept-encoding: identity" in head.lower()
    assert "answer is not" in str(error)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"result": []}',
        b'{"result": [5]}',
        b'{"result": [[5]]}',
        b'{"result": [[{}]]}',
        b'{"result": [[{"document": {"contents": 5}}]]}',
        b'{"result": [[{"document": {"contents": "x"}, "score": "high"}]]}',
        b"[" * 100_000,
    ],
)
def test_an_answer_of_another_format_is_an_error(body):
    with pytest.raises(RetrievalError, match="answer is not"):
        read_result(body)
    error, _ = ask(http(200, body))
    assert "answer is not" in str(error)


def test_an_unreachable_server_counts_as_unavailable_after_the_retries():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    client = HttpRetriever(f"http://127.0.0.1:{port}/", 1.0, 1)
    with pytest.raises(ToolAway, match="ConnectError"):
        asyncio.run(client.search("q", 1))


def test_an_invalid_http_answer_is_an_error():
    error, _ = ask(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", http(200, ANSWER))
    assert type(error) is RetrievalError
    error, _ = ask(b"nonsense\r\n\r\n", http(200, ANSWER))
    assert type(error) is RetrievalError


def test_more_searches_at_a_time_than_httpx_allows_by_default_reach_the_server():
    """The server answers when all of them have arrived."""
    count = 120

    async def episode():
        every = asyncio.Event()
        arrived = 0

        async def answer(writer, request):
            nonlocal arrived
            arrived += 1
            if arrived == count:
                every.set()
            await every.wait()
            await write(writer, http(200, ANSWER))

        async def search(client):
            return await asyncio.gather(*(client.search("q", 1) for _ in range(count)))

        return await serving(answer, search, 30.0, 0, None, 60.0)

    assert [len(found) for found in asyncio.run(episode())] == [1] * count


def test_bm25_ranks_the_named_passage_first_and_omits_passages_without_a_common_word(index):
    retriever = BM25Retriever(index)
    assert [d.title for d in retriever.lookup("spain", 3)] == ["Spain", "France"]
    assert retriever.lookup("Spain", 1)[0].text == "Spain: capital Madrid."
    assert retriever.lookup("...", 3) == retriever.lookup("zzz", 3) == []
    assert len(retriever.lookup("capital", 100)) == 3


def test_words_are_lower_case_and_split_at_punctuation():
    assert words("Port-au-Prince, São Tomé") == ["port", "au", "prince", "são", "tomé"]


def test_contents_without_a_title_are_text_only():
    assert Document.parse("1", "only text", 0.0) == Document("1", "", "only text", 0.0)
    assert Document.parse("1", '"A "B""\nx\ny', 0.0).text == "x\ny"


@contextlib.contextmanager
def running(app):
    """Run a uvicorn server on a free port. Yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def address(index):
    with running(create_app(index, "secret")) as address:
        yield address


def post(address, token="secret", **request):
    return httpx.post(
        f"{address}/retrieve", headers={"Authorization": f"Bearer {token}"}, trust_env=False, **request
    )


def test_the_server_returns_the_results_of_the_embedded_index(index, address, monkeypatch):
    monkeypatch.setenv("RETRIEVER_TOKEN", "secret")
    config = RetrievalConfig(kind="http", url=f"{address}/retrieve", topk=2, token_env="RETRIEVER_TOKEN")
    environment = factory(EnvironmentConfig(retrieval=config))()
    embedded = factory(EnvironmentConfig(retrieval=RetrievalConfig(index=index, topk=2)))()

    async def searched(environment):
        await environment.reset(TASK, 0)
        return (await environment.step("<search>Spain</search>")).observation

    assert asyncio.run(searched(environment)) == asyncio.run(searched(embedded))
    # A second event loop opens its own connections.
    assert "Madrid" in asyncio.run(searched(environment))


def test_the_server_omits_scores_unless_requested(address):
    rows = post(address, json={"queries": ["spain"], "topk": 1}).json()["result"]
    assert rows == [[{"id": "2", "contents": '"Spain"\nSpain: capital Madrid.'}]]
    request = {"queries": ["gabon", "zzz"], "topk": 1, "return_scores": True}
    scored = post(address, json=request).json()["result"]
    assert scored[0][0]["document"]["id"] == "0" and scored[0][0]["score"] > 0 and scored[1] == []


def test_the_server_refuses_a_wrong_token_a_wrong_request_and_a_large_one(address):
    assert post(address, token="wrong", json={"queries": ["x"]}).status_code == 401
    assert httpx.post(f"{address}/retrieve", json={"queries": ["x"]}, trust_env=False).status_code == 401
    assert post(address, content=b"{").status_code == 422
    assert post(address, json={"queries": "x"}).status_code == 422
    assert post(address, json={"query": "x"}).status_code == 422
    assert post(address, json={"queries": ["x"], "topk": 0}).status_code == 422
    assert post(address, json={"queries": ["x" * 5000]}).status_code == 422
    assert post(address, content=b"x" * (2**20 + 1)).status_code == 413


def test_a_wrong_token_is_detected_before_the_run(address):
    with pytest.raises(ConfigError, match="401"):
        factory(EnvironmentConfig(retrieval=RetrievalConfig(kind="http", url=f"{address}/retrieve")))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_a_loopback_listener_needs_no_token_but_a_variable_that_is_named_must_be_set(host: str) -> None:
    assert listener_token(host, None) is None
    with pytest.raises(ConfigError, match="SURELY_NOT_SET"):
        listener_token(host, "SURELY_NOT_SET")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node7"])
def test_a_listener_that_others_reach_needs_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--token-env"):
        listener_token(host, None)
    monkeypatch.setenv("RETRIEVER_TOKEN", "secret")
    assert listener_token(host, "RETRIEVER_TOKEN") == "secret"


def test_the_server_is_refused_without_a_token_that_others_need(tmp_path: Path) -> None:
    line = [sys.executable, str(SCRIPT), str(tmp_path), "--host", "0.0.0.0"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1) and "--token-env" in done.stderr


def test_the_servers_address_is_announced_only_when_it_listens(index, tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"^environment\.retrieval\.index="):
        serve(tmp_path / "none")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as raised:
        serve(index, port=(port := taken.getsockname()[1]))
    assert str(raised.value) == (
        f"--host=127.0.0.1 --port={port}: cannot listen on this address (Address already in use); give "
        "another --port, or a --host of this machine"
    )
    assert not capsys.readouterr().err


def test_a_corpus_is_indexed_and_a_malformed_row_is_named(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": 1, "contents": "\\"Gabon\\"\\nThe capital is Libreville."}\n')
    BM25Retriever.build(read_corpus(corpus), tmp_path / "index")
    assert BM25Retriever(tmp_path / "index").lookup("Libreville", 1)[0].title == "Gabon"
    for bad, said in (('{"id": 2}', "row 2: id is missing"), ("{", "row 2: is not JSON")):
        corpus.write_text(corpus.read_text().splitlines()[0] + f"\n{bad}\n")
        with pytest.raises(ConfigError, match=said):
            list(read_corpus(corpus))


def test_a_pickle_that_replaces_a_file_of_an_index_is_never_loaded(tmp_path: Path) -> None:
    canary = pickle.dumps(Canary(tmp_path / "alive"))
    BM25Retriever.build(CORPUS, tmp_path / "index")
    files = sorted((tmp_path / "index").iterdir())
    assert len(files) >= 5
    for file in files:
        kept = file.read_bytes()
        file.write_bytes(canary)
        with contextlib.suppress(ValueError):  # damage may be detected on opening, on lookup, or not at all
            BM25Retriever(tmp_path / "index").lookup("spain", 1)
        file.write_bytes(kept)
    assert not (tmp_path / "alive").exists()


def test_the_index_does_not_import_jax_which_would_take_the_gpus_memory(tmp_path: Path) -> None:
    (tmp_path / "jax.py").write_text("print('imported')\n")
    program = "import megatron_stppo.environments.retrieval; import sys; print('jax' in sys.modules)"
    line = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {program}"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
