"""What the engine is asked for: healthy runs pass, and each planted mistake is found by its check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.data.tasks import read
from megatron_stppo.evidence.bench.stage import Stage
from megatron_stppo.evidence.checks.asked import asked, ended
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
)

OF_RANKS = "the same seeds on each rank"


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
PLANTS: dict[str, tuple[str, staged.Patch]] = {  # {mistake: (part of the line, plant)}
    "one seed for all episodes": (SEEDS, _set(play, "request_seed", lambda *of: 7)),
    "the same seeds in each iteration": (SEEDS, _set(colocated, "seed_of", lambda run, iteration: run.seed)),
    OF_RANKS: (SEEDS, _set(colocated, "collect", _first_index_0)),
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
}


def _look(path: Path, names: list[str]) -> Any:
    plants = {name: PLANTS[name][1] for name in names}

    def of(stage: Stage) -> Any:
        found = staged.findings(stage, asked, plants, again=False)
        return found, [line.verdict for line in asked(stage)]

    return staged.run(of, path, *OVERRIDES)


@pytest.mark.parametrize(
    ("ranks", "names"), [(1, [name for name in PLANTS if name != OF_RANKS]), (2, [OF_RANKS])]
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
    assert found.pop("") == [] and verdicts == ["ok"] * 3
    for name in names:
        assert len(found[name]) == 1 and PLANTS[name][0] in found[name][0], (name, found[name])


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
