import datetime
import decimal
import json

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_stppo.base.types import Message, Task
from megatron_stppo.config import ConfigError
from megatron_stppo.data.tasks import TaskCursor, read
from megatron_stppo.data.values import plain

ROW = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "capital of France?"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Paris", "Paname"]}},
    "extra_info": {"split": "train", "index": 17},
}
TASK = Task(
    "nq",
    (Message("user", "capital of France?"),),
    ("Paris", "Paname"),
    "train",
    17,
    {"ability": "fact-reasoning"},
)
TASKS = [Task("t", (Message("user", str(i)),), (str(i),), "train", i) for i in range(5)]


def written(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_verl_row_reads_the_same_from_jsonl_and_parquet(tmp_path):
    pq.write_table(pa.Table.from_pylist([ROW]), tmp_path / "a.parquet")
    assert read(written(tmp_path / "a.jsonl", ROW)) == read(tmp_path / "a.parquet") == (TASK,)


def test_a_bare_target_and_missing_extra_info_are_accepted(tmp_path):
    row = {k: v for k, v in ROW.items() if k != "extra_info"}
    row["reward_model"] = {"ground_truth": "Paris"}
    tasks = read(written(tmp_path / "a.jsonl", row, row))
    assert [(task.targets, task.index) for task in tasks] == [(("Paris",), 0), (("Paris",), 1)]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("data_source", {"data_source": 5}),
        ("prompt", {"prompt": "capital of France?"}),
        ("prompt", {"prompt": []}),
        ("prompt[0]", {"prompt": ["x"]}),
        ("prompt[0].role", {"prompt": [{"role": "robot", "content": "x"}]}),
        ("prompt[1].content", {"prompt": [ROW["prompt"][0], {"role": "user", "content": None}]}),
        ("prompt[0].content", {"prompt": [{"role": "user", "content": "", "name": "ann"}]}),
        ("prompt[0].content", {"prompt": [{"role": "assistant", "content": "", "tool_calls": None}]}),
        ("prompt[0].content", {"prompt": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
        ("prompt[0].score", {"prompt": [{"role": "user", "content": "x", "score": float("nan")}]}),
        ("reward_model", {"reward_model": None}),
        ("reward_model.ground_truth", {"reward_model": {"style": "rule"}}),
        ("reward_model.ground_truth", {"reward_model": {"ground_truth": {"target": []}}}),
        ("reward_model.ground_truth.target", {"reward_model": {"ground_truth": {"target": ["x", 5]}}}),
        ("extra_info", {"extra_info": [1]}),
        ("extra_info.split", {"extra_info": {"split": 5}}),
        ("extra_info.index", {"extra_info": {"index": "x"}}),
        ("extra_info.index", {"extra_info": {"index": 2**63}}),
        ("extra_info.level", {"extra_info": {"level": [10**30]}}),
        ("extra_info.level.a", {"extra_info": {"level": {"a": float("inf")}}}),
        ("extra_info.level", {"extra_info": {"level": json.loads("[" * 200 + "]" * 200)}}),
        ("ability", {"ability": float("nan")}),
        ("data_source", {"data_source": "\ud800"}),
        ("reward_model", {"reward_model": {"ground_truth": {"target": ["\ud800"]}}}),
    ],
)
def test_a_malformed_row_names_file_row_and_field(tmp_path, field, change):
    path = written(tmp_path / "a.jsonl", ROW, {**ROW, **change})
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path} row 2: {field}=")
    assert "; " in str(caught.value) and "\n" not in str(caught.value)


def test_a_null_of_parquet_is_a_missing_key(tmp_path):
    """A parquet file has every key in every row: the first row's "level" is null in the second."""
    rows = [
        {**ROW, "extra_info": {"split": "train", "index": 3, "level": "easy", "hints": {"a": 1}}},
        {**ROW, "extra_info": {"note": "n", "hints": {"b": [2, None]}}},
    ]
    rows[1].pop("ability")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    tasks = read(tmp_path / "a.parquet")
    assert tasks == read(written(tmp_path / "a.jsonl", *rows))
    assert [(task.split, task.index, task.extra) for task in tasks] == [
        ("train", 3, {"level": "easy", "hints": {"a": 1}, "ability": "fact-reasoning"}),
        ("", 1, {"note": "n", "hints": {"b": [2, None]}}),
    ]


def test_a_null_where_a_value_is_needed_names_file_and_row(tmp_path):
    pq.write_table(pa.Table.from_pylist([ROW, {**ROW, "data_source": None}]), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet row 2: data_source=None is missing or malformed; "):
        read(tmp_path / "a.parquet")
    nulls = {"ability": None, "extra_info": {"split": None, "index": None}}
    (task,) = read(written(tmp_path / "a.jsonl", {**ROW, **nulls}))
    assert (task.split, task.index, task.extra) == ("", 0, {})


VALUES = {
    "created": (datetime.datetime(2026, 1, 2, 3, 4, 5), "2026-01-02T03:04:05"),
    "zoned": (datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC), "2026-01-02T03:00:00+00:00"),
    "date": (datetime.date(2026, 1, 2), "2026-01-02"),
    "time": (datetime.time(3, 4), "03:04:00"),
    "took": (datetime.timedelta(minutes=1), 60.0),
    "price": (decimal.Decimal("1.50"), "1.50"),
    "tiny": (decimal.Decimal("0.00000001"), "0.00000001"),
    "image": ({"bytes": b"\x89PNG\x00", "path": None}, {"bytes": "iVBORwA="}),
    "half": (np.float16(0.5), 0.5),
    "count": (7, 7),
    "right": (True, True),
    "text": ("a\x00b \U0001f468", "a\x00b \U0001f468"),
    "list": ([1.5, 2.5], [1.5, 2.5]),
}


