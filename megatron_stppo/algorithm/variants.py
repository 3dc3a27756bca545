"""Table of the algorithms: the four combinations of the paper's two switches, and baselines.

Source: ST-PPO, arXiv 2511.20718. `segments` chooses the tokens that share one importance ratio. `correction`
chooses the estimator of the clipping bias ||C||, by which the step of a minibatch is scaled down ("off": no
correction). `rate` chooses what else multiplies the rate of a step. A row holds the fields that define the
algorithm, as defaults of the configuration.
docs/algorithms.md describes every field and gives the sources of the baselines.
"""

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "ppo": {"segments": "token", "correction": "off", "rate": "constant", "advantage": "gae"},
    "turn_ppo": {"segments": "turn", "correction": "off", "rate": "constant", "advantage": "gae"},
    "s_ppo": {"segments": "token", "correction": "logit", "rate": "constant", "advantage": "gae"},
    "st_ppo": {"segments": "turn", "correction": "logit", "rate": "constant", "advantage": "gae"},
    # st_ppo as printed in the paper: a mean over trajectories of means over their tokens, whose gradient is
    # divided by its exact ||C||, even if ||C|| is small; bounds that do not follow the length of a turn
    "paper": {
        "segments": "turn",
        "clip_length_power": 0,
        "dual_clip": None,
        "correction": "gradient",
        "correction_apply": "gradient",
        "correction_unit": "mean",
        "correction_strength": 1,
        "correction_floor": 0,
        "aggregation": "sequence_mean_token_mean",
        "rate": "constant",
        "advantage": "gae",
    },
    "kl": {"segments": "token", "correction": "off", "rate": "kl", "advantage": "gae"},
    # ratios to the engine's policy; tokens outside the bounds leave, whatever the sign of the advantage
    "sao": {
        "segments": "token",
        "correction": "off",
        "rate": "constant",
        "advantage": "gae",
        "old_policy": "behaviour",
        "select": "ratio",
        "clip_low": 0.8,
        "clip_high": 3.0,
        "dual_clip": None,
        "lam_length": 1.5,
        "lam_critic": 1.0,
    },
    # grpo whose tokens leave by the change of their probability
    "dppo": {
        "segments": "token",
        "correction": "off",
        "rate": "constant",
        "advantage": "group",
        "select": "probability",
        "select_bound": 0.15,
        "dual_clip": None,
    },
    "grpo": {"segments": "token", "correction": "off", "rate": "constant", "advantage": "group"},
    "so_grpo": {"segments": "turn", "correction": "logit", "rate": "constant", "advantage": "group"},
    # grpo plus the advantages of turns among those of the group that begin in the same state
    "gigpo": {
        "segments": "token",
        "correction": "off",
        "rate": "constant",
        "advantage": "gigpo",
        "gamma": 0.95,
    },
    "gspo": {
        "segments": "sequence",
        "correction": "off",
        "rate": "constant",
        "advantage": "group",
        "aggregation": "sequence_mean_token_mean",
        "clip_length_power": 0,  # its bounds are for whole sequences
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    # grpo whose ratio is a bounded constant
    "cispo": {
        "segments": "token",
        "correction": "off",
        "rate": "constant",
        "advantage": "group",
        "loss": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "dual_clip": None,
    },
    # grpo without its divisions by the deviation and by the length
    "dr_grpo": {
        "segments": "token",
        "correction": "off",
        "rate": "constant",
        "advantage": "group_mean",
        "aggregation": "sequence_mean_token_sum",
    },
    # on-policy distillation: minus the KL to the reference, model.reference_path, of each token by itself
    "distil": {
        "segments": "token",
        "correction": "off",
        "rate": "constant",
        "advantage": "kl",
        "gamma": 0.0,
        "kl_coefficient": 1.0,
        "entropy_coefficient": 0.0,
    },
    "mini_rl": {
        "segments": "token",
        "correction": "off",
        "rate": "constant",
        "advantage": "group_mean",
        "aggregation": "sequence_mean_token_sum",
        "clip_high": 0.27,
        "mismatch": "truncate",
        "mismatch_bound": 5.0,
    },
}
