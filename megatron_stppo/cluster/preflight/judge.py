"""Judge the records of all ranks: a row per check, with the ranks or nodes that fail. Measures nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median, median_low
from typing import Literal

from megatron_stppo.cluster.launch.rendezvous import files_needed
from megatron_stppo.cluster.preflight.limits import EXCLUDE, LIMITS, NAMED
from megatron_stppo.cluster.preflight.records import Facts, GpuFacts, Together

NO_GPU = "no GPU: not checked"
# the limit for a group by its number of nodes; 3: all of them
BANDWIDTH = {1: "min_bandwidth_node", 2: "min_bandwidth_pair", 3: "min_bandwidth_all"}
STATES = ("every GPU used once", "kernels of csrc/", "throttling", "remapped memory rows")
Values = Mapping[str, float | None]  # {rank or node: value}


@dataclass(frozen=True)
class CheckRow:
    """One check. `who`: the ranks or nodes that fail, each with its value."""

    name: str
    value: str
    limit: str
    verdict: Literal["pass", "fail", "not checked"]
    who: tuple[str, ...] = ()
    remedy: str = ""


def judge(
    world: int, facts: Mapping[int, Facts], together: Mapping[int, Together], limits: Mapping[str, float]
) -> list[CheckRow]:
    """Return the rows of the table. facts, together: {rank: record} of the ranks that answered in time.

    `together` is empty if some ranks did not answer before.
    """
    names = {
        rank: f"rank {rank} ({facts[rank].node})" if rank in facts else f"rank {rank}"
        for rank in range(world)
    }
    ranks = {names[rank]: record for rank, record in facts.items()}
    limits = dict(limits) | {"min_open_files": max(limits["min_open_files"], files_needed(world))}
    gpus = {who: record.gpu for who, record in ranks.items() if record.gpu}
    found = [_answers(world, names, facts, together), _present(ranks, gpus), *_versions(ranks, gpus)]
    found += [_compute(ranks, limits, bool(gpus)), *_states(gpus)]
    found += [*_bandwidth(together, limits, bool(gpus)), _visible(facts, together, limits)]
    found.append(_bounded("max_skew", _skew(facts, together), limits))
    for limit in LIMITS:
        part = limit.field.partition(".")[0]
        if part == "gpu" and not gpus:
            found.append(_unchecked(limit.row))
        elif limit.field:
            values = {
                one.node if part == "folder" else who: attrgetter(limit.field)(one)
                for who, one in ranks.items()
                if getattr(one, part) is not None
            }
            found.append(_bounded(limit.name, values, limits))
    return found


def _bounded(key: str, values: Values, limits: Mapping[str, float]) -> CheckRow:
    """Return the row of the limit `key`, whose value is the worst of `values`.

    Values that are None are left out; without any value the row is not checked.
    Example: {"a": 3.0, "b": 1.0} with min_write 2.0 fails, with value "1 GB/s" and who ("b: 1 GB/s",).
    """
    named, bound = NAMED[key], limits[key]
    known = {who: value for who, value in values.items() if value is not None}
    lower = key.startswith("min_")
    limit = f"{'at least' if lower else 'at most'} {bound:g} {named.unit}"
    if not known:
        return CheckRow(named.row, "not measured", limit, "not checked")
    worst_first = sorted(known, key=lambda who: known[who], reverse=not lower)
    bad = {
        who: _number(known[who], named.unit)
        for who in worst_first
        if (known[who] < bound if lower else known[who] > bound)
    }
    worst = _number(known[worst_first[0]], named.unit)
    return replace(_none_of(named.row, bad, limit, named.remedy, worst), value=worst)


def _number(value: float, unit: str) -> str:
    """Return three digits, or a whole number as it is. Examples: "0.769 GB/s", "65536 files"."""
    if 0 < value < 0.001:
        return f"below 0.001 {unit}"
    return f"{value:.0f} {unit}" if value % 1 == 0 or value >= 1000 else f"{value:.3g} {unit}"


def _none_of(name: str, found: Mapping[str, str], limit: str, remedy: str, value: str = "none") -> CheckRow:
    """Return a row that fails if `found`, {rank or node: problem}, is not empty."""
    if not found:
        return CheckRow(name, value, limit, "pass")
    who = tuple(f"{who}: {problem}" for who, problem in found.items())
    return CheckRow(name, f"{len(found)}", limit, "fail", who, remedy)


def _equal(name: str, values: Mapping[str, str], remedy: str) -> CheckRow:
    """Return a row that passes if all values are the same; else those that differ from most are named."""
    counts = Counter(values.values())
    common, _ = counts.most_common(1)[0]
    bad = {who: value for who, value in values.items() if value != common}
    row = _none_of(name, bad, "the same on all ranks", remedy, common)
    return replace(row, value=f"{common}; {len(counts)} values") if bad else row


def _unchecked(name: str, value: str = "") -> CheckRow:
    """Return the row of a check that needs a GPU, where there is none."""
    return CheckRow(name, value, "", "not checked", remedy=NO_GPU)


def _answers(
    world: int, names: Mapping[int, str], facts: Mapping[int, Facts], together: Mapping[int, Together]
) -> CheckRow:
    """Return the row about ranks that did not answer, and measurements that failed."""
    silent = {names[r]: "did not start, or hangs" for r in range(world) if r not in facts}
    if together:
        silent |= {names[r]: "stopped answering" for r in facts if r not in together}
    failed = {}
    for rank in facts:
        errors = facts[rank].errors | (together[rank].errors if rank in together else {})
        if errors:
            failed[names[rank]] = "; ".join(f"{what}: {why}" for what, why in errors.items())
    remedy = "read the rank's log; if it has no entry, look at its node with sinfo -R"
    return _none_of(
        "ranks answer", silent | failed, f"all {world}, without an error", remedy, f"{len(facts)}"
    )


def _present(ranks: Mapping[str, Facts], gpus: Mapping[str, GpuFacts]) -> CheckRow:
    name = "a GPU for every rank"
    without = {
        who: "sees no GPU" for who, facts in ranks.items() if not facts.gpu and (gpus or facts.expects_gpu)
    }
    if not gpus and not without:
        return _unchecked(name)
    remedy = "run nvidia-smi on the node; check --gpus-per-node, the driver and the build of torch"
    return _none_of(name, without, "one each", remedy, f"{len(gpus)} GPUs")


def _versions(ranks: Mapping[str, Facts], gpus: Mapping[str, GpuFacts]) -> Iterator[CheckRow]:
    """Yield a row for every package, and for model and driver of the GPUs."""
    for name in dict.fromkeys(name for facts in ranks.values() for name in facts.versions):
        values = {who: facts.versions.get(name, "missing") for who, facts in ranks.items()}
        yield _equal(f"version of {name}", values, "install the same environment or image on all nodes")
    kinds = {"model of the GPUs": ("name", "request nodes of one kind (sbatch --constraint)")}
    for name, (field, remedy) in (kinds | {"version of the driver": ("driver", EXCLUDE)}).items():
        values = {who: getattr(gpu, field) for who, gpu in gpus.items()}
        yield _equal(name, values, remedy) if gpus else _unchecked(name)


def _compute(ranks: Mapping[str, Facts], limits: Mapping[str, float], has_gpu: bool) -> CheckRow:
    """Return the row about the speed of a matrix product; every rank is compared with the median rank."""
    speeds = {who: facts.compute for who, facts in ranks.items() if facts.compute}
    middle = median(speeds.values()) if speeds else 1.0
    row = _bounded("min_compute", {who: speed / middle for who, speed in speeds.items()}, limits)
    value = f"{row.value}; {middle:.3g} TFLOP/s" if speeds else row.value
    return replace(row, value=value) if has_gpu else _unchecked(row.name, value)


def _states(gpus: Mapping[str, GpuFacts]) -> Iterator[CheckRow]:
    """Yield the rows of STATES."""
    if not gpus:
        yield from map(_unchecked, STATES)
        return
    of_uuid: dict[str, list[str]] = {}
    for who, gpu in gpus.items():
        of_uuid.setdefault(gpu.uuid, []).append(who)
    shared = {" and ".join(whos): uuid for uuid, whos in of_uuid.items() if len(whos) > 1}
    remedy = "start srun without --gpus-per-task and --gpu-bind; do not set CUDA_VISIBLE_DEVICES"
    yield _none_of(STATES[0], shared, "no UUID twice", remedy, f"{len(of_uuid)} UUIDs")
    built = {who: f"not built for {gpu.capability}" for who, gpu in gpus.items() if not gpu.has_kernels}
    archs = sorted({_arch(gpu.capability) for gpu in gpus.values() if not gpu.has_kernels})
    remedy = f"install again with nvcc on PATH and STPPO_CUDA_ARCHS={';'.join(archs)}"
    yield _none_of(STATES[1], built, "built for the GPU", remedy, "built")
    hot = {who: ", ".join(gpu.throttled) for who, gpu in gpus.items() if gpu.throttled}
    yield _none_of(STATES[2], hot, "none under load", EXCLUDE)
    remapped = {who: gpu.remapped_rows for who, gpu in gpus.items() if gpu.remapped_rows}
    yield _none_of(STATES[3], remapped, "none pending or failed", f"the GPU must be reset; {EXCLUDE}")


def _arch(capability: str) -> str:
    """Return the value of STPPO_CUDA_ARCHS for a capability. Examples: "sm_80" -> "80", "sm_90" -> "90a"."""
    number = capability.removeprefix("sm_")
    return f"{number}a" if int(number) >= 90 else number


def _bandwidth(
    together: Mapping[int, Together], limits: Mapping[str, float], has_gpu: bool
) -> Iterator[CheckRow]:
    """Yield the rows about bandwidth, which is that of a group's slowest rank.

    It is judged on GPUs only: gloo's has no limit, but is shown.
    """
    groups: dict[tuple[str, ...], float] = {}
    for record in together.values():
        for one in record.bandwidth:
            groups[one.nodes] = min(one.speed, groups.get(one.nodes, one.speed))
    for size, key in BANDWIDTH.items():
        of_kind = {group: speed for group, speed in groups.items() if min(len(group), 3) == size}
        row = _bounded(key, {"all" if size == 3 else " + ".join(x): of_kind[x] for x in of_kind}, limits)
        if size == 2 and (slow := slow_nodes(of_kind, limits[key])):
            row = replace(
                row, remedy=f"{', '.join(slow)}: slow with both neighbours; {row.remedy}; {EXCLUDE}"
            )
        yield row if has_gpu or not of_kind else _unchecked(row.name, row.value)


def slow_nodes(pairs: Mapping[tuple[str, ...], float], limit: float) -> list[str]:
    """Return the nodes that are slow in each of their two or more pairs.

    Example: if a + b and b + c are below the limit, and a + c is not, b is slow.
    """
    of_node: dict[str, list[float]] = {}
    for pair, speed in pairs.items():
        for node in pair:
            of_node.setdefault(node, []).append(speed)
    return [node for node, speeds in of_node.items() if len(speeds) > 1 and max(speeds) < limit]


def _visible(
    facts: Mapping[int, Facts], together: Mapping[int, Together], limits: Mapping[str, float]
) -> CheckRow:
    named, limit = NAMED["max_visible"], f"files of all nodes within {limits['max_visible']:g} s"
    seen = {facts[rank].node: one for rank, one in together.items() if one.visible is not None}
    if not seen:
        return CheckRow(named.row, "not measured", limit, "not checked")
    hidden = {
        node: f"does not see the file of {', '.join(one.hidden)}" for node, one in seen.items() if one.hidden
    }
    slowest = max(one.visible or 0.0 for one in seen.values())
    return _none_of(named.row, hidden, limit, named.remedy, f"{slowest:.1f} s")


def _skew(facts: Mapping[int, Facts], together: Mapping[int, Together]) -> dict[str, float]:
    """Return {node: difference of its clock from the median clock}.

    The lower median is one of the clocks, so that of two nodes one has the whole difference.
    """
    clocks = {rank: record.clock for rank, record in together.items() if record.clock}
    middle = [median_low(readings) for readings in zip(*clocks.values(), strict=True)]
    skew: dict[str, float] = {}
    for rank, readings in clocks.items():
        late = median(abs(a - b) for a, b in zip(readings, middle, strict=True))
        skew[facts[rank].node] = max(late, skew.get(facts[rank].node, 0.0))
    return skew
