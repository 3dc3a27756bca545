"""Hostile clients, over real sockets: none reaches another episode, blocks others or fills the memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil
import pytest
from openai import AsyncOpenAI, AuthenticationError

from megatron_stppo.agents.endpoint.recorder import Recorder
from megatron_stppo.agents.endpoint.server import Endpoint
from megatron_stppo.agents.endpoint.session import EndpointLimits, Session
from megatron_stppo.agents.protocols.body import MAX_BYTES
from megatron_stppo.environments.base import AgentEpisode, Completion
from tests.agents.endpoint.world import World

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
QUICK = EndpointLimits(connections=12, head_seconds=1.0, body_seconds=1.0)


async def policy(world: World, session: Session) -> None:
    """Answer every request of an episode with "yes"."""
    recorder = Recorder(replace(world.rules, max_completions=10**6))
    while True:
        ask = await session.next()
        recorder.ask(ask)
        ask.reply.set_result(recorder.complete(Completion("yes", (5,), (-0.5,), "stop"))[1])


def serving(
    world: World,
    play: Callable[[Endpoint, Session, Session], Awaitable[None]],
    limits: EndpointLimits = QUICK,
) -> None:
    """Call play(endpoint, episode, another episode) while a policy answers in both episodes."""
    endpoint = Endpoint("tiny", 256, True, limits).start()

    async def main() -> None:
        sessions = [endpoint.open(), endpoint.open()]
        policies = [asyncio.create_task(policy(world, session)) for session in sessions]
        await play(endpoint, *sessions)
        for task in policies:
            task.cancel()

    try:
        asyncio.run(main())
    finally:
        endpoint.close()


def head(
    session: Session, token: str, length: int, path: str = "chat/completions", method: str = "POST"
) -> bytes:
    lines = [f"{method} /{session.name}/v1/{path} HTTP/1.1", "Host: x", f"Authorization: Bearer {token}"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "Connection: close", "", ""]).encode()


async def send(endpoint: Endpoint, content: bytes, host: str = "127.0.0.1") -> tuple[int, str]:
    """Send bytes, and return (status, body); status 0 if the connection was closed without an answer."""
    reader, writer = await asyncio.open_connection(host, endpoint.port)
    answer = b""
    with suppress(ConnectionError):
        writer.write(content)
        await writer.drain()
    with suppress(ConnectionError):
        answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    start, _, body = answer.decode().partition("\r\n\r\n")
    return (int(start.split()[1]), body) if start else (0, "")


async def ask(
    endpoint: Endpoint, session: Session, token: str, body: Any = CHAT, **given: Any
) -> tuple[int, str]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await send(endpoint, head(session, token, len(content), **given) + content)


def test_a_token_opens_its_own_episode_only(world: World) -> None:
    async def play(endpoint: Endpoint, mine: Session, other: Session) -> None:
        status, body = await ask(endpoint, mine, mine.token)
        assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == "yes"
        refused = {
            await ask(endpoint, other, token) for token in (mine.token, "", "x", "\xe9", mine.token[:-1])
        }
        unknown = Session()
        refused |= {await ask(endpoint, unknown, token) for token in (mine.token, unknown.token)}
        refused |= {await ask(endpoint, other, mine.token, b"", path="models", method="GET")}
        ((status, body),) = refused  # all the same: an unknown episode cannot be told from a wrong token
        assert status == 401 and json.loads(body)["error"]["message"] == "wrong API key, or no such episode"
        assert (await ask(endpoint, mine, mine.token, b"", path="models", method="GET"))[0] == 200
        status, body = await ask(endpoint, mine, mine.token, b"", path="models/openai/m", method="GET")
        assert (status, json.loads(body)["id"], json.loads(body)["object"]) == (200, "openai/m", "model")
        endpoint.shut(mine)
        assert (await ask(endpoint, mine, mine.token))[0] == 401, "not valid after the episode"

    serving(world, play)


def test_other_paths_and_methods_get_an_error_of_the_api_that_names_what_there_is(world: World) -> None:
    async def play(endpoint: Endpoint, mine: Session, other: Session) -> None:
        for path, method, expected, kind in (
            ("embeddings", "POST", 404, "not_found"),
            ("chat/completions", "GET", 405, "method_not_allowed"),
            ("models/m", "DELETE", 405, "method_not_allowed"),
            ("x" * 9000, "POST", 404, "not_found"),
        ):
            status, body = await ask(endpoint, mine, mine.token, CHAT, path=path, method=method)
            error = json.loads(body)["error"]
            assert (status, error["code"], error["type"]) == (expected, expected, kind)
            assert error["message"].startswith(
                "there is only GET BASE_URL/models, POST BASE_URL + /chat/completions, /completions, "
                f"/messages, /messages/count_tokens, /responses; not {method} /{mine.name}/v1/{path[:10]}"
            )
        status, body = await ask(endpoint, mine, mine.token, CHAT, path="v1/messages")
        error = json.loads(body)
        assert (status, error["type"], error["error"]["type"]) == (404, "error", "not_found_error")
        assert error["error"]["message"].startswith("use the base URL without /v1; there is only")

    serving(world, play)


def test_only_the_loopback_interface_listens(world: World) -> None:
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
    assert ("127.0.0.1", world.endpoint.port) in listening
    assert not [
        address for address in listening if address.port == world.endpoint.port and address.ip != "127.0.0.1"
    ]


def test_agents_elsewhere_reach_the_address_that_they_are_given_and_need_the_key(world: World) -> None:
    endpoint = Endpoint("tiny", 256, True, address="127.0.0.2").start()
    world.endpoint = endpoint
    listening = {c.laddr for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"}
    assert [address.ip for address in listening if address.port == endpoint.port] == ["127.0.0.2"]
    seen = []

    async def agent(episode: AgentEpisode) -> float:
        seen.append(episode.base_url)
        async with AsyncOpenAI(base_url=episode.base_url, api_key="x", max_retries=0) as thief:
            with pytest.raises(AuthenticationError):
                await thief.chat.completions.create(model="m", messages=[])
        async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        return 1.0

    (played,) = world.play(agent)
    endpoint.close()
    assert (played.outcome, len(played.turns)) == ("ok", 1), played.detail
    assert seen[0].startswith(f"http://127.0.0.2:{endpoint.port}/")


def test_an_ipv6_address_is_in_brackets(world: World) -> None:
    endpoint = Endpoint("tiny", 256, True, address="::1").start()

    async def url() -> str:
        return endpoint.url(endpoint.open())

    assert asyncio.run(url()).startswith(f"http://[::1]:{endpoint.port}/")
    endpoint.close()


def test_large_deep_and_garbled_bodies_are_refused_and_others_are_served(world: World) -> None:
    async def play(endpoint: Endpoint, mine: Session, other: Session) -> None:
        large = b'{"messages": "' + b"a" * 10 * 2**20 + b'"}'
        for status in [(await ask(endpoint, mine, mine.token, large))[0] for _ in range(4)]:
            assert status in (0, 413), "refused, perhaps before all of it was sent"
        assert await flood(endpoint, head(mine, mine.token, 2**30)) < 32 * 2**20, (
            "of 1 GiB, with socket buffers"
        )
        lying = head(mine, mine.token, MAX_BYTES + 1)
        assert (await send(endpoint, lying))[0] in (408, 413)
        for body in (b"[" * 10**6, b'{"messages": "\xff"}', b"\x00" * 100, b"{}", b'{"messages": [[[[]]]]}'):
            assert (await ask(endpoint, mine, mine.token, body))[0] == 400
        for garbage in (
            b"\x16\x03\x01" + b"\x00" * 500,
            b"GET / HTTP/1.1\r\n" + b"a" * 20_000,
            b"\r\n" * 5000,
        ):
            assert (await send(endpoint, garbage))[0] in (0, 400, 404)
        assert (await ask(endpoint, other, other.token))[0] == 200

    serving(world, play)


async def flood(endpoint: Endpoint, start: bytes) -> int:
    """Send a body of 1 GiB, and return how many bytes of it were taken before the connection was closed."""
    _, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    writer.write(start)
    sent, part = 0, b"a" * 2**16
    with suppress(ConnectionError):
        while sent < 2**30:
            writer.write(part)
            await writer.drain()
            sent += len(part)
    writer.close()
    return sent


def test_slow_heads_and_bodies_are_cut_and_others_are_served(world: World) -> None:
    async def play(endpoint: Endpoint, mine: Session, other: Session) -> None:
        slow_heads = [asyncio.create_task(drip(endpoint, head(mine, mine.token, 5)[:40])) for _ in range(3)]
        silent = asyncio.create_task(drip(endpoint, b""))
        body = asyncio.create_task(send(endpoint, head(mine, mine.token, 500) + b'{"mess'))
        assert (await ask(endpoint, other, other.token))[0] == 200
        assert [await task for task in (*slow_heads, silent)] == [b""] * 4, "closed without an answer"
        status, said = await body
        assert status == 408 and "did not arrive within 1 s" in said
        # a second request on a connection that is kept
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        content = json.dumps(CHAT).encode()
        writer.write(head(mine, mine.token, len(content)).replace(b"close", b"keep-alive") + content)
        assert b"200 OK" in await reader.readline()
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"POST /")
        assert b"POST" not in await asyncio.wait_for(reader.read(), 30), "the connection is closed"

    serving(world, play)


async def drip(endpoint: Endpoint, content: bytes) -> bytes:
    """Send a byte every 60 ms, and return what the server answers before it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    with suppress(ConnectionError):
        for byte in content:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.06)
    with suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), 30)
    return b""


