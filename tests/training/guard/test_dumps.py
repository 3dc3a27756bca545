from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_stppo.base.types import Batch, ScoredBatch, UpdatedBatch
from megatron_stppo.config import ConfigError
from megatron_stppo.data.packing import groups_of, to_batch
from megatron_stppo.data.validity import columns, not_finite
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.training.guard import dumps
from tests.observe.test_trajectory_log import EPISODE

pytestmark = pytest.mark.usefixtures("world_of_one")
MESH = MeshRank(0, 1, *(0, 1) * 4, layout=Layout())
FAILED = replace(EPISODE, outcome="error", group=1)


def scored(value: float = 0.5) -> Batch:
    """Return a scored batch of two episodes of four action tokens each; the second failed."""
    batch = to_batch([EPISODE, FAILED])
    return ScoredBatch.of(batch, epochs=(), old_logprob_T=torch.full((8,), value), value_T=torch.zeros(8))


def write(run: Path, iteration: int, batch: Batch, keep: int = 2) -> None:
    dumps.write(run, iteration, batch, groups_of([EPISODE.summary, FAILED.summary]), MESH, ["because"], keep)


def test_a_batch_comes_back_bit_for_bit_without_what_estimate_computes_again(tmp_path: Path) -> None:
    batch = scored(float("nan"))
    added = {name: torch.zeros(8) for name in ("advantage_T", "return_T", "return_R")}
    write(tmp_path, 7, UpdatedBatch.of(batch, **added))
    again, group_N = dumps.read(tmp_path, 7, MESH)
    assert group_N.tolist() == [2, 1]
    assert columns(again).keys() == columns(batch).keys() >= {"old_logprob_T", "value_T", "live_N"}
    for name, value in columns(batch).items():
        assert value.dtype == getattr(again, name).dtype
        assert torch.equal(value.nan_to_num(9), getattr(again, name).nan_to_num(9)), name
    record = json.loads((tmp_path / "dumps/iteration-00007/batch.json").read_text())
    assert record == {"iteration": 7, "reasons": ["because"], "routed": None}


def test_the_newest_dumps_are_kept_and_a_dump_of_an_interrupted_attempt_is_replaced(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 3):
        write(tmp_path, iteration, scored(float(iteration)))
    write(tmp_path, 3, scored(4.0))
    assert dumps.recorded(tmp_path) == [2, 3]
    assert sorted(path.name for path in (tmp_path / "dumps").iterdir()) == [
        "iteration-00002",
        "iteration-00003",
    ]
    again, _ = dumps.read(tmp_path, 3, MESH)
    assert again.old_logprob_T is not None and again.old_logprob_T[0] == 4


def test_dumps_of_an_abandoned_course_do_not_displace_new_ones(tmp_path: Path) -> None:
    for iteration in (7, 8, 3, 4, 5):
        write(tmp_path, iteration, scored())
    assert dumps.recorded(tmp_path) == [4, 5, 7, 8]


def test_a_failed_write_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "dumps").write_text("a file where the folder belongs")
    write(tmp_path, 1, scored())
    assert "not dumped" in caplog.text


def test_a_dump_that_the_disk_refuses_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        write(tmp_path, 1, scored())
    assert list((tmp_path / "dumps").iterdir()) == []
    write(tmp_path, 2, scored())
    assert dumps.recorded(tmp_path) == [2]


def test_a_damaged_dump_is_refused_with_its_name(tmp_path: Path) -> None:
    write(tmp_path, 1, scored())
    path = tmp_path / "dumps/iteration-00001/stage-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="iteration-00001: cannot be read"):
        dumps.read(tmp_path, 1, MESH)


def test_routes_of_other_stages_are_refused(tmp_path: Path) -> None:
    batch = scored()
    routes_P = torch.zeros(len(batch.tokens_P), 2, 1, dtype=torch.uint8)
    write(tmp_path, 1, replace(batch, routes_P=routes_P))
    assert dumps.read(tmp_path, 1, MESH)[0].routes_P is not None
    with pytest.raises(ConfigError, match=r"other pipeline stages; set parallel\.pipeline=1"):
        dumps.read(tmp_path, 1, replace(MESH, pipeline_size=2, layout=Layout(pipeline=2)))


def test_only_live_tokens_must_be_finite() -> None:
    batch = scored()
    assert batch.old_logprob_T is not None
    batch.old_logprob_T[4:] = float("inf")  # of the failed episode
    assert not_finite(batch) == []
    batch.old_logprob_T[1:] = float("inf")
    assert not_finite(batch) == ["old_logprob_T: 3 of 4 not finite"]


def test_a_batch_that_was_read_can_be_dumped_again(tmp_path: Path) -> None:
    write(tmp_path, 1, scored())
    write(tmp_path, 2, dumps.read(tmp_path, 1, MESH)[0])
    assert torch.equal(dumps.read(tmp_path, 2, MESH)[0].tokens_P, scored().tokens_P)
