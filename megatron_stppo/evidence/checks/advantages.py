"""Checks that advantages are those of the definition: with the run's own settings, on planted episodes.

Values, log-probs and rewards are random. Some episodes failed, are cut off, have no turns or several
histories; in some tasks one episode lives, or none, or all have the same reward. Where all episodes have it,
they differ by their penalties for length, if these are configured: their bounds are lengths of planted ones.
The fields of the preset are compared with a table of the published algorithms.
"""

import random
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from megatron_stppo.algorithm.own import OwnAdvantage
from megatron_stppo.algorithm.rate import StepMemory
from megatron_stppo.base.types import FAILED, Branch, Outcome, ScoredBatch, Task, Trajectory, Turn
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.data.packing import groups_of, to_batch
from megatron_stppo.evidence.bench import defined_advantages, defined_loss
from megatron_stppo.evidence.bench.defined_advantages import ExactEpisode, ExactToken, ExactTurn
from megatron_stppo.evidence.bench.stage import Checked, Stage, faultless, first_wrong
from megatron_stppo.model.learner import Learner
from megatron_stppo.training import stages
from megatron_stppo.training.advantage import has_signal

ADVANTAGES, PRESET = "advantages are the formula", "the preset is the published one"
USUAL = 4.0  # a usual deviation that limits whitening
EACH = 4  # episodes of a task
# outcomes of the episodes of each task; None: an error before the first turn
OUTCOMES: tuple[tuple[Outcome | None, ...], ...] = (
    ("ok", "wrong", "truncated", "ok"),
    ("error", "wrong", "timeout", None),
    ("ok", "wrong", "wrong", "error"),
    ("timeout", "error", None, "error"),
    ("truncated", "ok", "wrong", None),
)
FAR = 1e-4  # allowed, relative to the number or to 1


def advantages(stage: Stage) -> Iterator[Checked]:
    """Compare advantages, returns and signals with the definition; equal on every rank."""
    yield preset(stage.config.algorithm.preset)
    yield finding(replace(stage.learner, config=stage.config), stage.own.advantage)


def preset(name: str) -> Checked:
    """Compare the fields of a preset with the table of the published algorithms."""
    table = defined_loss.DEFAULTS | defined_loss.PRESETS[name] | {"preset": name}
    fields = [(field, value, table.get(field)) for field, value in AlgorithmConfig(preset=name)]
    wrong = [f"{field} is {value}, not {needed}" for field, value, needed in fields if value != needed]
    remedy = f"algorithm.preset={name}: report this line; fields of the section override it meanwhile"
    return faultless(PRESET, wrong, f"{len(fields)} fields of {name}", remedy, shown=3)


def finding(learner: Learner, own: OwnAdvantage | None = None) -> Checked:
    """Return the line of planted episodes. own: algorithm.advantage, if it names a function."""
    wrong, tokens, config, actor = list[str](), 0, learner.config, copy(learner.actor)
    a, seed = config.algorithm, config.run.seed
    assert actor is not None
    a = a if a.overlong_from is None else a.changed(overlong_from=3, overlong_to=9)
    penalty = {"kl_in": "reward", "kl_estimator": "k1", "kl_coefficient": max(0.1, a.kl_coefficient)}
    penalised = a.changed(**penalty)  # also where the run has no penalty, or a small one
    cases = ((a, None, 0.0), (a, None, USUAL), (a, 1.0, 0.0), (a, 0.0, 0.0), (penalised, None, 0.0))
    for settings, equal, usual in cases:
        histories = planted(67, 3 * len(OUTCOMES), seed, equal)
        tokens += sum(len(history.token_ids) for history in histories)
        actor.memory = StepMemory(deviation=usual, whitened=1)
        case = replace(learner, config=config.changed(algorithm=settings), actor=actor)
        for name, column, needed in compared(case, histories, defined(histories, seed), own):
            numbers = [] if column is None else column.tolist()
            wrong += first_wrong(f"{name}, usual deviation {usual:g}", numbers, needed, FAR)
    remedy = f"algorithm.advantage={a.advantage}: report this line; the advantages are not those of the docs"
    return faultless(ADVANTAGES, wrong, f"{tokens:,} action tokens of planted episodes", remedy)


