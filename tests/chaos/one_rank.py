"""Tests of Saver, each in a forked child with a world of one rank and a small model with its optimizer."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_stppo.base.errors import CheckpointError
from megatron_stppo.checkpoint import contents, loading, saving, writer
from megatron_stppo.checkpoint import step_folder as steps
from megatron_stppo.checkpoint.writer import HostCopy
from megatron_stppo.config import Config
from megatron_stppo.model import build
from megatron_stppo.model.optimizer import Trainer
from megatron_stppo.parallel import groups
from megatron_stppo.weights.sharding.hf_names import read_shape

SIZES = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}


def in_child(action: Callable[..., int | None], *arguments: Any) -> int:
    """Run the action in a fork and return its result as the exit code; 255 if it raised."""
    child = os.fork()
    if child == 0:
        code = 255
        try:
            code = action(*arguments) or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def start(folder: Path, model: Path, **run: Any) -> tuple[saving.Saver, dict[str, Trainer]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = Config.model_validate({"model": {"path": model}, "run": run})
    mesh = groups.initialize(config.parallel)
    actor = build.trainer("actor", read_shape(model), config, mesh, torch.float32)
    return saving.Saver(folder, config, mesh.layout), {"actor": actor}


def add(trainers: dict[str, Trainer], amount: float) -> None:
    for chunk in trainers["actor"].chunks:
        for parameter in chunk.parameters():
            parameter.data.add_(amount)


def files(path: Path) -> dict[str, steps.File]:
    """Return all files except megatron's .metadata, in which every save has a random name."""
    return {name: file for name, file in steps.inspect(path).items() if not name.endswith(".metadata")}


def goes_on(root: Path, model: Path) -> None:
    """Weights change while step 1 is being written in the background: the files have the old weights, like
    those of a save in the foreground."""
    saver, trainers = start(root / "waited", model, async_checkpoints=False)
    saver.save(1, trainers, {"iteration": 1})
    dist.destroy_process_group()
    groups.parallel_state.destroy_model_parallel()

    saver, trainers = start(root / "beside", model)
    may_write, write = threading.Event(), HostCopy.write

    def wait_and_write(self: HostCopy) -> Any:
        assert may_write.wait(60)
        return write(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCopy, "write", wait_and_write)
        saver.save(1, trainers, {"iteration": 1})
        add(trainers, 1.0)
        saver.check()
        assert steps.published(root / "beside") == [], "nothing is visible before it is complete"
        may_write.set()
        saver.finish()
    assert files(root / "beside" / "step_1") == files(root / "waited" / "step_1")


def many_episodes(root: Path, model: Path) -> None:
    """Episodes may exceed the limit of a JSON file. A step without episodes has no such file."""
    saver, trainers = start(root / "episodes", model)
    given = bytes(steps.MOST_BYTES + 1)
    saver.save(1, trainers, {"iteration": 1}, given)
    saver.finish()
    saver.save(2, trainers, {"iteration": 2})
    saver.finish()
    assert saver.episodes() == b"" and steps.EPISODES not in steps.inspect(root / "episodes" / "step_2")
    (root / "episodes" / steps.LATEST).write_text("step_1")
    saver.load(trainers)
    assert saver.episodes() == given


def writer_breaks(root: Path, model: Path) -> None:
    saver, trainers = start(root / "breaks", model)

    def fail(self: HostCopy) -> Any:
        raise LookupError("no such tensor")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCopy, "write", fail)
        saver.save(1, trainers, {"iteration": 1})
        saver._thread.join()  # type: ignore[union-attr]
        with pytest.raises(RuntimeError) as error:
            saver.check()
    assert "no such tensor" in str(error.value.__cause__)


def not_planned(root: Path, model: Path) -> None:
    """Rank 0 alone plans and finds the error, which all ranks must raise."""
    saver, trainers = start(root / "not_planned", model)

    def find(_: Any) -> None:
        raise ValueError("a.weight has a gap")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "check_coverage", find)
        with pytest.raises(RuntimeError, match=r"a save cannot be planned: a\.weight has a gap"):
            saver.save(1, trainers, {"iteration": 1})
    assert steps.published(root / "not_planned") == []


def not_read(root: Path, model: Path) -> None:
    """A file disappears between the check of the manifest and the load, as with a stale handle of NFS."""
    saver, trainers = start(root / "not_read", model)
    saver.save(1, trainers, {"iteration": 1})
    saver.finish()
    path = root / "not_read" / "step_1" / "actor"
    for file in path.glob("*.distcp"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"actor: cannot be loaded \(rank 0: FileNotFoundError: "):
        loading._read(contents.saved_tensors(trainers["actor"], is_loading=True), path)


