"""Repeated requests over real sockets: which get the answer of the first one, and which a second sample."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from openai import APITimeoutError, AsyncOpenAI

from megatron_stppo.agents.endpoint.recorder import Recorder
from megatron_stppo.agents.endpoint.server import Endpoint
from megatron_stppo.agents.endpoint.session import Session
from megatron_stppo.environments.base import Completion, Request
from tests.agents.endpoint.claims_hostile import CHAT, head, send
from tests.agents.endpoint.world import World

BODY = json.dumps(CHAT).encode()
Play = Callable[[Endpoint, Session, Recorder], Awaitable[None]]


async def policy(recorder: Recorder, session: Session, seconds: float) -> None:
    """Answer every request after some seconds."""
    while True:
        ask = await session.next()
        answer = recorder.ask(ask)
        if isinstance(answer, Request):
            await asyncio.sleep(seconds)
            ask, answer = recorder.complete(Completion("yes", (5,), (-0.5,), "stop"))
        ask.reply.set_result(answer)


def samples(world: World, play: Play, seconds: float = 0.0) -> tuple[int, int]:
    """Return (completions, repeated requests) of an episode."""
    endpoint, recorder = Endpoint("tiny", 256, True).start(), Recorder(world.rules)

    async def main() -> None:
        session = endpoint.open()
        answering = asyncio.create_task(policy(recorder, session, seconds))
        await play(endpoint, session, recorder)
        answering.cancel()

    try:
        asyncio.run(main())
    finally:
        endpoint.close()
    return recorder.completions, recorder.repeated


async def ask(endpoint: Endpoint, session: Session) -> None:
    assert (await send(endpoint, head(session, session.token, len(BODY)) + BODY))[0] == 200


def begun(endpoint: Endpoint, session: Session) -> socket.socket:
    """Return a connection on which a request has been sent, and nothing was read."""
    connection = socket.create_connection(("127.0.0.1", endpoint.port))
    connection.sendall(head(session, session.token, len(BODY)).replace(b"close", b"keep-alive") + BODY)
    return connection


def test_an_answer_that_has_arrived_and_was_not_read_is_the_answer_to_the_next_equal_request(
    world: World,
) -> None:
    async def play(endpoint: Endpoint, session: Session, recorder: Recorder) -> None:
        for _ in range(20):
            connection = begun(endpoint, session)
            while not await arrived(connection):
                await asyncio.sleep(0.001)
            connection.close()
            await ask(endpoint, session)

    completions, repeated = samples(replace(world, rules=replace(world.rules, max_completions=50)), play)
    assert (completions, repeated) == (20, 20)


async def arrived(connection: socket.socket) -> bool:
    """Return whether the whole answer waits in the socket."""
    with suppress(BlockingIOError):
        return connection.recv(65536, socket.MSG_PEEK | socket.MSG_DONTWAIT).endswith(b"}")
    return False


def test_an_answer_that_was_refused_by_a_closed_connection_is_that_of_the_next_equal_request(
    world: World,
) -> None:
    async def play(endpoint: Endpoint, session: Session, recorder: Recorder) -> None:
        for reset in (False, True):
            connection = begun(endpoint, session)
            while recorder.generating is None:
                await asyncio.sleep(0.001)
            if reset:  # closed without a word, as by a process that is killed with unread data
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            await ask(endpoint, session)

    assert samples(world, play, seconds=0.2) == (2, 2)


def test_a_client_that_has_read_the_answer_gets_a_second_sample(world: World) -> None:
    async def play(endpoint: Endpoint, session: Session, recorder: Recorder) -> None:
        await ask(endpoint, session)  # the server closes this connection
        with begun(endpoint, session) as connection:
            while not await arrived(connection):
                await asyncio.sleep(0.001)
            connection.recv(65536)
        await ask(endpoint, session)  # after a client that has closed its connection
        with begun(endpoint, session) as open_still:
            while not await arrived(open_still):
                await asyncio.sleep(0.001)
            await ask(endpoint, session)  # beside one that has not read its answer yet

    assert samples(world, play) == (5, 0)


def test_equal_requests_at_the_same_time_are_two_samples(world: World) -> None:
    async def play(endpoint: Endpoint, session: Session, recorder: Recorder) -> None:
        async with AsyncOpenAI(base_url=endpoint.url(session), api_key=session.token) as sdk:
            two = (sdk.chat.completions.create(model="m", messages=CHAT["messages"]) for _ in range(2))  # type: ignore[arg-type]
            await asyncio.gather(*two)

    assert samples(world, play, seconds=0.05) == (2, 0)


def test_openais_client_that_times_out_when_the_answer_comes_gets_the_same_one(world: World) -> None:
    """Its time limit is that of a completion, give or take a few ms, and it does not say that it repeats."""
    late = []

    async def play(endpoint: Endpoint, session: Session, recorder: Recorder) -> None:
        for number in range(24):
            # a client for each, as harnesses do; a question for each
            messages = [{"role": "user", "content": f"question {number}"}]
            url = endpoint.url(session)
            async with AsyncOpenAI(base_url=url, api_key=session.token, max_retries=0) as sdk:
                limit = 0.05 + (number % 8 - 2) / 400
                with suppress(APITimeoutError):
                    await sdk.chat.completions.create(model="m", messages=messages, timeout=limit)  # type: ignore[arg-type]
                    continue
                late.append(number)
                await sdk.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]

    rules = replace(world.rules, max_completions=100)
    completions, repeated = samples(replace(world, rules=rules), play, seconds=0.05)
    # a request that its client left before the policy has begun is not answered, and not repeated
    assert completions == 24 and late and repeated <= len(late)
