"""The command `audit`: check that every recorded log-prob is that of the policy version recorded with it.

The trainer's model scores the recorded trajectories under saved versions. A stale key-value cache, a wrong
version and a lost weight update all show as a difference from the engine's log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_stppo.checkpoint import loading
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data.packing import to_batch
from megatron_stppo.launch import process
from megatron_stppo.learner import Learner, build_learner
from megatron_stppo.parallel.collectives import broadcast_record
from megatron_stppo.score.logprobs import logprobs
from megatron_stppo.sharding.hf_names import read_shape
from megatron_stppo.telemetry import trajectory_files, trajectory_log
from megatron_stppo.telemetry.console import say, timed
from megatron_stppo.telemetry.metrics import progress
from megatron_stppo.types import Batch, Trajectory
from megatron_stppo.validation.lora import of_checkpoint
from megatron_stppo.validation.sources import has_start

# Nats. Engine and trainer differ by rounding only. One unit in the last place of a log-prob between -8 and -4
# is 4.8e-7 in float32. Measured without a fault: at most 2.8e-6. With planted faults: 0.2 to 2.
FLOAT32 = 1e-5
TOGETHER = 64  # trajectories that are scored together


@dataclass(frozen=True)
class Worst:
    """The token with the largest difference. Example: Worst(0.31, 4, 17, 2, 5)."""

    difference: float  # nats
    iteration: int
    line: int  # of the iteration's file, from 1
    turn: int  # from 1
    token: int  # of the turn, from 1


@dataclass(frozen=True)
class VersionFinding:
    """The difference between the engine's log-probs and those of one version.

    Example: VersionFinding(3, 512, 1e-8, Worst(2e-7, 4, 17, 2, 5)).
    """

    version: int
    tokens: int
    mean: float  # nats
    worst: Worst


def audit(config: Config, run: Path, tolerance: float | None = None) -> bool:
    """Score the trajectories of the folder `run` under its saved versions, and print a table. Collective.

    tolerance: the largest difference of a token in nats. Default: 1e-5 in float32. In bfloat16 rounding is
    large, and the default is that the mean of each version is at most rollout.max_mismatch.
    Return whether all differences are within the tolerance. Raises ConfigError if no token can be audited.
    """
    mesh, dtype = process.start(config), process.dtype(config)
    played = {n: trajectory_log.read(run, n) for n in trajectory_files.recorded(run)}
    named = sorted(
        {v for some in played.values() for t in some for turn in t.turns for v, _ in turn.versions}
    )
    start = broadcast_record(has_start(config), bool, source=0)  # nodes may see different disks
    saved = [version for version in named if (_is_saved(run, version) if version else start)]
    if not saved:
        raise ConfigError(
            f"RUN_DIR={run}: no version that its trajectories name is saved ({named or 'none named'}); train "
            "with run.checkpoint_every=1 run.keep_every=1, which keeps all"
            + ("" if start else f", or restore the folder model.lora.path={config.model.lora.path}")
        )
    with timed("models", mesh.rank == 0):
        begins = config if 0 in saved else of_checkpoint(config)
        learner = build_learner(begins, read_shape(config.model.path), mesh, dtype, training=False)
    findings = []
    for version in progress(saved, "versions", mesh.rank == 0, every=None):
        if version:
            loading.load_weights(run / "checkpoints", "actor", learner.policy, version)
        findings.append(_compare(learner, played, version))
    in_float32 = dtype == torch.float32
    limit = tolerance if tolerance is not None else FLOAT32 if in_float32 else None
    passed = [_is_within(finding, limit, config.rollout.max_mismatch) for finding in findings]
    if mesh.rank == 0:
        _print(findings, passed)
        left = sorted(set(named) - set(saved))
        say(f"not audited, because they are not saved: versions {left}", bool(left))
        say(f"version 0 needs the folder model.lora.path={config.model.lora.path}", 0 in left)
        said = f"each token within {limit:g} nats" if limit is not None else "the mean within max_mismatch"
        say(f"{'passed' if all(passed) else 'FAILED'}: {said}, {sum(f.tokens for f in findings)} tokens")
    process.stop()
    return all(passed)


def _is_saved(run: Path, version: int) -> bool:
    return (run / "checkpoints" / f"step_{version}").is_dir()


def _is_within(finding: VersionFinding, limit: float | None, mean: float) -> bool:
    # written so that NaN is not within
    return finding.worst.difference <= limit if limit is not None else finding.mean <= mean


def _compare(learner: Learner, played: dict[int, list[Trajectory]], version: int) -> VersionFinding:
    total, tokens, worst = 0.0, 0, Worst(-1.0, 0, 0, 0, 0)
    for iteration, line, chosen in _naming(played, version):
        batch = to_batch(chosen)
        difference_T = _differences(learner, batch)
        own_T = batch.version_T == version
        total += float(difference_T[own_T].double().sum())
        tokens += int(own_T.sum())
        largest = int(torch.where(own_T, difference_T, -1.0).argmax())
        if _is_worse(float(difference_T[largest]), worst.difference):
            worst = Worst(float(difference_T[largest]), iteration, *_place(batch, line, largest))
    return VersionFinding(version, tokens, total / tokens, worst)


def _is_worse(difference: float, known: float) -> bool:
    """Return whether a difference is larger than the largest one so far. NaN is larger than any number."""
    return not math.isnan(known) and not difference <= known


def _naming(
    played: dict[int, list[Trajectory]], version: int
) -> Iterator[tuple[int, list[int], list[Trajectory]]]:
    """Yield (iteration, line numbers, trajectories) of the trajectories with tokens of the version."""
    for iteration, trajectories in played.items():
        naming = [
            (line, t)
            for line, t in enumerate(trajectories, 1)
            if any(version == v for turn in t.turns for v, _ in turn.versions)
        ]
        for first in range(0, len(naming), TOGETHER):
            part = naming[first : first + TOGETHER]
            yield iteration, [line for line, _ in part], [t for _, t in part]


def _differences(learner: Learner, batch: Batch) -> Tensor:
    """Return abs(trainer's - engine's log-prob) of every action token, float32 [T]."""
    every = [list(range(len(batch.live_N)))]
    head = learner.head(learner.policy)
    return (logprobs(learner.policy, head, batch, learner.packer, every) - batch.rollout_logprob_T).abs()


def _place(batch: Batch, lines: Sequence[int], token: int) -> tuple[int, int, int]:
    """Return (line, turn, token) of an action token; the last two count from 1 in trajectory and turn."""
    turn = int(torch.searchsorted(batch.turn_offsets, token, right=True)) - 1
    sequence = int(batch.turn_to_sequence_S[turn])
    first = int(torch.searchsorted(batch.turn_to_sequence_S, sequence))
    return lines[sequence], turn - first + 1, token - int(batch.turn_offsets[turn]) + 1


def _print(findings: Sequence[VersionFinding], passed: Sequence[bool]) -> None:
    table = Table(
        "version", "tokens", "mean difference", "largest", "at", "", title="engine and trainer, nats"
    )
    for found, is_within in zip(findings, passed, strict=True):
        w = found.worst
        at = f"iteration {w.iteration}, line {w.line}, turn {w.turn}, token {w.token}"
        row = (str(found.version), str(found.tokens), f"{found.mean:.2g}", f"{w.difference:.2g}", at)
        table.add_row(*row, "" if is_within else "differs")
    Console().print(table)
