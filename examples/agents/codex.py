"""Codex, which gets a task as a prompt and runs commands in its sandbox; install it with `make .venv-codex`.

PYTHONPATH=examples/agents megatron-stppo train CONFIG environment.kind=agent \
    environment.tool_parser=hermes environment.agent=codex:agent

In its sandbox, commands may read all files of the machine, and have no network. Its prompt has today's date
and 6 kB of text, or 40 kB without the settings below.
"""

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[2] / ".venv-codex" / "node_modules" / ".bin" / "codex"
OPTIONS = ("--skip-git-repo-check", "--ephemeral", "--strict-config", "--sandbox", "read-only")
SETTINGS = {
    "model_provider": "run",
    "web_search": "disabled",  # a tool that the provider runs
    "features.multi_agent": False,
    "features.goals": False,
    "features.view_image": False,
    "skills.bundled.enabled": False,
    "check_for_update_on_startup": False,
    "analytics.enabled": False,
}


async def agent(episode: Any, **more: Any) -> dict[str, Any]:
    """Play an episode. more: further settings of Codex."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        for folder in ("codex", "tmp", "work"):  # its sandbox needs CODEX_HOME outside TMPDIR
            (home / folder).mkdir()
        (home / "system.md").write_text("Use the tool.", encoding="utf-8")
        provider = {"name": "run", "base_url": episode.base_url, "env_key": "KEY", "wire_api": "responses"}
        settings = SETTINGS | {"model": episode.model, "model_instructions_file": f"{home}/system.md"} | more
        settings |= {f"model_providers.run.{key}": value for key, value in provider.items()}
        given = [word for key, value in settings.items() for word in ("-c", f"{key}={json.dumps(value)}")]
        process = await asyncio.create_subprocess_exec(
            *(str(PROGRAM), "exec", *OPTIONS, *given, "-o", f"{home}/last", episode.task.prompt[-1].content),
            env={
                "KEY": episode.api_key,
                "CODEX_HOME": f"{home}/codex",
                "HOME": name,
                "TMPDIR": f"{home}/tmp",
                "PATH": os.environ["PATH"],
            },
            cwd=home / "work",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, log = await process.communicate()
        finally:  # also if the episode ends before
            if process.returncode is None:
                process.kill()
        if process.returncode:
            raise RuntimeError(log.decode(errors="replace").strip().rpartition("\n")[2])
        said = (home / "last").read_text(encoding="utf-8")
    return {"reward": float(any(target in said for target in episode.task.targets)), "detail": said}
