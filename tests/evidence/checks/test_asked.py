"""What the engine is asked for: healthy runs pass, and each planted mistake is found by its check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.evidence.bench.stage import Stage
from megatron_stppo.evidence.checks import asked as module
from megatron_stppo.evidence.checks.asked import asked, ended
from megatron_stppo.rollout.episodes import play
from megatron_stppo.rollout.vllm.requests import Requests
from megatron_stppo.training import colocated, rollouts
from tests.evidence.checks import staged
from tests.ranks import run_ranks


def one_seed_for_all(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(play, "request_seed", lambda seed, place, turn: 7)


def one_seed_for_all_iterations(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(colocated, "seed_of", lambda run, iteration: run.seed)


def _changed(mp: pytest.MonkeyPatch, **fields: Any) -> None:
    real = Requests.begin

    def begin(self: Requests, *given: Any, **sampling: Any) -> Any:
        request = real(self, *given, **sampling)
        for name, value in fields.items():
            setattr(request.sampling_params, name, value)
        return request

    mp.setattr(Requests, "begin", begin)


def top_p_ignored(mp: pytest.MonkeyPatch) -> None:
    _changed(mp, top_p=1.0)


def top_k_of_the_model(mp: pytest.MonkeyPatch) -> None:
    _changed(mp, top_k=20)


def evaluated_at_the_training_temperature(mp: pytest.MonkeyPatch) -> None:
    real = rollouts.rollout_settings
    mp.setattr(rollouts, "rollout_settings", lambda config, temperature=None: real(config))


def held_out_tasks_trained_on(mp: pytest.MonkeyPatch) -> None:
    real = colocated.Worker.draw

    def draw(self: Any, iteration: int) -> Any:
        config = self.learner.config
        held_out = module.fitting_tasks(config, "evaluate", shown=False).tasks
        own, self.cursor._tasks = self.cursor._tasks, (held_out * 9)[: len(self.cursor._tasks)]
        played = real(self, iteration)
        self.cursor._tasks = own
        return played

    mp.setattr(colocated.Worker, "draw", draw)


def training_tasks_evaluated(mp: pytest.MonkeyPatch) -> None:
    real = module.fitting_tasks
    mp.setattr(module, "fitting_tasks", lambda config, field, **k: real(config, "train", **k))


def turns_cut_early(mp: pytest.MonkeyPatch) -> None:
    _changed(mp, max_tokens=2)


FOUND = {
    one_seed_for_all: "different seeds",
    one_seed_for_all_iterations: "different seeds",
    top_p_ignored: "top_p is 1, not 0.9",
    top_k_of_the_model: "top_k=20",
    evaluated_at_the_training_temperature: "temperature is 1, not 0",
    training_tasks_evaluated: "an evaluation: ",
    turns_cut_early: "ends without a reason",
    held_out_tasks_trained_on: "training: ",
}


def look(path: Path) -> Any:
    plants = {one.__name__: one for one in FOUND if one is not turns_cut_early}

    def of(stage: Stage) -> Any:
        found = staged.findings(stage, asked, plants, again=False)
        name = turns_cut_early.__name__
        return found | {name: staged.findings(stage, asked, {name: turns_cut_early})[name]}

    return staged.run(of, path, "rollout.top_p=0.9", "evaluate.temperature=0")


def test_planted_requests_are_found_and_healthy_ones_are_not(tmp_path: Path) -> None:
    (found,) = run_ranks(look, 1, staged.write(tmp_path / "project"), timeout=240)
    assert found.pop("") == []
    for plant, line in FOUND.items():
        assert found[plant.__name__] and line in found[plant.__name__][0], (plant.__name__, found)


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
    decode = lambda ids: "".join(map(str, ids))  # noqa: E731
    assert ended(decode, ids, {0}, ("5",), room) == reason
