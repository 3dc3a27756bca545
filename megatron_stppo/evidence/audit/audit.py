"""The command `audit`: check that every recorded log-prob is that of the policy version recorded with it.

The trainer's model scores the recorded trajectories under saved versions. A stale key-value cache, a wrong
version and a lost weight update all show as a difference from the engine's log-probs. records.py compares the
files with their digests first, and limits.py has the limits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch

from megatron_stppo.base.errors import CheckpointError
from megatron_stppo.checkpoint import loading, step_folder
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data.packing import to_batch
from megatron_stppo.evidence.audit import limits, records, report
from megatron_stppo.evidence.audit.report import Token, VersionFinding
from megatron_stppo.evidence.audit.scoring import Piece, Scored, score
from megatron_stppo.model.learner import Learner, build_learner
from megatron_stppo.observe.console import say, timed
from megatron_stppo.observe.metrics import progress
from megatron_stppo.parallel.collectives import broadcast_record
from megatron_stppo.validation.sources import has_start
from megatron_stppo.weights.sharding.hf_checkpoint import weights_digest
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape

TOGETHER = 64  # trajectories that are scored together


def audit(config: Config, run: Path, tolerance: float | None = None) -> int:
    """Score the trajectories of the folder `run` under its saved versions, and print what is found.

    tolerance: the largest difference of a token in nats, instead of the limits of limits.py.
    Return report.PASSED, DIFFERS or DAMAGED. Collective. Raises ConfigError if no token can be audited, and
    nothing is damaged.
    """
    mesh, dtype = process.start(config), process.dtype(config)
    shape, first_rank = read_shape(config.model.path), mesh.rank == 0
    found = records.read(config, run, shape.vocab)
    named = {version for one in found.played for version in one.versions}
    away = _start_fault(config, run, shape, 0 in named)
    saved = _saved(run, not away)
    if not saved & named and not found.damage:
        if not named:
            raise ConfigError(f"RUN_DIR={run}: {'; '.join(report.notes(found))}; choose another run")
        raise ConfigError(
            f"RUN_DIR={run}: no version that its trajectories name is saved ({sorted(named)}); train "
            "with run.checkpoint_every=1 run.keep_every=1, which keeps all" + (away and f"; version 0 {away}")
        )
    with timed("models", first_rank):
        begins = config if 0 in saved else config.of_checkpoint()
        learner = build_learner(begins, shape, mesh, dtype, training=False)
    pieces = {version: list(_pieces(learner, found.played, version)) for version in saved & named}
    scored, damage = dict[int, Scored](), found.damage
    near = sorted(v for v in saved if {v - 1, v, v + 1} & pieces.keys())
    for version in progress(near, "versions", first_rank, every=None):
        try:
            if version:
                loading.load_weights(run / "checkpoints", "actor", learner.policy, version)
        except CheckpointError as error:
            damage.append(f"version {version} is not audited: {error}")
            continue
        for other in sorted({version - 1, version + 1} & pieces.keys()):
            for piece in pieces[other]:
                piece.under[version] = piece.logprobs()
        if version in pieces:
            scored[version] = score(learner, pieces[version], version, tolerance)
    single = tolerance is not None or not (shape.experts and dtype != torch.float32)
    findings = [_finding(pieces[version], version, scored[version], single) for version in sorted(scored)]
    if first_rank:
        report.show(findings, found, named, single)
        say(f"version 0 {away}", 0 in named and bool(away))
    process.stop()
    return report.exit_code(findings, damage)


def _start_fault(config: Config, run: Path, shape: ModelShape, is_named: bool) -> str:
    """Return why the weights of version 0 are not here, or "". Collective.

    is_named: whether tokens name version 0; otherwise they are not compared with those of the run.
    """
    if not broadcast_record(has_start(config), bool, source=0):  # nodes may see different disks
        return f"needs the folder model.lora.path={config.model.lora.path}"
    begun_with = broadcast_record(_begun_with(run) if is_named else "", str, source=0)
    if begun_with and begun_with != weights_digest(config.model.path, shape):
        return f"needs the weights that the run began with; model.path={config.model.path} holds others"
    return ""


def _begun_with(run: Path) -> str:
    """Return the digest that the newest checkpoint has of the run's first weights, or ""."""
    for step in step_folder.candidates(run / "checkpoints")[:1]:
        with suppress(OSError, ValueError):  # it is reported when its weights are loaded
            return str(step_folder.read_state(run / "checkpoints" / f"step_{step}").get("begun_with", ""))
    return ""


def _saved(run: Path, start: bool) -> set[int]:
    """Return the versions whose weights can be read. Steps after the one that LATEST names are abandoned."""
    steps = step_folder.candidates(run / "checkpoints")  # the first is the one that LATEST names
    return {step for step in steps if 0 < step <= steps[0]} | ({0} if start else set())


def _pieces(learner: Learner, played: Iterable[records.PlayedIteration], version: int) -> Iterator[Piece]:
    for one in played:
        naming = [
            (line, t)
            for line, t in enumerate(one.trajectories, 1)
            if any(version == v for turn in t.turns for v, _ in turn.versions)
        ]
        for begin in range(0, len(naming), TOGETHER):
            part = naming[begin : begin + TOGETHER]
            batch = to_batch([trajectory for _, trajectory in part])
            own_T, with_settings = batch.version_T == version, replace(learner, config=one.config)
            yield Piece(one.iteration, [line for line, _ in part], batch, own_T, with_settings)


def _finding(pieces: Sequence[Piece], version: int, scored: Scored, single: bool) -> VersionFinding:
    engine_T = torch.cat([piece.engine_T for piece in pieces])
    sequence_T = torch.cat([piece.sequence_T for piece in pieces])
    iteration_T = sequence_T // 2**32
    difference_T, limit_T = (scored.named_T - engine_T).abs(), scored.limit_T
    excess_T = (difference_T / limit_T.clamp(min=1e-30)).nan_to_num(nan=torch.inf, posinf=torch.inf)
    others = {}
    for other in (version - 1, version + 1):
        if all(other in piece.under for piece in pieces):
            under_T = torch.cat([piece.under[other] for piece in pieces])
            given = (scored.named_T, scored.nudged_T, under_T, engine_T, sequence_T)
            parts = [given, *(tuple(x[iteration_T == n] for x in given) for n in iteration_T.unique())]
            found = [one for one in (limits.resemblance(*part) for part in parts) if one]
            others[other] = max(found, key=lambda one: one.least, default=None)
    ends = list(accumulate(len(piece.under[version]) for piece in pieces))
    worst = []
    for t in excess_T.topk(min(report.WORST, len(excess_T))).indices.tolist():
        at = bisect_right(ends, t)
        place = pieces[at].place(t - (ends[at - 1] if at else 0))
        excess, engine, trainer = (float(x[t]) for x in (excess_T, engine_T, scored.named_T))
        worst.append(Token(excess, engine, trainer, place))
    return VersionFinding(
        version,
        len(engine_T),
        float(difference_T.mean()),
        scored.most,
        float(limit_T.median()),
        int((excess_T > 1).sum()) if single else 0,
        others,
        worst,
    )
