"""The command `audit`: check that every recorded log-prob is that of the policy version recorded with it.

The trainer's model scores the recorded trajectories under saved versions. A stale key-value cache, a wrong
version and a lost weight update all show as a difference from the engine's log-probs. records.py compares the
files with their digests first; bench/scoring.py has the limits.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, count, groupby
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from megatron_stppo.base.errors import CheckpointError
from megatron_stppo.checkpoint import loading, step_folder
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data.packing import to_batch
from megatron_stppo.evidence.audit import records
from megatron_stppo.evidence.audit.records import Records
from megatron_stppo.evidence.bench.scoring import TOKENS, Piece, Resemblance, Scored, judges_single, score
from megatron_stppo.model.learner import Learner, build_learner
from megatron_stppo.observe.console import say, timed
from megatron_stppo.observe.metrics import progress
from megatron_stppo.parallel.collectives import broadcast_record
from megatron_stppo.validation.run_folder import has_start
from megatron_stppo.weights.sharding.hf_checkpoint import weights_digest
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape

PASSED, DIFFERS, DAMAGED, CRASHED = 0, 1, 3, 70  # exit codes
WORST, LINES = 10, 20  # tokens that are listed; lines of damage
NOT_CHECKED = (
    "not checked: whether tokens were drawn with these probabilities, observations and rewards against the "
    "environment, and the updates (`megatron-stppo replay`)"
)
NO_SINGLE = "single tokens have no limit: in bfloat16, engine and trainer may choose different experts"
TOGETHER = 64  # trajectories that are scored together


def audit(config: Config, run: Path, tolerance: float | None = None) -> int:
    """Score the trajectories of the folder `run` under its saved versions, and print what is found.

    tolerance: the largest difference of a token in nats, instead of the limits of bench/scoring.py.
    Return PASSED, DIFFERS or DAMAGED. Collective. Raises ConfigError if no token can be audited, and
    nothing is damaged.
    """
    mesh, dtype = process.start(config), process.dtype(config)
    shape, first_rank = read_shape(config.model.path), mesh.rank == 0
    recorded = records.read(config, run, shape.vocab)
    named = {version for iteration in recorded.played for version in iteration.versions}
    away = _start_fault(config, run, shape, 0 in named)
    steps = step_folder.candidates(run / "checkpoints")  # LATEST names the first; later ones are abandoned
    saved = {step for step in steps if 0 < step <= steps[0]} | (set() if away else {0})
    if not saved & named and not recorded.damage:
        if not named:
            raise ConfigError(f"RUN_DIR={run}: {'; '.join(notes(recorded))}; choose another run")
        raise ConfigError(
            f"RUN_DIR={run}: no version that its trajectories name is saved ({sorted(named)}); train "
            "with run.checkpoint_every=1 run.keep_every=1, which keeps all" + (away and f"; version 0 {away}")
        )
    with timed("models", first_rank):
        begins = config if 0 in saved else config.of_checkpoint()
        learner = build_learner(begins, shape, mesh, dtype, training=False)
    pieces = {version: list(pieces_of(learner, recorded.played, version)) for version in saved & named}
    scored, damage = dict[int, Scored](), recorded.damage
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
    findings = [finding_of(pieces[version], version, scored[version]) for version in sorted(scored)]
    if first_rank:
        show(findings, recorded, named, judges_single(learner, tolerance))
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


def pieces_of(learner: Learner, played: Iterable[records.PlayedIteration], version: int) -> Iterator[Piece]:
    """Yield the trajectories with tokens of a version, in pieces that are scored together."""
    for iteration in played:
        naming = [
            (line, t)
            for line, t in zip(iteration.lines or count(1), iteration.trajectories, strict=False)
            if any(version == v for turn in t.turns for v, _ in turn.versions)
        ]
        for begin in range(0, len(naming), TOGETHER):
            lines, trajectories = zip(*naming[begin : begin + TOGETHER], strict=True)
            batch, with_settings = to_batch(trajectories), replace(learner, config=iteration.config)
            yield Piece(with_settings, batch, batch.version_T == version, lines, iteration.iteration)


def finding_of(pieces: Sequence[Piece], version: int, scored: Scored) -> VersionFinding:
    """Return how the tokens of one version differ, and which are the worst."""
    iteration_T = scored.sequence_T // 2**32
    parts = [slice(None), *(iteration_T == n for n in iteration_T.unique())]
    others = {}
    for other in (version - 1, version + 1):
        if all(other in piece.under for piece in pieces):
            under_T = torch.cat([piece.under[other] for piece in pieces])
            known = filter(None, (scored.resembles(under_T, part) for part in parts))
            others[other] = max(known, key=lambda resemblance: resemblance.least, default=None)
    ends = list(accumulate(len(piece.under[version]) for piece in pieces))
    worst = []
    for t in scored.excess_T.topk(min(WORST, len(iteration_T))).indices.tolist():
        at = bisect_right(ends, t)
        place = pieces[at].place(t - (ends[at - 1] if at else 0))
        excess, engine, trainer = (float(x[t]) for x in (scored.excess_T, scored.engine_T, scored.named_T))
        worst.append(Token(excess, engine, trainer, place))
    return VersionFinding(version, scored, others, worst)


class Token(NamedTuple):
    """A token whose log-prob is far from the trainer's."""

    excess: float  # difference / limit
    engine: float  # nats, as the following
    trainer: float
    place: str  # such as iteration 4, line 17, turn 2, token 5


