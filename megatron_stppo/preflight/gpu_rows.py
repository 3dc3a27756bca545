"""The rows about GPUs and versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median

from megatron_stppo.preflight.limits import UNITS
from megatron_stppo.preflight.records import Facts, GpuFacts
from megatron_stppo.preflight.rows import EXCLUDE, CheckRow, Rule, bounded, equal, judged, none_of, unchecked

RULES = (
    Rule("SM clock under load", "min_clock", lambda gpu: gpu.clock, EXCLUDE),
    Rule(
        "GPU memory in use",
        "max_memory_used",
        lambda gpu: gpu.memory_used,
        "end the processes that an earlier job left on the node, or exclude the node",
    ),
    Rule(
        "uncorrected memory errors",
        "max_uncorrected_errors",
        lambda gpu: gpu.uncorrected_errors,
        f"the GPU must be reset or replaced; {EXCLUDE}",
    ),
    Rule("retired memory pages", "max_retired_pages", lambda gpu: gpu.retired_pages, EXCLUDE),
)
PRESENT = "a GPU for every rank"
OTHERS = ("every GPU used once", "kernels of csrc/", "throttling", "remapped memory rows")


def rows(ranks: Mapping[str, Facts], limits: Mapping[str, float]) -> Iterator[CheckRow]:
    """Yield the rows. ranks: {name of a rank: its facts}. Without any GPU its rows are not checked."""
    gpus = {who: facts.gpu for who, facts in ranks.items() if facts.gpu}
    without = {
        who: "sees no GPU" for who, facts in ranks.items() if not facts.gpu and (gpus or facts.expects_gpu)
    }
    if gpus or without:
        remedy = "run nvidia-smi on the node; check --gpus-per-node, the driver and the build of torch"
        yield none_of(PRESENT, without, "one each", remedy, f"{len(gpus)} GPUs")
    else:
        yield unchecked(PRESENT)
    yield from _versions(ranks, gpus)
    yield _compute(ranks, limits, bool(gpus))
    if gpus:
        yield from _states(gpus)
        yield from (judged(rule, gpus, limits) for rule in RULES)
    else:
        yield from (unchecked(name) for name in (*OTHERS, *(rule.name for rule in RULES)))


def _states(gpus: Mapping[str, GpuFacts]) -> Iterator[CheckRow]:
    """Yield the rows of OTHERS."""
    of_uuid: dict[str, list[str]] = {}
    for who, gpu in gpus.items():
        of_uuid.setdefault(gpu.uuid, []).append(who)
    shared = {" and ".join(whos): uuid for uuid, whos in of_uuid.items() if len(whos) > 1}
    remedy = "start srun without --gpus-per-task and --gpu-bind; do not set CUDA_VISIBLE_DEVICES"
    yield none_of(OTHERS[0], shared, "no UUID twice", remedy, f"{len(of_uuid)} UUIDs")
    built = {who: f"not built for {gpu.capability}" for who, gpu in gpus.items() if not gpu.has_kernels}
    archs = sorted({_arch(gpu.capability) for gpu in gpus.values() if not gpu.has_kernels})
    remedy = f"install again with nvcc on PATH and STPPO_CUDA_ARCHS={';'.join(archs)}"
    yield none_of(OTHERS[1], built, "built for the GPU", remedy, "built")
    hot = {who: ", ".join(gpu.throttled) for who, gpu in gpus.items() if gpu.throttled}
    yield none_of(OTHERS[2], hot, "none under load", EXCLUDE)
    remapped = {who: gpu.remapped_rows for who, gpu in gpus.items() if gpu.remapped_rows}
    yield none_of(OTHERS[3], remapped, "none pending or failed", f"the GPU must be reset; {EXCLUDE}")


def _arch(capability: str) -> str:
    """Return the value of STPPO_CUDA_ARCHS for a capability. Examples: "sm_80" -> "80", "sm_90" -> "90a"."""
    number = capability.removeprefix("sm_")
    return f"{number}a" if int(number) >= 90 else number


def _versions(ranks: Mapping[str, Facts], gpus: Mapping[str, GpuFacts]) -> Iterator[CheckRow]:
    """Yield a row for every package, and for model and driver of the GPUs."""
    for name in dict.fromkeys(name for facts in ranks.values() for name in facts.versions):
        values = {who: facts.versions.get(name, "missing") for who, facts in ranks.items()}
        yield equal(f"version of {name}", values, "install the same environment or image on all nodes")
    if not gpus:
        yield from (unchecked(name) for name in ("model of the GPUs", "version of the driver"))
        return
    models, drivers = ({who: getattr(gpu, x) for who, gpu in gpus.items()} for x in ("name", "driver"))
    yield equal("model of the GPUs", models, "request nodes of one kind (sbatch --constraint)")
    yield equal("version of the driver", drivers, EXCLUDE)


def _compute(ranks: Mapping[str, Facts], limits: Mapping[str, float], has_gpu: bool) -> CheckRow:
    """Return the row about the speed of a matrix product; every rank is compared with the median rank."""
    name, key = "matrix product", "min_compute"
    speeds = {who: facts.compute for who, facts in ranks.items() if facts.compute}
    middle = median(speeds.values()) if speeds else 1.0
    shares = {who: speed / middle for who, speed in speeds.items()}
    row = bounded(name, shares, key, limits[key], UNITS[key], EXCLUDE)
    value = f"{row.value}; {middle:.3g} TFLOP/s" if speeds else row.value
    return replace(row, value=value) if has_gpu else unchecked(name, value)
