"""The family of algorithms as data: two switches of the paper, plus baselines. A row gives defaults.

Source: ST-PPO, arXiv 2511.20718. `segments` chooses the tokens that share one importance ratio;
`correction` chooses the estimator of the clipping bias ||C|| that weighs a minibatch down ("off": none).
"""

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "ppo": {"segments": "token", "correction": "off", "advantage": "gae"},
    "turn_ppo": {"segments": "turn", "correction": "off", "advantage": "gae"},
    "s_ppo": {"segments": "token", "correction": "logit", "advantage": "gae"},
    "st_ppo": {"segments": "turn", "correction": "logit", "advantage": "gae"},
    "grpo": {"segments": "token", "correction": "off", "advantage": "group"},
    "so_grpo": {"segments": "turn", "correction": "logit", "advantage": "group"},
    "gspo": {
        "segments": "sequence",
        "correction": "off",
        "advantage": "group",
        "aggregation": "sequence_mean_token_mean",
    },
}
