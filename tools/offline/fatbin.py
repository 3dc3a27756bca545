"""Remove the GPU code of other architectures from a shared library, without changing its size.

A library has one region for each CUDA source: a header of 16 bytes and entries, each with a header that names
the architecture, and a payload (a compiled program or PTX). Payloads that the chosen GPU cannot need become
zeros, which compress to nothing; headers and offsets stay, and the driver never loads an entry of another
architecture. The layout was read from libraries that nvcc 13.0 wrote; regions of another layout stay as they
are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

REGION = struct.Struct("<IHHQ")  # magic, version, size of this header, size of the entries
MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, REGION.size)
# kind, -, size of this header, size of the payload, -, -, minor, major, architecture
ENTRY = struct.Struct("<HHIQIIHHI")
PTX, PROGRAM = 1, 2


class Entry(NamedTuple):
    kind: int
    architecture: int  # 90 for sm_90 and sm_90a
    start: int  # of the payload in the library
    end: int


def without_other_architectures(library: bytes, architecture: int, *, ptx: bool = True) -> tuple[bytes, int]:
    """Return the library with only the code that a GPU of this architecture runs, and the zeroed bytes.

    In a region with programs for the architecture these stay. In a region without, the PTX stays that the
    driver would compile, unless `ptx` is False. Example: 90 for an H100.
    """
    kept, removed = bytearray(library), 0
    for entries in regions(library):
        wanted = needed(entries, architecture)
        wanted = wanted if ptx else [entry for entry in wanted if entry.kind == PROGRAM]
        for entry in entries:
            if entry not in wanted:
                kept[entry.start : entry.end] = bytes(entry.end - entry.start)
                removed += entry.end - entry.start
    return bytes(kept), removed


def needed(entries: list[Entry], architecture: int) -> list[Entry]:
    """Return the entries from which the driver chooses: programs of the newest architecture of the same major
    number that is not newer, else the newest PTX that is not newer."""
    for kind, oldest in ((PROGRAM, architecture // 10 * 10), (PTX, 0)):
        fit = [
            entry for entry in entries if entry.kind == kind and oldest <= entry.architecture <= architecture
        ]
        if fit:
            newest = max(entry.architecture for entry in fit)
            return [entry for entry in fit if entry.architecture == newest]
    return []


def regions(library: bytes) -> Iterator[list[Entry]]:
    """Yield the entries of every region whose entries fill it exactly."""
    at = 0
    while (at := library.find(MAGIC, at)) >= 0:
        *_, size = REGION.unpack_from(library, at)
        place, end, entries = at + REGION.size, at + REGION.size + size, []
        while place + ENTRY.size <= min(end, len(library)):
            kind, _, header, payload, _, _, _, _, architecture = ENTRY.unpack_from(library, place)
            if kind not in (PTX, PROGRAM) or header < ENTRY.size:
                break
            start, place = place + header, place + header + payload
            entries.append(Entry(kind, architecture, start, place))
        if entries and place == end <= len(library):
            yield entries
            at = end
        else:
            at += len(MAGIC)
