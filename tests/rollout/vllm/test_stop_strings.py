from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megatron_stppo.data.text.plain_text import encode_plain
from megatron_stppo.rollout.vllm.requests import StopFinder
from tests.data.text.tokenizer_kinds import KINDS
from tests.rollout.vllm.tiny import END, build_tokenizer

TOKENIZER = build_tokenizer()


def plain_text(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def first_completion(finder: StopFinder, ids: list[int]) -> int | None:
    """Return the number of tokens after which the finder reports a stop string."""
    return next((n for n in range(1, len(ids) + 1) if finder.completed(ids[:n])), None)


def test_a_stop_string_is_found_at_the_token_that_completes_it() -> None:
    ids = TOKENIZER.encode("<search>capital</search> and more")
    seen = first_completion(StopFinder(TOKENIZER, ("</search>",)), ids)
    assert seen is not None
    assert "</search>" in plain_text(TOKENIZER, ids[:seen])
    assert "</search>" not in plain_text(TOKENIZER, ids[: seen - 1])


def test_a_text_is_a_turn_if_it_ends_with_its_first_stop_string() -> None:
    finder = StopFinder(TOKENIZER, ("</search>", "\n"))
    assert finder.end_with("<search>a</search>") and finder.end_with("a\n")
    for text in ("", "a", "</search", "</search> b", "a\nb</search>", f"a{END}"):
        assert not finder.end_with(text)
    assert not StopFinder(TOKENIZER, ()).end_with("a\n")


def test_the_finder_treats_special_tokens_as_text() -> None:
    ids = [*TOKENIZER.encode("done"), TOKENIZER.eos_token_id]
    assert StopFinder(TOKENIZER, (END,)).completed(ids)


def test_without_stop_strings_nothing_stops() -> None:
    assert not StopFinder(TOKENIZER, ()).completed([5, 6, 7])


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopFinder(TOKENIZER, ("</a>", ""))


STOPS = ["</search>", "is", "é", "→>", "France", END, " b", "Obs: ", " ", "\n\n", "</s>"]
PREFIX = "x:"  # what a turn follows


@pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS)
@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(STOPS), st.lists(st.sampled_from(STOPS), min_size=1, max_size=3))
def test_finder_agrees_with_decoding_everything_after_every_token(
    tokenizer: PreTrainedTokenizerFast, data: st.DataObject, planted: str, stops: list[str]
) -> None:
    some = st.lists(st.integers(0, len(tokenizer) - 1), max_size=6)
    ids = [*data.draw(some), *encode_plain(tokenizer, planted), *data.draw(some)]
    prefix = tokenizer.encode(PREFIX)
    begin = len(plain_text(tokenizer, prefix))
    texts = (plain_text(tokenizer, prefix + ids[:n])[begin:] for n in range(1, len(ids) + 1))
    whole = (n for n, text in enumerate(texts, 1) if any(stop in text for stop in stops))
    assert first_completion(StopFinder(tokenizer, tuple(stops)), ids) == next(whole, None)


def test_a_space_at_either_end_of_a_stop_string_is_found() -> None:
    tokenizer = KINDS["prepend"]
    for text, stop, seen in ((" a b c", " b", 2), ("Obs: a", ": ", 3), ("ab ", " ", 3), ("hi a", "hi ", 2)):
        assert first_completion(StopFinder(tokenizer, (stop,)), encode_plain(tokenizer, text)) == seen, text


def test_a_character_of_a_stop_string_in_bytes_counts_only_as_the_environment_reads_it() -> None:
    """ "é" is two bytes; after half of another character the decoder makes three marks of all three."""
    tokenizer = KINDS["prepend"]
    half, e = tokenizer.convert_tokens_to_ids("<0xE2>"), encode_plain(tokenizer, "é")
    finder = StopFinder(tokenizer, ("é",))
    assert first_completion(finder, e) == 2
    assert first_completion(finder, [half, *e]) is None


def test_finders_share_the_texts_of_tokens() -> None:
    printed: dict[int, str] = {}
    ids = TOKENIZER.encode("a</b>", add_special_tokens=False)
    for stop in ("</b>", "never"):
        StopFinder(TOKENIZER, (stop,), printed).completed(ids)
    assert set(printed) <= set(ids) and printed
