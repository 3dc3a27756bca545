"""The agent without a model: a server answers as the policy would. Run it with `pytest`."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

from agent import TOOLS, agent

from megatron_stppo.base.types import Message, Task

A_TO_B = Task("boxes", (Message("user", "Move the ball from a to b."),), ("b",), "train", 0, {"ball": "a"})


def play(*completions: str | tuple[str, str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the agent's result and its requests. A completion is a text, or a tool and its box."""
    requests: list[dict[str, Any]] = []

    class Policy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            completion = completions[len(requests) - 1]
            message: dict[str, Any] = {"role": "assistant", "content": completion}
            if isinstance(completion, tuple):
                function = {"name": completion[0], "arguments": json.dumps({"box": completion[1]})}
                message |= {"content": None, "tool_calls": [{"id": "1", "function": function}]}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"message": message}]}).encode())

        def log_message(self, *given: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Policy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        episode = SimpleNamespace(base_url=url, api_key="k", model="m", task=A_TO_B, seed=0)
        result = asyncio.run(agent(episode))
        server.shutdown()
    return result, requests


def test_moving_the_ball_to_its_target_is_rewarded() -> None:
    result, requests = play(("take", "a"), ("put", "b"), "done")
    assert (result["reward"], result["calls"]) == (1.0, 2)
    assert requests[0]["tools"] == TOOLS and len(requests[0]["messages"]) == 1
    said = [message for message in requests[-1]["messages"] if message["role"] == "tool"]
    assert [message["content"] for message in said] == ["ok", "ok"]


def test_a_call_that_cannot_be_done_changes_nothing() -> None:
    result, requests = play(("put", "b"), ("take", "c"), ("throw", "a"), "done")
    assert (result["reward"], result["detail"]) == (0.0, "the ball is in a")
    assert requests[-1]["messages"][-1]["content"] == "nothing happens"


def test_an_agent_that_does_not_end_is_stopped() -> None:
    result, requests = play(*[("take", "b")] * 9)
    assert (result["reward"], len(requests)) == (0.0, 4)
