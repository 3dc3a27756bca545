"""An agent function as a program: it gets the episode, prints the result, and needs no installed package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from megatron_stppo.agents.command import episode_of
from megatron_stppo.agents.endpoint.agents import as_json
from megatron_stppo.base.types import Message, Task
from megatron_stppo.environments.base import AgentEpisode

ROOT = Path(__file__).parents[3]
PROMPT = (Message("user", "France?"), Message("tool", "Paris", {"name": "look_up"}))
TASK = Task("capitals", PROMPT, ("Paris",), "train", 3, {"level": 2})
VARIABLES = {
    "OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
    "OPENAI_API_KEY": "k-1",
    "MEGATRON_STPPO_MODEL": "tiny",
    "MEGATRON_STPPO_SEED": "7",
}
AGENT = """
async def agent(episode):
    print("a line of the agent", end="")
    if episode.seed == 8:
        raise LookupError("no tool")
    return {"reward": 0.5, "detail": episode.task.prompt[0].content + repr(episode)}
"""


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the program without site-packages, with a module my_agent in `folder`."""
    (folder / "my_agent.py").write_text(AGENT)
    return subprocess.run(
        [sys.executable, "-S", "-m", "megatron_stppo.agents.command", *arguments],
        input=as_json(TASK),
        env=VARIABLES | {"PYTHONPATH": f"{ROOT}:{folder}"} | variables,
        capture_output=True,
        text=True,
    )


def test_an_episode_survives_the_variables_and_the_input_of_a_command() -> None:
    expected = AgentEpisode(TASK, "http://127.0.0.1:1/v1", "k-1", "tiny", 7)
    assert episode_of(VARIABLES, as_json(TASK)) == expected


def test_the_last_line_is_the_result_and_the_key_is_not_in_it(tmp_path: Path) -> None:
    done = run(tmp_path, "my_agent:agent")
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first == "a line of the agent"
    assert json.loads(last)["reward"] == 0.5 and json.loads(last)["detail"].startswith("France?AgentEpisode")
    assert "k-1" not in done.stdout


def test_a_failure_of_the_agent_is_the_last_line_of_the_errors(tmp_path: Path) -> None:
    failed = run(tmp_path, "my_agent:agent", MEGATRON_STPPO_SEED="8")
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "LookupError: no tool")
    unnamed = run(tmp_path, "my_agent")
    assert (unnamed.returncode, unnamed.stderr) == (1, "give one argument, MODULE:FUNCTION\n")
