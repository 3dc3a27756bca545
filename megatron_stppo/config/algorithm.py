"""The section `algorithm`."""

import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_stppo.algorithm.variants import VARIANTS
from megatron_stppo.base.printing import did_you_mean
from megatron_stppo.config.section import Rule, Section

Factor = Annotated[float, Field(ge=0)]
GROUPED = ("group", "group_mean", "group_turn", "gigpo")  # they compare the episodes of a task
ADVANTAGES = ("gae", "kl", *GROUPED)
CORRECTIONS = ("coefficient", "logit", "gradient")  # beside off
LOSSES = ("cispo",)  # the names in algorithm/own.py, which imports torch
# (fields, another field, the values of it with which alone the first have an effect)
ONLY_WITH: tuple[tuple[str, str, tuple[str | None, ...]], ...] = (
    ("correction_apply correction_strength correction_floor", "correction", CORRECTIONS),
    ("gae_level lam lam_critic lam_length whiten value_clip", "advantage", ("gae",)),
    ("lam", "lam_length", (None,)),
    ("gamma", "advantage", ("gae", "kl", "group_turn", "gigpo")),
    ("mismatch_level mismatch_pooling mismatch_bound", "mismatch", ("truncate", "mask")),
    ("mismatch_lower", "mismatch", ("mask",)),
    ("rate_kl rate_rise", "rate", ("kl",)),
    ("select_bound", "select", ("probability",)),
    ("clip_decision", "segments", ("turn", "sequence")),
    ("turn_weight", "advantage", ("gigpo",)),
)


