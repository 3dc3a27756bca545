"""examples/agents/repair: code of the policy runs in a sandbox, and cannot change its own reward."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.replicas.test_promises import start
from tests.training.loop import small_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents" / "repair"
TESTS = json.loads((EXAMPLE / "tests.json").read_text())
BWRAP = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]


def _works() -> bool:
    try:
        return subprocess.run(BWRAP, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


needs_bwrap = pytest.mark.skipif(not _works(), reason="needs bubblewrap, and users who may make namespaces")
BOTH = [pytest.param(True, marks=needs_bwrap, id="bubblewrap"), pytest.param(False, id="no-sandbox")]
ATTACKS = """
import os, socket, subprocess, sys

def nothing():
    return "nothing"

def connect(port):
    socket.create_connection(("127.0.0.1", port), 2)
    return "connected"

def variables():
    return sorted(os.environ)

def read(path):
    open(path).read()
    return "read"

def write(path):
    open(path, "w").write("x")
    return "written"

def link(path):
    os.symlink("/etc/passwd", path)
    return "linked"

def stay(word):
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
    nowhere = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    subprocess.Popen([sys.executable, "-c", program, word], start_new_session=True, **nowhere)
    return "stays"

def hang():
    while True:
        pass

def flood():
    while True:
        os.write(1, b"a" * 1000)
"""


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """A function that imports a module of the example."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield importlib.import_module
    for name in ("agent", "sandbox"):
        sys.modules.pop(name, None)


@pytest.fixture
def attack(example: Callable[[str], Any], tmp_path: Path) -> Callable[..., str]:
    """A function that lets the code of a policy call one of ATTACKS, and returns what it gave."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "attacks.py").write_text(ATTACKS)

    def call(name: str, *arguments: Any, is_safe: bool = True) -> str:
        test = {"call": name, "arguments": arguments, "result": None}
        (text,) = example("sandbox").failures(folder, "attacks", [test], is_safe)
        return str(text).partition(" and gave ")[2]

    return call


@needs_bwrap
def test_code_in_the_sandbox_reaches_no_network_key_or_file(
    attack: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attack succeeds without the sandbox, or it would show nothing."""
    monkeypatch.setenv("OPENAI_API_KEY", "planted-9c1")
    secret = tmp_path / "of_another_episode"
    secret.write_text("planted")
    with socket.create_server(("127.0.0.1", 0)) as endpoint:
        calls: list[tuple[Any, ...]] = [
            ("connect", endpoint.getsockname()[1]),
            ("read", f"/proc/{os.getpid()}/environ"),
            ("read", str(secret)),
            ("read", str(EXAMPLE / "tests.json")),
            ("write", "areas.py"),
            ("write", str(tmp_path / "outside")),
            ("link", "clock.py"),
        ]
        inside = [attack(*call) for call in calls]
        outside = [attack(*call, is_safe=False) for call in calls]
    assert attack("nothing") == '"nothing"', "the sandbox runs code"
    assert outside == ['"connected"', '"read"', '"read"', '"read"', '"written"', '"written"', '"linked"']
    assert [text.partition(":")[0] for text in inside] == [
        *("ConnectionRefusedError", "FileNotFoundError", "FileNotFoundError", "FileNotFoundError"),
        *("OSError", "FileNotFoundError", "OSError"),
    ]
    assert "OPENAI" not in attack("variables") + attack("variables", is_safe=False)