def flushed(root: Path, model: Path) -> None:
    """The order of flushes, for a loss of power: all files of a step are on disk before its name is, and its
    name before LATEST. Killing a process does not test this, because the kernel still writes."""
    folder, calls = root / "flushed", list[tuple[str, Path]]()
    saver, trainers = start(folder, model)
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def see_fsync(descriptor: int) -> None:
        calls.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def see(name: str, call: Callable[..., None]) -> Callable[..., None]:
        return lambda source, target: (calls.append((name, Path(target))), call(source, target))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", see_fsync)
        patch.setattr(os, "rename", see("rename", rename))
        patch.setattr(os, "replace", see("replace", replace))
        saver.save(1, trainers, {"iteration": 1})
        saver.finish()
    shown = calls.index(("rename", folder / "step_1"))
    scratch, before = folder / "step_1.tmp-0", [path for name, path in calls[:shown] if name == "fsync"]
    manifest, given = scratch / steps.MANIFEST, {scratch / name for name in steps.inspect(folder / "step_1")}
    assert given <= set(before[: before.index(manifest)]), "all files, then the manifest"
    assert {scratch, scratch / "actor"} <= set(before[before.index(manifest) :]), "then the folders"
    pointer = [("fsync", folder / "LATEST.tmp"), ("replace", folder / steps.LATEST)]
    assert calls[shown + 1 :] == [("fsync", folder), *pointer, ("fsync", folder)]


def disk_full(root: Path, model: Path, said: list[str]) -> None:
    """A limit on the file size stands for a full disk; then it is lifted."""
    folder = root / "full"
    saver, trainers = start(folder, model, keep_checkpoints=1)
    saver.save(1, trainers, {"iteration": 1})
    saver.finish()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    writer.say = said.append  # type: ignore[assignment]
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))
    for step in (2, 3):
        add(trainers, 0.5)
        saver.save(step, trainers, {"iteration": step})
        saver._settle()
    assert [p.name for p in folder.iterdir() if "tmp" in p.name] == [], "the scratch folder is removed"
    assert steps.published(folder) == [1] and steps.latest(folder) == 1
    assert len(said) == 2 and all(len(line.splitlines()) == 1 for line in said)
    assert str(folder / "step_2") in said[0] and "MiB" in said[0] and "File too large" in said[0], said
    with pytest.raises(saving.CheckpointError, match="could not be saved"):
        saver.finish()
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    saver.save(4, trainers, {"iteration": 4})
    saver.finish()
    assert steps.published(folder) == [4]
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))
    with pytest.raises(saving.CheckpointError, match="3 checkpoints in a row"):
        for step in (5, 6, 7):
            saver.save(step, trainers, {"iteration": step})
        saver.finish()
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    state = saver.load(trainers)
    assert state is not None and state["iteration"] == 4
    (folder / "step_3.tmp-0" / "actor").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2048))
        patch.setattr(HostCopy, "write", lambda self: pytest.fail("there is no room for it"))
        saver.save(8, trainers, {"iteration": 8})
        with pytest.raises(saving.CheckpointError, match="could not be saved"):
            saver.finish()
    assert "No space left on device, 0.0 MiB are free" in said[-1]
    assert [p.name for p in folder.iterdir() if "tmp" in p.name] == [], (
        "the interrupted save is removed to make room"
    )


def not_finite(root: Path, model: Path) -> None:
    """With one infinite weight or moment nothing is published, and the previous step is kept."""
    saver, trainers = start(root / "finite", model)
    saver.save(1, trainers, {"iteration": 1})
    for spoil in (next(trainers["actor"].chunks[0].parameters()).data, list(trainers["actor"].states())[-1]):
        before = spoil.flatten()[0].item()
        spoil.view(-1)[0] = float("inf")
        with pytest.raises(saving.CheckpointError, match="step_2 is not saved: numbers of actor are"):
            saver.save(2, trainers, {"iteration": 2})
        spoil.view(-1)[0] = before
    saver.finish()
    assert steps.published(root / "finite") == [1] and steps.latest(root / "finite") == 1
    saver.save(2, trainers, {"iteration": 2})
    saver.finish()
    assert steps.published(root / "finite") == [2, 1]


def kept(root: Path, model: Path) -> None:
    """The last two steps, every third and the only good one are kept; an abandoned course is removed."""
    folder = root / "kept"
    saver, trainers = start(folder, model, keep_checkpoints=2, keep_every=3)
    for step in range(1, 9):
        saver.save(step, trainers, {"iteration": step})
    saver.finish()
    assert steps.published(folder) == [8, 7, 6, 3] and steps.latest(folder) == 8
    (folder / steps.LATEST).write_text("step_6")  # a user rolls back
    state = saver.load(trainers)
    assert state is not None and state["iteration"] == 6
    saver.save(6, trainers, {"iteration": 6})  # is there
    saver.save(7, trainers, {"iteration": 7})
    saver.finish()
    assert steps.published(folder) == [7, 6, 3], "8 belongs to the abandoned course"
    (folder / "step_7" / "actor" / "common.pt").write_bytes(b"")
    state = saver.load(trainers)
    assert state is not None and state["iteration"] == 6
    shutil.rmtree(folder / "step_3")
    saver.save(8, trainers, {"iteration": 8})
    saver.finish()
    assert steps.published(folder) == [8, 6], "7 cannot be read and displaces no other step"
