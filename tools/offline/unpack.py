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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    folder, manifest = Path(sys.argv[1]).resolve(), json.loads((HERE / "manifest.json").read_text())
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
            f'cd "{folder}/megatron_stppo"\n'
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
    with tarfile.open(
        fileobj=Joined([HERE / part["name"] for part in stream["parts"]]), mode="r|*"
    ) as archive:
        archive.extractall(folder, filter="data")
    print(f"{name}: {stream['files']} files in {folder}")
    return ""


class Joined(io.RawIOBase):
    """The bytes of several files, one after the other."""

    def __init__(self, paths: list[Path]) -> None:
        self._pieces = self._read(paths)
        self._rest = b""

    def _read(self, paths: list[Path]) -> Iterator[bytes]:
        for path in paths:
            with path.open("rb") as file:
                while piece := file.read(1 << 20):
                    yield piece

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while (size < 0 or len(self._rest) < size) and (piece := next(self._pieces, b"")):
            self._rest += piece
        size = len(self._rest) if size < 0 else size
        given, self._rest = self._rest[:size], self._rest[size:]
        return given


if __name__ == "__main__":
    sys.exit(main())
