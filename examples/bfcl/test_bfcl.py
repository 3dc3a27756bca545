"""Tasks of the real package bfcl-eval, played with scripts: the ground truth, mistakes and hostile text."""

from __future__ import annotations

import asyncio
import copy
import decimal
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bfcl
import bfcl_tools
import make_data
import pytest
import yaml

from megatron_stppo.base.types import Task
from megatron_stppo.config import ConfigError, EnvironmentConfig
from megatron_stppo.data import tasks
from megatron_stppo.environments import choose
from megatron_stppo.environments.base import StepResult
from tests.environments.playing import played
from tests.training.loop import small_run

sys.path.remove(str(Path(__file__).parent))  # where pytest put it: other tests must not see its modules

pytest.importorskip("bfcl_eval", reason="needs megatron-stppo[bfcl]")
EXAMPLE = Path(bfcl.__file__).parent
SECTION, DENSE = (
    EnvironmentConfig(kind=f"bfcl:{name}", max_turns=100).beside(EXAMPLE)
    for name in ("factory", "turn_rewards")
)
Row = dict[str, Any]


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    """All 800 rows, by the benchmark's names."""
    both = [row for split in ("train", "evaluate") for row in make_data.task_rows(split)]
    return {row["reward_model"]["ground_truth"]: row for row in both}


@pytest.fixture(scope="module")
def apis() -> bfcl_tools.SimulatedApis:
    return bfcl_tools.load()


def task(row: Row) -> Task:
    return Task("bfcl", (), ("-",), "train", 0, {"bfcl": row["extra_info"]["bfcl"]})


def reply(*calls: Row) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def call(function: str, **arguments: Any) -> Row:
    return {"name": function, "arguments": arguments}


def truth(row: Row) -> list[list[Row]]:
    """The ground truth: calls, in each turn of the user. The caller may change it."""
    return [copy.deepcopy(turn["calls"]) for turn in row["extra_info"]["bfcl"]["turns"]]


def script(turns: Sequence[Sequence[Row]]) -> list[str]:
    """Replies that make the calls of a turn at once and then end the turn."""
    return [text for calls in turns for text in ([reply(*calls)] if calls else []) + ["Done."]]


def play(row: Row, replies: Sequence[str], section: EnvironmentConfig = SECTION) -> list[StepResult]:
    return played(choose.factory(section)(), task(row), *replies)


def observed(row: Row, *calls: Row) -> list[str]:
    """Return the results of calls that are made in one reply."""
    (result,) = play(row, [reply(*calls)])
    return [
        part.partition("\n</tool_response>")[0] for part in result.observation.split("<tool_response>\n")[1:]
    ]


def test_the_ground_truth_has_reward_1_on_all_tasks_that_the_example_writes(
    apis: bfcl_tools.SimulatedApis, tmp_path: Path
) -> None:
    async def total(each: Task) -> tuple[float, float, str | None]:
        dense, plain = (bfcl.BfclEnvironment(apis, 100, turn_rewards) for turn_rewards in (True, False))
        rewards = [0.0, 0.0]
        for number, environment in enumerate((dense, plain)):
            assert await environment.reset(each, 0) == list(each.prompt)
            for text in script([turn["calls"] for turn in each.extra["bfcl"]["turns"]]):
                result = await environment.step(text)
                rewards[number] += result.reward
        return (round(rewards[0], 9), rewards[1], result.outcome)

    async def all_of(given: Sequence[Task]) -> Counter[tuple[float, float, str | None]]:
        return Counter([await total(each) for each in given])

    make_data.main(tmp_path)
    given = [tasks.read(tmp_path / f"{split}.jsonl") for split in ("train", "evaluate")]
    assert [asyncio.run(all_of(split)) for split in given] == [{(1.0, 1.0, "ok"): n} for n in (640, 160)]


def test_each_kind_of_mistake_has_reward_0(rows: dict[str, Row]) -> None:
    row = rows["multi_turn_base_0"]  # files: cd, mkdir, mv; cd, grep; sort; cd, mv, cd, diff
    wrong = {name: truth(row) for name in ("missing", "extra", "argument", "unknown", "unread", "idle")}
    wrong["missing"][0].pop()  # mv
    wrong["extra"][0].append(call("touch", file_name="x"))
    wrong["argument"][0][1]["arguments"]["dir_name"] = "tmp"
    wrong["unknown"][0][1]["name"] = "make_directory"
    wrong["unread"][2].clear()  # sort changes nothing, and its result is missing
    wrong["idle"] = [[]]
    ends = {name: play(row, script(turns)) for name, turns in wrong.items()}
    assert {
        name: (sum(r.reward for r in results), results[-1].outcome) for name, results in ends.items()
    } == (dict.fromkeys(wrong, (0.0, "wrong")))
    assert ends["extra"][-1].detail == "turn 1 of 4: another state of GorillaFileSystem"
    assert ends["unread"][-1].detail == "turn 3 of 4: no call"
    assert play(row, script([[call("pwd")]]))[-1].detail == "turn 1 of 4: another state of GorillaFileSystem"
    unread = truth(row)[:2]
    unread[1][1]["arguments"]["pattern"] = "absent"
    assert play(row, script(unread))[-1].detail == "turn 2 of 4: results of the ground truth are missing"


