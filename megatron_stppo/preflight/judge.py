"""Judge the records of all ranks: a row per check, with the ranks or nodes that fail. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_stppo.launch.rendezvous import files_needed
from megatron_stppo.preflight import gpu_rows, network_rows
from megatron_stppo.preflight.records import Facts, Together
from megatron_stppo.preflight.rows import CheckRow, Rule, judged, none_of

SLOW_FOLDER = "write checkpoints to a faster file system (run.root)"
FOLDER_RULES = (
    Rule("write to the run folder", "min_write", lambda folder: folder.write, SLOW_FOLDER),
    Rule("read from the run folder", "min_read", lambda folder: folder.read, SLOW_FOLDER),
    Rule(
        "free space in the run folder",
        "min_free_space",
        lambda folder: folder.free,
        "remove old runs, keep fewer checkpoints, or set run.root to another file system",
    ),
)
HOST_RULES = (
    Rule(
        "limit on open files",
        "min_open_files",
        lambda facts: facts.open_files,
        "raise the hard limit: LimitNOFILE of slurmd.service, or /etc/security/limits.conf",
    ),
    Rule(
        "size of /dev/shm",
        "min_shared_memory",
        lambda facts: facts.shared_memory,
        "mount a larger tmpfs; with Docker --ipc=host or --shm-size",
    ),
)


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
    folders = {record.node: record.folder for record in facts.values() if record.folder}
    limits = dict(limits) | {"min_open_files": max(limits["min_open_files"], files_needed(world))}
    return [
        _answers(world, names, facts, together),
        *gpu_rows.rows(ranks, limits),
        *network_rows.rows(facts, together, limits),
        *(judged(rule, folders, limits) for rule in FOLDER_RULES),
        *(judged(rule, ranks, limits) for rule in HOST_RULES),
    ]


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
    return none_of("ranks answer", silent | failed, f"all {world}, without an error", remedy, f"{len(facts)}")
