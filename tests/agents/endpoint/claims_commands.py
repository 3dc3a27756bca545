"""Agents that are commands, with the real engine: their environment, their task, their failures."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_stppo.agents.endpoint.agents import open_agent
from megatron_stppo.cluster.launch.process import free_port
from megatron_stppo.config import EnvironmentConfig
from tests.agents.endpoint.claims_agents import EXAMPLES
from tests.agents.endpoint.world import World

COMMAND = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
{extra}
body = json.dumps({{"messages": [{{"role": "user", "content": str(task["index"])}}]}}).encode()
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
    {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}})
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("text of the agent")
print({result})
"""
PLAYS = 'json.dumps({"reward": 0.25, "outcome": "ok", "detail": " ".join(sorted(os.environ))})'


# It starts a process that has its own session and no environment, and whose parent has ended.
HIDE = """
import subprocess
program = "import sys; print(1, flush=True); import time; time.sleep(11.75)"
hidden = ["setsid", "-f", "env", "-i", sys.executable, "-c", program]
subprocess.run(["setsid", "-f", "env", "-i", *hidden])
import time; time.sleep(0.3)
"""


def command(result: str, extra: str = "", **given: Any) -> Any:
    program = [sys.executable, "-c", COMMAND.format(extra=extra, result=result)]
    return open_agent(EnvironmentConfig(kind="agent", command=program, **given))


def test_a_command_is_an_agent_with_an_allow_listed_environment(world: World) -> None:
    os.environ |= {"PLANTED_SECRET": "a41f", "WANTED": "yes", "no_proxy": "127.0.0.1"}
    (played,) = world.play(command(PLAYS, command_variables=["WANTED"]))
    assert (played.outcome, played.reward, len(played.turns)) == ("ok", 0.25, 1)
    names = played.detail.split()
    assert "WANTED" in names and "OPENAI_API_KEY" in names and "PATH" in names
    assert "no_proxy" in names, "else a proxy in command_variables gets its prompts"
    assert "PLANTED_SECRET" not in names
    assert [name for name in names if "TOKEN" in name] == ["ANTHROPIC_AUTH_TOKEN"], "the episode's key"
    (number,) = world.play(command("1.5"))
    assert (number.outcome, number.reward) == ("ok", 1.5)


def test_a_command_reads_a_task_of_any_size_or_does_not_read_it(world: World) -> None:
    """Linux limits one variable to 128 KiB, and a pipe that nobody reads holds 64 KiB."""
    (given,) = world.tasks
    world.tasks = [replace(given, extra={"image": "iVBOR" * 100_000})]
    there, size = 'str("MEGATRON_STPPO_TASK" in os.environ)', 'len(task["extra"]["image"])'
    (read,) = world.play(command(f'json.dumps({{"reward": {size}, "detail": {there}}})'))
    assert (read.outcome, read.reward, read.detail) == ("ok", 500_000.0, "False")
    program = COMMAND.format(extra="", result="2").replace("json.load(sys.stdin)", '{"index": 0}')
    agent = open_agent(EnvironmentConfig(kind="agent", command=[sys.executable, "-c", program]))
    (unread,) = world.play(agent)
    assert (unread.outcome, unread.reward) == ("ok", 2.0)
    world.tasks = [given]
    (small,) = world.play(command(f'json.dumps({{"reward": 1, "detail": {there}}})'))
    assert small.detail == "True", "for agents that were written for the variable"


def test_a_command_that_fails_hangs_or_prints_no_result_is_an_outcome(world: World) -> None:
    (failed,) = world.play(command("1", extra="raise SystemExit('no \\x1b[2J tool')"))
    assert failed.outcome == "error" and failed.detail.startswith(
        "CommandFailed: the command ended with status 1: no "
    )
    assert "\x1b" not in failed.detail
    (said,) = world.play(command("'good'"))
    assert said.outcome == "error" and said.detail.startswith(
        "CommandFailed: the command's last line is 'good'"
    )
    (hung,) = world.play(command("1", extra="import time; time.sleep(60)"), deadline=1.0)
    assert hung.outcome == "timeout"


def test_nothing_of_an_episode_is_left_however_it_ends(world: World) -> None:
    """Not one process, though they ignore SIGTERM and have left the session, and no file."""
    before = tempfile.tempdir
    for end, outcome in (("ends", "ok"), ("fails", "error"), ("hangs", "timeout")):
        with tempfile.TemporaryDirectory() as scratch:
            tempfile.tempdir = scratch
            word = Path(scratch).name
            program = [sys.executable, str(Path(__file__).with_name("leaving.py")), word, end]
            agent = open_agent(EnvironmentConfig(kind="agent", command=program))
            started = time.monotonic()
            (played,) = world.play(agent, deadline=4.0)
            seconds = time.monotonic() - started
            tempfile.tempdir = before
            assert played.outcome == outcome, played.detail
            assert end == "hangs" or seconds < 3.5, "it does not wait for processes that hold the output"
            assert end != "ends" or played.detail.startswith(f"{scratch}/episode-")
            assert end != "ends" or played.detail.endswith(" True"), "the folder was empty"
            assert not list(Path(scratch).iterdir())
            running = [p for p in psutil.process_iter(["cmdline"]) if word in (p.info["cmdline"] or ())[-1:]]
            assert not running
    (next_one,) = world.play(command("1"))
    assert next_one.outcome == "ok"


