"""The GPU that a plan is for. The peak rates are the manufacturer's; none of them was measured."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stppo.observe.throughput import PEAK_FLOPS

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int  # bytes that torch can allocate
    reserve: int  # of these, bytes that are not available to tensors
    flops: float  # per second
    memory_rate: float  # bytes per second
    node_rate: float  # bytes per second to GPUs of its node, one way
    network_rate: float  # bytes per second of a whole node to other nodes, one way
    per_node: int  # GPUs of a node
    is_cuda: bool  # whether the model uses the code paths for CUDA
    sources: tuple[str, ...]

    @property
    def usable(self) -> int:
        return self.memory - self.reserve


H100 = Gpu(
    name="H100 80GB",
    memory=int(79.1 * GIB),
    reserve=int(8 * GIB),
    flops=PEAK_FLOPS["NVIDIA H100 80GB HBM3"],
    memory_rate=3.35e12,
    node_rate=450e9,
    network_rate=400e9,
    per_node=8,
    is_cuda=True,
    sources=(
        "989 TFLOP/s dense bfloat16, 3.35 TB/s, NVLink 450 GB/s each way: NVIDIA's H100 SXM5 data sheet",
        "400 GB/s per node of 8 each way: eight 400 Gb/s adapters (NVIDIA's DGX H100 data sheet)",
        "8 of 79.1 GiB for memory outside tensors: megatron's communicators on 8 H100 hold 7 GB per rank, "
        "with experts 9.5 (verl's pull request 6408); CUDA, a sleeping engine's graphs, fragmentation",
    ),
)
