import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_stppo.config import ConfigError
from megatron_stppo.data.tasks import TaskCursor, read
from megatron_stppo.types import Message, Task

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
        ("reward_model", {"reward_model": None}),
        ("reward_model.ground_truth", {"reward_model": {"style": "rule"}}),
        ("reward_model.ground_truth", {"reward_model": {"ground_truth": {"target": []}}}),
        ("reward_model.ground_truth.target", {"reward_model": {"ground_truth": {"target": ["x", 5]}}}),
        ("extra_info", {"extra_info": [1]}),
        ("extra_info.index", {"extra_info": {"index": "x"}}),
        ("extra_info.index", {"extra_info": {"index": 2**63}}),
        ("extra_info.level", {"extra_info": {"level": [10**30]}}),
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