def test_requests_of_an_episode_are_limited_in_number_rate_and_at_a_time(world: World) -> None:
    async def number(endpoint: Endpoint, mine: Session, other: Session) -> None:
        statuses = [(await ask(endpoint, mine, mine.token, b"{}"))[0] for _ in range(5)]
        assert statuses == [400, 400, 400, 429, 429], "refused requests count too"
        assert (await ask(endpoint, other, other.token))[0] == 200, "each episode has its own"

    async def rate(endpoint: Endpoint, mine: Session, other: Session) -> None:
        answers = await asyncio.gather(*(ask(endpoint, mine, mine.token) for _ in range(8)))
        statuses = [status for status, _ in answers]
        assert set(statuses) == {200, 429}

    async def waiting(endpoint: Endpoint, mine: Session, other: Session) -> None:
        half = head(mine, mine.token, 500) + b"{"
        slow = [asyncio.create_task(send(endpoint, half)) for _ in range(2)]
        while mine._waiting < 2:
            await asyncio.sleep(0.01)
        assert (await ask(endpoint, mine, mine.token))[0] == 429
        assert [(await task)[0] for task in slow] == [408, 408]
        assert (await ask(endpoint, mine, mine.token))[0] == 200, "places are free again"

    serving(world, number, replace(QUICK, requests=3))
    serving(world, rate, replace(QUICK, per_second=1.0))
    serving(world, waiting, replace(QUICK, waiting=2))


def test_connections_are_limited(world: World) -> None:
    async def play(endpoint: Endpoint, mine: Session, other: Session) -> None:
        held = [await asyncio.open_connection("127.0.0.1", endpoint.port) for _ in range(12)]
        assert (await ask(endpoint, mine, mine.token))[0] == 503
        for _, writer in held:
            writer.close()
        async with asyncio.timeout(10):
            while (await ask(endpoint, mine, mine.token))[0] != 200:
                await asyncio.sleep(0.05)

    serving(world, play, replace(QUICK, head_seconds=30.0))
