"""Memory of one rank's models and of a micro-batch, measured with the rank's real modules on meta tensors."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from megatron_stppo.config import Config
from megatron_stppo.data.packing import Microbatch
from megatron_stppo.model import build
from megatron_stppo.model.optimizer import Trainer, trained
from megatron_stppo.model.policy_head import ActionTokens, PolicyHead
from megatron_stppo.model.token_model import TokenModel, frozen
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.plan.meter import Meter, device_paths, forget, route_evenly
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape


@dataclass(frozen=True)
class ModelUse:
    """One model on one rank. Memory is in bytes; FLOP are those of one micro-batch through all its chunks."""

    parameters: int
    weights: int  # without frozen ones, which models share (StageUse.trunk)
    buffers: int  # tensors that are neither weights nor states, and never leave the GPU
    gradients: int  # float32 main gradients
    optimizer: int  # this rank's shard of its states, and of float32 weights if the model has another type
    scoring: int  # the most that a forward pass adds
    kept: tuple[int, ...]  # per chunk, what one micro-batch keeps between forward and backward
    working: int  # the most that a micro-batch adds during its forward and backward
    stepping: int  # the most that reduction and optimizer step add
    set_aside: int  # copy of the loss's gradients while correction=gradient computes the clipping bias
    score_flop: int
    update_flop: int

    def in_flight(self, layout: Layout, stage: int, microbatches: int) -> int:
        """Return the bytes kept by micro-batches that wait for their backward on this stage."""
        return sum(self.kept[chunk] for chunk in waiting(layout, stage, microbatches)) if self.kept else 0


def waiting(layout: Layout, stage: int, microbatches: int) -> list[int]:
    """Return the chunks whose forward passes run before a stage's first backward, in megatron's order.

    This is the warm-up of megatron's schedule. Its length is pipeline - stage - 1 with one chunk per stage,
    and 2 (pipeline - stage - 1) + (virtual - 1) pipeline with several. Then `pipeline` micro-batches of a
    chunk run one after another (schedules.py, get_pp_rank_microbatches and get_schedule_table).
    Example: stage 0 of 2 with 2 chunks: [0, 0, 1, 1].
    """
    behind, chunks = layout.pipeline - stage - 1, layout.virtual
    count = behind if chunks == 1 else 2 * behind + (chunks - 1) * layout.pipeline
    count = min(count, microbatches * chunks - 1)
    return [k // layout.pipeline % chunks for k in range(count)]


class RankModels:
    """Measures the models of one rank, one after the other.

    With adapters, the actor's frozen weights stay until the end, because critic and reference use them,
    except a reference of model.reference_path.
    """

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        mesh: MeshRank,
        dtype: torch.dtype,
        microbatch: Microbatch,
        is_cuda: bool,
    ) -> None:
        self.config = config.changed(model=config.model.in_torch)
        self.shape, self.mesh, self.dtype = shape, mesh, dtype
        self.microbatch, self.is_cuda = microbatch, is_cuda
        self.warm = False
        self.meter = Meter()
        self._trunk: list[TokenModel] | None = None

    def uses(self, roles: Sequence[build.Role]) -> tuple[dict[str, ModelUse], int, int]:
        """Measure the models of these roles, of which the actor is the first.

        Return them by role, and the bytes that all share: frozen weights (0 without adapters), and megatron's
        buffers, which stay when the models are deleted.
        """
        assert roles[0] == "actor"
        models: dict[str, ModelUse] = {role: self._use(role) for role in roles}
        trunk = _bytes(frozen(self._trunk or ()))
        self._trunk = None
        gc.collect()
        return models, trunk, self.meter.alive

    def _use(self, role: build.Role) -> ModelUse:
        with self.meter, device_paths(self.is_cuda):
            used = self._reference() if role == "reference" else self._trained(role)
        gc.collect()  # megatron's modules and hooks refer to each other
        return used

    def _build(self, role: build.Role) -> list[TokenModel]:
        config, shape, trunk = self.config, self.shape, self._trunk
        if role == "reference" and config.of_reference is not config:
            config = config.of_reference
            shape, trunk = read_shape(config.model.path), None
        chunks = build.build(role, shape, config, self.mesh, self.dtype, trunk)
        route_evenly(chunks)
        return chunks

    def _reference(self) -> ModelUse:
        before = self.meter.rest()
        chunks = self._build("reference")
        weights = _bytes(_parameters(chunks), besides=frozen(self._trunk or ()))
        buffers = self.meter.rest() - before - weights
        scoring, flop = self._score(chunks, "reference")
        return ModelUse(_count(chunks), weights, buffers, 0, 0, scoring, (), 0, 0, 0, flop, 0)

    def _trained(self, role: build.Role) -> ModelUse:
        config, meter = self.config, self.meter
        settings = config.update.optimizer(role)
        before = meter.rest()
        chunks = self._build(role)
        trainer = Trainer(build.data_parallel(chunks, settings.distributed), settings, 1)
        weights, gradients = _bytes(_trained(chunks)), _bytes(trainer.gradient_buffers())
        optimizer = _bytes(trainer.states(), besides=_trained(chunks))
        resident = meter.rest() - before
        if config.model.lora.rank and self._trunk is None:
            self._trunk = chunks
            resident -= _bytes(frozen(chunks))
        scoring, score_flop = self._score(trainer.model, role)
        trainer.zero()
        passes = (self._pass(trainer.model, number, role) for number in range(len(chunks)))
        kept, peaks, update_flop = zip(*passes, strict=True)
        forget(chunks)
        corrects = role == "actor" and config.algorithm.correction == "gradient"
        return ModelUse(
            parameters=_count(chunks),
            weights=weights,
            buffers=resident - weights - gradients - optimizer,
            gradients=gradients,
            optimizer=optimizer,
            scoring=scoring,
            kept=kept,
            working=max(peaks),
            stepping=self._step(trainer),
            set_aside=self._set_aside(trainer) if corrects else 0,
            score_flop=score_flop,
            update_flop=sum(update_flop),
        )

    def _score(self, chunks: Sequence[torch.nn.Module], role: build.Role) -> tuple[int, int]:
        """Return (bytes, FLOP) of a forward pass. For a policy it includes the log-probs."""
        for _ in range(1 if self.warm else 2):  # the very first pass allocates megatron's buffers, which stay
            before = self.meter.rest()
            with torch.no_grad():
                for chunk in chunks:
                    hidden, _given = self._forward(chunk)
                    if _is_last(chunk) and role != "critic":
                        self._head(chunks).logprob(hidden, self.microbatch)
                    del hidden, _given
        self.warm = True
        return self.meter.peak - before, self.meter.flop

    def _pass(self, chunks: Sequence[torch.nn.Module], number: int, role: build.Role) -> tuple[int, int, int]:
        """Return of a micro-batch through a chunk the bytes kept for the backward, the peak, and the FLOP."""
        meter, chunk = self.meter, chunks[number]
        before = meter.rest()
        out, given = self._forward(chunk)
        if _is_last(chunk):
            out = self._head(chunks).loss(out, self.microbatch, _terms)[0] if role == "actor" else out.sum()
        kept = meter.alive - before
        torch.autograd.backward(out, None if _is_last(chunk) else torch.empty_like(out))
        del out, given
        return kept, meter.peak - before, meter.flop

    def _forward(self, chunk: torch.nn.Module) -> tuple[Tensor, Tensor | None]:
        """Return the chunk's output and the input that the stage before would send (None on the first)."""
        model: Any = getattr(chunk, "module", chunk)
        given = None
        if not model.pre_process:
            tokens = self.microbatch.tokens // (self.mesh.tensor_size if self.config.parallel.sequence else 1)
            given = torch.empty(tokens, 1, model.config.hidden_size, dtype=self.dtype, device="meta")
            model.set_input_tensor(given.requires_grad_(torch.is_grad_enabled()))
        out = chunk(self.microbatch)
        if given is not None:
            model.set_input_tensor(None)
        return out, given

    def _head(self, chunks: Sequence[torch.nn.Module]) -> PolicyHead:
        return PolicyHead.configured(chunks, self.mesh, self.shape.vocab, self.config, self.is_cuda)

    def _step(self, trainer: Trainer) -> int:
        """Return the bytes that Trainer.reduce, without the norm, and Trainer.step add.

        The norm needs a number per gradient.
        """
        before = self.meter.rest()
        finalize_model_grads(trainer.model)
        trainer.optimizer.prepare_grads()
        trainer.step(1.0)
        return self.meter.peak - before

    def _set_aside(self, trainer: Trainer) -> int:
        """Return the bytes of the kept gradients.

        Call this after _step, which leaves the gradients where the optimizer reads them.
        """
        before = self.meter.rest()
        with trainer.gradients_kept():
            return self.meter.alive - before


def _terms(tokens: ActionTokens) -> tuple[Tensor, Tensor]:
    """A loss that takes the memory of a real one: it has gradients for log-prob and entropy."""
    loss = tokens.logprob_T.sum() + tokens.entropy_T.sum()
    return loss, loss.detach()


def _is_last(chunk: torch.nn.Module) -> bool:
    return bool(getattr(chunk, "module", chunk).post_process)


def _count(chunks: Sequence[torch.nn.Module]) -> int:
    return sum(p.numel() for p in _parameters(chunks))


def _parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[Any]:
    return (p for chunk in chunks for p in chunk.parameters())


def _trained(chunks: Sequence[torch.nn.Module]) -> Iterator[Any]:
    return (p for chunk in chunks for p in trained(chunk))


def _bytes(tensors: Iterable[Tensor], besides: Iterable[Tensor] = ()) -> int:
    """Return the bytes of the tensors' storages, each counted once, without the storages of `besides`.

    megatron puts parameters and gradients into shared buffers.
    """
    storages = {s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}
    without = {tensor.untyped_storage()._cdata for tensor in besides}
    return sum(size for key, size in storages.items() if key not in without)
