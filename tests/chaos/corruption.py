"""Random damage to a folder of checkpoints: it is always detected, and always reported in one line."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from megatron_stppo.checkpoint import loading
from megatron_stppo.checkpoint import step_folder as steps

STEPS = (3, 6, 9)
HOSTILE = (
    b"",
    b"{}",
    b"[]",
    b"null",
    b"[" * 100_000,
    b'{"files": ' * 50_000,
    b'{"step": 9, "files": {}, "config_sha256": "", "versions": {}, "layout": {}}',
    b'{"step": 9, "files": {"../../../etc/passwd": {"sha256": "", "bytes": 1}, "state.json": '
    b'{"sha256": "", "bytes": 1}}, "config_sha256": "", "versions": {}, "layout": {}}',
    b'{"step": 9, "files": {"/etc/passwd": 1}}',
    b'{"step": 9999999999999999999999999999, "files": 1}',
    b"\xff\xfe\x00",
)
POINTERS = (
    b"",
    b"step_9\n",
    b"step_7",
    b"step_",
    b"../step_3",
    b"step_" + b"9" * 60,
    b"\xff",
    b"step_9" * 1000,
)


def write(root: Path) -> None:
    """Write three steps of small files, published as a save publishes them."""
    for step in STEPS:
        scratch = root / f"step_{step}.tmp-0"
        for name in ("state.json", "actor/__0_0.distcp", "actor/.metadata", "critic/common.pt"):
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).write_bytes(f"{step} {name} ".encode() * 20)
        names = sorted(p.relative_to(scratch).as_posix() for p in scratch.rglob("*") if p.is_file())
        files = {name: steps.describe(scratch / name) for name in names}
        steps.publish(scratch, root / f"step_{step}", steps.Manifest(step, files, "", {}, {"world": 1}))


def damages(step: int) -> st.SearchStrategy[tuple[str, int, Any]]:
    """Draw (kind of damage, step, details)."""
    number = st.integers(0, 10**6)
    kinds: dict[str, st.SearchStrategy[Any]] = {
        **dict.fromkeys(("flip", "truncate", "append"), st.tuples(number, number)),
        **dict.fromkeys(("delete", "link", "pipe"), number),
        "manifest": st.sampled_from(HOSTILE) | st.binary(max_size=200),
        **dict.fromkeys(("stranger", "gone", "no manifest", "huge manifest"), st.none()),
    }
    return st.sampled_from(sorted(kinds)).flatmap(lambda k: st.tuples(st.just(k), st.just(step), kinds[k]))


def damage(folder: Path, kind: str, step: int, how: Any) -> None:
    path = folder / f"step_{step}"
    files = sorted(p for p in path.rglob("*") if p.is_file())
    if kind in ("flip", "truncate", "append"):
        target = files[how[0] % len(files)]
        data = bytearray(target.read_bytes())
        if kind == "flip":
            data[how[1] % len(data)] ^= 1 << how[1] % 8
        elif kind == "truncate":
            del data[how[1] % len(data) :]
        else:
            data += b"x"
        target.write_bytes(data)
    elif kind in ("delete", "link", "pipe"):
        target = files[how % len(files)]
        copy = folder / f"copy-{step}"
        target.rename(copy)
        if kind == "link":
            target.symlink_to(copy)
        elif kind == "pipe":
            os.mkfifo(target)
    elif kind == "manifest":
        (path / steps.MANIFEST).write_bytes(how)
    elif kind == "stranger":
        (path / "actor" / "__1_0.distcp").write_bytes(b"not published")
    elif kind == "gone":
        shutil.rmtree(path)
    elif kind == "no manifest":
        (path / steps.MANIFEST).unlink()
    else:
        with (path / steps.MANIFEST).open("wb") as file:
            file.truncate(steps.MOST_BYTES + 1)


def always_noticed(root: Path, examples: int, random_seed: int) -> int:
    """Check the property on `examples` draws in a world of one rank. Return 0, or raise its error."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    write(root / "template")
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(loading.__package__).addHandler(handler)
    logging.getLogger(loading.__package__).propagate = False
    one_per_step = st.tuples(*(st.none() | damages(step) for step in STEPS))
    pointer = st.none() | st.just(b"-") | st.sampled_from(POINTERS) | st.binary(max_size=80)

    @seed(random_seed)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(one_per_step, pointer)
    def check(drawn: tuple[tuple[str, int, Any] | None, ...], latest: bytes | None) -> None:
        folder = root / "checkpoints"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(root / "template", folder)
        for one in drawn:
            if one is not None:
                damage(folder, *one)
        if latest == b"-":
            (folder / steps.LATEST).unlink()
        elif latest is not None:
            (folder / steps.LATEST).write_bytes(latest)
        warned.clear()
        hurt = {one[1]: one[0] for one in drawn if one is not None}
        hurt = {n: kind for n, kind in hurt.items() if kind != "flip" or not _same(root, n)}
        _expect(folder, hurt, latest, warned)

    check()
    return 0


def _expect(folder: Path, damaged: dict[int, str], latest: bytes | None, warned: list[str]) -> None:
    good = [step for step in reversed(STEPS) if step not in damaged]
    there = [step for step in reversed(STEPS) if damaged.get(step) != "gone"]
    choose: Callable[[], Path | None] = lambda: loading._agree(folder, None)  # noqa: E731
    if not there:
        assert choose() is None
        return
    if not good:
        try:
            choose()
        except loading.CheckpointError as error:
            assert len(str(error).splitlines()) == 1 and all(f"step_{step}: " in str(error) for step in there)
        else:
            raise AssertionError("a damaged step was taken")
        return
    named = _named(latest, there)
    expected = named if named in good else good[0]
    assert choose() == folder / f"step_{expected}", (damaged, latest)
    assert all(len(line.splitlines()) == 1 for line in warned), warned
    tried = [named, *(n for n in there if n != named)] if named is not None else there
    refused = tried[: tried.index(expected)]
    about_steps = [line for line in warned if steps.LATEST not in line]
    assert len(about_steps) == len(refused), "one line per refused step"
    assert all(f"step_{n}" in line for n, line in zip(refused, about_steps, strict=True))
    assert (len(warned) > len(about_steps)) == (named is None), "one line about LATEST if it cannot be used"


def _same(root: Path, step: int) -> bool:
    """A flipped bit of the manifest may be in its data about the run instead of the files."""
    before, now = (root / name / f"step_{step}" for name in ("template", "checkpoints"))
    try:
        given, read = (json.loads((path / steps.MANIFEST).read_bytes()) for path in (before, now))
        for name in ("config_sha256", "versions", "layout"):
            given[name], read[name] = None, None if name in read else "missing"
        others = [
            p.relative_to(before) for p in before.rglob("*") if p.is_file() and p.name != steps.MANIFEST
        ]
        return given == read and all((now / p).read_bytes() == (before / p).read_bytes() for p in others)
    except (OSError, ValueError, RecursionError, TypeError):
        return False


def _named(latest: bytes | None, there: list[int]) -> int | None:
    """Return the step that the pointer names."""
    text = b"step_9" if latest is None else latest
    return next(
        (n for n in there if len(text) <= 64 and text.strip(b" \t\n\r\x0b\x0c") == b"step_%d" % n), None
    )