@needs_bwrap
def test_code_in_the_sandbox_leaves_no_process_and_ends_in_time(
    attack: Callable[..., str], example: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = f"stays-{os.getpid()}"
    assert attack("stay", word) == '"stays"'
    deadline = time.monotonic() + 5
    while [p for p in psutil.process_iter(["cmdline"]) if word in (p.info["cmdline"] or ())]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    monkeypatch.setattr(example("sandbox"), "SECONDS", 2.0)
    began = time.monotonic()
    assert attack("hang") == "nothing"
    assert attack("flood").startswith("aaa")
    assert time.monotonic() - began < 8


@pytest.mark.parametrize("is_safe", BOTH)
def test_code_that_forges_results_passes_no_test(
    example: Callable[[str], Any], tmp_path: Path, is_safe: bool
) -> None:
    failures = example("sandbox").failures
    forged = (
        "import os, sys; os.write(1, b'ready\\n' + b'null\\n' * 9); os._exit(0)",
        "import json; json.dumps = lambda value: 'null'\ndef area(*_): return 1\nperimeter = area",
        "import sys\ndef area(*_): return sys._getframe(1).f_globals['test']['result']\nperimeter = area",
        "class Same(int):\n    __eq__ = lambda *_: True\ndef area(*_): return Same(1)\nperimeter = area",
    )
    for code in forged:
        (tmp_path / "areas.py").write_text(code)
        assert all(failures(tmp_path, "areas", TESTS["areas"], is_safe)), code


@pytest.mark.parametrize("is_safe", BOTH)
def test_the_policy_sees_what_fails_and_the_reward_counts_all_tests(
    example: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_safe: bool
) -> None:
    agent = example("agent")
    monkeypatch.setenv("MEGATRON_STPPO_MODEL", "m")
    task = {"extra": {"module": "areas"}, "prompt": [{"role": "user", "content": "Repair areas.py."}]}
    sides = "def perimeter(width, height):\n    return 2 * (width + height)\n"
    wrong = "def area(width, height):\n    return 6\n" + sides
    right = "def area(width, height):\n    return width * height\n" + sides
    seen: list[Any] = []

    def played(*replies: str) -> list[str]:
        said = iter(replies)

        def create(messages: list[Any], **_: Any) -> Any:
            seen.append(json.loads(json.dumps(messages)))
            message = SimpleNamespace(content=next(said))
            return SimpleNamespace(choices=[SimpleNamespace(message=message)])

        chat = SimpleNamespace(completions=SimpleNamespace(create=create))
        monkeypatch.setattr(agent, "OpenAI", lambda: SimpleNamespace(chat=chat))
        folder = tmp_path / f"copy-{len(seen)}"
        folder.mkdir()
        (folder / "areas.py").write_text((EXAMPLE / "repository" / "areas.py").read_text())
        return agent.repair(task, folder, is_safe)  # type: ignore[no-any-return]

    assert played("No.", f"```python\n{right}```") == ["", "", "", ""]
    assert "return width + height" in seen[0][0]["content"]
    assert seen[1][-1] == {"role": "user", "content": "area(2, 3) must be 6 and gave 5"}
    assert played(f"```\n{wrong}```").count("") == 2, "the tests that it does not see count too"
    assert played("a", "b", "c").count("") == 2, "nothing was changed"


@needs_bwrap
def test_a_sandbox_that_does_not_start_is_an_error_and_no_reward(
    example: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = example("sandbox")
    monkeypatch.setattr(sandbox, "BUBBLEWRAP", ["bwrap", "--no-such-option"])
    with pytest.raises(sandbox.SandboxFailed):
        sandbox.failures(EXAMPLE / "repository", "areas", TESTS["areas"])


@pytest.mark.long
@pytest.mark.parametrize("is_safe", BOTH)
def test_a_run_trains_on_it(tmp_path: Path, is_safe: bool) -> None:
    config = small_run.write(tmp_path)
    shape = tmp_path / "model" / "config.json"
    shape.write_text(json.dumps(json.loads(shape.read_text()) | {"max_position_embeddings": 2000}))
    command = [sys.executable, str(EXAMPLE / "agent.py"), *([] if is_safe else ["--no-sandbox"])]
    fields = (
        *("run.iterations=3", "run.checkpoint_every=3", "parallel.tensor=1", "environment.kind=agent"),
        *(f"environment.command={json.dumps(command)}", f"data.train={EXAMPLE / 'tasks.jsonl'}"),
        *("environment.agents_address=127.0.0.2", "environment.max_turns=3", "environment.deadline=60"),
        *("environment.retrieval.index=null", "rollout.max_context=2000", "rollout.max_prompt_tokens=200"),
    )
    start(["train", str(config), "run.name=repair", *fields])
    folder = tmp_path / "runs" / "repair"
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["outcome/error"] == row["outcome/timeout"] == 0
        assert row["actor/first_kl_to_old"] == 0.0 and 0 < row["mismatch/mean_abs"] < 1e-6
        assert row["actor/gradient_norm"] > 0
    played = (folder / "trajectories" / "iteration-00001.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["reward"] for line in played) == [0.25, 0.4, 0.5, 0.75]
    assert {len(json.loads(line)["turns"]) for line in played} == {3}
