"""Batches of a replica: a healthy one passes, and each planted mistake is found, in both processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.commands.check import MARK
from megatron_stppo.data.ledger import Terms
from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.evidence.bench.stage import Stage
from megatron_stppo.evidence.checks.asked import asked, batches
from megatron_stppo.replicas.trainer.ledger import EpisodeLedger
from tests.evidence.checks import staged
from tests.ranks import run_ranks

OVERRIDES = (
    "rollout.tasks_per_iteration=3",
    "rollout.samples_per_task=2",
    "rollout.top_p=0.9",
    "serving.replicas=1",
    "evaluate.temperature=0.5",
    "data.evaluate=train.jsonl",
)
HEALTHY = "turn"


def _ledger(method: str, line: str, mistake: str) -> staged.Patch:
    return staged.mistaken(f"replicas.trainer.ledger:EpisodeLedger.{method}", line, mistake)


FINISHED, VERSION_0 = "(closed[number].finished.items())", "replace(t, versions=((0, len(t.token_ids)),))"
PLANTS: dict[str, tuple[str, staged.Patch]] = {  # of the trainer: {mistake: (part of the line, plant)}
    "": ("", lambda mp: None),
    "samples share a seed": ("different seeds", _ledger("_episodes", "samples + n, *", "samples, *")),
    "top_p is lost": (
        "training: top_p is 1.0",
        _ledger("__init__", "temperature, top_p)", "temperature, 1.0)"),
    ),
    "a version too old": ("later", staged.mistaken("data.ledger:Ledger.limit", "n + 1)", "n + 2)")),
    "evaluation as training": (
        "an evaluation: temperature is 1.0, not 0.5",
        staged.mistaken("replicas.trainer.served:Served.play", "settings.temperature", "1.0"),
    ),
    "one group": ("with the groups [0]", _ledger("batch", "group=place", "group=0")),
    "too few samples": (": 3 episodes", _ledger("batch", FINISHED, f"{FINISHED}[1:]")),
    "a group twice": ("tasks are not", _ledger("batch", "(taken.groups)", "(taken.groups[:1] * 3)")),
    "samples in another order": ("did not give", _ledger("batch", FINISHED, f"{FINISHED}[::-1]")),
    "all tokens of version 0": (
        "has versions [0",
        _ledger("finish", "task=group", f"turns=tuple({VERSION_0} for t in trajectory.turns), task=group"),
    ),
}
OF_REPLICA = {  # {what is sent in place of a turn: part of the line}
    "replace(turn, reward=float(int(turn.reward)))": "did not give",
    "replace(turn, reward=max(-1.0, turn.reward))": "did not give",
}
SENDS = """
from dataclasses import replace
from pathlib import Path

from megatron_stppo.replicas.wire import episodes

packed = episodes._packed_turn
episodes._packed_turn = lambda turn: packed(eval(Path("sent").read_text()))
"""


def lines(stage: Stage, patch: staged.Patch, sent: str = HEALTHY) -> list[str]:
    """Return the lines of failed findings, with a new ledger."""
    Path("sent").write_text(sent)
    rollouts, r = stage.rollouts, stage.config.rollout
    terms = Terms(r.tasks_per_iteration, r.samples_per_task, stage.config.serving.max_staleness)
    with pytest.MonkeyPatch.context() as mp:
        patch(mp)
        hub: Any = rollouts._hub
        cursor = TaskCursor(hub.ledger._cursor._tasks, stage.config.run.seed)
        hub.ledger = hub._crew.ledger = EpisodeLedger(cursor, terms, 0, r.temperature, r.top_p)
        stage.drawn.clear()
        findings = [*asked(stage), *batches(stage)]
    return [finding.measured for finding in findings if finding.verdict == "fails"]


def look(stage: Stage) -> Any:
    return {name: lines(stage, patch) for name, (_, patch) in PLANTS.items()} | {
        sent: lines(stage, PLANTS[""][1], sent) for sent in OF_REPLICA
    }


def test_a_healthy_replica_passes_and_planted_mistakes_are_found(tmp_path: Path) -> None:
    path = staged.write(tmp_path / "project")
    module = path.with_name("guess.py")
    module.write_text(module.read_text() + SENDS)  # only the replica imports it
    (path.parent / "sent").write_text(HEALTHY)
    (path.parent / "runs/verify").mkdir(parents=True)
    (path.parent / "runs/verify" / MARK).touch()
    (found,) = run_ranks(staged.run, 1, look, path, *OVERRIDES, timeout=240)
    assert found.pop("") == []
    parts = {name: part for name, (part, _) in PLANTS.items()} | OF_REPLICA
    for name, lines in found.items():
        assert any(parts[name] in line for line in lines), (name, lines)
