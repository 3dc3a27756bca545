"""Presets as docs/algorithms.md and the papers that it names define them: without imports from the code that
trains. `verify` and the tests compare `algorithm.preset` with them.

A row has what differs from DEFAULTS. Fields that DEFAULTS lacks are null.
"""

from typing import Any

Fields = dict[str, Any]
DEFAULTS: Fields = {  # of st_ppo
    "segments": "turn", "pooling": "mean", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0,
    "clip_length_power": 0.5, "clip_decision": "token", "aggregation": "token_mean",
    "correction": "logit", "correction_apply": "step", "correction_unit": "relative",
    "correction_strength": 10.0, "correction_floor": 1.0, "correction_probe": False,
    "select": "all", "select_bound": 0.15, "rate": "constant", "rate_kl": 0.002, "rate_rise": "step",
    "advantage": "gae", "turn_weight": 1.0, "gae_level": "token", "gae_observations": False,
    "gae_histories": "alone", "gamma": 1.0, "lam": 1.0, "truncated": "end", "overlong_penalty": 1.0,
    "whiten": True, "value_clip": 0.5, "kl_coefficient": 0.001, "kl_estimator": "k1", "kl_in": "reward",
    "entropy_coefficient": 0.001, "old_policy": "score", "mismatch": "off", "mismatch_level": "token",
    "mismatch_pooling": "mean", "mismatch_bound": 2.0, "routing_replay": "off",
}  # fmt: skip
PPO: Fields = {"segments": "token", "correction": "off"}  # 1707.06347
GRPO = PPO | {"advantage": "group"}  # 2402.03300
DR_GRPO = PPO | {"advantage": "group_mean", "aggregation": "sequence_mean_token_sum"}  # 2503.20783
MEANS = {"aggregation": "sequence_mean_token_mean", "clip_length_power": 0.0}  # and bounds for any length
EXACT = {"correction": "gradient", "correction_apply": "gradient", "correction_unit": "mean"}
PRINTED = EXACT | {"correction_strength": 1.0, "correction_floor": 0.0}
INSIDE = {"select": "ratio", "clip_low": 1 - 0.2, "clip_high": 4.0 - 1}  # ratios from 0.2 to 4 stay
LENGTHS = {"lam_length": 1.5, "lam_critic": 1.0}
PRESETS: dict[str, Fields] = {
    "ppo": PPO,
    "turn_ppo": {"correction": "off"},  # 2511.20718, as the next three and so_grpo
    "s_ppo": {"segments": "token"},
    "st_ppo": {},
    "paper": MEANS | PRINTED | {"dual_clip": None},
    "kl": PPO | {"rate": "kl"},  # 2109.11978
    "sao": PPO | INSIDE | LENGTHS | {"old_policy": "behaviour", "dual_clip": None},  # 2607.07508
    "grpo": GRPO,
    "so_grpo": {"advantage": "group"},
    "gigpo": PPO | {"advantage": "gigpo", "gamma": 0.95},  # 2505.10978
    "gspo": GRPO | MEANS | {"segments": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},  # 2507.18071
    # ratios from 0 to 5, 2506.13585
    "cispo": GRPO | {"loss": "cispo", "clip_low": 1.0, "clip_high": 5.0 - 1, "dual_clip": None},
    "dppo": GRPO | {"select": "probability", "select_bound": 0.15, "dual_clip": None},  # 2602.04879
    "dr_grpo": DR_GRPO,
    "mini_rl": DR_GRPO | {"mismatch": "truncate", "mismatch_bound": 5.0, "clip_high": 0.27},  # 2512.01374
    "distil": PPO | {"advantage": "kl", "gamma": 0.0, "kl_coefficient": 1.0, "entropy_coefficient": 0.0},
}
