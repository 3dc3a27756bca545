import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_stppo.environments.answers import exact_match, inside_last, normalise, parse_action


def test_normalisation_lowers_and_drops_punctuation_articles_and_spaces():
    assert normalise(" The  Kingdom, of\tSpain! ") == "kingdom of spain"
    assert normalise("an A.B. the-C") == "ab thec"


def test_any_target_matches_and_a_part_of_one_does_not():
    assert exact_match("the paris.", ["Lyon", "Paris"])
    assert not exact_match("Paris Lyon", ["Lyon", "Paris"])
    assert not exact_match("Par", ["Paris"])


def test_an_empty_answer_matches_no_target():
    assert not exact_match(None, ["Paris"])
    assert not exact_match("The ...", ["The ..."])


def test_an_answer_above_the_length_limit_matches_no_target():
    assert not exact_match("Paris" + " " * 600, ["Paris"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<search> Gabon</search>", ("search", "Gabon")),
        ("<think>x</think><answer>Paris</answer>", ("answer", "Paris")),
        ("<answer>Lyon</answer> no, <answer>Paris</answer>", ("answer", "Paris")),
        ("<answer>a<answer>b</answer></answer>", ("answer", "b")),
        ("<search>q</search><answer>Paris</answer>", ("answer", "Paris")),
        ("<answer>Paris</answer><search>q</search>", ("search", "q")),
        ("<answer>Paris", ("invalid", "")),
        ("</answer>", ("invalid", "")),
        ("<answer>Paris</answer><answer>", ("invalid", "")),
        ("</answer>Paris<answer>", ("invalid", "")),
        ("<answer> </answer>", ("invalid", "")),
        ("<ANSWER>Paris</ANSWER>", ("invalid", "")),
        ("Paris", ("invalid", "")),
        ("", ("invalid", "")),
    ],
)
def test_the_last_closed_tag_decides_the_action(text, expected):
    assert parse_action(text) == expected


def test_a_turn_with_a_thousand_answers_has_no_answer():
    assert parse_action("<answer>Paris</answer>" * 1000) == ("invalid", "")
    assert parse_action("<answer>Lyon</answer>" * 4 + "<answer>Paris</answer>") == ("invalid", "")


def test_hostile_text_is_read_in_linear_time():
    start = time.perf_counter()
    for text in ("<answer>" * 10**6, "</answer>" * 10**6, "<" * 10**7, "<answer>" * 4000):
        parse_action(text)
        inside_last(text, "answer")
    normalise("a " * 10**6)
    assert time.perf_counter() - start < 2.0


@given(st.text(alphabet="<>/answersch AP", max_size=200))
def test_any_text_is_an_action_of_one_of_three_kinds(text):
    kind, content = parse_action(text)
    assert kind in ("search", "answer", "invalid")
    assert (content == "") == (kind == "invalid")
    assert content in text


@given(st.text(max_size=100))
def test_normalisation_is_idempotent(text):
    assert normalise(normalise(text)) == normalise(text)