def compared(
    learner: Learner,
    histories: Sequence[Trajectory],
    episodes: Sequence[ExactEpisode],
    own: OwnAdvantage | None,
) -> Iterator[tuple[str, Tensor | None, list[float]]]:
    """Yield names of numbers, those of the trainer, and those of the definition."""
    assert learner.actor is not None
    a, usual = learner.config.algorithm, learner.actor.memory.deviation
    batch, group_N = scored(histories, episodes), groups_of([history.summary for history in histories])
    out = stages.advantages(learner, batch, group_N, own)
    of_user = None if own is None else partial(of_lists, own)
    deviation = defined_advantages.estimate(episodes, a, usual, of_user)
    acted = [token for turn in turns_of(episodes) for token in turn.acted]
    yield "advantage", out.advantage_T, [token.advantage for token in acted]
    if a.advantage == "gae":
        yield "return", out.return_T, [token.target for token in acted]
    if a.gae_observations:
        every = defined_advantages.every_token(episodes, a)
        yield "return with observations", out.return_R, [token.target for token in every]
    yield "live", out.live_N.float(), [float(e.lives(a)) for e in episodes for _ in e.histories]
    yield "deviation", torch.tensor([out.deviation]), [deviation]
    signal = float(has_signal(out, a, group_N, own))
    yield "signal", torch.tensor([signal]), [float(defined_advantages.signals(episodes, a, of_user))]


def planted(vocab: int, tasks: int, seed: int, equal: float | None = None) -> list[Trajectory]:
    """Return random histories of EACH episodes of each task. equal: the reward of all."""
    draw = random.Random(seed)
    read = [tuple(draw.randrange(vocab) for _ in range(n)) for n in (0, 3, 5)]  # so that states repeat

    def turn(reward: float) -> Turn:
        ids = tuple(draw.randrange(vocab) for _ in range(draw.choice((1, 1, 2, 3, 5, 9))))
        return Turn(ids, (-1.0,) * len(ids), draw.choice(read), reward, ((0, len(ids)),))

    def turns(last: float) -> tuple[Turn, ...]:
        before = [
            0.0 if equal is not None else draw.choice((0.0, 0.0, 0.5, -0.25))
            for _ in range(draw.randrange(4))
        ]
        return tuple(map(turn, (*before, last)))

    histories = list[Trajectory]()
    for number in range(tasks * EACH):
        group, place = divmod(number, EACH)
        task, prompt = Task("formula", (), ("",), "train", group), (group % vocab, 1, 2)
        outcome = OUTCOMES[group % len(OUTCOMES)][place]
        reward = equal if equal is not None else draw.choice((0.0, 1.0, 1.0, 0.25))
        own = turns(reward) if outcome else ()
        branches = tuple(Branch((3, 1), turns(reward)) for _ in range(2 if outcome == "ok" else 0))
        episode = Trajectory(task, prompt, own, outcome or "error", group, branches=branches)
        histories += episode.histories()
    return histories


def defined(histories: Sequence[Trajectory], seed: int) -> list[ExactEpisode]:
    """Return the episodes as the definition reads them, with random values and log-probs."""
    draw, episodes = torch.Generator().manual_seed(seed), list[ExactEpisode]()

    def token(failed: bool) -> ExactToken:
        value, old, reference = torch.randn(3, generator=draw).tolist()
        unknown = float("nan")  # what failed may hold anything
        return ExactToken(unknown if failed else value, old, unknown if failed else reference)

    for history in histories:
        befores = (history.prompt_ids, *(turn.observation_ids for turn in history.turns))
        if not history.branch:
            episodes.append(ExactEpisode(history.group, [], history.outcome))
        turns = list[ExactTurn]()
        for turn, before in zip(history.turns, befores, strict=False):
            acted = [token(history.outcome in FAILED) for _ in turn.token_ids]
            read = [token(history.outcome in FAILED) for _ in turn.observation_ids]
            turns.append(ExactTurn(acted, read, turn.reward, hash(before) if before else 0))
        episodes[-1].histories.append(turns)
    return episodes


def turns_of(episodes: Sequence[ExactEpisode]) -> list[ExactTurn]:
    return [turn for _, history in defined_advantages.every_history(episodes) for turn in history]


def scored(histories: Sequence[Trajectory], episodes: Sequence[ExactEpisode]) -> ScoredBatch:
    """Return the batch of the histories, with the numbers of the tokens of the episodes."""
    turns = turns_of(episodes)

    def column(name: str, observed: bool = False) -> Tensor:
        tokens = chain.from_iterable(turn.acted + turn.read if observed else turn.acted for turn in turns)
        return torch.tensor([getattr(token, name) for token in tokens], dtype=torch.float32)

    return ScoredBatch.of(
        to_batch(histories),
        epochs=(),
        old_logprob_T=column("old"),
        reference_logprob_T=column("reference"),
        value_T=column("value"),
        value_R=column("value", observed=True),
    )


def of_lists(own: OwnAdvantage, results: list[float], tasks: list[int], counted: list[bool]) -> list[float]:
    """Return what the user's function gives for lists of numbers."""
    results_N = torch.tensor(results, dtype=torch.float64)
    return [float(x) for x in own(results_N, torch.tensor(tasks), torch.tensor(counted))]
