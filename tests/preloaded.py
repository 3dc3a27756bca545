"""Imports of the process from which tests fork theirs (tests/ranks.py, tests/forking): torch, vLLM, the CPU
platform and megatron, in this order, and what the commands import."""

import gc
import os

from megatron_stppo.launch import process

_given = dict(os.environ)
process.prepare()
VARIABLES = {name: value for name, value in os.environ.items() if _given.get(name) != value}


def _is_prepared(engine: bool = True, device: str = "cpu") -> None:
    assert device == "cpu", "forked processes have the CPU platform; start this command with Python itself"


process.prepare = _is_prepared

import megatron_stppo.commands.audit  # noqa: E402  after prepare: they import megatron
import megatron_stppo.commands.evaluate  # noqa: E402
import megatron_stppo.commands.replay  # noqa: E402
import megatron_stppo.commands.rollout  # noqa: E402
import megatron_stppo.commands.serve  # noqa: E402
import megatron_stppo.loop  # noqa: E402
import megatron_stppo.report.page  # noqa: E402
import megatron_stppo.serving.start  # noqa: E402
import megatron_stppo.worker  # noqa: E402, F401

gc.freeze()  # a collection in a forked process does not look at, and so copy, what is imported here
