"""Mistakes in the formulas, each of one line of the program, and the row of `verify` that finds them."""

from __future__ import annotations

import inspect
import textwrap
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stppo.algorithm.variants import VARIANTS
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import AlgorithmConfig, Config
from megatron_stppo.evidence.bench import defined_advantages
from megatron_stppo.evidence.bench.defined_advantages import ExactEpisode, ExactToken, ExactTurn
from megatron_stppo.evidence.bench.stage import Checked
from megatron_stppo.evidence.checks import advantages
from megatron_stppo.model.learner import Learner
from megatron_stppo.model.optimizer import Trainer
from tests.evidence.checks import bench
from tests.ranks import run_ranks

GRPO, LONG = {"preset": "grpo"}, {"overlong_from": 3, "overlong_to": 9}
FAR = {"overlong_from": 300, "overlong_to": 900}
TURN = GRPO | {"advantage": "group_turn", "gamma": 0.9}
GAE = {"preset": "ppo", "gamma": 0.9, "lam": 0.8}
OWN = GRPO | {"advantage": "recipe:centred"}
OBSERVED = GAE | {"gae_observations": True, "truncated": "bootstrap"}
TURNS = {"preset": "st_ppo", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5}
KL = {"kl_in": "loss", "kl_estimator": "k3", "kl_coefficient": 0.1}
PAPER = {"preset": "st_ppo", "correction_floor": 0.1, "correction_unit": "mean", "correction_strength": 3.0}

