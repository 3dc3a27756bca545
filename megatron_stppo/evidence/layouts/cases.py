"""The layouts, micro-batch sizes and packing orders that are possible with a number of ranks."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_stppo.config import ConfigError, ParallelConfig
from megatron_stppo.parallel.layout import Layout, divisors
from megatron_stppo.validation.model_layout import check_model_layout
from megatron_stppo.weights.sharding.hf_names import ModelShape

OTHERS = 3  # layouts of `few` besides the given one


@dataclass(frozen=True)
class Case:
    """One way to compute the same step.

    Example: Case(ParallelConfig(tensor=2), 64) on 4 ranks is called "TP2 DP2, 64 tokens".
    """

    parallel: ParallelConfig
    budget: int  # tokens of a micro-batch on one rank
    reverse: bool = False  # the trajectories in the opposite order
    apart: bool = False  # tokens in common are computed for each trajectory

    def name(self, world: int) -> str:
        p, layout = self.parallel, Layout.of_world(world, self.parallel)
        ends = f"{p.first_stage_layers or ''}..{p.last_stage_layers or ''}"
        parts = [
            f"TP{p.tensor}" * (p.tensor > 1),
            "SP" * p.sequence,
            f"CP{p.context}" * (p.context > 1),
            f"EP{p.expert}" * (p.expert > 1),
            f"PP{p.pipeline}" * (p.pipeline > 1),
            f"stages {ends}" * (ends != ".."),
            f"VPP{p.virtual}" * (p.virtual > 1),
            f"DP{layout.data}" * (layout.data > 1),
        ]
        text = f"{' '.join(filter(None, parts)) or 'one rank'}, {self.budget:,} tokens"
        return text + ", reversed" * self.reverse + ", nothing shared" * self.apart


def cases(shape: ModelShape, world: int, given: ParallelConfig, budgets: list[int]) -> list[Case]:
    """Return the given layout with every micro-batch size, both orders, and without shared prefixes, then all
    other layouts.

    The other layouts have the first size.
    """
    own = [Case(given, budget) for budget in budgets]
    own += [Case(given, budgets[0], reverse=True), Case(given, budgets[-1], apart=True)]
    return own + [Case(other, budgets[0]) for other in layouts(shape, world) if other != given]


def few(shape: ModelShape, world: int, given: ParallelConfig, budgets: list[int]) -> list[Case]:
    """Return the cases of the given layout, and at most OTHERS others.

    Those without data parallelism and with as much of it as possible come first, but none whose ranks hold
    more than twice as many weights.
    """
    every = cases(shape, world, given, budgets)
    own = [case for case in every if case.parallel == given]
    fit = [case for case in every[len(own) :] if 2 * _shards(case.parallel) >= _shards(given)]
    others = sorted(fit, key=lambda case: Layout.of_world(world, case.parallel).data)
    most = [case for case in others[::-1][: OTHERS - 1] if case is not others[0]]
    return own + others[:1] + most


def _shards(parallel: ParallelConfig) -> int:
    return parallel.tensor * parallel.pipeline * parallel.expert


def layouts(shape: ModelShape, world: int) -> Iterator[ParallelConfig]:
    """Yield every layout of `world` ranks that the model allows.

    These are all sizes of tensor, context, pipeline and data parallelism whose product is `world`: with and
    without sequence parallelism, with one and two chunks per stage, with even and uneven stages, and, if the
    model has experts, with every size of expert parallelism.
    """
    for tensor, context, pipeline in itertools.product(divisors(world), repeat=3):
        if world % (tensor * context * pipeline):
            continue
        axes = {"tensor": tensor, "context": context, "pipeline": pipeline}
        others = itertools.product(
            (False, True) if tensor > 1 else (False,),
            divisors(world // tensor // pipeline) if shape.experts else (1,),
            _stages(shape.layers, pipeline),
        )
        for sequence, expert, stages in others:
            candidate = ParallelConfig(**axes, sequence=sequence, expert=expert, **stages)
            if _fits(shape, world, candidate):
                yield candidate


def _fits(shape: ModelShape, world: int, parallel: ParallelConfig) -> bool:
    """Return whether `world` ranks can train the model under this layout."""
    try:
        check_model_layout(shape, parallel, Layout.of_world(world, parallel))
    except ConfigError:
        return False
    return True


def _stages(layers: int, pipeline: int) -> Iterator[dict[str, int]]:
    yield {}
    if pipeline > 1:
        yield {"virtual": 2}
        even, rest = divmod(layers, pipeline)
        for first in range(1, layers):
            if (rest or first != even) and not (layers - first) % (pipeline - 1):
                yield {"first_stage_layers": first}
                return
