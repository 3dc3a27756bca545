"""tools/check_gpu.py: steps, limits and results, with real commands; the rehearsal of its fastest part."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import check_gpu
from tools.check_gpu import Part, Step

ROOT = Path(__file__).parents[2]


@pytest.fixture
def part(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    return Part("kernels", tmp_path, "cpu", 1.0, work)


def python(code):
    return [sys.executable, "-c", code]


def test_a_step_reports_the_results_that_it_wrote(part, tmp_path):
    code = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'GB/s': 1.5})); print('said')"
    (done,) = part.run([Step("copy", [*python(code), "{result}"], 20)])
    assert (done.outcome, done.results) == ("ok", {"GB/s": 1.5})
    assert "said" in (tmp_path / "kernels.log").read_text()
    assert json.loads((tmp_path / "kernels.json").read_text())["steps"][0]["results"] == {"GB/s": 1.5}
    row = "| kernels | copy (cpu, "
    assert any(line.startswith(row) and line.endswith("| GB/s 1.5 |") for line in lines(tmp_path))


def lines(output):
    return check_gpu.table(output).splitlines()


def test_a_step_that_fails_or_hangs_does_not_stop_the_next(part, tmp_path):
    late = tmp_path / "late"
    steps = [
        Step("fails", python("raise SystemExit('the reason')"), 20),
        Step("hangs", python(f"import subprocess; subprocess.run(['sh', '-c', 'sleep 7; touch {late}'])"), 5),
        Step("missing", ["/no/such/program"], 20),
        Step("works", python("pass"), 20),
    ]
    done = part.run(steps)
    assert [each.outcome for each in done] == ["FAILED", "FAILED", "FAILED", "ok"]
    assert "the reason" in done[0].detail and "not done after 5 s" in done[1].detail
    assert "/no/such/program" in done[2].detail
    time.sleep(3)
    assert not late.exists(), "the processes that the step had started continued"


def test_a_step_without_its_tool_is_skipped_with_the_reason(part):
    (done,) = part.run([Step("memcheck", python("raise SystemExit(1)"), 20, needs=check_gpu.sanitizer)])
    assert (done.outcome, done.detail) == ("skipped", "needs a GPU")
    assert check_gpu.modules("no_such_module")("cuda") == "not installed: no_such_module"


def test_the_parts_take_38_minutes_and_every_check_exists(tmp_path):
    parts = check_gpu.parts("cuda", tmp_path, tmp_path)
    assert list(parts) == list(check_gpu.MINUTES) and sum(check_gpu.MINUTES.values()) == 38
    for name, steps in parts.items():
        assert sum(step.limit for step in steps) <= 60 * check_gpu.MINUTES[name], name
    for step in (step for steps in parts.values() for step in steps):
        if step.line[-1] == "{result}":
            module, name, _ = list(step.line)[-3:]
            assert f"def {name}() -> " in (ROOT / f"tools/gpu_checks/{module}.py").read_text()


def test_the_rehearsal_of_a_part_runs_on_a_cpu(tmp_path):
    line = [sys.executable, "tools/check_gpu.py", "sanitizers", "--device", "cpu", "--output", str(tmp_path)]
    done = subprocess.run([*line, "--limits", "4"], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = {
        x["name"]: x["outcome"] for x in json.loads((tmp_path / "sanitizers.json").read_text())["steps"]
    }
    assert outcomes == {"memcheck": "skipped", "racecheck": "skipped", "one call of every op": "ok"}


def test_an_unknown_part_is_named(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", "kernel"])
    with pytest.raises(SystemExit):
        check_gpu.main()
    assert "PART=kernel: no such part; choose from kernels, training" in capsys.readouterr().err