def test_a_step_over_the_limit_ends_the_episode_and_a_new_turn_counts_again(rows: dict[str, Row]) -> None:
    row, look = rows["multi_turn_base_0"], reply(call("ls"))
    *_, last = results = play(row, [look] * 30)
    assert (len(results), last.done, last.reward, last.outcome) == (21, True, 0.0, "truncated")
    assert last.detail == "turn 1 of 4: over 20 steps"
    first, second = ([reply(*calls)] for calls in truth(row)[:2])
    results = play(row, [*[look] * 19, *first, "Done.", *[look] * 19, *second, "Done."])
    assert not any(result.done for result in results)
    assert play(row, [look] * 9, SECTION.model_copy(update={"max_turns": 3}))[-1].detail.endswith(
        "max_turns=3"
    )


def test_a_turn_that_passes_has_its_share_of_the_reward_at_its_last_reply(rows: dict[str, Row]) -> None:
    row = rows["multi_turn_base_0"]
    turns = truth(row)
    turns[2].clear()
    assert [result.reward for result in play(row, script(turns), DENSE)] == [0, 0.25, 0, 0.25, 0]
    # four of five turns have a ground truth in this one, whose third turn cannot be done
    row = rows["multi_turn_miss_func_0"]
    rewards = [result.reward for result in play(row, script(truth(row)), DENSE)]
    assert rewards == [0, 0.25, 0, 0.25, 0.0, 0, 0.25, 0, 0.25]
    *others, last = play(row, script(truth(row)))
    assert {result.reward for result in others} == {0.0} and last.reward == 1.0
    assert last.metrics == {"turns_passed": 5, "turns_passed_share": 1.0}


def test_a_withheld_function_can_be_called_only_after_the_turn_that_shows_it(rows: dict[str, Row]) -> None:
    row = rows["multi_turn_miss_func_0"]  # sort is added before the fourth turn
    assert '"name": "sort"' not in row["prompt"][0]["content"]
    replies = [
        *script(truth(row)[:2]),
        reply(truth(row)[3][0]),
        "It is not possible.",
        *script([truth(row)[3]]),
    ]
    results = play(row, replies)
    assert "no such function: 'sort'" in results[4].observation
    assert '"name": "sort"' in results[5].observation and results[5].observation.startswith("More functions")
    assert "sorted_content" in results[6].observation and not results[-1].done


def test_the_prompt_has_json_schemas_without_excluded_functions_and_results(rows: dict[str, Row]) -> None:
    system = rows["multi_turn_base_0"]["prompt"][0]["content"]
    lines = system.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    tools = {tool["function"]["name"]: tool for tool in map(json.loads, lines)}
    assert "cp" not in tools and {"mv", "post_tweet"} <= tools.keys()
    assert tools["mention"]["function"]["parameters"]["type"] == "object"
    assert not [line for line in lines if '"response"' in line or '"dict"' in line or '"float"' in line]
    kinds = {'"type": "number"' in row["prompt"][0]["content"] for row in rows.values()}
    assert kinds == {True, False}  # only some APIs have numbers with a fraction


# Calls of the arithmetic API that would take minutes or gigabytes, or that are no calls at all.
HOSTILE = (
    call("power", base=10**9, exponent=10**9),
    call("power", base=2.0, exponent=float("inf")),
    call("power", base=10**400, exponent=2),
    call("power", base=0, exponent=-1),
    call("logarithm", value=2, base=3, precision=10**9),
    call("square_root", number=2, precision=10**9),
    call("round_number", number=5, decimal_places=-(10**9)),
    call("sum_values", numbers=[1] * 200),
    call("sum_values", numbers=[[[[[[1]]]]]]),
    call("sum_values", numbers=[{"a": 1}]),
    call("add", a="x" * 12_000, b=True),
    call("add", a=1, b=True),
    call("add", a=[], b={}),
    call("add", c=1),
    call("add"),
    call("__init__"),
    call("_load_scenario", scenario={}),
    call("__class__"),
    call("eval", source="1"),
    call("\ud800" * 3),
    call("echo", content="\ud800"),
)


