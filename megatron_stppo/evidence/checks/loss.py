"""Checks that the steps of the actor are those of the definition: each weight, term, derivative and rate.

The model is built for this. Its log-probs and entropies are compared with its logits; old log-probs,
advantages and the controllers' state are planted. The learning rate is so small that no weight changes, so
that all steps of an iteration can be predicted: with the run's settings, and with all terms on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, product
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stppo.algorithm.own import OwnLoss
from megatron_stppo.algorithm.rate import StepMemory
from megatron_stppo.base.types import FAILED, EstimatedBatch, Minibatch, Trajectory
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import AlgorithmConfig, Config
from megatron_stppo.data.packing import Microbatch, to_batch
from megatron_stppo.evidence.bench import defined_loss
from megatron_stppo.evidence.bench.distributions import FAR, ROUNDED, apart, distributions
from megatron_stppo.evidence.bench.stage import Checked, Stage, faultless, of_every_rank
from megatron_stppo.evidence.bench.trial import Counted, Trial
from megatron_stppo.evidence.checks.adamw import norm_of, tensors
from megatron_stppo.evidence.checks.advantages import OUTCOMES, planted
from megatron_stppo.model.learner import Learner
from megatron_stppo.model.offload import Offloader
from megatron_stppo.model.pipeline import forward_backward, logprobs
from megatron_stppo.model.policy_head import ActionTokens
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.training.stages import divided, update
from megatron_stppo.training.update.actor_step import ActorLoss, actor_step, minibatch_weights, rate_scale
from megatron_stppo.training.update.ratios import StepRatios
from megatron_stppo.weights.sharding.hf_names import ModelShape

LOSS = "the loss is the formula"
RATE = 1e-30  # moves no weight by a bit
STILL = {"lr": RATE, "warmup_fraction": 0.0, "weight_decay": 0.0, "grad_clip": 1e30}
DEVIATION = 2.0  # of the planted advantages
LOOSE = 5.0  # a target of the KL that lets the rate rise


def loss(stage: Stage) -> Iterator[Checked]:
    """Compare the steps of an iteration with the definition. Collective."""
    yield finding(stage.config, stage.learner.shape, stage.learner.mesh, stage.own.loss)


def finding(config: Config, shape: ModelShape, mesh: MeshRank, own: OwnLoss | None = None) -> Checked:
    """Return the line of a model that is built for this. Collective."""
    # an odd number of episodes
    played = planted(shape.vocab, max(len(OUTCOMES), mesh.data_size), config.run.seed)[:-1]
    tokens = sum(len(trajectory.token_ids) for trajectory in played)
    half = tokens // (2 * config.update.minibatches * mesh.data_size) + 1
    still = {"actor": STILL, "tokens_per_microbatch": half}  # with its weights, no expert changes either
    config = config.changed(update=still, algorithm={"routing_replay": "off"})
    trial = Trial.of("actor", config, shape, mesh, process.dtype(config))
    wrong = list(distributions(trial.head, next(trial.trainer.chunks[0].parameters())))
    a = config.algorithm
    for name, algorithm in (("these settings", a), ("all terms", everything(a))):
        of_settings = replace(trial, config=config.changed(algorithm=algorithm))
        wrong += [f"{line} ({name})" for line in Iteration.of(of_settings, played, own).wrong()]
    text = f"{tokens:,} tokens, {config.update.minibatches} minibatches, {a.named()}"
    remedy = "algorithm, update.minibatches: report this line; a step is not that of docs/algorithms.md"
    return faultless(LOSS, of_every_rank(wrong), text, remedy)


def everything(a: AlgorithmConfig) -> AlgorithmConfig:
    """Return the algorithm with the terms that it does not have and that fit."""
    more: dict[str, object] = {"entropy_coefficient": a.entropy_coefficient or 0.01}
    if a.kl_in == "reward" or not a.kl_coefficient:
        more |= {"kl_in": "loss", "kl_estimator": "k3", "kl_coefficient": 0.1}
    if a.old_policy == "score" and a.mismatch == "off":
        more |= {"mismatch": "mask"}
    if a.select == "probability":
        more |= {"select_bound": 1e-12}  # the probabilities of random tokens change by little
    if a.clips and a.correction == "off":
        more |= {"correction": "logit"}
    if a.rate != "open_loop":
        more |= {"rate": "kl", "rate_kl": LOOSE}
    return a.changed(**more)


@dataclass(frozen=True)
class WatchedLoss(ActorLoss):
    """The actor's loss, which records the tokens of the steps: a row for each of COLUMNS."""

    seen: Tensor = field(kw_only=True)  # float64 [len(COLUMNS), T]

    def terms(self, tokens: ActionTokens) -> tuple[Tensor, Tensor]:
        value, sums = super().terms(tokens)
        leaves = (tokens.logprob_T, tokens.entropy_T)
        slopes = [defined_loss.slope(value, leaf) for leaf in leaves]
        biased = self.bias_terms(tokens)[0] if self.own is None else value * 0
        columns = (*leaves, tokens.sum_p_sq_T, *slopes, defined_loss.slope(-biased, leaves[0]))
        self.seen[:, tokens.rows_T] = torch.stack([column.detach().double().cpu() for column in columns])
        return value, sums


