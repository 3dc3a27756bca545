"""The journal's file, without a replica. test_replica.py repeats one from it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from megatron_stppo.config import ConfigError
from megatron_stppo.replicas.replica.news import News
from megatron_stppo.replicas.wire import journal
from megatron_stppo.replicas.wire.journal import Journal, Line
from megatron_stppo.replicas.wire.messages import Assignment, Receive
from megatron_stppo.replicas.wire.route import Route
from megatron_stppo.rollout.episodes.environment_host import Answer
from tests.rollout.vllm.tiny import task

ROUTE = Route("route-1", "127.0.0.1", 1, 1, 1, ("member-1", "member-2"))
GIVEN = Assignment(70, task(0), 0, 11, 0, 1.0, 1.0)


def written(run: Path, name: str = "replica-0") -> Path:
    recording = Journal(run, name)
    recording.write(News(assigned=(GIVEN,)).line(0))
    recording.write(News().line(3))
    recording.write(News(hold=True, answers=(Answer(70), Answer(64))).line(3))
    recording.write(News(receive=Receive(ROUTE, 4)).line(9))
    path = max((run / journal.FOLDER).iterdir(), key=lambda path: len(path.name))
    assert path.read_bytes().count(b"\n") == 3, "every line is flushed"
    recording.close()
    return path


def test_a_journal_has_a_line_for_all_that_was_applied_before_a_step(tmp_path: Path) -> None:
    path = written(tmp_path)
    first = path.read_text().splitlines()[0]
    assert first == '{"step":0,"assigned":[70],"answers":[],"version":null,"hold":false}'
    assert list(journal.read(tmp_path, "replica-0")) == [
        Line(0, (70,), (), None),
        Line(3, (), (70, 64), None, True),
        Line(9, (), (), 4),
    ]


def test_a_line_that_a_killed_replica_did_not_complete_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-9])
    assert [line.step for line in journal.read(tmp_path, "replica-0")] == [0, 3]


def test_a_second_replica_of_the_name_begins_a_journal_of_its_own(tmp_path: Path) -> None:
    assert [written(tmp_path).name, written(tmp_path).name] == ["replica-0.jsonl", "replica-0-2.jsonl"]


@pytest.mark.parametrize(
    "damage", [b"[]\n", b"\xff\n", b'{"step": "3"}\n', b"[" * 5000 + b"\n", b"1" * 2**21], ids=range(5)
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: bytes) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes() + damage)
    with pytest.raises(ConfigError, match=r"replica-0.jsonl: line 4 cannot be used .*; give the file"):
        list(itertools.islice(journal.read(tmp_path, "replica-0"), 10))


def test_a_missing_journal_is_named_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/serving/journal/big.jsonl: cannot be read"):
        journal.read(tmp_path, "big")
