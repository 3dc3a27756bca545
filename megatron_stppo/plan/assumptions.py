"""What a plan assumes: the GPU, and the numbers of a forecast as data, which a user may replace.

The GPU's peak rates are the manufacturer's; none of them was measured. Does not import torch.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_stppo.base.printing import did_you_mean
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.plan.simulation.workload import DrawnLengths, LogNormal, ToolTimes

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
    reserve=int(3 * GIB),
    flops=989e12,
    memory_rate=3.35e12,
    node_rate=450e9,
    network_rate=400e9,
    per_node=8,
    is_cuda=True,
    sources=(
        "989 TFLOP/s dense bfloat16, 3.35 TB/s, NVLink 450 GB/s each way: NVIDIA's H100 SXM5 data sheet",
        "400 GB/s per node of 8 each way: eight 400 Gb/s adapters (NVIDIA's DGX H100 data sheet)",
        "3 of 79.1 GiB for CUDA and its libraries, a sleeping engine's graphs, and fragmentation",
        "communicators: 1.2 x the buffers of NCCL 2.30 without NVLS: 24 channels that sum in a node, 16 "
        "between nodes, 32 that send, and per channel 12 MiB for a neighbour in the node, 20 for one in "
        "another node",
    ),
)


def communicator(ranks: Sequence[int], kind: str, per_node: int) -> int:
    """Return the bytes of a rank's communicator of NCCL 2.30 on nodes of 8 H100, with its defaults, but
    without NVLS, as in a run (cluster/launch/connections.py); with NVLS, sums in a node take 256 MiB more.

    kind: as in parallel/groups.py; "ring" makes two communicators. Each of 32 channels has 3 tables of 2 MiB,
    the least that CUDA maps (src/channel.cc). A connection receives into 4 MiB (NCCL_BUFFSIZE), 4.7 (LL128)
    and 0.5 (LL) and sends from a header, which takes 10 + 2; between nodes 10 + 10 (src/transport/). Sums run
    in rings and trees of 24 channels in a node, 16 between nodes. To send to a rank takes 32 channels in a
    group of one node, else 4 and pools of 64 MiB (src/graph/paths.cc). Times 1.2, because of measurements:
    1 GiB for 4 ranks that sum (vLLM's pull request 51485), 3.28 GB for 8 that swap (NCCL's issue 1685).
    """
    of_node = Counter(rank // per_node for rank in ranks)
    alone, peers = len(of_node) == 1, max(of_node.values()) - 1
    if kind == "sum":
        size = min(2, len(ranks) - 1) * (24 * 12 if alone else 16 * 20)
    else:
        size = min(peers, {"pass": 2, "ring": 1}.get(kind, peers)) * 12 * (32 if alone else 4) + 64 * (
            not alone
        )
    return int(1.2 * (3 * 2 * 32 + size) * (1 + (kind == "ring")) * 2**20)


def links(tensor: int, count: int, per_node: int) -> int:
    """Return the bytes of the communicators that join a replica's rank with `count` other replicas.

    A rank receives from all ranks of one of them, and sends to all of the others. Sizes: see communicator.
    """
    near = 2 * tensor <= per_node
    channels, received, sent = (32, 10, 2) if near else (4, 10, 10)
    of_pairs = tensor * channels * (received + sent * (count - 1))
    return int(1.2 * (count * (3 * 2 * 32 + 64 * (not near)) + of_pairs) * 2**20) if count else 0


@dataclass(frozen=True)
class Assumption:
    """One number. `most` is the largest value; all are above 0.

    Example: Assumption("s for a call of a tool, median", lambda _: 1.0).
    """

    meaning: str  # follows the number, so it begins with the unit
    default: Callable[[Config], float]
    most: float = math.inf


ALL = {
    "turns": Assumption("turns of an episode", lambda c: c.environment.max_turns),
    "prompt_tokens": Assumption(
        "tokens of a prompt, median; one in 100 has rollout.max_prompt_tokens",
        lambda c: max(1.0, c.rollout.max_prompt_tokens / 4),
    ),
    "turn_tokens": Assumption(
        "tokens of a turn, median; one in 100 has rollout.max_turn_tokens",
        lambda c: max(1.0, c.rollout.max_turn_tokens / 2),
    ),
    "observation_tokens": Assumption(
        "tokens of an observation", lambda c: c.environment.max_observation_tokens
    ),
    "tool_seconds": Assumption("s for a call of a tool, median", lambda _: 1.0),
    "tool_seconds_p99": Assumption("s or more for one in 100 calls of tools", lambda _: 10.0),
    "step_seconds": Assumption(
        "s of an engine step beside memory and FLOP: launches, collectives, sampling", lambda _: 0.005
    ),
    "memory_share": Assumption("of the memory's bandwidth, in engine steps", lambda _: 0.7, 1.0),
    "engine_share": Assumption("of the peak FLOP/s, in engine steps", lambda _: 0.5, 1.0),
    "training_share": Assumption("of the peak FLOP/s, in score and update", lambda _: 0.35, 1.0),
    "network_share": Assumption("of the links' bandwidth, when weights are sent", lambda _: 0.5, 1.0),
    "host_rate": Assumption("GB/s that a replica's GPU receives from the trainer, over gloo", lambda _: 2.0),
    "switch_seconds": Assumption(
        "s to put a colocated engine to sleep, wake it, and move the models' memory", lambda _: 5.0
    ),
    "replica_memory": Assumption("of a replica's GPU memory for the engine", lambda _: 0.9, 0.99),
}
OF_LENGTHS = ("turns", "prompt_tokens", "turn_tokens", "observation_tokens")


def read(config: Config, overrides: Iterable[str]) -> dict[str, float]:
    """Return all assumptions by name, with those of `overrides` ("NAME=VALUE") in place of the defaults.

    Raises ConfigError for an unknown name, or a value that is out of range.
    """
    values = {name: assumption.default(config) for name, assumption in ALL.items()}
    for override in overrides:
        name, _, text = override.partition("=")
        if name not in values:
            hint = did_you_mean(name, values, "--assume {}=VALUE") or f"choose from {', '.join(values)}"
            raise ConfigError(f"--assume {override}: there is no assumption {name!r}; {hint}")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value <= ALL[name].most or math.isinf(value):
            most = "" if math.isinf(ALL[name].most) else f" and at most {ALL[name].most:g}"
            raise ConfigError(f"--assume {override}: {text!r} is not a number above 0{most}")
        values[name] = value
    if values["tool_seconds_p99"] < values["tool_seconds"]:
        raise ConfigError(
            f"--assume tool_seconds_p99={values['tool_seconds_p99']:g}: is below the median "
            f"tool_seconds={values['tool_seconds']:g}; give both"
        )
    return values


def lengths(config: Config, assumed: Mapping[str, float]) -> DrawnLengths:
    """Return the assumed lengths of episodes."""
    prompt, turn = config.rollout.max_prompt_tokens, config.rollout.max_turn_tokens
    return DrawnLengths(
        prompt=_up_to(assumed["prompt_tokens"], prompt),
        turns=LogNormal(assumed["turns"], assumed["turns"]),
        turn=_up_to(assumed["turn_tokens"], turn),
        observation=LogNormal(assumed["observation_tokens"], assumed["observation_tokens"]),
        context=config.max_context,
    )


def tools(config: Config, assumed: Mapping[str, float]) -> ToolTimes:
    """Return the assumed times of tools."""
    calls = LogNormal(assumed["tool_seconds"], assumed["tool_seconds_p99"], config.environment.deadline)
    return ToolTimes(calls, at_once=config.environment.concurrency)


def _up_to(median: float, most: float) -> LogNormal:
    """Return a distribution of which one in 100 reaches `most`, and none exceeds it."""
    return LogNormal(min(median, most), most, most)
