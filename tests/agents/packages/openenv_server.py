"""A server of the package openenv-core on the loopback interface: guess a number of 1 to 9 in three steps.

It prints its port, and serves until it is killed. Every wrong guess costs 0.25; the right one gives 1.
"""

from __future__ import annotations

import socket
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    message: str


class Hint(Observation):
    text: str


class Guessing(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, number: int = 1, **_: Any
    ) -> Hint:
        self._number, self._state = number, State(episode_id=episode_id)
        return Hint(text="Guess a number of 1 to 9.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._state.step_count += 1
        if action.message == str(self._number):
            return Hint(text="Right.", reward=1.0, done=True)
        return Hint(text="Wrong, again.", reward=-0.25, done=self._state.step_count == 3)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=4)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
