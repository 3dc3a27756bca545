"""Write report.html: one page without external files that shows a run, or compares several.

The page's own code, a few kilobytes, draws the curves. A plotting library would add megabytes to every page,
and would handle untrusted text of models and tools. That text is stored in the page as JSON without "<", and
added to the document as text nodes. The Content-Security-Policy allows only the scripts of SCRIPTS, by their
hash, and forbids all requests.
"""

import base64
import hashlib
import json
import logging
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_stppo.base.files import replacing
from megatron_stppo.config import ConfigError
from megatron_stppo.config.file import NOT_YAML, parse
from megatron_stppo.observe.report import episodes, numbers

log = logging.getLogger(__name__)
FILE, TRAJECTORIES = "report.html", 400
SCRIPTS = ("text.js", "series.js", "panels.js", "curves.js", "table.js", "episodes.js", "page.js")
MAX_TREE = 2**20  # bytes read of a configuration or a summary
OF_A_RUN = ("metrics.jsonl", "config.yaml", "trajectories")


def draw(folders: Sequence[Path], output: Path, trajectories: int = TRAJECTORIES) -> list[str]:
    """Write the page of these runs. Return notes on what is damaged, missing or left out.

    Raises ConfigError for a folder without a run, and for an output that cannot be written.
    """
    for folder in folders:
        if not any((folder / name).exists() for name in OF_A_RUN):
            raise ConfigError(f"RUN_DIR={folder}: holds none of {', '.join(OF_A_RUN)}; give a run's folder")
    budget = episodes.MAX_BYTES // max(1, len(folders))
    runs = [
        read(folder, name, trajectories, budget) for folder, name in zip(folders, names(folders), strict=True)
    ]
    try:
        with replacing(output) as scratch:
            scratch.write_text(page({"runs": runs}), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output={output}: {error.strerror}; name a file that can be written") from None
    return [f"{run['name']}: {note}" for run in runs for note in (*run["notes"], run["left_out"])]


def draw_at_the_end(folder: Path) -> bool:
    """Draw the page of a run that has ended; return whether that succeeded. A failure is a warning only: the
    run has ended."""
    try:
        for note in draw([folder], folder / FILE):
            log.info("%s", note)
    except Exception as error:
        log.warning("%s: not drawn: %s: %s", folder / FILE, type(error).__name__, error)
        return False
    return True


def names(folders: Sequence[Path]) -> list[str]:
    """Return unique names of the runs: the names of their folders, or their paths if two names are equal."""
    short = [folder.resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def read(folder: Path, name: str, trajectories: int, budget: int) -> dict[str, Any]:
    """Return all data of a run that the page shows, as JSON types."""
    notes: list[str] = []
    return {
        "name": name,
        **numbers.read(folder, notes),
        **episodes.read(folder, trajectories, budget, notes),
        "config": _tree(folder / "config.yaml", parse, notes),
        "summary": _tree(folder / "summary.json", json.loads, []),
        "notes": notes,
    }


def page(data: dict[str, Any]) -> str:
    """Return the document. Placeholders inside `data` are not replaced."""
    folder = resources.files(__package__)
    style, script = (
        "".join((folder / name).read_text(encoding="utf-8") for name in files)
        for files in (("page.css",), SCRIPTS)
    )
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
    parts = {
        "POLICY": policy + "base-uri 'none'; form-action 'none'",
        "STYLE": style,
        "SCRIPT": script,
        "DATA": in_html(data),
    }
    return re.sub(
        "|".join(f"@{name}@" for name in parts),
        lambda found: parts[found[0].strip("@")],
        (folder / "page.html").read_text(encoding="utf-8"),
    )


def in_html(data: Any) -> str:
    """Return `data` as ASCII JSON that every HTML parser reads as text.

    Example: {"a": "</script>\\u202e"} becomes {"a":"\\\\u003c/script\\\\u003e\\\\u202e"}.
    """
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _tree(path: Path, read: Any, notes: list[str]) -> dict[str, str]:
    """Return a file's leaves as JSON, by dotted name. If it cannot be read, add a note and return {}."""
    try:
        with path.open("rb") as file:
            return dict(_leaves("", read(file.read(MAX_TREE))))
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")
    except NOT_YAML:  # nor JSON
        notes.append(f"{path.name} is damaged and left out")
    return {}


def _leaves(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        dotted = ((f"{name}.{key}" if name else str(key), inner) for key, inner in value.items())
        return [leaf for key, inner in dotted for leaf in _leaves(key, inner)]
    return [(name, json.dumps(value, ensure_ascii=False, default=str))] if name else []