# (settings of the section `algorithm`, where, a line, the mistaken one); what each does is seen from the two
OF_ADVANTAGES: tuple[tuple[dict[str, Any], str, str, str], ...] = (
    (GAE, "algorithm.gae:token_level", ".masked_fill(remaining_T[:-1] == 0, 0)", ""),
    (GAE, "algorithm.gae:token_level", "return advantage_T, advantage_T +", "return advantage_T, 0 *"),
    (GAE, "training.advantage:estimate", "whole.live_T, usual", "torch.ones_like(whole.live_T), usual"),
    (GAE, "algorithm.baselines:whitened", "min=LEAST * usual", "min=0"),
    (GAE, "training.advantage:estimate", " and _rewards_vary(shaped)", ""),
    (GAE, "training.advantage:with_kl_penalty", "return batch.reward_T -", "return batch.reward_T +"),
    (GAE, "training.advantage:_gae", "gamma=algorithm.gamma", "gamma=algorithm.lam"),
    (GAE, "training.advantage:_gae", "cut_N = batch.action_off", "cut_N = batch.turn_off"),  # verl #7278
    (GAE | {"lam_critic": 1.0}, "training.advantage:_gae", "_, return_T", "advantage_T, _"),
    (GAE | {"gae_level": "turn"}, "algorithm.gae:turn_level", "value_T[start_S]", "value_T[start_S - 1]"),
    (GAE | {"truncated": "mask"}, "training.advantage:estimate", '== "mask"', '== "bootstrap"'),
    (GAE | {"truncated": "bootstrap"}, "training.advantage:_gae", '== "bootstrap"', '== "mask"'),
    (GAE | {"gae_histories": "chained"}, "training.advantage:_rewarded_once", "-batch", "0 * batch"),
    (GAE | {"gae_histories": "discounted"}, "algorithm.gae:later_steps", "- offsets[1:]", "- offsets[:-1]"),
    ({"preset": "sao"}, "algorithm.gae:of_length", "alpha * length_N", "length_N"),
    (GAE | LONG, "training.advantage:_shaped", "first is None", "first is not None"),
    (GAE | FAR, "training.advantage:has_signal", "_shaped(batch, algorithm)", "batch"),
    (GRPO | FAR, "training.advantage:has_signal", "_shaped(batch, algorithm)", "batch"),
    (GRPO | LONG, "training.advantage:with_overlong_penalty", "tokens_N)[episode_N]", "tokens_N)"),
    (GAE, "training.stages:advantages", "own, learner.usual_deviation", "own"),
    (OWN, "training.stages:advantages", "group_N, own", "group_N, None"),
    (GRPO, "training.advantage:_of_outcomes", "e(outcome_N, group_N", "e(outcome_N, 0 * group_N"),
    (GRPO, "algorithm.baselines:group_relative", "live_N & first_N", "live_N"),
    (GRPO, "algorithm.baselines:group_relative", "counted_N.double()", "torch.ones(len(group_N)).double()"),
    (GRPO, "algorithm.baselines:group_relative", "(variance_N + EPSILON).sqrt()", "(variance_N + EPSILON)"),
    ({"preset": "mini_rl"}, "training.advantage:_of_outcomes", '!= "group_mean"', '!= "group"'),
    ({"preset": "gigpo"}, "training.advantage:_relative", "algorithm.gamma)", "1.0)"),
    ({"preset": "gigpo", "turn_weight": 2.0}, "training.advantage:_relative", "algorithm.turn_weight * ", ""),
    ({"preset": "gigpo"}, "algorithm.baselines:same_state", "group_N[owner_S]", "0 * owner_S"),
    (TURN, "algorithm.baselines:same_index", "alone_S)", "0 * alone_S)"),
    ({"preset": "distil"}, "training.advantage:_over_actions", 'algorithm.gamma if', "1.0 if"),
    (TURN | {"kl_coefficient": 0.0}, "training.advantage:_over_actions", "gamma, 1.0)", "gamma, 0.0)"),
)  # fmt: skip
STEP, LOSS = "training.update.actor_step:actor_step", "training.update.actor_step:ActorLoss."
HEAD, WEIGHTS = "model.policy_head:PolicyHead.configured", "training.update.actor_step:minibatch_weights"
OF_LOSS: tuple[tuple[dict[str, Any], str, str, str], ...] = (
    (TURNS, LOSS + "surrogate", "dual_clip=a.dual_clip", "dual_clip=None"),
    (TURNS, LOSS + "surrogate", "clip_length_power=power", "clip_length_power=0.0"),
    (TURNS, LOSS + "surrogate", "clip_low, clip_high, power =", "clip_high, clip_low, power ="),
    (TURNS | {"clip_decision": "segment"}, LOSS + "surrogate", "self.advantage", "self.batch.advantage"),
    ({"preset": "gspo"}, HEAD, "config.algorithm.segments", '"turn"'),
    (TURNS, HEAD, "config.rollout.temperature", "1.0"),
    ({"preset": "sao"}, LOSS + "surrogate", 'a.select != "all"', 'a.select == "all"'),
    ({"preset": "dppo"}, "algorithm.selection:leaving", "(rises_T & (change_T", "(rises_T & (-change_T"),
    (TURNS, LOSS + "surrogate", "if old_T is None", "if True"),  # higgsfield #20
    (TURNS, LOSS + "terms", "loss - a.entropy_coefficient", "loss + a.entropy_coefficient"),
    (TURNS | KL, LOSS + "terms", "loss + a.kl_coefficient", "loss - a.kl_coefficient"),
    (TURNS | KL, LOSS + "terms", "self.batch.reference_logprob_T", "self.batch.old_logprob_T"),
    (TURNS | KL, "algorithm.penalties:k3", "= reference_logprob_T -", "= 2 * reference_logprob_T -"),
    (TURNS, "algorithm.aggregation:token_weights", "live.sum()", "live.new_tensor(len(live))"),
    (TURNS, WEIGHTS, "live_T & (factor_T != 0)", "live_T"),
    (TURNS, WEIGHTS, " & chosen_tokens(batch, chosen)", ""),
    (TURNS | {"mismatch": "truncate"}, WEIGHTS, "weight_T * factor_T", "weight_T"),
    (TURNS, STEP, "else scale * factor", "else factor"),
    ({"preset": "st_ppo", "correction_floor": 50.0}, STEP, "a.correction_floor)", "1.0)"),
    (PAPER, STEP, "a.correction_strength * bias_norm", "bias_norm"),
    (PAPER, STEP, "a.correction_unit, **sizes", '"relative", **sizes'),
    ({"preset": "paper"}, STEP, "scale if on_gradient else 1.0,", "1.0,"),
    (TURNS, "model.optimizer:Trainer.step", "self.learning_rate * rate_scale", "self.learning_rate"),
    ({"preset": "kl"}, "algorithm.rate:kl", "given.kl > 2", "given.kl > 200"),
    ({"preset": "kl"}, "algorithm.rate:kl", "given.target / 2", "given.target"),
    ({"preset": "kl"}, "algorithm.rate:kl", "return min(max(factor, LOWEST), 1.0)", "return factor"),
    (TURNS, "training.update.actor_step:rate_scale", "a.rate_rise, ", '"step", '),
    (TURNS, "algorithm.rate:may_rise", "else steps - 1", "else steps - 2"),
    ({"preset": "kl", "rate_rise": "iteration"}, "training.stages:update", "count = c", "count = 2 * c"),
    ({"preset": "paper"}, "model.optimizer:Trainer.step", "norm *= gradient_scale", "pass"),
    ({"preset": "kl"}, "algorithm.rate:capped_kl", "k3(old_T, new_T)", "k3(new_T, old_T)"),
    (TURNS, "training.update.actor_step:rate_scale", "ratios.logprob_T, old_T,", "old_T, ratios.logprob_T,"),
    (TURNS, "training.stages:update", "hold, len(steps), count", "hold, 0, count"),
    (TURNS, "data.division:minibatches", "len(episodes) * part // count", "len(episodes) // count * part"),
    (TURNS, "data.division:minibatches", "{seed}/{iteration}/{epoch}", "{seed}"),
    (TURNS, "data.division:minibatches", "{seed}/{iteration}/{epoch}", "{seed}/{epoch}"),
    ({"preset": "cispo"}, "algorithm.own:cispo", "clamp(low, high)", "clamp(low)"),
)  # fmt: skip
# with STPPO_OPS=torch and update.critic_only
VOCABULARY = "algorithm.vocabulary:logits_gradient"
OF_TORCH: tuple[tuple[dict[str, Any], str, str, str], ...] = (
    (TURNS, VOCABULARY, "(log_p + merged.entropy_T[rows, None])", "(log_p + 1)"),
    (TURNS, VOCABULARY, "entropy_T[rows, None])", "entropy_T[rows, None].mean())"),
    (GRPO, "algorithm.correction:squared_estimate", "1 - 2 * logprob_T", "1 - logprob_T"),
    (GRPO, "ops.linear_logprob:_LinearLoss.forward", "chunk.start + live,", "live,"),
    (GAE, "training.stages:update", "hold or iteration < config.update.critic_only", "hold"),
    (GAE, "training.stages:update", "< config.update.critic_only", "< config.update.critic_only - 1"),
    (GAE, "training.stages:update", "iteration < config", "0 < iteration < config"),
)  # fmt: skip
ROLLOUT = {"samples_per_task": 4, "temperature": 0.8}
HEALTHY: tuple[dict[str, Any], ...] = (
    *({"preset": name} for name in VARIANTS),
    GAE, TURNS, PAPER, TURNS | KL, TURNS | KL | {"kl_estimator": "k2"}, GAE | LONG,
)  # fmt: skip


