from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megatron_stppo.rollout.stop_strings import StopFinder
from tests.rollout.tiny import END, VOCABULARY, build_tokenizer

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


def test_the_finder_treats_special_tokens_as_text() -> None:
    ids = [*TOKENIZER.encode("done"), TOKENIZER.eos_token_id]
    assert StopFinder(TOKENIZER, (END,)).completed(ids) == END


def test_of_two_stop_strings_the_one_that_ends_first_is_named() -> None:
    ids = TOKENIZER.encode("Paris")
    assert len(ids) == 1, "one token holds both"
    assert StopFinder(TOKENIZER, ("is", "ar")).completed(ids) == "ar"


def test_without_stop_strings_nothing_stops() -> None:
    assert StopFinder(TOKENIZER, ()).completed([5, 6, 7]) is None


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopFinder(TOKENIZER, ("</a>", ""))


TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)
STOPS = ["</search>", "is", "é", "→>", "France", END]


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.sampled_from(STOPS), TOKENS, st.lists(st.sampled_from(STOPS), min_size=1, max_size=3))
def test_finder_agrees_with_decoding_everything_after_every_token(
    before: list[int], planted: str, after: list[int], stops: list[str]
) -> None:
    ids = [*before, *TOKENIZER.encode(planted), *after]
    finder = StopFinder(TOKENIZER, tuple(stops))
    whole = (n for n in range(1, len(ids) + 1) if any(s in plain_text(TOKENIZER, ids[:n]) for s in stops))
    assert first_completion(finder, ids) == next(whole, None)


def test_finders_share_the_texts_of_tokens() -> None:
    printed: dict[int, str] = {}
    ids = TOKENIZER.encode("a</b>", add_special_tokens=False)
    for stop in ("</b>", "never"):
        StopFinder(TOKENIZER, (stop,), printed).completed(ids)
    assert set(printed) <= set(ids) and printed
