"""Requests are matched against the recorded histories. Letters are units; X, Y and Z are completions."""

from __future__ import annotations

from megatron_stppo.agents.endpoint.recorder import Histories, Match


def record(histories: Histories, asked: str, answer: str, new: list[int], sampled: list[int]) -> Match:
    place = histories.place("chat", asked)
    histories.record(place, "chat", asked, answer, new, sampled)
    return place


def two_turns() -> Histories:
    """Return "ab" X "c" Y with the tokens 1, 2, then 7, 8 for X, 3 for c and 9 for Y."""
    histories = Histories()
    assert record(histories, "ab", "X", [1, 2], [7, 8]) == Match(0, 0, (), False)
    assert record(histories, "abXc", "Y", [3], [9]) == Match(0, 3, (1, 2, 7, 8), True)
    return histories


def test_a_request_that_repeats_a_history_continues_it_with_the_sampled_tokens() -> None:
    assert two_turns().place("chat", "abXcYd") == Match(0, 5, (1, 2, 7, 8, 3, 9), True)


def test_an_edited_message_begins_a_new_history_after_the_completions_before_it() -> None:
    histories = two_turns()
    assert histories.place("chat", "abXe") == Match(1, 3, (1, 2, 7, 8), False), "c became e"
    assert histories.place("chat", "abXcZ") == Match(1, 3, (1, 2, 7, 8), False), "the answer Y became Z"
    assert histories.place("chat", "aXcYd") == Match(1, 0, (), False), "nothing is the same"
    assert histories.place("chat", "sum") == Match(1, 0, (), False), "a compacted history"


def test_the_new_history_shares_tokens_and_goes_its_own_way() -> None:
    histories = two_turns()
    assert record(histories, "abXe", "Z", [4], [5]).history == 1
    assert histories.place("chat", "abXeZf") == Match(1, 5, (1, 2, 7, 8, 4, 5), True)
    assert histories.place("chat", "abXcYf") == Match(0, 5, (1, 2, 7, 8, 3, 9), True), "the first goes on too"


def test_two_conversations_in_turn_are_two_histories() -> None:
    histories = Histories()
    record(histories, "a", "X", [1], [7])
    record(histories, "b", "Y", [2], [8])
    assert histories.place("chat", "aXc") == Match(0, 2, (1, 7), True)
    assert histories.place("chat", "bYc") == Match(1, 2, (2, 8), True)
    assert len(histories) == 2


def test_the_same_request_twice_is_two_histories_even_with_equal_answers() -> None:
    histories = Histories()
    record(histories, "a", "X", [1], [7])
    assert record(histories, "a", "X", [1], [7]) == Match(1, 0, (), False)
    assert record(histories, "aXb", "Y", [2], [8]) == Match(0, 2, (1, 7), True), "the oldest is continued"
    assert histories.place("chat", "aXb") == Match(1, 2, (1, 7), True), "then the other one"
    record(histories, "aXb", "Z", [2], [9])
    assert histories.place("chat", "aXb") == Match(2, 2, (1, 7), False), "then none can be"


def test_a_history_of_another_kind_is_not_continued() -> None:
    assert two_turns().place("chat with tools", "abXcYd") == Match(1, 0, (), False)
    histories = Histories()
    histories.record(histories.place("ids", (1, 2)), "ids", (1, 2), (7,), (1, 2), (7,))
    assert histories.place("ids", (1, 2, 7, 3)) == Match(0, 3, (1, 2, 7), True)


def test_a_request_shorter_than_a_history_continues_none() -> None:
    assert two_turns().place("chat", "abX") == Match(1, 3, (1, 2, 7, 8), False)
    assert two_turns().place("chat", "ab") == Match(1, 0, (), False), "a retry, or a second sample"


def test_a_completion_without_units_is_never_continued() -> None:
    histories = Histories()
    record(histories, "ab", "X", [1, 2], [7, 8])
    record(histories, "abXc", "", [3], [9])
    for asked in ("abXc", "abXcd"):
        assert histories.place("chat", asked) == Match(1, 3, (1, 2, 7, 8), False), "after X"
