"""What the ranks of a cluster check measure and send to the first rank. None: not measured, not supported."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class GpuFacts:
    """The state of one GPU.

    Example: GpuFacts("NVIDIA H100 80GB HBM3", "GPU-5e0c...", "sm_90", True) has the kernels of csrc/.
    """

    name: str
    uuid: str
    capability: str  # as sm_90
    has_kernels: bool  # csrc/ was built for this capability
    driver: str = ""
    memory_used: float | None = None  # GiB, by all processes, before this check allocates any
    clock: float | None = None  # SM clock in a matrix product / maximum
    throttled: tuple[str, ...] = ()  # reasons during a matrix product that name a defect
    uncorrected_errors: int | None = None  # of memory, since the driver was loaded
    remapped_rows: str = ""  # "pending" or "failed"; "" if there is nothing to do


@dataclass(frozen=True)
class FolderSpeed:
    """What a node's first rank measured in the run folder."""

    write: float  # GB/s, with fsync
    read: float  # GB/s, after the file left the page cache, where the file system allows it
    free: float  # GB


@dataclass(frozen=True)
class Facts:
    """What a rank finds out alone."""

    rank: int
    node: str
    expects_gpu: bool = False  # Slurm gave this job GPUs
    versions: dict[str, str] = field(default_factory=dict)
    gpu: GpuFacts | None = None
    compute: float | None = None  # TFLOP/s of a matrix product
    open_files: int | None = None  # hard limit
    shared_memory: float | None = None  # GiB of /dev/shm
    folder: FolderSpeed | None = None  # first rank of a node only
    errors: dict[str, str] = field(default_factory=dict)  # {measurement: why it failed}


@dataclass(frozen=True)
class Bandwidth:
    """Bus bandwidth of an all-reduce, of the fastest size. Example: Bandwidth(("a", "b"), 80.0)."""

    nodes: tuple[str, ...]
    speed: float  # GB/s


@dataclass(frozen=True)
class Together:
    """What a rank measures with the others."""

    rank: int
    visible: float | None = None  # seconds until the files of all nodes appeared; first rank of a node only
    hidden: tuple[str, ...] = ()  # nodes whose file did not appear
    clock: tuple[float, ...] = ()  # time.time() after each of a few barriers
    bandwidth: tuple[Bandwidth, ...] = ()
    errors: dict[str, str] = field(default_factory=dict)
