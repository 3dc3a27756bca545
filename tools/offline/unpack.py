"""Unpack a bundle of tools/offline_bundle.py, on a machine without a network.

    python3 unpack.py FOLDER [STREAM ...]
    source FOLDER/activate

Run it with the Python that has torch; it needs only the standard library. Without STREAM it unpacks every
stream whose parts have all arrived, and names those that are missing. The exit status is 0 if all that was
asked for is unpacked, else 1.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    folder, manifest = (
        Path(sys.argv[1]).resolve(),
        json.loads((HERE / "manifest.json").read_text(encoding="utf-8")),
    )
    if problem := unfit(manifest):
        print(problem)
        return 1
    names = sys.argv[2:] or list(manifest["streams"])
    if unknown := [name for name in names if name not in manifest["streams"]]:
        print(f"STREAM={unknown[0]}: this bundle has {', '.join(manifest['streams'])}")
        return 1
    problems = [problem for name in names if (problem := unpack(name, manifest["streams"][name], folder))]
    if (folder / "packages").is_dir():
        (folder / "activate").write_text(
            f'export PYTHONPATH="{folder}/megatron_stppo:{folder}/packages${{PYTHONPATH:+:$PYTHONPATH}}"\n'
            f'export PATH="{Path(sys.executable).parent}:$PATH" HF_HUB_OFFLINE=1\n'
            f'cd "{folder}/megatron_stppo"\n',
            encoding="utf-8",
        )
        print(f"source {folder}/activate")
    print("\n".join(problems), end="\n" * bool(problems))
    return 1 if problems else 0


def unfit(manifest: dict[str, Any]) -> str:
    """Return why this Python cannot use the bundle, or an empty string."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if python != manifest["python"]:
        return f"this is Python {python}; run unpack.py with Python {manifest['python']}"
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return f"torch is not installed for {sys.executable}; the bundle needs {manifest['torch']}"
    if torch.partition("+")[0] != manifest["torch"]:
        return f"torch is {torch}; the bundle is for {manifest['torch']}: install it, or build another bundle"
    return ""


def unpack(name: str, stream: dict[str, Any], folder: Path) -> str:
    """Unpack a stream below the folder. Return why it cannot be, or an empty string."""
    for part in stream["parts"]:
        path = HERE / part["name"]
        if not path.exists():
            return f"{name}: {part['name']} has not arrived ({part['bytes']} bytes)"
        if hashlib.sha256(path.read_bytes()).hexdigest() != part["sha256"]:
            return f"{name}: {part['name']} is damaged; copy it again"
    folder.mkdir(parents=True, exist_ok=True)
    joined = io.BufferedReader(Joined([HERE / part["name"] for part in stream["parts"]]))
    with tarfile.open(fileobj=joined, mode="r|*") as archive:
        archive.extractall(folder, filter="data")
    print(f"{name}: {stream['files']} files in {folder}")
    return ""


class Joined(io.RawIOBase):
    """The bytes of several files, one after the other."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths, self._file = iter(paths), io.BytesIO()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not (size := self._file.readinto(buffer)):
            if (path := next(self._paths, None)) is None:
                return 0
            self._file.close()
            self._file = path.open("rb")
        return size


if __name__ == "__main__":
    sys.exit(main())
