"""What the engine is asked for: healthy runs pass, and each planted mistake is found by its check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.data.tasks import read
from megatron_stppo.evidence.bench.stage import Checked, Stage
from megatron_stppo.evidence.checks.asked import asked, ended
from megatron_stppo.evidence.checks.rewards import landing
from megatron_stppo.rollout.episodes import play
from megatron_stppo.rollout.vllm.requests import Requests
from megatron_stppo.training import colocated, rollouts
from tests.evidence.checks import staged
from tests.ranks import run_ranks

OVERRIDES = (
    "rollout.top_p=0.9",
    "evaluate.temperature=0",
    "data.evaluate=evaluate.jsonl",
    "environment.max_turns=2",
    "evaluate.tasks=3",
    "algorithm.preset=grpo",
    "rollout.samples_per_task=4",
    "rollout.resample=1",
)

OF_RANKS = ("the same seeds on each rank", "tokens in the order of their sources")


def _requested(**fields: Any) -> staged.Patch:
    """Return a plant that changes sampling parameters of each request."""
    real = Requests.begin

    def begin(self: Requests, *given: Any, **sampling: Any) -> Any:
        request = real(self, *given, **sampling)
        for name, value in fields.items():
            setattr(request.sampling_params, name, value)
        return request

    return lambda mp: mp.setattr(Requests, "begin", begin)


def _set(module: Any, name: str, planted: Any) -> staged.Patch:
    return lambda mp: mp.setattr(module, name, planted)


def _first_index_0(*a: Any, real: Any = colocated.collect, **k: Any) -> Any:
    return real(*a, **k | {"first_index": 0})


def _training_tasks(config: Any, field: str, **k: Any) -> Any:
    return colocated.fitting_tasks(config, "train", **k)


SEEDS = "different seeds"
ORDER, RESAMPLED = "data.tasks:TaskCursor._order", "training.rollouts:resampled"
FLAT = "without_variance(played[-1].every)"
PLANTS: dict[str, tuple[str, staged.Patch]] = {  # {mistake: (part of the line, plant)}
    "one seed for all episodes": (SEEDS, _set(play, "request_seed", lambda *of: 7)),
    "the same seeds in each iteration": (SEEDS, _set(colocated, "seed_of", lambda run, iteration: run.seed)),
    OF_RANKS[0]: (SEEDS, _set(colocated, "collect", _first_index_0)),
    OF_RANKS[1]: (
        "tokens of other episodes",
        staged.mistaken("data.exchange:deal", "in wanted[rank])])", "in order)])"),
    ),
    "top_p is ignored": ("training: top_p is 1.0, not 0.9", _requested(top_p=1.0)),
    "top_k of the model's folder": ("training: top_k is 20, not ", _requested(top_k=20)),
    "an end token that is left out": ("training: stop_token_ids is [], not [", _requested(stop_token_ids=[])),
    "evaluation at the training temperature": (
        "an evaluation: temperature is 1.0, not 0",
        _set(rollouts, "rollout_settings", lambda config, temperature: colocated.rollout_settings(config)),
    ),
    "training tasks are evaluated": (
        "of data.evaluate have tasks that it lacks",
        _set(rollouts, "fitting_tasks", _training_tasks),
    ),
    "held-out tasks are trained on": (
        "of data.train have tasks that it lacks",
        _set(colocated.TaskCursor, "take", lambda self, n: list(read(Path("evaluate.jsonl"))[:n])),
    ),
    "the last task of an epoch is not drawn": (
        "an epoch has 5 of 6 tasks",
        staged.mistaken(
            ORDER,
            "list(range(len(self._tasks)))",
            "(list(range(len(self._tasks) - 1)) * 2)[:len(self._tasks)]",
        ),
    ),
    "tasks are drawn with replacement": (
        "of 6 tasks",
        staged.mistaken(
            ORDER, "(order)", "(order); order = random.Random(0).choices(order, k=len(self._tasks))"
        ),
    ),
    "the cursor returns to the start of an epoch": (
        "an epoch has 3 of 6 tasks",
        staged.mistaken("data.tasks:TaskCursor.restore", 'state["position"]', "0"),
    ),
    "one order for all epochs": (
        "does not depend on the epoch",
        staged.mistaken(ORDER, "{self._seed}/{self._epoch}", "{self._seed}"),
    ),
    "one order for all runs": (
        "does not depend on run.seed",
        staged.mistaken(ORDER, "{self._seed}/{self._epoch}", "{self._epoch}"),
    ),
    "each evaluation has other tasks": (
        "evaluate.tasks: each evaluation has",
        staged.mistaken("rollout.episodes.fitting:sample", "random.Random(SEED)", "random"),
    ),
    "evaluate.tasks is ignored": (
        "4 tasks of data.evaluate are played, not 3",
        staged.mistaken("rollout.episodes.fitting:sample", "count is None or", "True or"),
    ),
    "a full context is a wrong answer": (
        "the outcome wrong, not truncated",
        staged.mistaken("rollout.episodes.episode:Episode.add_turn", '"truncated"', '"wrong"'),
    ),
    "the environment names the outcome in vain": (
        "the outcome wrong, not ok",
        staged.mistaken("rollout.episodes.episode:Episode.answer", "(result.outcome,", '("wrong",'),
    ),
    "groups in the place of others get their tasks": (
        "not the 3 that follow",
        staged.mistaken(RESAMPLED, "tasks += drawn", "tasks = drawn + tasks"),
    ),
    "groups that differ are dropped": (
        "drops the groups [0, 2], some of which differ",
        staged.mistaken(RESAMPLED, FLAT, f"({{s.group for s in played[-1].every}} - {FLAT})"),
    ),
}


def _checks(stage: Stage) -> Iterator[Checked]:
    yield from landing(stage)
    yield from asked(stage)


def _look(path: Path, names: list[str]) -> Any:
    plants = {name: PLANTS[name][1] for name in names}

    def of(stage: Stage) -> Any:
        found = staged.findings(stage, _checks, plants, again=False)
        return found, [line.verdict for line in _checks(stage)]

    return staged.run(of, path, *OVERRIDES)


@pytest.mark.parametrize(
    ("ranks", "names"), [(1, [name for name in PLANTS if name not in OF_RANKS]), (2, list(OF_RANKS))]
)
def test_requests_of_healthy_ranks_pass_and_planted_mistakes_are_found(
    ranks: int, names: list[str], tmp_path: Path
) -> None:
    path = staged.write(tmp_path / "project")
    rows = (path.parent / "train.jsonl").read_text().splitlines(keepends=True)
    for name, of_file in (("train", rows[:6]), ("evaluate", rows[6:])):
        (path.parent / f"{name}.jsonl").write_text("".join(of_file))
    (found, verdicts), *others = run_ranks(_look, ranks, path, names, timeout=240)
    assert [(found, verdicts)] * len(others) == others
    assert found.pop("") == [] and verdicts == ["ok"] * 5
    for name in names:
        assert sum(PLANTS[name][0] in line for line in found[name]) == 1, (name, found[name])


@pytest.mark.parametrize(
    ("ids", "room", "reason"),
    [
        ((1, 2, 0), 9, "end"),
        ((1, 5), 9, "stop"),
        ((1, 2), 2, "limit"),
        ((1, 2), 9, "ends without a reason, and may have 9"),
        ((1, 0, 2), 3, "goes on after its end"),
        ((5, 1), 2, "goes on after a stop string"),
    ],
)
def test_a_turn_ends_with_its_end_a_stop_string_or_the_limit(ids: Any, room: int, reason: str) -> None:
    assert ended(lambda ids: "".join(map(str, ids)), ids, {0}, ("5",), room) == reason
