"""Mistakes of public projects, planted in this one: each is what a project had, as near as our code allows.

A plant changes the code of the process that it is called in, by pytest's monkeypatch. docs/verify.md has the
numbers of the issues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_stppo.evidence.checks import arrival
from megatron_stppo.model import build
from megatron_stppo.model.token_model import TokenModel
from megatron_stppo.training import colocated, stages
from megatron_stppo.training.colocated import Worker
from megatron_stppo.weights.reshard.resharder import Resharder, SyncReport
from megatron_stppo.weights.sharding.low_rank import LowRank

Plant = Callable[[pytest.MonkeyPatch, Worker], None]


def adapters_never_delivered(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    patch.setattr(build, "adapter_terms", lambda *a, **k: {})


def adapters_merged_twice(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    real = build.adapter_terms

    def twice(*a: Any, **k: Any) -> dict[str, Any]:
        return {
            name: term._replace(scale=2 * term.scale)
            if isinstance(term, LowRank)
            else term._replace(factor=2 * term.factor)
            for name, term in real(*a, **k).items()
        }

    patch.setattr(build, "adapter_terms", twice)


def delivered_once(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    real = Resharder.sync

    def once(self: Any, version: int) -> SyncReport:
        if self._version < 0:
            return real(self, version)
        self._version, self._reason = version, ""
        return SyncReport(version, 0, 0, 0, 0, 0)

    patch.setattr(Resharder, "sync", once)


def gate_and_up_swapped(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    real = Resharder.sync

    def swapped(self: Any, version: int) -> SyncReport:
        report, target = real(self, version), self._exchanges[-1]._target
        if version > FIRST:
            weight = next(w for name, w in target.items() if "gate_up_proj" in name)
            with torch.no_grad():
                weight.copy_(weight.roll(weight.shape[0] // 2, 0))
        return report

    patch.setattr(Resharder, "sync", swapped)


def embedding_only_in_the_first_sync(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    real, key = colocated.transfer, "model.embed_tokens.weight"

    def stale(*a: Any) -> Any:
        rows = real(*a)
        return rows._replace(changed=(rows.widths.keys() if rows.changed is None else rows.changed) - {key})

    patch.setattr(colocated, "transfer", stale)


def cache_kept(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    patch.setattr(worker.engine._core, "reset_prefix_cache", lambda *a, **k: True)


def scored_at_another_temperature(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    real = stages.logprobs

    def other(model: Any, head: Any, *a: Any, **k: Any) -> torch.Tensor:
        return real(model, replace(head, temperature=0.7 * head.temperature), *a, **k)

    patch.setattr(stages, "logprobs", other)


def dropout_in_the_update(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    real = TokenModel._head

    def dropped(self: Any, hidden: torch.Tensor, microbatch: Any) -> torch.Tensor:
        return real(self, torch.nn.functional.dropout(hidden, 0.1, torch.is_grad_enabled()), microbatch)

    patch.setattr(TokenModel, "_head", dropped)


def small_steps(patch: pytest.MonkeyPatch, worker: Worker) -> None:
    """No mistake, but too little to see one, as with adapters of a model whose head has small weights."""
    patch.setattr(arrival, "RATE", 2e-13)


FIRST = 100  # the version that the engine has when a plant begins to act
