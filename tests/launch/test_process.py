"""A rank shows every warning except those of megatron and vLLM about themselves."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import warnings
from megatron_stppo.launch import process

process._ignore_warnings(())
for module in ("megatron.core.models", "vllm", "vllm.config", "megatron_stppo.loop", "vllms", "torch.cuda"):
    for category in (UserWarning, RuntimeWarning):
        text = f"{category.__name__} of {module}"
        warnings.warn_explicit(text, category, "a.py", 1, module=module, registry={})
"""


def test_only_the_warnings_of_named_modules_and_categories_are_silent() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    shown = [line.partition(": ")[2].split(": ")[1] for line in done.stderr.splitlines()]
    assert shown == [
        "RuntimeWarning of megatron.core.models",
        "RuntimeWarning of vllm",
        "RuntimeWarning of vllm.config",
        *(f"{kind} of megatron_stppo.loop" for kind in ("UserWarning", "RuntimeWarning")),
        *(f"{kind} of vllms" for kind in ("UserWarning", "RuntimeWarning")),
        *(f"{kind} of torch.cuda" for kind in ("UserWarning", "RuntimeWarning")),
    ]
