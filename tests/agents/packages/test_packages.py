"""Agents of other packages, with a policy whose completions are given; `make test-agents` runs them.

Each package is installed in a Python environment of its own, in which the agent's command runs.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.data.tasks import read
from tests.agents.packages.scripted import PATHS, ROOT, Play, Seen, play_all
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(1000)  # seconds; the packages take long to import
CALL = '<tool_call>{"name": "capital", "arguments": {"country": "France"}}</tool_call>'
BASH = '<tool_call>{{"name": "bash", "arguments": {{"command": "{}"}}}}</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"  # Claude Code and Codex send it back in a form of their own
RUN = '<tool_call>{"name": "exec_command", "arguments": {"cmd": "echo Paris"}}</tool_call>'
ASK = '<tool_call>{"name": "mcp__capitals__capital", "arguments": {"country": "France"}}</tool_call>'
TERMINAL = '<tool_call>{"name": "terminal", "arguments": {"command": "echo Paris"}}</tool_call>'
FINISH = '<tool_call>{"name": "finish", "arguments": {"message": "It is Paris."}}</tool_call>'
SAY = '<tool_call>{"name": "Bash", "arguments": {"command": "echo Paris", "description": "Say"}}</tool_call>'
SHELL = ("echo Paris", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo Paris")
OPENING = "<|im_end|>\n<|im_start|>assistant\n"
QUESTION = f"<|im_start|>user\nWhat is the capital of France?{OPENING}"
# name: (which .venv-NAME, the agent, what the policy says)
AGENTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "openai_agents": ("agents", "openai_agents:agent", (CALL, "It is Paris.")),
    "mcp_tools": ("agents", "mcp_tools:agent", (CALL, "It is Paris.")),
    "openai_sdk": ("agents", "openai_sdk:agent", (CALL, "It is Paris.")),
    "openai_responses": ("agents", "openai_responses:agent", (CALL, "It is Paris.")),
    "anthropic_sdk": ("agents", "anthropic_sdk:agent", (CALL, "It is Paris.")),
    "chat_agents": ("agents", "tests.agents.packages.clients:chat_agents", (CALL, "It is Paris.")),
    "claude_code": ("agents", "claude_code:agent", (THOUGHT + SAY, f"{THOUGHT}It is Paris.")),
    "codex": ("agents", "codex:agent", (THOUGHT + RUN, f"{THOUGHT}It is Paris.")),
    "codex with mcp": ("agents", "tests.agents.packages.clients:codex_with_mcp", (ASK, "It is Paris.")),
    "openhands": ("openhands", "openhands_sdk:agent", (TERMINAL, FINISH)),
    **{
        name: ("agents", f"tests.agents.packages.clients:{name}", tuple(map(BASH.format, SHELL)))
        for name in ("mini_chat", "mini_responses", "mini_messages")
    },
    "verifiers right": ("verifiers", "verifiers_agent:agent", ("Rome", "Paris")),
    "verifiers wrong": ("verifiers", "verifiers_agent:agent", ("Paris", "Rome")),
    "openenv won": ("openenv", "openenv_agent:agent", ("3", "7")),
    "openenv lost": ("openenv", "openenv_agent:agent", ("7 or 8", "1", "2")),
}
CAPITALS = {"taskset": {"id": "vf_capitals"}, "agent": {"runtime": {"type": "subprocess"}}}


def python(name: str) -> Path:
    return ROOT / f".venv-{name}" / "bin" / "python"


@pytest.fixture(scope="module")
def played() -> dict[str, Any]:
    here = {name: agent for name, agent in AGENTS.items() if python(agent[0]).exists()}
    for program, names in {"claude": ["claude_code"], "codex": ["codex", "codex with mcp"]}.items():
        if not (ROOT / f".venv-{program}").exists():
            here = {name: agent for name, agent in here.items() if name not in names}
    if not here:
        pytest.skip("needs the packages: make test-agents")
    with openenv_server() as url:
        server = {"url": url, "action": "message", "observation": "text", "reset": {"number": 7}}
        extra = (("verifiers", {"env": CAPITALS, "task": 0}), ("openenv", server))
        plays = {
            name: Play(str(python(venv)), agent, says, extra) for name, (venv, agent, says) in here.items()
        }
        seen: dict[str, Any] = run_ranks(play_all, 1, plays, timeout=1000)[0]
    return seen


@contextmanager
def openenv_server() -> Iterator[str]:
    """Start a server on the loopback interface, and give its address; "" without the package."""
    if not python("openenv").exists():
        yield ""
        return
    command = [str(python("openenv")), "-m", "tests.agents.packages.openenv_server"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def of(played: dict[str, Any], name: str) -> Seen:
    if name not in played:
        pytest.skip(f"needs .venv-{AGENTS[name][0]}: make test-agents")
    seen = played[name]
    assert isinstance(seen, Seen), seen
    return seen


ENDED = "It is Paris."
TOOL = "\n<|im_start|>tool\n"  # begins what the policy reads after its call
# names: (the detail, texts in the first prompt, its end, the end and a text of the second)
READS: dict[tuple[str, ...], tuple[str, tuple[str, ...], str, str]] = {
    ("openai_agents", "chat_agents", "mcp_tools", "openai_sdk", "openai_responses", "anthropic_sdk"): (
        ENDED, ("Look up the capital of a country.",), QUESTION, f"{TOOL}Paris{OPENING}",
    ),
    ("claude_code",): (
        ENDED, ('"name": "Bash"', "Use the tool.<|im_end|>"), QUESTION[len("<|im_start|>user\n"):],
        f"{TOOL}Paris{OPENING}",
    ),
    ("codex",): (
        ENDED, ("<|im_start|>system\nUse the tool.<|im_end|>",), QUESTION[len("<|im_start|>user\n"):],
        f"Process exited with code 0\nOriginal token count: 2\nOutput:\nParis\n{OPENING}",
    ),
    ("codex with mcp",): (ENDED, ('"name": "mcp__capitals__capital"',), "", ""),
    ("openhands",): (
        ENDED, ('"name": "terminal"', "Use the tool.<|im_end|>"), "",
        f"[Command finished with exit code 0]{OPENING}",
    ),
    ("mini_chat", "mini_responses", "mini_messages"): (
        "Paris ", ("Execute a bash command",), "",
        f"{TOOL}<returncode>0</returncode>\n<output>\nParis\n</output>{OPENING}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("agent", [agent for agents in READS for agent in agents])
def test_an_agent_calls_its_tool_and_reads_the_result_in_one_history(
    played: dict[str, Any], agent: str
) -> None:
    """cache_control of Claude Code moves, and Codex sends thinking back as encrypted_content only."""
    seen = of(played, agent)
    detail, texts, end, result = next(read for agents, read in READS.items() if agent in agents)
    assert (seen.outcome, seen.reward, seen.detail) == ("ok", 1.0, detail)
    assert seen.histories == (0, 0), "the tool call is not tokenised again"
    assert all(text in seen.read[0] for text in texts) and seen.read[0].endswith(end)
    assert seen.read[1].startswith(TOOL) and "Paris" in seen.read[1] and seen.read[1].endswith(result)


def test_an_environment_of_verifiers_plays_and_its_rubric_gives_the_reward(played: dict[str, Any]) -> None:
    right, wrong = of(played, "verifiers right"), of(played, "verifiers wrong")
    assert (right.outcome, right.reward, right.histories) == ("wrong", 0.5, (0, 0))
    assert (wrong.outcome, wrong.reward, wrong.detail) == ("wrong", 0.0, "")
    assert right.metrics == {"right": 0.5, "answers": 2.0}
    assert right.read == (QUESTION, f"\n<|im_start|>user\nAre you sure?{OPENING}")


@pytest.mark.skipif(not python("verifiers").exists(), reason="needs .venv-verifiers: make test-agents")
def test_the_tasks_of_verifiers_become_rows_of_a_data_file(tmp_path: Path) -> None:
    program = [str(python("verifiers")), str(ROOT / "examples" / "agents" / "verifiers_agent.py")]
    written = subprocess.run(
        [*program, json.dumps(CAPITALS), "train", "1", "9"],
        env={"PYTHONPATH": PATHS, "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert not written.returncode, written.stderr
    (tmp_path / "train.jsonl").write_text(written.stdout)
    (task,) = read(tmp_path / "train.jsonl")
    assert (task.index, task.prompt[0].content) == (1, "What is the capital of Italy?")
    assert task.extra["verifiers"] == {"env": CAPITALS, "task": 1}


def test_a_server_of_openenv_plays_and_its_rewards_are_added(played: dict[str, Any]) -> None:
    won, lost = of(played, "openenv won"), of(played, "openenv lost")
    assert (won.outcome, won.reward, won.metrics) == ("wrong", 0.75, {"steps": 2.0})
    assert (lost.outcome, lost.reward, lost.metrics) == ("wrong", -0.75, {"steps": 3.0})
    asked = "<|im_end|>\n<|im_start|>user\nGuess a number of 1 to 9."
    assert won.read == (
        QUESTION.removesuffix(OPENING) + asked + OPENING,
        f"\n<|im_start|>user\nWrong, again.{OPENING}",
    )