def test_hostile_arguments_give_an_error_at_once(rows: dict[str, Row]) -> None:
    row = next(row for row in rows.values() if set(row["extra_info"]["bfcl"]["classes"]) >= {"MathAPI"})
    before = time.process_time()
    results = observed(row, *HOSTILE)
    assert time.process_time() - before < 2
    assert len(results) == len(HOSTILE)
    for hostile, result in zip(HOSTILE, results, strict=True):
        assert "error" in json.loads(result), hostile
        result.encode()
    assert observed(row, call("power", base=3, exponent=4)) == ['{"result": 81}']


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>" * 2900,
        "<tool_call></tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "ls", "arguments": "x"}</tool_call>',
        f"<tool_call>{'[' * 9000}</tool_call>",
        f"<tool_call>{'9' * 9000}</tool_call>",
        "<tool_call>" + "x" * 10**6,
    ],
)
def test_text_that_is_no_call_is_answered_and_not_valid(rows: dict[str, Row], text: str) -> None:
    (result,) = play(rows["multi_turn_base_0"], [text])
    assert (result.done, result.valid, result.reward) == (False, False, 0.0)
    assert result.observation.startswith('<tool_response>\n{"error": "')
    assert result.tool_calls == result.observation.count("<tool_response>") <= 64


def test_no_call_of_the_ground_truth_is_over_a_limit_and_no_precision_of_the_process_changes(
    rows: dict[str, Row], apis: bfcl_tools.SimulatedApis
) -> None:
    before = decimal.getcontext().prec, apis.mpmath.dps
    refused = re.compile(r'\{"error": .*(must (be|have)|too long|no such (function|arg))')
    found = set[str]()
    for row in rows.values():
        given = row["extra_info"]["bfcl"]
        played = bfcl_tools.Simulation(apis, given["classes"], given["state"], given["long_context"])
        calls = [each for turn in given["turns"] for each in turn["calls"]]
        results = [played.call(each["name"], each["arguments"]) for each in calls]
        found |= set(filter(refused.match, results))
    assert found == {'{"error": "ticket_id=\'ticket_001\': must be of type integer"}'}
    assert (decimal.getcontext().prec, apis.mpmath.dps) == before


def test_a_search_of_folders_that_contain_each_other_ends(rows: dict[str, Row]) -> None:
    """Each pair of copies doubles the number of paths; a folder in itself makes them endless."""
    row = copy.deepcopy(rows["multi_turn_base_0"])
    row["extra_info"]["bfcl"]["hidden"] = []
    calls = [call("mkdir", dir_name="f0")]
    for i in range(40):
        pair = (f"f{i + 1}", f"g{i + 1}")
        calls += [call("mkdir", dir_name=name) for name in pair]
        calls += [call("cp", source=f"f{i}", destination=name) for name in pair]
        calls += [call("mv", source=pair[1], destination=pair[0])]
    replies = [reply(*calls[i : i + 60]) for i in range(0, len(calls), 60)]
    before = time.process_time()
    *_, result = play(row, [*replies, reply(call("find"), call("du"), call("ls"))])
    assert time.process_time() - before < 3
    assert result.observation.count("the call takes too long") == 2 and "f40" in result.observation
    same = [call("cp", source="document", destination="document"), call("find"), call("du")]
    assert observed(row, *same)[1].startswith('{"error": "')
    assert play(row, [reply(*same), "Done."])[-1].outcome == "wrong"


