"""tools/benchmark_kernels.py on small sizes: the contents of its JSON and the results of variants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_stppo.ops import extension

ROOT = Path(__file__).parents[2]
# Every turn set, pass and valid fraction, on tensors that fit in a register file.
TINY = """
import sys, torch
from tools.benchmark_kernels import PASSES, TURN_SETS, Sizes, main
vocab = [(8, 40, torch.float32), (8, 40, torch.bfloat16)]
linear = [(16, 8, 40, torch.float32)]
copies = [(1, 4, 8, 8), (3, 4, 5, 8)]
chosen = Sizes(300, list(TURN_SETS), vocab, PASSES, linear, (1.0, 0.5), copies, 0.0, cold=True)
sys.exit(main(sys.argv[1:], chosen, scratch=1 << 20))
"""

pytestmark = pytest.mark.skipif("cpu" not in extension.parts(), reason="the extension is not built")


def run(program: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the tool in a separate process: it loads megatron and sets threads and STPPO_OPS."""
    return subprocess.run(
        [sys.executable, *program],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    arguments = ["--quick", "--device", "cpu", "--output", str(folder)]
    # the environment variable does not turn the variants named "fused" into the fallback
    done = run(["-c", TINY, *arguments], STPPO_OPS="torch")
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "kernels.json").read_text())


def test_every_op_and_its_opponents_are_timed_or_give_a_reason(measured) -> None:
    rows = measured[1]["rows"]
    ops = {"bucket_checksum", "bucket_copy", "clipped_surrogate", "vocab_logprob", "linear_loss"}
    assert {row["section"].split()[0] for row in rows} == ops
    for row in rows:
        assert bool(row["missing"]) == (row["warm"] is None), row
        if not row["missing"]:
            low, middle, high = row["warm"]
            assert 0 < low <= middle <= high and row["bytes"] > 0 and row["of_copy"] > 0
    assert not [
        row for row in rows if row["missing"] and row["variant"].startswith(("fused", "fallback", "linear_"))
    ]


def test_every_variant_agrees_with_float64(measured) -> None:
    for row in measured[1]["rows"]:
        if row["error_rel"] is not None:
            assert row["error_rel"] < (0.05 if "bfloat16" in row["section"] else 1e-4), row


def test_limits_are_ratios_of_medians_with_a_verdict(measured) -> None:
    text, record = measured
    for limit in record["limits"]:
        assert f"{limit['measured']:.3g}x" in text
        assert limit["reached"] == (limit["measured"] >= limit["bound"])
    # the surrogate in three forms on 8 turn sets, 2 dtypes
    assert len(record["limits"]) == 3 * 8 + 2


def test_the_machine_is_recorded(measured) -> None:
    about = measured[1]["machine"]
    assert about["device"] == "cpu" and about["threads"] == 2 and about["extension"]["cpu"] == "built"
    assert about["copy_bandwidth"] > 0 and about["torch"] and about["date"]


def test_a_device_without_the_extension_is_refused() -> None:
    program = "import sys, tools.benchmark_kernels as b; b.extension._csrc = None; sys.exit(b.main())"
    done = run(["-c", program], CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "not built for this cpu" in done.stderr
