"""Imports of the process from which tests fork theirs (tests/ranks.py, tests/forking): torch, vLLM, the CPU
platform and megatron, in this order, and what the commands import."""

import gc
import multiprocessing.process
import os
from multiprocessing import resource_tracker
from typing import Any

import numpy
import torch

from megatron_stppo.cluster.launch import process

GIVEN = dict(os.environ)
_MAIN = multiprocessing.current_process()
gc.disable()  # until all is imported: collections would take a fifth of the time
process.prepare()


def _is_prepared(engine: bool = True, device: str = "cpu") -> None:
    assert device == "cpu", "forked processes have the CPU platform; start this command with Python itself"


process.prepare = _is_prepared

import megatron_stppo.evidence.audit.audit  # noqa: E402  after prepare: they import megatron
import megatron_stppo.observe.report.page  # noqa: E402
import megatron_stppo.replicas.replica.start  # noqa: E402
import megatron_stppo.replicas.trainer.start  # noqa: E402
import megatron_stppo.training.colocated  # noqa: E402
import megatron_stppo.training.loop  # noqa: E402
import megatron_stppo.training.play_only  # noqa: E402
import megatron_stppo.training.replay  # noqa: E402
import tests.orders  # noqa: E402
import tests.shapes  # noqa: E402

VARIABLES = {name: value for name, value in os.environ.items() if GIVEN.get(name) != value}


def start(stand_in: int) -> None:
    """Make this forked process the main process of a program. stand_in: the process that it runs for."""
    started: Any = multiprocessing.process
    started._current_process, started._parent_process, started._children = _MAIN, None, set()
    _MAIN.name = "MainProcess"  # multiprocessing has given it the name of its fork
    tracker: Any = resource_tracker._resource_tracker  # of pytest's shared memory
    os.close(tracker._fd)
    tracker._fd = tracker._pid = None  # the program starts its own when it needs one
    numpy.random.seed()
    torch.default_generator.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    replica: Any = megatron_stppo.replicas.replica.start
    name = replica.process_name
    # A trainer expects the process that it has started: that is the stand-in.
    replica.process_name = lambda pid: name(stand_in if pid == os.getpid() else pid)
    tests.orders.start()


gc.freeze()  # a collection in a forked process does not look at, and so copy, what is imported here
gc.enable()
