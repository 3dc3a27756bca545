"""The command `audit`: check that every recorded log-prob is that of the policy version recorded with it.

The trainer's model scores the recorded trajectories under saved versions. A stale key-value cache, a wrong
version and a lost weight update all show as a difference from the engine's log-probs. records.py compares the
files with their digests first, and limits.py has the limits.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from megatron_stppo.base.errors import CheckpointError
from megatron_stppo.checkpoint import loading, step_folder
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data.packing import to_batch
from megatron_stppo.evidence.audit import limits, records
from megatron_stppo.evidence.audit.limits import TOKENS, Resemblance
from megatron_stppo.evidence.audit.records import Records
from megatron_stppo.evidence.audit.scoring import Piece, Scored, score
from megatron_stppo.model.learner import Learner, build_learner
from megatron_stppo.observe.console import say, timed
from megatron_stppo.observe.metrics import progress
from megatron_stppo.parallel.collectives import broadcast_record
from megatron_stppo.validation.sources import has_start
from megatron_stppo.weights.sharding.hf_checkpoint import weights_digest
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape

PASSED, DIFFERS, DAMAGED, CRASHED = 0, 1, 3, 70  # exit codes
WORST, LINES = 10, 20  # tokens that are listed; lines of damage
NOT_CHECKED = (
    "not checked: whether tokens were drawn with these probabilities, observations and rewards against the "
    "environment, and the updates (`megatron-stppo replay`)"
)
TOGETHER = 64  # trajectories that are scored together


def audit(config: Config, run: Path, tolerance: float | None = None) -> int:
    """Score the trajectories of the folder `run` under its saved versions, and print what is found.

    tolerance: the largest difference of a token in nats, instead of the limits of limits.py.
    Return PASSED, DIFFERS or DAMAGED. Collective. Raises ConfigError if no token can be audited, and
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
            raise ConfigError(f"RUN_DIR={run}: {'; '.join(notes(found))}; choose another run")
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
        show(findings, found, named, single)
        say(f"version 0 {away}", 0 in named and bool(away))
    process.stop()
    return exit_code(findings, damage)


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
    for t in excess_T.topk(min(WORST, len(excess_T))).indices.tolist():
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


@dataclass(frozen=True)
class Token:
    """A token whose log-prob is far from the trainer's.

    Example: Token(1.3, -2.0, -2.4, "iteration 4, line 17, turn 2, token 5").
    """

    excess: float  # difference / limit
    engine: float  # nats, as the following
    trainer: float
    place: str


@dataclass(frozen=True)
class VersionFinding:
    """How the engine's log-probs of one version's tokens differ from the trainer's, in nats."""

    version: int
    tokens: int
    mean: float
    most: float  # that the mean may be
    limit: float  # of a token: the median
    beyond: int  # tokens beyond their limit
    # by version, of the iteration that is most like it, or of all together; None: cannot be compared
    others: Mapping[int, Resemblance | None]
    worst: Sequence[Token]

    @property
    def reasons(self) -> list[str]:
        """Why the version fails. A mean of few tokens is not compared."""
        like = [f"like version {v}" for v, given in self.others.items() if given and given.differs]
        single = [f"{self.beyond} beyond"] if self.beyond else []
        mean = ["mean"] if self.tokens >= TOKENS and not self.mean <= self.most else []  # NaN fails
        return single + mean + like


def exit_code(findings: Sequence[VersionFinding], damage: Sequence[str]) -> int:
    differs = any(finding.reasons for finding in findings)
    return DAMAGED if damage else DIFFERS if differs else PASSED


def show(
    findings: Sequence[VersionFinding],
    found: Records,
    versions: Collection[int],
    single: bool,
) -> None:
    """Print everything. versions: that tokens name. single: whether single tokens have limits."""
    damage = found.damage
    console = Console(width=None if Console().is_terminal else 120)
    if findings:
        console.print(_versions(findings))
        console.print(_worst(findings))
    for line in [*damage[:LINES], *([f"{len(damage) - LINES} lines more"] if len(damage) > LINES else [])]:
        say(f"damaged: {line}")
    for line in notes(found):
        say(line)
    if left := sorted(set(versions) - {finding.version for finding in findings}):
        say(f"versions without a readable checkpoint, whose tokens are not audited: {_ranges(left)}")
    if not single:
        say("single tokens have no limit: in bfloat16, engine and trainer may choose different experts")
    say(NOT_CHECKED)
    said = f"{sum(finding.tokens for finding in findings)} of {found.tokens} tokens audited"
    verdicts = {PASSED: "passed", DIFFERS: "FAILED: log-probs differ", DAMAGED: "FAILED: damaged records"}
    code = exit_code(findings, damage)
    also = ", and log-probs differ" if code == DAMAGED and exit_code(findings, ()) else ""
    say(f"{verdicts[code]}{also}; {said}")


def notes(found: Records) -> list[str]:
    """Return a line for each reason why iterations are not audited, or not compared."""
    return [f"iterations {_ranges(iterations)}: {reason}" for reason, iterations in found.notes.items()]


def _versions(findings: Sequence[VersionFinding]) -> Table:
    columns = ("version", "tokens", "mean", "limit", "median limit of a token", "like others", "differs")
    table = Table(*columns, title="difference of engine and trainer by version, nats")
    for found in findings:
        like = [
            f"{v}: {given.share:.2f} ± {given.error:.2f}" if given else f"{v}: -"
            for v, given in found.others.items()
        ]
        numbers = (f"{found.mean:.2g}", f"{found.most:.2g}", f"{found.limit:.2g}")
        named = str(found.version), str(found.tokens)
        table.add_row(*named, *numbers, "; ".join(like), ", ".join(found.reasons))
    return table


def _worst(findings: Sequence[VersionFinding]) -> Table:
    columns = ("at", "version", "engine", "trainer", "difference / limit")
    table = Table(*columns, title=f"the {WORST} worst tokens, log-probs in nats")
    every = [(token, found.version) for found in findings for token in found.worst]
    for token, version in heapq.nlargest(WORST, every, key=lambda one: one[0].excess):
        numbers = (f"{token.engine:.4g}", f"{token.trainer:.4g}", f"{token.excess:.2g}")
        table.add_row(token.place, str(version), *numbers)
    return table


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers with ranges. Example: [1, 2, 3, 7] gives "1-3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(a[0]) if len(a) == 1 else f"{a[0]}-{a[-1]}" for a in parts)
