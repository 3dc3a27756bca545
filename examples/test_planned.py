"""The plans beside the examples are current, fit their GPUs, and leave memory."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest

from tests.plan.test_plans import EXAMPLES, PLANNED, run


@pytest.mark.parametrize(
    ("folder", "config", "plan", "gpus"),
    [one if one[0] == "qwen2.5-7b" else pytest.param(*one, marks=pytest.mark.long) for one in PLANNED],
)
def test_every_plan_is_current_and_takes_at_most_75_s_and_8_gib(
    folder: str, config: str, plan: str, gpus: int
) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = run(f"examples/{folder}/{config}", "--gpus", str(gpus))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (EXAMPLES / folder / plan).read_text(encoding="utf-8")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    # a minute of one core, and 15 s more because other processes share its caches
    assert used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime < 75
    assert used.ru_maxrss < 8 << 20  # KiB, of the largest child so far


@pytest.mark.long
def test_the_run_that_the_readme_shows_fits_its_8_gpus(tmp_path: Path) -> None:
    block = re.search(r"```yaml\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(), re.DOTALL)
    assert block is not None
    (tmp_path / "config.yaml").write_text(block[1])
    result = run(str(tmp_path / "config.yaml"), "model.path=examples/qwen2.5-7b/model", "--gpus", "8")
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "fits"), result.stderr


@pytest.mark.parametrize(("folder", "config", "plan", "gpus"), PLANNED)
def test_every_example_fits_its_gpus_and_leaves_two_gib_free(
    folder: str, config: str, plan: str, gpus: int
) -> None:
    text = (EXAMPLES / folder / plan).read_text(encoding="utf-8")
    lines, slack = text.splitlines(), re.search(r"^slack: at least ([\d.]+) GiB", text, re.MULTILINE)
    assert (EXAMPLES / folder / config).is_file()
    assert f"on {gpus} H100" in lines[0]
    assert lines[-1] == "fits" and slack is not None and float(slack[1]) >= 2