def test_episodes_share_no_state(rows: dict[str, Row], apis: bfcl_tools.SimulatedApis) -> None:
    # the package keeps tags in a default argument, credit cards and the weather in module globals
    row = next(row for row in rows.values() if "TwitterAPI" in row["extra_info"]["bfcl"]["classes"])
    post = [call("authenticate_twitter", username="a", password="b"), call("post_tweet", content="x")]
    state = row["extra_info"]["bfcl"]["state"]["TwitterAPI"] | {"username": "a", "password": "b"}
    posting = copy.deepcopy(row)
    posting["extra_info"]["bfcl"]["state"]["TwitterAPI"] = state
    number = state["tweet_counter"]
    mention = call("mention", tweet_id=number, mentioned_usernames=["@c"])
    first = observed(posting, *post, mention, call("get_tweet", tweet_id=number))
    again = observed(posting, *post, call("get_tweet", tweet_id=number))
    assert json.loads(first[-1])["mentions"] == ["@c"] and json.loads(again[-1])["mentions"] == []

    state = {"TravelAPI": {"access_token": "t", "budget_limit": None}}
    travel = [bfcl_tools.Simulation(apis, ["TravelAPI"], state, True) for _ in range(2)]
    card = next(iter(json.loads(travel[0].call("get_all_credit_cards", {}))["credit_card_list"]))
    balance = {"access_token": "t", "card_id": card}
    before = travel[1].call("get_credit_card_balance", balance)
    flight = {"travel_date": "2024-10-10", "travel_from": "SFO", "travel_to": "LAX", "travel_class": "first"}
    assert json.loads(travel[0].call("book_flight", balance | flight))["booking_status"] is True
    assert travel[1].call("get_credit_card_balance", balance) == before
    assert travel[0].call("get_credit_card_balance", balance) != before
    assert travel[0].differing(travel[1]) == ["TravelAPI"]

    weather = [bfcl_tools.Simulation(apis, ["VehicleControlAPI"], {}, True) for _ in range(2)]
    first, again = ([each.call("get_outside_temperature_from_google", {}) for _ in "ab"] for each in weather)
    assert first == again and first[0] != first[1]


def test_arguments_of_the_data_are_not_changed_by_an_episode(rows: dict[str, Row]) -> None:
    for name in ("multi_turn_base_0", "multi_turn_base_149", "multi_turn_long_context_199"):
        before = copy.deepcopy(rows[name])
        assert play(rows[name], script(truth(rows[name])))[-1].outcome == "ok"
        assert rows[name] == before


def test_a_scenario_is_in_one_split_with_all_its_variants(rows: dict[str, Row]) -> None:
    held_out = Counter(row["extra_info"]["index"] % 200 for row in make_data.task_rows("evaluate"))
    assert set(held_out.values()) == {4} and len(held_out) == 40
    assert Counter(scenario // 50 for scenario in held_out) == {0: 10, 1: 10, 2: 10, 3: 10}
    train = {row["extra_info"]["index"] % 200 for row in make_data.task_rows("train")}
    assert train == set(range(200)) - set(held_out)
    assert sorted(row["extra_info"]["index"] for row in rows.values()) == list(range(800))


def test_a_row_of_other_data_names_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"^other row 3: extra_info.bfcl is missing; write the data with"):
        environment = choose.factory(SECTION)()
        asyncio.run(environment.reset(Task("other", (), ("-",), "train", 3, {}), 0))


def test_without_the_package_one_line_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    with pytest.raises(ConfigError, match=r"; pip install --no-deps bfcl-eval==2026.3.23 mpmath$"):
        choose.factory(SECTION)


@pytest.mark.long
def test_a_tiny_model_trains_for_an_iteration(
    tmp_path: Path, rows: dict[str, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random model makes no calls. So turns that cannot be done pass, and all others do not."""
    config = yaml.safe_load(small_run.write(tmp_path).read_text(encoding="utf-8"))
    short = [copy.deepcopy(rows[f"multi_turn_base_{number}"]) for number in range(4)]
    for number, row in enumerate(short):  # its context has 256 tokens
        row["prompt"] = [{"role": "user", "content": "Go."}]
        given = row["extra_info"]["bfcl"]["turns"][:2]
        given[0] |= {"calls": []}
        given[1] |= {"user": "And now?", "calls": given[1]["calls"] if number % 2 else []}
        row["extra_info"]["bfcl"]["turns"] = given
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short), encoding="utf-8")
    config["environment"] = {"kind": "bfcl:factory", "max_turns": 4, "max_observation_tokens": 24}
    config["data"].pop("evaluate")
    config["run"] |= {"iterations": 1, "checkpoint_every": 1}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    monkeypatch.setitem(small_run.ENVIRONMENT, "PYTHONPATH", f"{small_run.ROOT}:{EXAMPLE}")
    done = small_run.run("train", tmp_path / "config.yaml")
    assert done.returncode == 0, done.stderr[-3000:]
    path = tmp_path / "runs" / "small" / "trajectories" / "iteration-00001.jsonl"
    played = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    ends = {
        row["targets"][0]: (row["outcome"], row["reward"], row["detail"], len(row["turns"])) for row in played
    }
    right, wrong = ("ok", 1.0, "turn 2 of 2", 2), ("wrong", 0.0, "turn 2 of 2: no call", 2)
    assert ends == {f"multi_turn_base_{number}": wrong if number % 2 else right for number in range(4)}
    assert "And now?" in played[0]["turns"][0]["observation"]