@dataclass(frozen=True)
class VersionFinding:
    """How the engine's log-probs of one version's tokens differ from the trainer's, in nats."""

    version: int | str
    scored: Scored
    # by version, of the iteration that is most like it, or of all together; None: cannot be compared
    others: Mapping[int, Resemblance | None]
    worst: Sequence[Token]

    @property
    def tokens(self) -> int:
        return len(self.scored.named_T)

    @property
    def reasons(self) -> list[str]:
        """Why the version fails. A mean of few tokens is not compared."""
        like = [f"like version {v}" for v, other in self.others.items() if other and other.differs]
        single = [f"{beyond} beyond"] if (beyond := self.scored.beyond) else []
        mean = ["mean"] if self.tokens >= TOKENS and not self.scored.near else []
        return single + mean + like


def exit_code(findings: Sequence[VersionFinding], damage: Sequence[str]) -> int:
    differs = any(finding.reasons for finding in findings)
    return DAMAGED if damage else DIFFERS if differs else PASSED


def show(
    findings: Sequence[VersionFinding], recorded: Records, versions: Collection[int], single: bool
) -> None:
    """Print everything. versions: that tokens name. single: whether single tokens have limits."""
    damage = recorded.damage
    print_tables(findings)
    for line in [*damage[:LINES], *([f"{len(damage) - LINES} lines more"] if len(damage) > LINES else [])]:
        say(f"damaged: {line}")
    for line in notes(recorded):
        say(line)
    if left := sorted(set(versions) - {finding.version for finding in findings}):
        say(f"versions without a readable checkpoint, whose tokens are not audited: {_ranges(left)}")
    say(NO_SINGLE, not single)
    say(NOT_CHECKED)
    said = f"{sum(finding.tokens for finding in findings)} of {recorded.tokens} tokens audited"
    verdicts = {PASSED: "passed", DIFFERS: "FAILED: log-probs differ", DAMAGED: "FAILED: damaged records"}
    code = exit_code(findings, damage)
    also = ", and log-probs differ" if code == DAMAGED and exit_code(findings, ()) else ""
    say(f"{verdicts[code]}{also}; {said}")


def print_tables(findings: Sequence[VersionFinding], *more: Table) -> None:
    """Print how far the versions differ, the worst tokens, and further tables."""
    console = Console(width=None if Console().is_terminal else 120, markup=False)  # texts may look like it
    for table in (_versions(findings), _worst(findings), *more) if findings else ():
        if table.rows:
            console.print(table)


def notes(recorded: Records) -> list[str]:
    """Return a line for each reason why iterations are not audited, or not compared."""
    return [f"iterations {_ranges(iterations)}: {reason}" for reason, iterations in recorded.notes.items()]


def _versions(findings: Sequence[VersionFinding]) -> Table:
    columns = ("version", "tokens", "mean", "limit", "median limit of a token", "like others", "differs")
    table = Table(*columns, title="difference of engine and trainer by version, nats")
    for finding in findings:
        like = [
            f"{v}: {other.share:.2f} ± {other.error:.2f}" if other else f"{v}: -"
            for v, other in finding.others.items()
        ]
        scored = finding.scored
        numbers = (f"{x:.2g}" for x in (scored.mean, scored.most, float(scored.limit_T.median())))
        named = str(finding.version), str(finding.tokens)
        table.add_row(*named, *numbers, "; ".join(like), ", ".join(finding.reasons))
    return table


def _worst(findings: Sequence[VersionFinding]) -> Table:
    columns = ("at", "version", "engine", "trainer", "difference / limit")
    table = Table(*columns, title=f"the {WORST} worst tokens, log-probs in nats")
    every = [(token, finding.version) for finding in findings for token in finding.worst]
    for token, version in heapq.nlargest(WORST, every, key=lambda of: of[0].excess):
        numbers = (f"{token.engine:.4g}", f"{token.trainer:.4g}", f"{token.excess:.2g}")
        table.add_row(token.place, str(version), *numbers)
    return table


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers with ranges. Example: [1, 2, 3, 7] gives "1-3, 7"."""
    runs = groupby(enumerate(numbers), lambda item: item[1] - item[0])
    parts = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(a[0]) if len(a) == 1 else f"{a[0]}-{a[-1]}" for a in parts)