def plain(function: Any) -> Any:
    """Return the function of a class method, or below a decorator."""
    return inspect.unwrap(getattr(function, "__func__", function))


def mistake(patch: pytest.MonkeyPatch, where: str, line: str, mistaken: str) -> None:
    """Change one line of a function, wherever it has been imported."""
    module, name = where.split(":")
    function = plain(attrgetter(name)(import_module(f"megatron_stppo.{module}")))
    source, names = textwrap.dedent(inspect.getsource(function)), dict(function.__globals__)
    assert source.count(line) == 1, (where, line)
    exec(source.replace(line, mistaken), names)
    patch.setattr(function, "__code__", plain(names[function.__name__]).__code__)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lam": 0.0}, [0, 1, 0, 2, 0, 3]),
        ({"lam": 1.0}, [3, 3, 2, 2, 3, 3]),
        ({"lam": 0.0, "gae_level": "turn"}, [1, 1, 2, 2, 3, 3]),
        ({"lam": 0.0, "gae_histories": "discounted"}, [0, 0, 0, 0, 0, 3]),
        ({"lam": 1.0, "gae_histories": "discounted"}, [3, 3, 2, 2, 3, 3]),
        ({"lam": 0.0, "gae_histories": "chained"}, [0, 1, 0, 0, 0, 3]),
        ({"lam": 1.0, "gae_histories": "chained"}, [4, 4, 3, 3, 3, 3]),
    ],
)
def test_an_episode_of_two_histories_has_the_advantages_of_its_setting(settings: Any, expected: Any) -> None:
    """Turns of two tokens; rewards 1 and 2 in the first history, 3 in the second."""
    turns = [ExactTurn([ExactToken(0.0), ExactToken(0.0)], [], reward) for reward in (1.0, 2.0, 3.0)]
    algorithm = AlgorithmConfig(preset="ppo", whiten=False, kl_coefficient=0.0, **settings)
    defined_advantages.estimate([ExactEpisode(0, [turns[:2], turns[2:]], "ok")], algorithm)
    assert [token.advantage for turn in turns for token in turn.acted] == expected


