"""The runs of the study: algorithms and settings as data.

The configuration of a run is that of an example (bases.py), with COMMON, one setting and one algorithm.
Nothing else differs: all algorithms have the same learning rates and batches, and all algorithms except those
in NARROWED have the same clip bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_stppo.algorithm.variants import VARIANTS
from tools.study import adapter_settings, lag_settings
from tools.study.bases import SEARCH, SUMS, Base
from tools.study.lag_settings import LAGGED, REPEATED, SUMMED

Fields = dict[str, Any]

# Rollouts are on policy at the beginning of an iteration and become stale within it: the last of its epochs *
# minibatches steps trains on rollouts of the policy epochs * minibatches - 1 steps earlier, as in the paper.
COMMON: Fields = {
    "parallel.tensor": 1,
    "rollout.tasks_per_iteration": 16,  # groups of 4 for all algorithms: group-normalised advantages need
    "rollout.samples_per_task": 4,  # groups, and GAE gets the same batches
    "update.minibatches": 4,
    "run.iterations": 100,
    "run.evaluate_every": 2,
    "run.checkpoint_every": 1000,  # only at the end, and at an interruption
    "run.dump": "none",
    "evaluate.samples": 1,  # per held-out task, at temperature 1
}
SETTINGS: dict[str, Fields] = {
    "gentle": {"update.epochs": 1, "update.actor.lr": 1.5e-4, "update.critic.lr": 4.5e-4},
    # increasingly harsh settings; the results of token PPO alone decided which of them the study uses
    "harsh_1": {"update.epochs": 2, "update.actor.lr": 3e-4, "update.critic.lr": 9e-4},
    "harsh_2": {"update.epochs": 2, "update.actor.lr": 6e-4, "update.critic.lr": 1.8e-3},
    "harsh_3": {"update.epochs": 4, "update.actor.lr": 3e-4, "update.critic.lr": 9e-4},
    "harsh_4": {"update.epochs": 4, "update.actor.lr": 6e-4, "update.critic.lr": 1.8e-3},
    # controls: harsh_2 with half the actor's learning rate (st_ppo's scale is 0.5 there on average), and
    # harsh_2 with every batch used once
    "harsh_2_half": {"update.epochs": 2, "update.actor.lr": 3e-4, "update.critic.lr": 1.8e-3},
    "harsh_2_once": {"update.epochs": 1, "update.actor.lr": 6e-4, "update.critic.lr": 1.8e-3},
}
# The second round: harsh_2's batches and critic with five learning rates of the actor.
RATES = {f"rate_{rate}": float(f"{rate}e-4") for rate in ("1.5", "3", "6", "12", "24")}
SETTINGS |= {
    name: {"update.epochs": 2, "update.actor.lr": rate, "update.critic.lr": 1.8e-3}
    for name, rate in RATES.items()
}
SETTINGS |= adapter_settings.settings()  # of docs/lora.md
SETTINGS |= lag_settings.settings()  # of the second stage
SECOND_ROUND = (*RATES, *LAGGED, *REPEATED, *SUMMED)
STUDIED = ("gentle", "harsh_2")
CONTROLS = {"harsh_2_half": "harsh_2", "harsh_2_once": "harsh_2"}  # compared on the same seeds
PILOT = 100  # seeds from 100 on were used to choose the setting, and are in no result

# The first round ran the printed correction with the mean over all tokens. The preset now also has the
# weights of tokens that the paper prints (`aggregation`).
PAPER: Fields = {field: value for field, value in VARIANTS["paper"].items() if field.startswith("correction")}
# A copy of the defaults, so that the study does not change with them; a test compares the two.
TODAY: Fields = {
    "correction": "logit",
    "correction_apply": "step",
    "correction_unit": "relative",
    "correction_strength": 10,
    "correction_floor": 1,
}
CORRECTED = ("s_ppo", "st_ppo", "so_grpo")
FAMILY: dict[str, Fields] = {
    name: {"preset": name} | (TODAY if name in CORRECTED else {})
    for name in ("ppo", "turn_ppo", "s_ppo", "st_ppo", "grpo", "so_grpo")
}
FAMILY["st_ppo_paper"] = {"preset": "st_ppo"} | PAPER
# ST-PPO with changes to one part or the strength of its correction, and the same for the paper's printed
# form.
FORMS: dict[str, Fields] = {
    "st_ppo_coefficient": FAMILY["st_ppo"] | {"correction": "coefficient"},
    "st_ppo_gradient": FAMILY["st_ppo"] | {"correction": "gradient"},
    "st_ppo_floor_0": FAMILY["st_ppo"] | {"correction_floor": 0},
    "st_ppo_unit_mean": FAMILY["st_ppo"] | {"correction_unit": "mean"},
    "st_ppo_on_gradient": FAMILY["st_ppo"] | {"correction_apply": "gradient"},
}
STRENGTH: dict[str, Fields] = {
    "s_ppo_strength_1": FAMILY["s_ppo"] | {"correction_strength": 1},
    "st_ppo_strength_1": FAMILY["st_ppo"] | {"correction_strength": 1},
    "st_ppo_strength_3": FAMILY["st_ppo"] | {"correction_strength": 3},
    "st_ppo_strength_30": FAMILY["st_ppo"] | {"correction_strength": 30},
}
PRINTED: dict[str, Fields] = {
    "st_ppo_paper_floor_1": FAMILY["st_ppo_paper"] | {"correction_floor": 1},
    "st_ppo_paper_on_step": FAMILY["st_ppo_paper"] | {"correction_apply": "step"},
}
# The default of the correction at the time when the study began.
BEGUN: Fields = {"correction_unit": "sum", "correction_strength": 1}
BEFORE: dict[str, Fields] = {f"{name}_sum": FAMILY[name] | BEGUN for name in CORRECTED}
# These runs record all estimators at every step. They train like the run of the name without _probe.
PROBES: dict[str, Fields] = {
    f"{name}_probe": fields | {"correction_probe": True}
    for name, fields in (FAMILY | BEFORE).items()
    if name in ("s_ppo", "st_ppo", "s_ppo_sum", "st_ppo_sum")
}
# The arms of the second round. Its first runs are those of BASELINES at the three highest rates.
BASELINES: dict[str, Fields] = {name: FAMILY[name] for name in ("ppo", "turn_ppo", "s_ppo", "st_ppo")}
CONTROLLED: Fields = {"segments": "token", "correction": "off", "advantage": "gae"}
PROFILE = [1, 0.55, 0.54, 0.48, 0.24, 0.18, 0.16, 0.19]  # a factor for each of the 2 x 4 steps
ARMS: dict[str, Fields] = BASELINES | {
    "open_loop": {"preset": "open_loop", "rate": "open_loop", "rate_profile": PROFILE} | CONTROLLED,
    "kl": {"preset": "kl", "rate": "kl", "rate_kl": 0.01} | CONTROLLED,
    "ess": {"preset": "ess", "rate": "ess"} | CONTROLLED,
}
# The arms of stage 2. An iteration has 1 x 4 steps there: the profile's first epoch.
LAG_ARMS: dict[str, Fields] = BASELINES | {
    "open_loop_4": {"preset": "open_loop", "rate": "open_loop", "rate_profile": PROFILE[:4]} | CONTROLLED,
}
# Added for the third task, whose turns are five times as long: this target allows the same KL per turn. Then
# also run on the first task, and now the default.
ADDED_ARMS: dict[str, Fields] = {"kl_low": ARMS["kl"] | {"rate_kl": 0.002}}
# ST-PPO as the paper prints it, on the grid of the rates.
ADDED_ARMS["paper"] = {"preset": "paper", "aggregation": "sequence_mean_token_mean"} | PAPER
# A mean over the 32 tokens of a turn of the third task varies less than a token. 0.035 is 0.2 / sqrt(32),
# 0.006 is 0.2 / 32: as wide as 0.2 for a token if tokens change independently, and if one of them changes.
NARROWED: dict[str, Fields] = {
    f"{name}_{bound}": FAMILY[name] | {"clip_low": bound, "clip_high": bound}
    for name, bound in (("st_ppo", 0.035), ("st_ppo", 0.006), ("s_ppo", 0.035), ("turn_ppo", 0.006))
}
NARROWED["kl_low_0.035"] = ADDED_ARMS["kl_low"] | {"clip_low": 0.035, "clip_high": 0.035}
# The second family: each changes one thing of ppo, or of s_ppo.
OTHERS: dict[str, Fields] = {
    "select_turn": {"preset": "select_turn", "select": "turn", "select_bound": 0.04} | CONTROLLED,
    "momentum_reset": {"preset": "momentum_reset", "momentum": "reset"} | CONTROLLED,
    "momentum_clock": {"preset": "momentum_clock", "momentum": "clock"} | CONTROLLED,
    "clipping_bias": TODAY | {"preset": "clipping_bias", "correction_unit": "running"},
}
GROUPS = {
    "family": FAMILY,
    "forms": FORMS,
    "strength": STRENGTH,
    "printed": PRINTED,
    "before": BEFORE,
    "probes": PROBES,
    "baselines": BASELINES,
    "arms": ARMS,
    "lag_arms": LAG_ARMS,
    "added_arms": ADDED_ARMS,
    "narrowed": NARROWED,
    "others": OTHERS,
}
ALGORITHMS = {name: fields for group in GROUPS.values() for name, fields in group.items()}

# Seconds on one of the 2 cores of an x86-64 CPU, 2026-11-22. The times of finished runs replace them.
START = 15.0
EVALUATION = 0.65
ROLLOUT_AND_SCORE = 0.9
STEP = {"gae": 0.26, "group": 0.13}
SECOND_BACKWARD = 0.06
# of an asynchronous run of two processes, on 2 cores that other work shared, 2026-11-23
SERVED_START, SERVED_ITERATION = 50.0, 3.3


@dataclass(frozen=True)
class Run:
    """Example: Run("harsh_1", "ppo", 3).name is "harsh_1-ppo-3"."""

    setting: str
    algorithm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.setting}-{self.algorithm}-{self.seed}"

    @property
    def base(self) -> Base:
        return SUMS if self.setting in SUMMED else SEARCH

    @property
    def processes(self) -> int:
        """The number of its processes that compute: the trainer and its replicas."""
        return 1 + int(SETTINGS[self.setting].get("serving.replicas", 0))

    def overrides(self, iterations: int | None = None) -> list[str]:
        """Return the overrides of the example's configuration for the command line, without paths."""
        own = {f"algorithm.{field}": value for field, value in ALGORITHMS[self.algorithm].items()}
        fields = COMMON | SETTINGS[self.setting] | own | {"run.seed": self.seed}
        if iterations is not None:
            fields["run.iterations"] = iterations
        return [f"{field}={str(value).lower()}" for field, value in fields.items()]

    def seconds(self, iterations: int | None = None) -> float:
        """Return the expected time of the whole run on a core per process, in seconds."""
        own, common = ALGORITHMS[self.algorithm], COMMON | SETTINGS[self.setting]
        total = iterations or common["run.iterations"]
        if self.processes > 1:
            return SERVED_START + SERVED_ITERATION * float(total)
        steps = common["update.epochs"] * common["update.minibatches"]
        per_step = STEP["group" if "grpo" in self.algorithm else "gae"]
        if own.get("correction") == "gradient" or own.get("correction_probe"):
            per_step += SECOND_BACKWARD
        evaluations = 1 + total / common["run.evaluate_every"]
        return float(START + evaluations * EVALUATION + total * (ROLLOUT_AND_SCORE + steps * per_step))


def select(only: Sequence[str], seeds: Sequence[int], settings: Sequence[str]) -> list[Run]:
    """Return all runs of these algorithms or groups, seed by seed, so that the finished ones can be compared.

    Raises ValueError for an unknown name.
    """
    chosen: list[str] = []
    for name in only:
        if name not in GROUPS and name not in ALGORITHMS:
            known = ", ".join([*GROUPS, *ALGORITHMS])
            raise ValueError(f"--only {name}: unknown algorithm or group; choose from {known}")
        chosen += [x for x in GROUPS.get(name, {name: None}) if x not in chosen]
    for setting in settings:
        if setting not in SETTINGS:
            raise ValueError(f"--settings {setting}: unknown setting; choose from {', '.join(SETTINGS)}")
    return [Run(setting, name, seed) for seed in seeds for setting in settings for name in chosen]


def seeds_of(text: str) -> list[int]:
    """Example: "0-2,7" gives [0, 1, 2, 7]. Raises ValueError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"--seeds {text}: not a list of numbers; write for example 0-4 or 0,3")
        found += range(int(first), int(last if dash else first) + 1)
    return found