COLUMNS = ("log-prob", "entropy", "sum p^2", "dloss/dlogprob", "dloss/dentropy", "clipped part")


@dataclass(frozen=True)
class Iteration:
    """The steps of an iteration on planted episodes."""

    trial: Trial
    learner: Learner
    played: Sequence[Trajectory]
    batch: EstimatedBatch
    own: OwnLoss | None
    memory: StepMemory  # before

    @classmethod
    def of(cls, trial: Trial, played: Sequence[Trajectory], own: OwnLoss | None) -> Iteration:
        trainer, a = trial.trainer, trial.config.algorithm
        models = (trainer.chunks, trainer, None, None, trial.packer, Offloader({}, None, "none"))
        learner = Learner(trial.config, trial.mesh, trial.shape, *models)
        batch = divided(learner, to_batch(played), 0)
        own_T = logprobs(trainer.model, trial.head, batch, trial.packer, batch.epochs[0])
        draw = torch.Generator().manual_seed(trial.config.run.seed)

        def normal_T(scale: float) -> Tensor:
            return torch.randn(len(own_T), generator=draw) * scale

        # some turns and some whole histories are far from the old policy
        far_S = (torch.randint(-2, 3, (len(batch.state_S),), generator=draw) / 2).trunc() * 1.3
        far_N = (torch.randint(-2, 3, (len(played),), generator=draw) / 2).trunc() * 0.5
        lengths_S, lengths_N = batch.turn_offsets.diff(), batch.action_offsets.diff()
        away_T = far_S.repeat_interleave(lengths_S) + far_N.repeat_interleave(lengths_N) + normal_T(0.3)
        old_T = own_T - away_T * (1.0 if a.pooling == "mean" else 0.1)
        engine_T = old_T.clone() if a.old_policy == "behaviour" else old_T + normal_T(0.5)
        estimated = EstimatedBatch.of(
            replace(batch, rollout_logprob_T=engine_T),
            old_logprob_T=old_T,
            reference_logprob_T=own_T + normal_T(0.5),
            advantage_T=normal_T(1.0).masked_fill(~batch.live_T, 0),
            deviation=DEVIATION,
        )
        return cls(trial, learner, played, estimated, own, StepMemory(0.5, 9 * a.rate_kl, 1.5, 3))

    def wrong(self) -> Iterator[str]:
        """Yield what differs at each step, none of which is applied, and in the whole update. Collective."""
        a, rows = self.trial.config.algorithm, list[dict[str, float]]()
        steps = [minibatch for epoch in self.batch.epochs for minibatch in epoch]
        factor, trained = self.memory.rate_scale, torch.zeros(len(self.played))
        for index, minibatch in enumerate(steps):
            weight_T = minibatch_weights(self.batch, minibatch.chosen, a)
            ratios, metrics, seen = self._held(minibatch, weight_T)
            sample, at = self._sample(seen, minibatch), f"of minibatch {index + 1}"
            step = defined_loss.step(sample, a, self.own if a.own_loss else None)
            if index == 0:
                yield from self._distribution(seen, minibatch)
            needed = (step.slope, step.slope_entropy, step.removed, step.weight)
            for name, own, of in zip((*COLUMNS[3:], "c_t"), (*seen[3:], weight_T), needed, strict=True):
                yield from apart(f"{name} {at}", own, of, FAR)
            numbers = step.numbers | self._scaled(step, minibatch)
            yield from self._numbers(at, metrics, numbers)
            to_old = defined_loss.capped_kl(sample, step.weight)
            yield from self._steered(ratios, weight_T, to_old)
            factor = defined_loss.rate(a, index, len(steps), factor, to_old, self.memory.kl_after)
            on_rate = 1.0 if a.correction_apply == "gradient" else numbers["actor/correction_scale"]
            rows.append(numbers | {"actor/rate_scale": factor, "actor/effective_lr": RATE * factor * on_rate})
            trained[list(minibatch.chosen)] += 1
        every = (*self.batch.epochs, *divided(self.learner, self.batch, 1).epochs)
        if len({tuple(minibatch.chosen for minibatch in epoch) for epoch in every}) < len(every):
            yield "the episodes have the same order in two epochs or iterations"
        if not bool((trained == self.trial.config.update.epochs).all()):
            yield "an epoch does not have every episode once"
        yield from self._waiting()
        yield from self._updated(rows)

    def _steered(self, ratios: StepRatios, weight_T: Tensor, to_old: float) -> Iterator[str]:
        """Yield where `rate: kl` does not follow its rule, with a KL of to_old near both limits, each of them
        read by the step and from the update before."""
        trainer, limits = self.trial.trainer, (0.49, 0.51, 1.99, 2.01) if to_old > 0 else ()
        for share, rise, of in product(limits, ("step", "iteration"), ("score", "behaviour")):
            rule = {"rate": "kl", "rate_kl": to_old / share, "rate_rise": rise, "old_policy": of}
            a = self.trial.config.algorithm.changed(**rule)
            loss = ActorLoss(self.batch, weight_T, a, self.trial.head)
            for last, (index, steps) in product((0.012, 0.5, 0.8), ((0, 1), (0, 3), (1, 3), (2, 3))):
                trainer.memory = StepMemory(last, to_old)
                factor = rate_scale(trainer, loss, ratios, index, steps)
                needed = defined_loss.rate(a, index, steps, last, to_old, to_old)
                if not math.isclose(factor, needed):
                    at = f"rate_rise={rise}, old_policy={of}, KL {share:g} x rate_kl, step {index} of {steps}"
                    yield f"{at}: the rate's factor is {factor:.3g}, not {needed:.3g}"

    def _held(self, minibatch: Minibatch, weight_T: Tensor) -> tuple[StepRatios, dict[str, float], Tensor]:
        """Compute a step without applying it. Return its ratios and metrics, and COLUMNS of all ranks.

        Collective.
        """
        trial, seen = self.trial, torch.zeros(len(COLUMNS), len(weight_T), dtype=torch.float64)
        trial.trainer.memory = self.memory
        loss = WatchedLoss(self.batch, weight_T, trial.config.algorithm, trial.head, self.own, seen=seen)
        step = actor_step(trial.trainer, loss, minibatch, trial.packer, hold=True)
        return step.ratios, step.metrics, self._reduced(seen)

    def _waiting(self) -> Iterator[str]:
        """Yield whether the actor steps before the iteration update.critic_only. Collective."""
        trainer, only = self.trial.trainer, self.trial.config.update.critic_only
        for iteration in sorted({0, only - 1}) if only else ():
            before = trainer.updates, trainer.memory
            row, _, _ = update(self.learner, self.batch, iteration, False, self.own)
            if (trainer.updates, trainer.memory, row["actor/held"]) != (*before, 1.0):
                yield f"update.critic_only={only}: the actor is updated in iteration {iteration}, from 0"

    def _updated(self, rows: Sequence[dict[str, float]]) -> Iterator[str]:
        """Yield what differs after a whole update with steps that have these numbers. Collective."""
        trainer, before, iteration = self.trial.trainer, self.memory, self.trial.config.update.critic_only
        norm, scaled = (rows[-1][f"actor/{name}"] for name in ("gradient_norm", "scaled_gradient_norm"))
        bound = math.sqrt(norm * scaled)  # between the two: what is clipped first, then scaled, is smaller
        trainer.memory, trainer.settings = before, trainer.settings.changed(grad_clip=bound or 1.0)
        row, ratios, _ = update(self.learner, self.batch, iteration, False, self.own)
        means = {name: fmean(numbers[name] for numbers in rows) for name in rows[0]}
        yield from self._numbers("of the update", row, means)
        if ratios is None or not bool(ratios.chosen_T.all()):
            yield "the update has not computed every token"
        last, after = rows[-1], trainer.memory
        applied = norm_of(tensors(trainer, Counted.of(self.trial)))
        found = {"norm of Adam's gradient": applied, "factor of the rate": after.rate_scale}
        found |= {"KL after the update": after.kl_after, "usual deviation": after.deviation}
        found |= {f"rate of Adam's group {n}": g["lr"] for n, g in enumerate(trainer.optimizer.param_groups)}
        needed = dict.fromkeys(found, last["actor/effective_lr"]) | {
            "norm of Adam's gradient": min(bound, scaled),
            "factor of the rate": last["actor/rate_scale"],
            "KL after the update": 0.0,
            "usual deviation": (before.deviation * before.whitened + DEVIATION) / (before.whitened + 1),
        }
        yield from self._numbers("after the last step", found, needed)

    def _numbers(self, at: str, found: Mapping[str, float], needed: Mapping[str, float]) -> Iterator[str]:
        for name, number in needed.items():
            least = 0.0 if 0 < abs(number) < 1e-20 else 1e-3  # a rate must agree as such
            allowed = ROUNDED[process.dtype(self.trial.config)] * max(abs(number), least)
            if not abs(found[name] - number) <= allowed:
                yield f"{name} {at}: {found[name]:.6g}, not {number:.6g}"

    def _scaled(self, step: defined_loss.ExactStep, minibatch: Minibatch) -> dict[str, float]:
        """Return the numbers that need gradients of the model. Collective."""
        a, clipped = self.trial.config.algorithm, step.numbers["actor/clip_fraction"]
        gradient = self._norm(minibatch, step.slope, step.slope_entropy)
        corrects = a.correction != "off" and clipped > 0
        exact = self._norm(minibatch, step.removed) if a.correction == "gradient" and corrects else 0.0
        bias = defined_loss.bias_norm(step, a, gradient, exact) if corrects else 0.0
        scale = defined_loss.scale(bias, clipped, a)
        return {
            "actor/gradient_norm": gradient,
            "actor/clipping_bias": bias,
            "actor/correction_scale": scale,
            "actor/scaled_gradient_norm": gradient * (scale if a.correction_apply == "gradient" else 1.0),
        }

    def _norm(self, minibatch: Minibatch, slope_T: Tensor, of_entropy_T: Tensor | None = None) -> float:
        """Return the norm of the gradient of a loss with these derivatives. Collective."""
        trainer, head = self.trial.trainer, self.trial.head

        def terms(tokens: ActionTokens) -> tuple[Tensor, Tensor]:
            rows, like = tokens.rows_T, tokens.logprob_T
            value = (slope_T[rows].to(like) * like).sum()
            if of_entropy_T is not None:
                value = value + (of_entropy_T[rows].to(like) * tokens.entropy_T).sum()
            return value, value.detach().reshape(1)

        trainer.zero()
        packed = self.trial.packer.pack(self.batch, minibatch)
        forward_backward(trainer.model, packed, lambda hidden, part: head.loss(hidden, part, terms)[:2])
        return trainer.reduce()

    def _distribution(self, seen: Tensor, minibatch: Minibatch) -> Iterator[str]:
        """Yield which log-probs, entropies and sums of p^2 are not those of the logits. Collective."""
        packed, exact = self.trial.packer.pack(self.batch, minibatch), torch.zeros_like(seen[:3])
        records = forward_backward(self.trial.trainer.model, packed, self._statistics, trains=False)
        for part, record in zip(packed, records, strict=False):
            exact[:, part.rows_T] = record.cpu()
        far = ROUNDED[process.dtype(self.trial.config)]
        for name, found, needed in zip(COLUMNS, seen, self._reduced(exact), strict=False):
            yield from apart(name, found, needed, far)

    def _statistics(self, hidden: Tensor, part: Microbatch) -> tuple[Tensor, Tensor]:
        """Return 0, and log-prob, entropy and sum of p^2 of each token in float64 from the model's logits."""
        head, mesh = self.trial.head, self.trial.mesh
        assert head.weight is not None
        factors = (hidden.float(), head.weight.float()) if head.float32_logits else (hidden, head.weight)
        local = (factors[0] @ factors[1].t()).contiguous()
        shards = [torch.empty_like(local) for _ in range(mesh.tensor_size)]
        dist.all_gather(shards, local, group=mesh.tensor_group)
        logits = torch.cat(shards, dim=1)[:, : head.vocab_size].double()
        log_p = (logits / self.trial.config.rollout.temperature).log_softmax(1)
        p = log_p.exp()
        own = log_p.gather(1, part.target_T[:, None])[:, 0]
        return hidden.new_zeros(()), torch.stack([own, -(p * log_p).sum(1), p.square().sum(1)])

    def _reduced(self, rows: Tensor) -> Tensor:
        """Add up the rows of the ranks, each of which has some tokens, in place."""
        if not self.trial.mesh.is_last_stage:
            rows.zero_()
        for group in (self.trial.mesh.token_group, self.trial.mesh.pipeline_group):
            dist.all_reduce(rows, group=group)
        return rows

    def _sample(self, seen: Tensor, minibatch: Minibatch) -> defined_loss.Sample:
        """Return the tokens of all episodes, with those of the live ones of the minibatch counted."""
        batch, lengths = self.batch, [sum(len(turn.token_ids) for turn in t.turns) for t in self.played]
        assert batch.old_logprob_T is not None and batch.reference_logprob_T is not None
        live = (bool(t.turns) and t.outcome not in FAILED for t in self.played)
        counted = [n in minibatch.chosen and lives for n, lives in enumerate(live)]
        firsts = [n for n, history in enumerate(self.played) if not history.branch]
        histories = _slices(lengths)
        return defined_loss.Sample(
            logprob=seen[0],
            old=batch.old_logprob_T.double(),
            reference=batch.reference_logprob_T.double(),
            engine=batch.rollout_logprob_T.double(),
            advantage=batch.advantage_T.double(),
            entropy=seen[1],
            square=seen[2],
            counted=torch.tensor(counted).repeat_interleave(torch.tensor(lengths)),
            turns=_slices(len(turn.token_ids) for history in self.played for turn in history.turns),
            histories=histories,
            episodes=[
                slice(histories[first].start, histories[end - 1].stop)
                for first, end in pairwise([*firsts, len(histories)])
            ],
        )


def _slices(lengths: Iterable[int]) -> list[slice]:
    return [slice(*pair) for pair in pairwise(accumulate(lengths, initial=0))]