@pytest.mark.parametrize(("algorithm", "where", "line", "mistaken"), OF_ADVANTAGES)
def test_mistakes_in_advantages_are_found(
    monkeypatch: pytest.MonkeyPatch, algorithm: Any, where: str, line: str, mistaken: str
) -> None:
    mistake(monkeypatch, where, line, mistaken)
    assert of_advantages(algorithm).verdict == "fails"


def of_advantages(algorithm: dict[str, Any]) -> Checked:
    """Return the line of a learner that has no models."""
    config = Config.model_validate({"model": {"path": "model"}, "algorithm": algorithm})
    none: Any = None
    learner = Learner(config, none, none, [], object.__new__(Trainer), none, none, none, none)
    return advantages.finding(learner, centred if config.algorithm.own_advantage else None)


def centred(outcome: torch.Tensor, group: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    return outcome - outcome[counted].mean()


def test_presets_are_the_published_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fields in VARIANTS.items():
        assert advantages.preset(name).verdict == "ok"
        monkeypatch.setitem(fields, "aggregation", "turn_mean")
        assert "aggregation is turn_mean" in advantages.preset(name).measured


def test_healthy_advantages_give_no_alarm() -> None:
    of_presets = [{"preset": name} for name in VARIANTS]
    overlong = [GRPO | {"advantage": name} | LONG for name in ("group", "group_mean", "group_turn", "gigpo")]
    for algorithm in (*(plant[0] for plant in OF_ADVANTAGES), *of_presets, *overlong, OBSERVED):
        row = of_advantages(algorithm)
        assert row.verdict == "ok", (algorithm, row)


def look(model: str, settings: Any, plants: Any, sections: dict[str, Any]) -> list[list[str]]:
    """Return the lines of the rows that fail, for each of the settings, and then for each plant."""
    process.prepare(engine=False)
    from megatron_stppo.evidence.checks import loss
    from megatron_stppo.parallel import groups
    from megatron_stppo.training.update.own import Own
    from megatron_stppo.weights.sharding.hf_names import read_shape

    shape, mesh, found = read_shape(Path(model)), None, list[list[str]]()
    sections = {"rollout": ROLLOUT} | sections | {"model": {"path": model} | sections.get("model", {})}
    for algorithm, *plant in (*((each,) for each in settings), *plants):
        config = Config.model_validate(sections | {"algorithm": algorithm})
        mesh, own = mesh or groups.initialize(config.parallel), Own.of(config)
        with pytest.MonkeyPatch.context() as patch:
            mistake(patch, *plant) if plant else None
            rows = [
                of_advantages(algorithm),
                loss.finding(config, shape, mesh, own.loss),
            ]
        found.append([row.measured for row in rows if row.verdict == "fails"])
    return found


def test_mistakes_in_steps_are_found(tmp_path: Path) -> None:
    (found,) = run_ranks(look, 1, bench.write(tmp_path / "m"), (), OF_LOSS, {}, timeout=300)
    assert [plant for plant, lines in zip(OF_LOSS, found, strict=True) if not lines] == []


def test_mistakes_in_operations_of_torch_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STPPO_OPS", "torch")
    model, sections = bench.write(tmp_path / "m"), {"update": {"critic_only": 2}}
    (found,) = run_ranks(look, 1, model, (TURNS, GAE | {"gae_observations": True}), OF_TORCH, sections)
    assert (
        found[:2] == [[], []] and [p for p, lines in zip(OF_TORCH, found[2:], strict=True) if not lines] == []
    )


def test_healthy_settings_give_no_alarm(tmp_path: Path) -> None:
    (found,) = run_ranks(look, 1, bench.write(tmp_path / "m"), HEALTHY, (), {}, timeout=300)
    assert [lines for lines in found if lines] == []


@pytest.mark.parametrize("name", ["tensor", "pipeline", "context", "distributed optimizer", "expert"])
def test_steps_are_the_same_on_two_ranks(tmp_path: Path, name: str) -> None:
    parallel = {name: 2} if name in ("tensor", "pipeline", "context", "expert") else {}
    sections = {"parallel": parallel, "model": {"lora": {"rank": 2}} if name == "pipeline" else {}}
    model = bench.write(tmp_path / "m", "qwen3_moe" if name == "expert" else "qwen3")
    first, second = run_ranks(look, 2, model, (PAPER, TURNS | KL), OF_LOSS[:1], sections, timeout=300)
    assert first == second and first[:2] == [[], []] and first[2]
