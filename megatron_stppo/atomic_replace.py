"""Replace a file or a folder in one step: a reader sees the old one or the new one, never a part of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a scratch file in the same folder, which becomes `path` when the block ends.

    If the block raises, `path` is unchanged and the scratch file is removed: a full disk needs its space.
    Example: with replacing(Path("a.json")) as scratch: scratch.write_text("{}") writes a.json.tmp first.
    """
    scratch = path.with_name(f"{path.name}.tmp")
    try:
        yield scratch
        os.replace(scratch, path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink()
        raise


def replace_folder(scratch: Path, final: Path) -> None:
    """Rename the folder `scratch` to `final`. An older folder `final` is renamed first and then removed.

    A process that is killed in between may leave the older folder under the name FINAL.tmp-removed, which
    the next call removes.
    """
    older = final.with_name(f"{final.name}.tmp-removed")
    shutil.rmtree(older, ignore_errors=True)
    if final.exists():
        final.rename(older)
    scratch.rename(final)
    shutil.rmtree(older, ignore_errors=True)