def test_values_of_parquet_become_those_of_json_and_survive_json_and_msgpack(tmp_path):
    given = {name: value for name, (value, _) in VALUES.items()}
    expected = {name: value for name, (_, value) in VALUES.items()} | {"map": {"a": 1}}
    extra = pa.array([given]).cast(pa.struct(pa.array([given]).type))
    fields = [*extra.type, pa.field("map", pa.map_(pa.string(), pa.int64()))]
    maps = pa.array([[("a", 1)]], type=fields[-1].type)
    extra = pa.StructArray.from_arrays([*extra.flatten(), maps], fields=fields)
    row = pa.Table.from_pylist([{**ROW, "extra_info": None, "ability": None}])
    row = row.set_column(row.schema.get_field_index("extra_info"), "extra_info", extra)
    pq.write_table(row, tmp_path / "a.parquet")
    (task,) = read(tmp_path / "a.parquet")
    assert task.extra == expected
    assert {name: type(value) for name, value in task.extra.items()} == {
        name: type(value) for name, value in expected.items()
    }
    assert json.loads(json.dumps(task.extra, allow_nan=False)) == task.extra
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=Task) == task


def test_arrays_of_numpy_become_lists_and_unknown_types_are_refused():
    given = {"a": np.array([[1, 2]]), "b": np.float32(0.5), "c": np.bool_(True), "d": (1, "x")}
    assert plain(given, "row 1", "x") == {"a": [[1, 2]], "b": 0.5, "c": True, "d": [1, "x"]}
    for value in (object(), {1: 2}, np.datetime64("2026-01-02", "ns"), decimal.Decimal("NaN"), 1j):
        with pytest.raises(ConfigError, match=r"^row 1: x\.y"):
            plain({"y": value}, "row 1", "x")


CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"city": "Rome"}}}


def test_messages_keep_the_keys_that_a_template_may_read(tmp_path):
    """The second row's call has other arguments: in parquet each row has null for those of the other."""
    other = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    rows = [
        {
            **ROW,
            "prompt": [
                {"role": "user", "content": "Where?"},
                {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
                {"role": "tool", "content": "", "tool_call_id": "1", "name": "look_up"},
            ],
        }
        for call in (CALL, other)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    tasks = read(tmp_path / "a.parquet")
    assert tasks == read(written(tmp_path / "a.jsonl", *rows))
    assert tasks[0].prompt == (
        Message("user", "Where?"),
        Message("assistant", "", {"reasoning_content": "Hm.", "tool_calls": [CALL]}),
        Message("tool", "", {"tool_call_id": "1", "name": "look_up"}),
    )
    assert [m.as_dict() for m in tasks[1].prompt] == rows[1]["prompt"]


def test_a_value_that_python_cannot_hold_names_the_rows(tmp_path):
    far = pa.array([10**8], type=pa.date32())  # days: the year 275760
    table = pa.Table.from_pylist([ROW]).append_column("far", far)
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet rows 1 to 1: hold a value that cannot be read"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("line", ["{", "[" * 100_000, "", "5"])
def test_a_line_that_is_not_an_object_gives_an_error_with_file_and_row(tmp_path, line):
    path = written(tmp_path / "a.jsonl", ROW, line)
    with pytest.raises(ConfigError, match=r"a\.jsonl row 2: is "):
        read(path)


def test_a_long_value_is_shortened_in_the_error(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read(written(tmp_path / "a.jsonl", {**ROW, "prompt": "x" * 10**6}))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "name", ["missing.jsonl", "missing.parquet", "broken.parquet", "broken.jsonl", "a.csv"]
)
def test_an_unreadable_file_gives_a_one_line_error(tmp_path, name):
    if name.startswith("broken"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no rows"):
        read(written(tmp_path / "a.jsonl"))


def test_every_epoch_has_every_task_once_in_a_different_order():
    cursor = TaskCursor(TASKS, 0)
    epochs = [[task.index for task in cursor.take(5)] for _ in range(4)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1


def test_the_order_depends_on_the_seed_and_not_on_the_number_of_tasks_per_call():
    whole = TaskCursor(TASKS, 3).take(23)
    cursor = TaskCursor(TASKS, 3)
    assert [task for n in (0, 4, 1, 11, 7) for task in cursor.take(n)] == whole
    assert TaskCursor(TASKS, 4).take(23) != whole


def test_a_restored_cursor_continues_at_the_saved_position():
    saved, resumed = TaskCursor(TASKS, 3), TaskCursor(TASKS, 3)
    saved.take(13)
    resumed.restore(json.loads(json.dumps(saved.state())))
    assert resumed.take(9) == saved.take(9)


@pytest.mark.parametrize(("tasks", "seed", "named"), [(TASKS[:4], 3, "tasks is 4"), (TASKS, 4, "seed is 4")])
def test_a_cursor_is_not_restored_for_different_tasks(tasks, seed, named):
    state = TaskCursor(TASKS, 3).state()
    with pytest.raises(ConfigError, match=named):
        TaskCursor(tasks, seed).restore(state)


def test_a_cursor_without_tasks_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        TaskCursor([], 0)
