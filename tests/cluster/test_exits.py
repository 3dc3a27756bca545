from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.cluster import exits


def test_torchrun_never_reads_a_part_of_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the other ranks when one has failed, also one that is writing."""
    path, seen, write = tmp_path / "error.json", list[bool](), Path.write_text

    def watched(self: Path, *given: Any, **named: Any) -> int:
        count = write(self, *given, **named)
        seen.append(path.exists())
        return count

    monkeypatch.setattr(Path, "write_text", watched)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    exits.report_to_torchrun("no such field", 2)
    assert seen == [False], "the file appears when it is complete"
    reason = json.loads(path.read_text())
    assert (reason["message"], reason["exit_code"]) == ("no such field", 2)
    assert list(tmp_path.iterdir()) == [path]
