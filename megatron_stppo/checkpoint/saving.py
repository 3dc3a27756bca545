"""Saves a run's checkpoints during training, in megatron's distributed format.

All ranks plan a save together and copy its tensors to host memory. Writing (writer.py) needs neither the
models nor the run's process groups, so it runs in the background while training continues. With
run.async_checkpoints=false the same code writes the same bytes before save() returns. step_folder.py
describes which files are published, and when.

All random numbers of a run are functions of (seed, iteration), so a checkpoint contains no random state.
"""

import atexit
import hashlib
import importlib.metadata
import json
import logging
import os
import threading
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_stppo
from megatron_stppo.base.errors import CheckpointError
from megatron_stppo.checkpoint import loading
from megatron_stppo.checkpoint import step_folder as steps
from megatron_stppo.checkpoint.contents import saved_tensors
from megatron_stppo.checkpoint.loading import made_of
from megatron_stppo.checkpoint.step_folder import Manifest
from megatron_stppo.checkpoint.writer import HostCopy, Save
from megatron_stppo.config import Config
from megatron_stppo.data.text.tokenizer_files import digests
from megatron_stppo.model.optimizer import Trainer, not_finite
from megatron_stppo.parallel.collectives import all_reduce_sum, any_rank
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.hf_names import read_shape

FAILURES = 3  # the run ends when this many saves in a row have failed
LAST_SECONDS = 60  # time that a save in progress gets to finish when the process exits
VERSIONS = {
    "megatron_stppo": megatron_stppo.__version__,
    "torch": torch.__version__,
    "megatron-core": importlib.metadata.version("megatron-core"),
}
log = logging.getLogger(__name__)


class Saver:
    """Saves the checkpoints of a run during training. All methods are collective.

    At most one save is in progress. If the file system rejects a save (for example, the disk is full), a
    warning is logged, its files are removed, and training continues: somebody may free disk space before the
    next checkpoint. After FAILURES failed saves in a row the run ends, to limit the work that can be lost.
    """

    def __init__(self, folder: Path, config: Config, layout: Layout) -> None:
        self._folder, self._run = folder, config.run
        self._config_sha256 = hashlib.sha256(config.dump().encode()).hexdigest()
        self._layout = {"world": layout.world, **asdict(layout)}
        path = config.model.path
        self._model = {"shape": asdict(read_shape(path)), steps.TOKENIZER: digests(path)}
        # A separate group for the writer threads, because training uses the others at the same time. Its
        # timeout is long because writing to a slow disk may take as long as a phase.
        self._group = dist.new_group(timeout=config.timeout, backend="gloo", group_desc="checkpoint")
        self._thread: threading.Thread | None = None
        self._save: Save | None = None
        self._failures = 0
        self._last = -1  # the step published last or resumed from
        atexit.register(self._linger)

    def load(self, trainers: dict[str, Trainer]) -> dict[str, Any] | None:
        """Wait for the save in progress, then call loading.load() on the run's folder."""
        self._settle()
        state = loading.load(self._folder, trainers)
        if state is not None:
            self._last = int(state["iteration"])
        return state

    def newest(self) -> int:
        """Wait for the save in progress, then return the step published or resumed from last; -1 if none."""
        self._settle()
        return self._last

    def episodes(self) -> bytes:
        """Return the episodes of the step that was published or resumed from last. Not collective."""
        return steps.read_episodes(self._folder / f"step_{self._last}")

    def save(
        self, step: int, trainers: dict[str, Trainer], state: dict[str, Any], episodes: bytes = b""
    ) -> None:
        """Start to save `step`, after the previous save has ended. Do nothing if that was the same step.

        state: the state of the training loop, which must be JSON-serialisable. episodes: of the first rank;
        they have a file of their own, because state.json is small and read by every rank.
        Raises what check() raises, and CheckpointError if a number to be saved is not finite.
        """
        self._settle()
        if step == self._last:
            return
        if roles := not_finite(trainers):
            raise CheckpointError(
                f"step_{step} is not saved: numbers of {' and '.join(roles)} are not finite; resume from an "
                f"earlier step in {self._folder} with a lower update.{roles[0]}.lr"
            )
        self._save = self._take(step, trainers, state, episodes)
        if self._run.async_checkpoints:
            self._thread = threading.Thread(target=self._save.run, name=f"step_{step}", daemon=True)
            self._thread.start()
        else:
            self._save.run()
            self._settle()

    def check(self) -> None:
        """Evaluate the result of a save that has ended, if there is one. Called between steps.

        Raises CheckpointError after FAILURES failed saves in a row, and RuntimeError if a save failed for a
        reason other than the file system.
        """
        if self._thread is not None and not any_rank(self._thread.is_alive()):
            self._settle()

    def finish(self) -> None:
        """Wait for the save in progress. Raises CheckpointError if it failed, and what check() raises."""
        self._settle()
        if self._failures:
            raise CheckpointError(
                f"the last checkpoint could not be saved; {self._folder} holds the earlier ones"
            )

    def _take(self, step: int, trainers: dict[str, Trainer], state: dict[str, Any], episodes: bytes) -> Save:
        folder, run = self._folder, self._run
        scratch = folder / f"step_{step}.tmp-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        copies = {
            role: HostCopy(
                saved_tensors(trainer, is_loading=False), scratch / role, keep=run.async_checkpoints
            )
            for role, trainer in trainers.items()
        }
        own = torch.tensor(sum(copy.bytes for copy in copies.values()) + len(episodes))
        # the arguments of Trainer.restore
        counters = {r: (t.updates, t.skipped, asdict(t.memory), t.iterations) for r, t in trainers.items()}
        state = state | {"trainers": counters} | made_of(trainers) | self._model
        files = {steps.STATE: json.dumps(state).encode()}
        if episodes:
            files[steps.EPISODES] = episodes
        return Save(
            scratch,
            folder / f"step_{step}",
            copies,
            files,
            Manifest(step, {}, self._config_sha256, VERSIONS, self._layout),
            int(all_reduce_sum(own)),
            partial(steps.retire, folder, step, self._last, run.keep_checkpoints, run.keep_every),
            self._group,
        )

    def _settle(self) -> None:
        """Wait for the save in progress, if any, and evaluate its result, which is equal on all ranks."""
        if self._thread is not None:
            self._thread.join()
        save, self._thread, self._save = self._save, None, None
        if save is None:
            return
        if save.broken is not None:
            raise RuntimeError(f"{save.scratch}: the checkpoint writer failed") from save.broken
        if not save.refused:
            self._failures, self._last = 0, save.manifest.step
            return
        self._failures += 1
        if self._failures == FAILURES:
            raise CheckpointError(f"{FAILURES} checkpoints in a row could not be saved; {save.refused}")

    def _linger(self) -> None:
        # A daemon thread that is still running when the interpreter shuts down can change the exit code.
        if self._thread is not None:
            self._thread.join(LAST_SECONDS)
