"""The section `algorithm`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_stppo.algorithm.variants import VARIANTS
from megatron_stppo.config.section import Section
from megatron_stppo.messages import did_you_mean


class AlgorithmConfig(Section):
    """`preset` names a row of VARIANTS (algorithm/variants.py); a field that is given overrides the row."""

    preset: str = Field(
        "st_ppo", description="row of the table of algorithms; fields beside it override the row"
    )
    segments: Literal["token", "turn", "sequence"] = Field(
        "turn", description="tokens that share an importance ratio"
    )
    pooling: Literal["mean", "sum"] = Field("mean", description="how a segment's log-ratios are combined")
    clip_low: float = Field(
        0.2, ge=0, lt=1, description="ratios below 1 - clip_low are clipped where the advantage is negative"
    )
    clip_high: float = Field(
        0.2, ge=0, description="ratios above 1 + clip_high are clipped where the advantage is positive"
    )
    dual_clip: float | None = Field(
        None, gt=1, description="largest ratio where the advantage is negative; null: none"
    )
    aggregation: Literal[
        "token_mean",
        "turn_mean",
        "sequence_mean_token_mean",
        "sequence_mean_token_sum",
        "sequence_mean_token_sum_norm",
    ] = Field("token_mean", description="weights of the tokens in the loss")
    aggregation_length: int | None = Field(
        None, ge=1, description="the constant that sequence_mean_token_sum_norm divides by, tokens"
    )
    correction: Literal["off", "coefficient", "logit", "gradient"] = Field(
        "logit", description="estimator of ||C||, the norm of the gradient that clipping removes"
    )
    correction_apply: Literal["gradient", "step"] = Field(
        "step", description="what the scale multiplies: the gradient, or the step's learning rate"
    )
    correction_unit: Literal["mean", "sum", "relative"] = Field(
        "relative",
        description="||C|| of the loss, a mean; of the sum over the minibatch's action tokens, which grows "
        "with their number; or as a multiple of the norm of the gradient that is left",
    )
    correction_strength: float = Field(
        10.0, gt=0, description="how many times ||C|| counts, in its unit; the paper: once"
    )
    correction_floor: float = Field(
        1.0, ge=0, description="scale = 1 / max(floor, strength ||C||); 0 is the paper's literal form"
    )
    correction_probe: bool = Field(
        False,
        description="also report ||C|| by every estimator, and every step in steps.jsonl; the same training, "
        "but for the time of a second backward pass where something is clipped",
    )
    advantage: Literal["gae", "group", "group_mean"] = Field(
        "gae",
        description="by a critic; or outcomes less their group's mean, divided by its deviation or not",
    )
    gae_level: Literal["token", "turn"] = Field("token", description="steps of GAE")
    gae_observations: bool = Field(
        False, description="True: GAE and value loss take observations in too, as the search baseline's do"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount per step of GAE")
    lam: float = Field(1.0, ge=0, le=1, description="lambda of GAE")
    whiten: bool = Field(True, description="advantages to mean 0 and variance 1 over the batch")
    value_clip: float = Field(0.5, gt=0, description="range around the old value, as in PPO")
    kl_coefficient: float = Field(
        0.001, ge=0, description="weight of the KL divergence from the reference; 0 builds no reference"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k1", description="estimator of the KL divergence")
    kl_in: Literal["reward", "loss"] = Field(
        "reward", description="whether it is subtracted from rewards or added to the loss"
    )
    entropy_coefficient: float = Field(0.001, ge=0, description="weight of the entropy bonus")
    mismatch: Literal["off", "truncate", "mask"] = Field(
        "off", description="weight for train/serve mismatch: TIS, MIS or none"
    )
    mismatch_level: Literal["token", "turn", "sequence"] = Field(
        "token", description="tokens that the mismatch weight is averaged over"
    )
    mismatch_bound: float = Field(2.0, gt=1, description="bound of the mismatch weight")
    routing_replay: Literal["off", "old_policy"] = Field(
        "off",
        description="experts that an update uses: its own router's, or those of the old policy's scores",
    )

    @model_validator(mode="before")
    @classmethod
    def _row(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        preset = given.get("preset", "st_ppo")
        if preset not in VARIANTS:
            remedy = did_you_mean(str(preset), VARIANTS, "'{}'") or f"choose from {sorted(VARIANTS)}"
            raise ValueError(f"preset={preset!r} is not known; {remedy}")
        return {**VARIANTS[preset], **given}

    @model_validator(mode="after")
    def _length_given(self) -> AlgorithmConfig:
        if (self.aggregation == "sequence_mean_token_sum_norm") != (self.aggregation_length is not None):
            raise ValueError(
                f"aggregation_length={self.aggregation_length} with aggregation={self.aggregation!r}; "
                "sequence_mean_token_sum_norm needs it, such as the most tokens an episode may write, the "
                "others do not take it"
            )
        return self

    @model_validator(mode="after")
    def _observations_have_values(self) -> AlgorithmConfig:
        if self.gae_observations and (self.advantage != "gae" or self.gae_level != "token"):
            raise ValueError(
                f"gae_observations=True with advantage={self.advantage!r} and gae_level={self.gae_level!r}; "
                "only token-level GAE runs over observations, choose 'gae' and 'token'"
            )
        return self

    @model_validator(mode="after")
    def _kl_has_a_gradient(self) -> AlgorithmConfig:
        if self.kl_in == "loss" and self.kl_estimator == "k1" and self.kl_coefficient > 0:
            raise ValueError(
                "kl_estimator='k1' has no expected gradient as a loss; choose k2 or k3, or kl_in=reward"
            )
        return self
