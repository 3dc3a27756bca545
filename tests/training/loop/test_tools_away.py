"""The whole program on two ranks, with a retriever that is unavailable for a while, and then permanently."""

from __future__ import annotations

import json
import math
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron_stppo.observe.run_files import played_path
from tests.training.loop import small_run

ANSWER = json.dumps({"result": [[{"id": "1", "contents": '"Rome"\nRome is a capital.'}]]}).encode()
SHORT = 1.0  # seconds of an outage that ends
WAIT = 8  # seconds; the sum of all waits of a rollout
WAITS, ANSWERS = "tools do not answer: ", "tools answer again after "


class Retriever(ThreadingHTTPServer):
    """Refuses requests for `outage` seconds from the first refused one on, then answers.

    The server ends the outage itself, so that it is not longer on a busy machine, where a thread of the test
    may notice it late. The probes that follow refused searches are refused for one more second, so that no
    episode fails because the outage ends between the two.
    """

    denies = False  # whether it refuses the key of every request: episodes fail, and nothing waits
    _began: float | None = None
    _outage = 0.0

    def go_away(self, outage: float) -> None:
        self._began, self._outage = None, outage

    def refuses(self, request: bytes) -> bool:
        if not self._outage:
            return False
        self._began = time.monotonic() if self._began is None else self._began
        return time.monotonic() - self._began < self._outage + (b'"probe"' in request)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Retriever)
        away = self.server.refuses(self.rfile.read(int(self.headers["Content-Length"])))
        body = b"" if away or self.server.denies else ANSWER
        self.send_response(503 if away else 401 if self.server.denies else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(BrokenPipeError):  # the client has timed out
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@dataclass(frozen=True)
class Ended:
    code: int  # of the run, from exit.json
    reason: str
    said: list[str]  # stderr
    rows: list[int]  # iterations in metrics.jsonl
    steps: list[str]  # checkpoints
    details: list[str]  # of the episodes after the last row


@pytest.fixture(scope="module")
def retriever() -> Iterator[Retriever]:
    with Retriever(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, retriever: Retriever) -> tuple[Ended, Ended]:
    """(a run whose tool fails twice, at last permanently; its resume while the tool is unavailable, in which
    later all episodes fail)."""
    root = tmp_path_factory.mktemp("away")
    config, run = small_run.write(root), root / "runs" / "away"
    log = root / "stderr"

    def train(*arguments: str, during: Callable[[subprocess.Popen[bytes]], None]) -> Ended:
        url = f"environment.retrieval.url=http://127.0.0.1:{retriever.server_address[1]}/retrieve"
        given = (
            "environment.kind=tests.training.loop.searching:factory",
            "environment.retrieval.kind=http",
            url,
        )
        limits = (f"environment.tool_wait={WAIT}", "environment.retrieval.retries=0", "parallel.tensor=1")
        command = [*small_run.torchrun(), "train", str(config), "run.name=away", "run.checkpoint_every=1000"]
        command += [*given, *limits, *arguments]
        with log.open("w") as stderr:
            process = subprocess.Popen(command, env=small_run.ENVIRONMENT, stderr=stderr)
            try:
                during(process)
                process.wait(600)
            finally:
                process.terminate()
        note = json.loads((run / "exit.json").read_text())
        rows = [json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
        after = played_path(run, rows[-1] + 1)
        lines = after.read_text().splitlines() if after.exists() else []
        details = [json.loads(line)["detail"] for line in lines]
        return Ended(note["code"], note["reason"], log.read_text().splitlines(), rows, steps, details)

    def go_away_twice(process: subprocess.Popen[bytes]) -> None:
        metrics = run / "metrics.jsonl"
        wait_until(process, lambda: metrics.exists() and metrics.read_text().count("\n") >= 1)
        retriever.go_away(SHORT)
        wait_until(process, lambda: ANSWERS in log.read_text())
        rows = metrics.read_text().count("\n")
        wait_until(process, lambda: metrics.read_text().count("\n") > rows)
        retriever.go_away(math.inf)

    def deny_later(process: subprocess.Popen[bytes]) -> None:
        rows = (run / "metrics.jsonl").read_text().count("\n")
        wait_until(process, lambda: (run / "metrics.jsonl").read_text().count("\n") > rows)
        retriever.denies = True

    first = train("run.iterations=100000", during=go_away_twice)
    retriever.go_away(SHORT)
    return first, train("--resume", "run.iterations=100000", during=deny_later)


def wait_until(process: subprocess.Popen[bytes], there: Callable[[], bool]) -> None:
    while not there():
        assert process.poll() is None, f"the run ended with {process.returncode}"
        time.sleep(0.05)


@pytest.mark.timeout(1800)
def test_the_run_waits_for_unavailable_tools_and_ends_with_a_checkpoint_if_they_stay_unavailable(
    ended: tuple[Ended, Ended],
) -> None:
    run, _ = ended
    last = run.rows[-1]
    assert (run.code, run.steps) == (85, [f"step_{last}"])
    assert run.rows == list(range(1, last + 1))
    why = f"tools did not answer for {WAIT} s (environment.tool_wait): retriever http://127.0.0.1:"
    assert run.reason.startswith(f"step_{last} of 100000 is checkpointed and can be resumed: {why}")
    assert run.reason.endswith("/retrieve: status 503")


def test_a_wait_prints_one_line_at_its_start_and_one_at_its_end_without_a_traceback(
    ended: tuple[Ended, Ended],
) -> None:
    run, _ = ended
    # Each rank has an engine here. All calls of one rank may fall between the two outages of the tool.
    counts = [
        [
            sum(text in line and ("rank 1: " in line) == (rank == 1) for line in run.said)
            for text in (WAITS, ANSWERS)
        ]
        for rank in (0, 1)
    ]
    assert all(waits - answers in (0, 1) and waits <= 2 for waits, answers in counts)
    assert sum(waits for waits, _ in counts) >= 2 and sum(answers for _, answers in counts) >= 1
    assert sum(run.reason in line for line in run.said if line.startswith("megatron-stppo: step_")) == 1
    assert not any("Error" in line and "megatron_stppo" in line for line in run.said)


def test_a_resumed_run_waits_for_its_tools_and_continues_after_the_last_finished_iteration(
    ended: tuple[Ended, Ended],
) -> None:
    run, resumed = ended
    assert resumed.rows == list(range(1, resumed.rows[-1] + 1)) and len(resumed.rows) > len(run.rows)
    assert [sum(text in line for line in resumed.said) for text in (WAITS, ANSWERS)] == [1, 1]


def test_a_run_in_which_too_many_episodes_fail_ends_with_a_checkpoint_of_its_last_iteration(
    ended: tuple[Ended, Ended],
) -> None:
    _, run = ended
    assert run.code == 1 and f"step_{run.rows[-1]}" in run.steps
    assert "more than environment.max_failure_rate=0.2 allows" in run.reason
    assert "status 401" in run.reason
    assert sum("status 401" in detail for detail in run.details) > 0.2 * len(run.details) > 0, "what failed"