def test_a_process_that_cannot_be_found_does_not_hold_up_the_episode(world: World) -> None:
    (played,) = world.play(command("1", extra=HIDE))
    assert (played.outcome, played.reward) == ("ok", 1.0), played.detail


def test_a_sandbox_is_a_prefix_of_the_command(world: World) -> None:
    """The prefix of docs/agents.md. The agent reaches the endpoint, and its own processes only."""
    prefix = [
        *("bwrap", "--unshare-all", "--share-net", "--die-with-parent", "--new-session"),
        *(word for name in ("/usr", "/lib", "/lib64") for word in ("--ro-bind-try", name, name)),
        *("--ro-bind", sys.base_prefix, sys.base_prefix, "--proc", "/proc", "--dev", "/dev"),
        *("--tmpfs", "/tmp", "--setenv", "TMPDIR", "/tmp"),
    ]
    hide = HIDE.replace("11.75", "11.25")  # that of another test may still run
    with suppress(FileNotFoundError):
        if subprocess.run([*prefix, "/usr/bin/true"], capture_output=True).returncode == 0:
            shown = 'json.dumps({"reward": 1, "detail": f"{sorted(os.listdir(chr(47)))} {processes}"})'
            extra = 'processes = len([name for name in os.listdir("/proc") if name.isdigit()])' + hide
            python, program = os.path.realpath(sys.executable), COMMAND.format(extra=extra, result=shown)
            agent = open_agent(EnvironmentConfig(kind="agent", command=[*prefix, python, "-c", program]))
            (played,) = world.play(agent)
            assert played.outcome == "ok", played.detail
            root, _, processes = played.detail.rpartition(" ")
            assert "home" not in root and int(processes) == 2, "bubblewrap and the agent"
            found = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
            assert not [words for words in found if "sleep(11.25)" in words], "it could not hide"
            return
    pytest.skip("needs bubblewrap, and users who may make namespaces")


def test_an_agent_on_another_machine_plays_through_an_ssh_tunnel(world: World) -> None:
    """The other machine is this one, with an SSH server of its own."""
    server = "/usr/sbin/sshd"
    if not all(map(os.path.exists, (server, "/run/sshd"))) or not shutil.which("ssh-keygen"):
        pytest.skip("needs sshd, and its folder /run/sshd")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/{name}"], check=True
            )
        port = free_port()
        settings = {
            **{"Port": port, "ListenAddress": "127.0.0.1", "HostKey": f"{folder}/host", "PidFile": "none"},
            **{"AuthorizedKeysFile": f"{folder}/user.pub", "StrictModes": "no", "UsePAM": "no"},
        }
        Path(folder, "sshd").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        Path(folder, "agent.py").write_text(COMMAND.format(extra="", result=PLAYS))
        os.environ["SSH_OPTIONS"] = (
            f"-F none -p {port} -i {folder}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
        )
        words = [str(EXAMPLES / "remote.sh"), "127.0.0.1", sys.executable, f"{folder}/agent.py"]
        given = EnvironmentConfig(kind="agent", command=words, command_variables=["SSH_OPTIONS"])
        with subprocess.Popen([server, "-D", "-f", f"{folder}/sshd"]) as listening:
            wait_for(int(port))
            (played,) = world.play(open_agent(given))
            listening.terminate()
    assert (played.outcome, played.reward, len(played.turns)) == ("ok", 0.25, 1), played.detail
    assert "OPENAI_API_KEY" in played.detail and "SSH_CONNECTION" in played.detail


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 10
    with socket.socket() as probe:
        while probe.connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_agent_for_a_hosted_model_plays_with_nothing_but_the_address_changed(world: World) -> None:
    folder = EXAMPLES.parent / "hosted_agent"
    with tempfile.TemporaryDirectory() as scratch:
        facts = Path(scratch) / "facts.json"
        facts.write_text("{}")
        os.environ["FACTS"] = str(facts)
        program = [sys.executable, str(folder / "reward.py")]
        agent = open_agent(EnvironmentConfig(kind="agent", command=program, command_variables=["FACTS"]))
        (played,) = world.play(agent)
    assert (played.outcome, len(played.turns)) == ("wrong", 1), played.detail
    assert world.rules.tokenizer.decode(played.prompt_ids).startswith("<|im_start|>user\nQuestion 0: which")
