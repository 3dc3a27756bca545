"""Table of the algorithms: the four combinations of the paper's two switches, and baselines.

Source: ST-PPO, arXiv 2511.20718. `segments` chooses the tokens that share one importance ratio. `correction`
chooses the estimator of the clipping bias ||C||, by which the step of a minibatch is scaled down ("off": no
correction). `rate` chooses what else multiplies the rate of a step. A row holds the fields that define the
algorithm, as defaults of the configuration; `PPO | {..}` are those of PPO with changes.
docs/algorithms.md describes every field and gives the sources of the baselines.
"""

from typing import Any

Fields = dict[str, Any]
PPO: Fields = {"segments": "token", "correction": "off", "rate": "constant", "advantage": "gae"}
ST_PPO = PPO | {"segments": "turn", "correction": "logit"}
GRPO = PPO | {"advantage": "group"}
DR_GRPO = PPO | {"advantage": "group_mean", "aggregation": "sequence_mean_token_sum"}
EXACT = {"correction": "gradient", "correction_apply": "gradient", "correction_unit": "mean"}
WHOLE = {"aggregation": "sequence_mean_token_mean", "clip_length_power": 0}  # bounds for any length

VARIANTS: dict[str, Fields] = {
    "ppo": PPO,
    "turn_ppo": PPO | {"segments": "turn"},
    "s_ppo": PPO | {"correction": "logit"},
    "st_ppo": ST_PPO,
    # st_ppo as printed in the paper: a mean over trajectories of means over their tokens, whose gradient is
    # divided by its exact ||C||, even if ||C|| is small; bounds that do not follow the length of a turn
    "paper": ST_PPO | WHOLE | EXACT | {"correction_strength": 1, "correction_floor": 0, "dual_clip": None},
    "kl": PPO | {"rate": "kl"},
    # ratios to the engine's policy; tokens outside the bounds leave, whatever the sign of the advantage
    "sao": PPO
    | {"old_policy": "behaviour", "select": "ratio", "clip_low": 0.8, "clip_high": 3.0, "dual_clip": None}
    | {"lam_length": 1.5, "lam_critic": 1.0},
    # grpo whose tokens leave by the change of their probability
    "dppo": GRPO | {"select": "probability", "select_bound": 0.15, "dual_clip": None},
    "grpo": GRPO,
    "so_grpo": GRPO | {"segments": "turn", "correction": "logit"},
    # grpo plus the advantages of turns among those of the group that begin in the same state
    "gigpo": PPO | {"advantage": "gigpo", "gamma": 0.95},
    "gspo": GRPO | WHOLE | {"segments": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    # grpo whose ratio is a bounded constant
    "cispo": GRPO | {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0, "dual_clip": None},
    # grpo without its divisions by the deviation and by the length
    "dr_grpo": DR_GRPO,
    # on-policy distillation: minus the KL to the reference, model.reference_path, of each token by itself
    "distil": PPO | {"advantage": "kl", "gamma": 0.0, "kl_coefficient": 1.0, "entropy_coefficient": 0.0},
    "mini_rl": DR_GRPO | {"clip_high": 0.27, "mismatch": "truncate", "mismatch_bound": 5.0},
}
