"""A new project: a folder with everything that a first run needs, which a user then changes file by file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from megatron_stppo.config import ConfigError

TEMPLATE, AGENT = "template", "agent"
SHARED = "make_model.py"  # of TEMPLATE; in every project


def write(folder: Path, template: str = TEMPLATE) -> list[str]:
    """Copy the template's files into `folder`, which is created; return their names, sorted.

    Raises ConfigError if the folder holds anything, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"FOLDER={folder}: is not an empty folder; name a new one")
    root = resources.files(__package__)
    files = {
        item.name: item.read_text(encoding="utf-8")
        for item in (root / TEMPLATE / SHARED, *(root / template).iterdir())
        if item.is_file()  # not __pycache__
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"FOLDER={folder}: {error.strerror}; name a folder that can be written") from None
    return sorted(files)
