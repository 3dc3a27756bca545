"""Claude Code, which gets a task as a prompt and may run `echo`; install it with `make .venv-claude`.

PYTHONPATH=examples/agents megatron-stppo train CONFIG environment.kind=agent \
    environment.tool_parser=hermes environment.agent=claude_code:agent

Its shell commands are the policy's: allow others only in a sandbox. Its prompt has today's date and 13 kB of
text, or 74 kB with all of its tools.
"""

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[2] / ".venv-claude" / "node_modules" / ".bin" / "claude"
OPTIONS = ("--bare", "--tools", "Bash", "--allowedTools", "Bash(echo:*)", "--output-format", "json")


async def agent(episode: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as home:
        variables = {
            "ANTHROPIC_BASE_URL": episode.anthropic_base_url,
            "ANTHROPIC_AUTH_TOKEN": episode.api_key,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "HOME": home,
            "PATH": os.environ["PATH"],
        }
        process = await asyncio.create_subprocess_exec(
            str(PROGRAM),
            *OPTIONS,
            *("--system-prompt", "Use the tool.", "--model", episode.model),
            *("-p", episode.task.prompt[-1].content),
            env=variables,
            cwd=home,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            out, _ = await process.communicate()
        finally:  # also if the episode ends before
            if process.returncode is None:
                process.kill()
    said = str(json.loads(out)["result"])
    return {"reward": float(any(target in said for target in episode.task.targets)), "detail": said}
