"""The command `audit-tokens`: whether the log-probs of a dump are those of a model, and why they are not.

Each known cause predicts other log-probs for turns that differ: those of the next token, those at another
temperature, or those after another context. It explains a turn if the recorded log-probs are within their
limits (bench/scoring.py) of a prediction, and if that is no chance: the *gain* is the logarithm of how much
nearer they are, summed over tokens, minus the logarithm of the number of predictions that were tried.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from megatron_stppo.base.printing import one_line
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config
from megatron_stppo.evidence.audit import audit
from megatron_stppo.evidence.audit.dumps import Recorded
from megatron_stppo.evidence.audit.records import PlayedIteration
from megatron_stppo.evidence.bench.scoring import FACTOR, MEAN, Scored, judges_single, score
from megatron_stppo.model.learner import Learner, build_learner
from megatron_stppo.observe.console import say, timed
from megatron_stppo.observe.metrics import progress
from megatron_stppo.weights.sharding.hf_load import load_tokenizer
from megatron_stppo.weights.sharding.hf_names import read_shape

EXAMINED, COMPARED = 16, 32  # episodes of a version on which causes are tried, and tokens of a turn
SURE = math.log(100)  # the least gain of one turn, or of most together
WITHIN, NONE = 0.9, -1e9  # share of the tokens that must be within their limits, and the gain if they are not
GRID, HEADER = 32, 64  # ends of a part that may be missing; tokens that may be missing before the prompt
COLUMNS = ("version", "it looks like", "episodes", "for example")
OTHER = "other weights, missing text, or log-probs after top_p or top_k"
Ids = tuple[int, ...]
Reason = tuple[float, str]  # gain, and what fits


@dataclass(frozen=True, eq=False)
class Suspect:
    """A turn, or its beginning."""

    line: int
    turn: int  # from 1
    temperature: float
    context: Ids
    ids: Ids
    scored: Scored  # named_T, engine_T and limit_T are of these ids

    def gain(self, logprob_T: Tensor, tries: int, own: slice = slice(None)) -> float:
        """Return how much a prediction explains of the tokens `own`; negative if they are beyond limits."""
        both = self.scored, replace(self.scored, named_T=logprob_T)
        before_T, after_T = (scored.excess_T[own].clamp(max=1e9) for scored in both)
        nearer = float(((1 + FACTOR * before_T) / (1 + FACTOR * after_T)).log().sum()) - math.log(tries)
        near = after_T.clamp(max=3).mean() <= MEAN / FACTOR and (after_T <= 1).float().mean() >= WITHIN
        return nearer if near else nearer + NONE


@dataclass(frozen=True)
class Judge:
    """The model, with its tokenizer."""

    learner: Learner
    tokenizer: Any

    def played(self, episodes: Mapping[int, Recorded], temperature: float) -> PlayedIteration:
        """Return what is scored at a temperature. episodes: by line."""
        config = self.learner.config.changed(rollout={"temperature": temperature})
        return PlayedIteration(0, [e.trajectory(n) for n, e in episodes.items()], config, list(episodes))

    def logprobs(self, turns: Iterable[tuple[Ids, Ids]], temperature: float) -> list[Tensor]:
        """Return the log-probs of turns, which are given as (context, tokens). Collective."""
        parts = [(ids, own, (0,) * len(ids), (1,) * len(own)) for ids, own in turns]
        episodes = [Recorded(ids + own, zeros + ones, (0.0,) * len(own)) for ids, own, zeros, ones in parts]
        played = self.played(dict(enumerate(episodes)), temperature)
        logprobs = [piece.logprobs() for piece in audit.pieces_of(self.learner, [played], 0)]
        return list(torch.cat(logprobs).split([len(own) for _, own, *_ in parts])) if parts else []

    def best(self, suspect: Suspect, contexts: Sequence[Ids]) -> tuple[float, Ids]:
        """Return the gain of the best context of a turn, and the context."""
        logprobs = self.logprobs(((context, suspect.ids) for context in contexts), suspect.temperature)
        gains = [suspect.gain(logprob_T, len(contexts)) for logprob_T in logprobs]
        return max(zip(gains, contexts, strict=True), default=(NONE, ()))


Causes = dict[str, dict[Suspect, Reason]]  # {cause: the turns that it explains}
Cause = Callable[[Judge, Sequence[Suspect]], list[Reason]]


def audit_tokens(config: Config, episodes: Mapping[int, Recorded], tolerance: float | None = None) -> int:
    """Score the episodes, by line of their file, print what is found, and return the exit code of an audit.

    tolerance: as for `audit`. Collective.
    """
    mesh, shape = process.start(config), read_shape(config.model.path)
    with timed("models", mesh.rank == 0):
        learner = build_learner(config, shape, mesh, process.dtype(config), training=False)
        judge = Judge(learner, load_tokenizer(config.model.path))
    findings, table = [], Table(*COLUMNS, title="why log-probs differ")
    for version in dict.fromkeys(episode.version for episode in episodes.values()):
        at = dict[float, dict[int, Recorded]]()
        for line, episode in episodes.items():
            if episode.version == version:
                at.setdefault(episode.temperature, {})[line] = episode
        played = [judge.played(own, temperature) for temperature, own in at.items()]
        pieces, name = list(audit.pieces_of(learner, played, 0)), one_line(str(version))
        scored = score(learner, pieces, 0, tolerance, shown=mesh.rank == 0)
        findings.append(replace(audit.finding_of(pieces, 0, scored), version=name))
        suspects = _suspects(played, scored) if findings[-1].reasons else []
        for cause, turns in explain(judge, suspects, shown=mesh.rank == 0).items():
            turn, (_, detail) = max(turns.items(), key=lambda item: item[1])
            example = one_line(f"line {turn.line}, turn {turn.turn}: {detail}").removesuffix(": ")
            table.add_row(name, cause, f"{len(turns)} of {len(suspects)} examined", example)
    code = audit.exit_code(findings, ())
    if mesh.rank == 0:
        audit.print_tables(findings, table)
        say(audit.NO_SINGLE, not judges_single(learner, tolerance))
        say(audit.NOT_CHECKED)
        beyond, tokens = sum(f.scored.beyond for f in findings), sum(f.tokens for f in findings)
        failed = f"FAILED: {beyond} of {tokens} tokens cannot have the recorded log-probs"
        say(failed if code else f"passed; {tokens} tokens audited")
    process.stop()
    return code


def _suspects(played: Iterable[PlayedIteration], scored: Scored) -> list[Suspect]:
    """Return the first turn that differs of some episodes; if only the mean differs, their first turn."""
    done, turns, names = 0, list[Suspect](), ("named_T", "engine_T", "limit_T")
    for part in played:
        for line, trajectory in zip(part.lines, part.trajectories, strict=True):
            context = trajectory.prompt_ids
            for number, turn in enumerate(trajectory.turns, 1):
                ids = turn.token_ids[:COMPARED]
                own = {name: getattr(scored, name)[done : done + len(ids)] for name in names}
                at = line, number, part.config.rollout.temperature
                turns.append(Suspect(*at, context, ids, replace(scored, **own)))
                done, context = done + len(turn.token_ids), context + turn.token_ids + turn.observation_ids
    differ = [suspect for suspect in turns if (suspect.scored.excess_T > 1).any()] or turns
    first = list({suspect.line: suspect for suspect in reversed(differ)}.values())[::-1]
    return first[:: -(-len(first) // EXAMINED)]


def explain(judge: Judge, suspects: Sequence[Suspect], shown: bool) -> Causes:
    """Return the causes of turns that differ. shown: whether progress is. Collective."""
    left, causes = list(suspects), Causes()
    for cause in progress(list(CAUSES if left else ()), "causes", shown):
        reasons = CAUSES[cause](judge, left) if left else []
        explained = {s: reason for s, reason in zip(left, reasons, strict=True) if reason[0] > 0}
        gains = [gain for gain, _ in explained.values()]
        # many small gains are no chance if most turns have one
        if gains and (max(gains) >= SURE or (2 * len(gains) > len(left) and sum(gains) >= SURE)):
            causes[cause] = explained
            left = [suspect for suspect in left if suspect not in explained]
    if left:
        causes[OTHER] = dict.fromkeys(left, (0.0, ""))
    return causes


def _shifted(judge: Judge, suspect: Suspect) -> Reason:
    def of(by: int, own: slice, which: str) -> Reason:
        moved = replace(suspect, scored=replace(scored, limit_T=scored.limit_T.roll(by)))
        return moved.gain(scored.named_T.roll(by), 2, own), f"each token has the log-prob of the {which}"

    scored = suspect.scored

    return max(of(-1, slice(-1), "next one"), of(1, slice(1, None), "one before"))


def _at_another_temperature(judge: Judge, suspects: Sequence[Suspect]) -> list[Reason]:
    """Look for one temperature of all turns, in ever finer steps."""
    turns, engine_T = [(s.context, s.ids) for s in suspects], torch.cat([s.scored.engine_T for s in suspects])
    best, ratio = 1.0, 1.7
    while ratio > 1 + 1e-7:
        tries = [best * ratio**n for n in range(-3, 4)]
        away = [(torch.cat(judge.logprobs(turns, t)) - engine_T).abs().mean() for t in tries]
        best, ratio = tries[int(torch.stack(away).argmin())], ratio**0.35
    return [
        (s.gain(logprob_T, 7), f"recorded at temperature {best:.3g}, not {s.temperature:.3g}")
        for s, logprob_T in zip(suspects, judge.logprobs(turns, best), strict=True)
    ]


def _encoded_again(judge: Judge, suspect: Suspect) -> Reason:
    """Encode the text before the turn again."""
    text = judge.tokenizer.decode(list(suspect.context), clean_up_tokenization_spaces=False)
    again = tuple(judge.tokenizer(text, add_special_tokens=False)["input_ids"])
    contexts = [again] if again and again != suspect.context else []
    return judge.best(suspect, contexts)[0], "fits if the text before the turn is encoded again"


def _without_a_part(judge: Judge, suspect: Suspect) -> Reason:
    """Remove a beginning, or what special tokens delimit; look closer near the best beginning."""
    context, special = suspect.context, set(judge.tokenizer.added_tokens_decoder)
    length, step = len(context), -(-len(context) // GRID)
    marks = sorted({n + k for n, token in enumerate(context) if token in special for k in (0, 1)})
    shorter = [context[n:] for n in sorted({*range(step, length, step), *marks})]
    shorter += [context[:a] + context[b:] for a, b in pairwise(marks)]
    coarse = judge.best(suspect, [ids for ids in shorter if ids])
    sizes = range(max(1, len(coarse[1]) - step), min(length, len(coarse[1]) + step))
    gain, best = max(coarse, judge.best(suspect, [context[-size:] for size in sizes]))
    return gain, f"fits with {len(best)} of the {length} tokens before the turn"


def _with_a_header(judge: Judge, suspect: Suspect) -> Reason:
    """Add the beginning of the chat template, which a prompt may lack."""
    if judge.tokenizer.chat_template is None:
        return NONE, ""
    messages = [{"role": "user", "content": ""}]
    header = tuple(judge.tokenizer.apply_chat_template(messages, return_dict=False))[:HEADER]
    gain, best = judge.best(suspect, [header[: n + 1] + suspect.context for n in range(len(header))])
    added = len(best) - len(suspect.context)
    return gain, f"fits with {added} tokens of the chat template before the prompt"


def _each(*reasons: Callable[[Judge, Suspect], Reason]) -> Cause:
    return lambda judge, suspects: [max(of(judge, suspect) for of in reasons) for suspect in suspects]


CAUSES: dict[str, Cause] = {
    "log-probs shifted by one token": _each(_shifted),
    "another temperature": _at_another_temperature,
    "text decoded and encoded again": _each(_encoded_again),
    "a cut prompt or context": _each(_without_a_part, _with_a_header),
}
