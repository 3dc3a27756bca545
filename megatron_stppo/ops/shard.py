"""The part of the vocabulary that a rank's logits hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.ops import extension
from megatron_stppo.ops.extension import check

IGNORED = -100  # a target whose row gives 0, and gets a gradient of 0


@dataclass(frozen=True)
class Shard:
    """The columns of the vocabulary that a rank's logits hold, and targets and temperature of the rows."""

    target: Tensor  # int64 [T], global ids
    temperature: float | Tensor  # float32 [T] if a tensor
    vocab_start: int
    valid: int  # columns of true vocabulary; what follows is padding

    @classmethod
    def of(
        cls,
        target: Tensor,
        columns: int,
        vocab_start: int,
        vocab_size: int | None,
        temperature: float | Tensor,
    ) -> Shard:
        """Return the shard of `columns` columns from id vocab_start on.

        Raises ValueError that names the argument that does not fit.
        """
        _check_temperature(temperature, target)
        if vocab_start < 0 or (vocab_size is not None and vocab_size < 1):
            raise ValueError(
                f"vocab_start={vocab_start}, vocab_size={vocab_size}: give the first column's id and the size"
            )
        valid = columns if vocab_size is None else min(max(vocab_size - vocab_start, 0), columns)
        return cls(target, temperature, vocab_start, valid)

    def rows(self, rows: range | Tensor) -> Shard:
        """Return the shard restricted to some of the rows."""
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = rows_of(temperature, rows)
        return replace(self, target=rows_of(self.target, rows), temperature=temperature)

    @property
    def temperature_T(self) -> Tensor:
        """The temperature of each row, float32 [T]."""
        if isinstance(self.temperature, Tensor):
            return self.temperature
        return torch.full(self.target.shape, self.temperature, device=self.target.device)

    def record(self, logits: Tensor) -> Any:
        """Return csrc's record of logits [T, V_local] and their shard."""
        pointer, temperature = extension.pointer, self.temperature
        of_rows, uniform = (temperature, 1.0) if isinstance(temperature, Tensor) else (None, temperature)
        shape = (pointer(logits), extension.DTYPES[logits.dtype], *logits.shape)
        columns = (self.valid, self.vocab_start, pointer(self.target))
        return extension.logits(*shape, *columns, pointer(of_rows), float(uniform), IGNORED)


def rows_of(tensor: Tensor, rows: range | Tensor) -> Tensor:
    """Return some of the tensor's rows: a view if `rows` is a range."""
    return tensor[rows.start : rows.stop] if isinstance(rows, range) else tensor[rows]


def _check_temperature(temperature: float | Tensor, target: Tensor) -> None:
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} divides the logits; choose a number > 0")
        return
    check("temperature", temperature, target.device, (torch.float32,), (len(target),))
    if not temperature.is_cuda and not bool((temperature > 0).all()):
        raise ValueError("temperature holds a row that is not above 0; it divides the logits")
