"""The whole program gets SIGTERM while an environment of an evaluation works on its answer."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

from tests.forking import stand_in
from tests.training.loop import small_run


def test_an_evaluation_is_abandoned_at_sigterm_and_the_finished_iteration_is_checkpointed(
    tmp_path: Path,
) -> None:
    config, run = small_run.write(tmp_path), tmp_path / "runs" / "small"
    rows = (tmp_path / "tasks.jsonl").read_text(encoding="utf-8")
    (tmp_path / "held.jsonl").write_text(rows.replace('"train"', '"evaluate"'), encoding="utf-8")
    hold, waits, metrics = tmp_path / "hold", tmp_path / "waits", run / "metrics.jsonl"

    def leave(*options: str, held_after: str) -> tuple[str, float]:
        """Train until an evaluation waits, and return stderr and the seconds from SIGTERM to the end."""
        given = ("environment.kind=tests.training.loop.searching:holding", "environment.deadline=900")
        files = (f"data.evaluate={tmp_path}/held.jsonl", "parallel.tensor=1")
        line = [stand_in.python(), "-m", "megatron_stppo", "train", str(config), *given, *files]
        line += ["run.evaluate_every=1", "run.checkpoint_every=100", *options]
        with subprocess.Popen(
            line, cwd=tmp_path, env=small_run.ENVIRONMENT, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                deadline = time.monotonic() + 240
                while not waits.exists():
                    assert process.poll() is None and time.monotonic() < deadline
                    if not held_after or (metrics.exists() and held_after in metrics.read_text("utf-8")):
                        hold.touch()
                    time.sleep(0.02)
                began = time.monotonic()
                process.send_signal(signal.SIGTERM)
                _, said = process.communicate(timeout=120)
            finally:
                process.kill()
        assert process.returncode == 85, said
        for file in (hold, waits):
            file.unlink()
        return said, time.monotonic() - began

    said, seconds = leave(held_after="")
    assert "nothing was trained, and step_0 is evaluated first with --resume: SIGTERM" in said
    assert seconds < 30 and not metrics.read_text("utf-8") and not list((run / "checkpoints").glob("step_*"))

    said, seconds = leave("--resume", held_after='"evaluate/exact_match"')
    first, *_, last = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    step = last["iteration"]
    assert first["iteration"] == 0 and "evaluate/exact_match" in first
    assert step > 0 and "evaluate/exact_match" not in last
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == [f"step_{step}"]
    assert f"step_{step} is not evaluated (SIGTERM)" in said and seconds < 30
    reason = f"step_{step} of 6 is checkpointed and can be resumed: SIGTERM"
    assert json.loads((run / "exit.json").read_text("utf-8")) == {"code": 85, "reason": reason}