class AlgorithmConfig(Section):
    """`preset` names a row of VARIANTS (algorithm/variants.py); other fields that are given override it."""

    preset: str = "st_ppo"
    """row of the table of algorithms; other fields of this section override it"""
    segments: Literal["token", "turn", "sequence"] = "turn"
    """tokens that share an importance ratio"""
    pooling: Literal["mean", "sum"] = "mean"
    """how a segment's log-ratios are combined"""
    clip_low: float = Field(0.2, ge=0, le=1)
    """ratios below 1 - clip_low are clipped if the advantage is negative; of longer segments, see
    clip_length_power"""
    clip_high: float = Field(0.2, ge=0)
    """ratios above 1 + clip_high are clipped if the advantage is positive; of longer segments, see
    clip_length_power"""
    dual_clip: float | None = Field(3.0, gt=1)
    """largest ratio if the advantage is negative; null: no limit"""
    clip_length_power: float = Field(0.5, ge=0)
    """power p of the segment's number of tokens n: ratios are clipped at (1 - clip_low), (1 + clip_high) and
    dual_clip, each to the power of n^-p; 0.5: for tokens that change independently; 1: the segment's
    probability is bounded; 0, as in the paper: the same bounds for every length; no effect with
    segments=token"""
    clip_decision: Literal["token", "segment"] = "token"
    """whose advantage decides, with its sign, which bound holds: each token's own, or the weighted mean of
    the segment's tokens, so that a segment is clipped as a whole"""
    aggregation: Literal[
        "token_mean",
        "turn_mean",
        "episode_mean",
        "sequence_mean_token_mean",
        "sequence_mean_token_sum",
        "sequence_mean_token_sum_norm",
    ] = "token_mean"
    """weights of the tokens in the loss"""
    aggregation_length: int | None = Field(None, ge=1)
    """divisor of sequence_mean_token_sum_norm, in tokens"""
    correction: Literal["off", "coefficient", "logit", "gradient"] = "logit"
    """estimator of ||C||, the norm of the gradient that clipping removes"""
    correction_apply: Literal["gradient", "step"] = "step"
    """what the scale multiplies: the gradient, or the step's learning rate"""
    correction_unit: Literal["mean", "sum", "relative"] = "relative"
    """mean: ||C|| of the loss; sum: of the sum over the minibatch's action tokens, which grows with their
    number; relative: as a multiple of the norm of the remaining gradient"""
    correction_strength: float = Field(10.0, gt=0)
    """factor of ||C|| in the scale; 1 in the paper"""
    correction_floor: float = Field(1.0, ge=0)
    """scale = 1 / max(floor, strength ||C||); 0 is the paper's literal form"""
    correction_probe: bool = False
    """report ||C|| by every estimator, and every step in steps.jsonl; training is the same, but a step that
    clips takes a second backward pass"""
    select: Literal["all", "ratio", "probability"] = "all"
    """tokens in the surrogate. In place of clipping: ratio: without segments whose ratio is not inside the
    clip bounds; probability: without tokens whose probability has changed by more than select_bound in the
    direction of the advantage"""
    select_bound: float = Field(0.15, gt=0)
    """with select=probability: largest change of a token's probability"""
    rate: Literal["constant", "open_loop", "kl"] = "constant"
    """factor on the actor's learning rate of each optimizer step: 1; rate_profile; from the KL divergence to
    the old policy"""
    rate_profile: list[Factor] | None = None
    """with rate=open_loop: a factor for each optimizer step of an iteration, in order"""
    rate_kl: float = Field(0.002, gt=0)
    """with rate=kl: target of the KL divergence to the old policy, nats per token"""
    rate_rise: Literal["step", "iteration"] = "step"
    """with rate=kl: whether every step may raise the factor, or one step of an iteration"""
    advantage: str = "gae"
    """gae: with a critic; group: (outcome - group mean) / group deviation; group_mean: outcome - group mean;
    group_turn: as group, of the return of each turn among turns with the same index; gigpo: group, plus
    turn_weight times the same of turns that begin in the same state; kl: minus the KL penalties of the token
    and, discounted by gamma, of those after it, without the environment's rewards; or MODULE:FUNCTION
    (docs/algorithms.md)"""
    turn_weight: float = Field(1.0, gt=0)
    """weight of the turns' part of advantage=gigpo (omega of GiGPO)"""
    loss: str | None = None
    """cispo or MODULE:FUNCTION, in place of the clipped surrogate (docs/algorithms.md)"""
    gae_level: Literal["token", "turn"] = "token"
    """what one step of GAE is"""
    gae_observations: bool = False
    """include observations in GAE and in the value loss, as Search-R1 does"""
    gae_histories: Literal["alone", "discounted", "chained"] = "alone"
    """an agent's episode of several histories. alone: each ends with the reward; discounted: and its
    advantages are multiplied by (gamma lambda)^n, for n steps of GAE in the episode's later histories;
    chained: they are one trajectory, one after another, that ends with the reward"""
    gamma: float = Field(1.0, ge=0, le=1)
    """discount per step of GAE, and of advantage=kl; with group_turn and gigpo, per turn"""
    lam: float = Field(1.0, ge=0, le=1)
    """lambda of GAE"""
    lam_critic: float | None = Field(None, ge=0, le=1)
    """lambda of the critic's returns; null: that of the advantages"""
    lam_length: float | None = Field(None, gt=0)
    """alpha of a lambda that follows the length l of a trajectory, in steps of GAE: the advantages have 1 - 1
    / (alpha l), at least 0, in place of lam; null: lam"""
    truncated: Literal["end", "bootstrap", "mask"] = "end"
    """episodes with the outcome truncated, because the context is full or the turns are used up. end: what
    would have followed counts 0; bootstrap: with a critic, it counts with the value of the last step; mask:
    they carry no loss"""
    overlong_from: int | None = Field(None, ge=0)
    """action tokens of an episode above which its reward is reduced; null: never"""
    overlong_to: int | None = None
    """action tokens of an episode from which its reward is reduced by overlong_penalty"""
    overlong_penalty: float = Field(1.0, gt=0)
    """largest reduction of an episode's reward"""
    whiten: bool = True
    """scale advantages to mean 0 and variance 1 over the batch"""
    value_clip: float = Field(0.5, gt=0)
    """clipping range around the old value, as in PPO"""
    kl_coefficient: float = Field(0.001, ge=0)
    """weight of the KL divergence from the reference; 0 builds no reference"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """estimator of the KL divergence"""
    kl_in: Literal["reward", "loss"] = "reward"
    """whether the KL divergence is subtracted from rewards or added to the loss"""
    entropy_coefficient: float = Field(0.001, ge=0)
    """weight of the entropy bonus"""
    old_policy: Literal["score", "behaviour"] = "score"
    """denominator of the importance ratios: the trainer's policy at the iteration's start, or the engine's
    policies that generated the tokens"""
    mismatch: Literal["off", "truncate", "mask"] = "off"
    """correction of what lies between the engine's policy and the old policy: truncate (TIS), mask (MIS) or
    off"""
    mismatch_level: Literal["token", "turn", "sequence"] = "token"
    """tokens that the mismatch weight is averaged over"""
    mismatch_pooling: Literal["mean", "sum"] = "mean"
    """how the log-ratios of mismatch_level are combined; sum: the product of the ratios"""
    mismatch_bound: float = Field(2.0, gt=1)
    """upper bound of the mismatch weight"""
    mismatch_lower: float | None = Field(None, ge=0, le=1)
    """lower bound of mismatch=mask; null: 1 / mismatch_bound"""
    routing_replay: Literal["off", "old_policy", "rollout"] = "off"
    """experts that the trainer uses: those its router chooses; in updates, those chosen when the old policy
    was scored (R2); in scoring and updates, those that the engine chose (R3)"""

    @model_validator(mode="before")
    @classmethod
    def _row(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        preset = given.get("preset", cls.model_fields["preset"].default)
        if not isinstance(preset, str) or preset not in VARIANTS:
            remedy = did_you_mean(str(preset), VARIANTS, "'{}'") or f"choose from {sorted(VARIANTS)}"
            raise ValueError(f"preset={preset!r} is not known; {remedy}")
        return {**VARIANTS[preset], **given}

    def named(self) -> str:
        """Return the preset's name, and the fields that differ from its row.

        Example: "ppo with clip_low=0.006 (preset: 0.2)".
        """
        row = AlgorithmConfig(preset=self.preset)
        own = ((name, value, getattr(row, name)) for name, value in self)
        changed = ", ".join(f"{name}={value} (preset: {of})" for name, value, of in own if value != of)
        return f"{self.preset} with {changed}" if changed else self.preset

    @property
    def clips(self) -> bool:
        """Whether the surrogate clips: no loss is in its place, and no selection in place of clipping."""
        return self.loss is None and self.select == "all"

    @property
    def clip_bounds(self) -> tuple[float, float, float]:
        """clip_low, clip_high and clip_length_power of the surrogate; (1, inf, 0) where it does not clip."""
        return (self.clip_low, self.clip_high, self.clip_length_power) if self.clips else (1.0, math.inf, 0.0)

    @property
    def own_loss(self) -> bool:
        """Whether `loss` names a function of the user."""
        return self.loss is not None and self.loss not in LOSSES

    @property
    def own_advantage(self) -> bool:
        """Whether `advantage` names a function of the user."""
        return ":" in self.advantage

    def rules(self) -> Iterable[Rule]:
        a, first, last = self, self.overlong_from, self.overlong_to
        rises = first is not None and last is not None and first < last
        named, used = a.loss in LOSSES, f"loss={a.loss}" if a.loss else f"select={a.select!r}"
        return (
            Rule(
                a.advantage not in ADVANTAGES and not a.own_advantage,
                f"advantage={a.advantage!r} is not known; choose {', '.join(ADVANTAGES)}",
                did_you_mean(a.advantage, ADVANTAGES, "'{}'") or "it is none of these, nor MODULE:FUNCTION",
            ),
            Rule(
                not a.clips and (a.correction != "off" or bool(a.correction_probe and a.loss)),
                f"correction={a.correction!r} with {used}: the correction is for what clipping removes, and "
                "this is in place of clipping",
                "set correction to off and correction_probe to false",
            ),
            Rule(
                named and a.dual_clip is not None,
                f"dual_clip={a.dual_clip} with {used}: it would have no effect",
                "set dual_clip=null",
            ),
            Rule(
                named and a.segments != "token",
                f"segments={a.segments} with {used}: it would have no effect",
                "set segments=token",
            ),
            *(rule for row in ONLY_WITH for rule in self._have_effect(*row)),
            *(
                Rule(
                    not (a.clips or named or a.select == "ratio") and getattr(a, name) != self._idle(name),
                    f"{name}={getattr(a, name)} with {used}: it has no such bounds",
                    "leave it out",
                )
                for name in ("clip_low", "clip_high")
            ),
            Rule(
                a.truncated == "bootstrap" and a.advantage != "gae",
                f"truncated='bootstrap' with advantage={a.advantage!r}: there is no critic",
                "choose end or mask, or advantage=gae",
            ),
            Rule(
                not rises and (first, last, a.overlong_penalty) != (None, None, 1),
                f"overlong_from={first}, overlong_to={last}, overlong_penalty={a.overlong_penalty}: the "
                "penalty rises between two numbers of tokens",
                "give both, the second above the first, or leave out all three",
            ),
            Rule(
                rises and a.advantage == "kl",
                f"overlong_from={first} with advantage=kl: rewards do not count",
                "leave it out",
            ),
            Rule(
                a.pooling == "sum" and a.segments != "token" and a.clip_length_power > 0,
                f"clip_length_power={a.clip_length_power} with pooling='sum': such a ratio is already of the "
                "segment's probability, so its bounds must not follow the length",
                "set clip_length_power=0",
            ),
            Rule(
                (a.aggregation == "sequence_mean_token_sum_norm") != (a.aggregation_length is not None),
                f"aggregation_length={a.aggregation_length} with aggregation={a.aggregation!r}",
                "sequence_mean_token_sum_norm needs a length, such as the largest number of tokens of an "
                "episode; the other aggregations take none",
            ),
            Rule(
                (a.rate == "open_loop") != (a.rate_profile is not None),
                f"rate_profile={a.rate_profile} with rate={a.rate!r}",
                "open_loop needs a factor for each optimizer step of an iteration, such as [1, 0.5] for two; "
                "with the others give null",
            ),
            Rule(
                a.gae_observations and (a.advantage != "gae" or a.gae_level != "token"),
                f"gae_observations=True with advantage={a.advantage!r} and gae_level={a.gae_level!r}",
                "only token-level GAE includes observations, choose 'gae' and 'token'",
            ),
            Rule(
                a.gae_histories != "alone" and (a.advantage != "gae" or a.gae_observations),
                f"gae_histories={a.gae_histories!r} with advantage={a.advantage!r} and "
                f"gae_observations={a.gae_observations}: it is for GAE over action tokens",
                "set gae_histories=alone, or advantage=gae and gae_observations=false",
            ),
            Rule(
                a.advantage == "kl" and (a.kl_in != "reward" or a.kl_coefficient == 0),
                f"advantage='kl' with kl_in={a.kl_in} and kl_coefficient={a.kl_coefficient}: the KL "
                "penalties of the reward are all that it has",
                "set kl_in=reward and a kl_coefficient such as 1",
            ),
            Rule(
                a.kl_in == "reward" and a.kl_estimator != "k1" and a.kl_coefficient > 0,
                f"kl_estimator={a.kl_estimator!r} in the reward: as a reward its gradient is not that of the "
                "KL divergence, and may lead away from the reference",
                "choose k1, or kl_in=loss",
            ),
            Rule(
                a.kl_in == "loss" and a.kl_estimator == "k1" and a.kl_coefficient > 0,
                "kl_estimator='k1' has no expected gradient as a loss",
                "choose k2 or k3, or kl_in=reward",
            ),
        )

    def _have_effect(self, names: str, of: str, values: tuple[str | None, ...]) -> Iterator[Rule]:
        chosen, needed = getattr(self, of), " or ".join(value or "null" for value in values)
        for name in names.split():
            value = getattr(self, name)
            yield Rule(
                value != self._idle(name) and chosen not in values,
                f"{name}={value} with {of}={chosen!r}: it has an effect only with {of}={needed}",
                f"leave it out, or set {of}={needed}",
            )

    def _idle(self, name: str) -> Any:
        """Return the value of a field that is not given."""
        return VARIANTS[self.preset].get(name, type(self).model_fields[name].default)
