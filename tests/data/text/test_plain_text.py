"""Text that follows other tokens has the ids and the spaces that it has inside a whole text."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from megatron_stppo.base.types import Message
from megatron_stppo.config import ConfigError
from megatron_stppo.data.demonstrations import encode, validated
from megatron_stppo.data.text.chat import CLOSE, OPEN, encode_chat, encode_marked
from megatron_stppo.data.text.plain_text import check_continues, decode_plain, encode_plain
from tests.data.text.tokenizer_kinds import KINDS

each = pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS)
PIECES = [
    " ",
    "  ",
    "a",
    " b",
    "hi",
    "the",
    " the capital",
    "Obs: ",
    "</a>",
    "\n",
    "\n\n",
    "é",
    "→",
    "1",
    ",",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)


def whole(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def read(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


@each
@settings(max_examples=150, deadline=None)
@given(before=TEXTS, text=TEXTS)
def test_ids_are_those_of_the_whole_text_and_no_space_is_lost(tokenizer: Any, before: str, text: str) -> None:
    head, tail = whole(tokenizer, before := f"x{before}"), encode_plain(tokenizer, text)
    assert decode_plain(tokenizer, tail) == text
    assert read(tokenizer, head + tail) == read(tokenizer, head) + text == before + text
    both = whole(tokenizer, before + text)
    if both[: len(head)] == head:  # otherwise a token of the whole text lies on both sides
        assert head + tail == both


@each
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_tokens_have_the_text_that_they_have_in_their_context(tokenizer: Any, data: st.DataObject) -> None:
    """Any tokens: also wrong and incomplete characters, and special tokens."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=8))
    head = encode_chat(tokenizer, [Message("user", "hi")])
    assert read(tokenizer, head + ids) == read(tokenizer, head) + decode_plain(tokenizer, ids)


def test_a_prompt_two_turns_and_an_observation_are_the_template_of_one_text() -> None:
    """Worked out: the prompt ends with "[/INST]"; "▁hi" begins a turn, "b" continues one."""
    tokenizer = KINDS["prepend"]
    head = encode_chat(tokenizer, [Message("user", "a")])
    turn, observation = encode_plain(tokenizer, " hi"), encode_plain(tokenizer, "b the")
    assert tokenizer.convert_ids_to_tokens([*turn, *observation]) == ["▁hi", "b", "▁the"]
    assert head + turn + observation == whole(tokenizer, "<s>[INST] a [/INST] hib the")


@each
def test_a_message_with_the_text_of_a_special_token_gains_and_loses_no_space(tokenizer: Any) -> None:
    end = tokenizer.eos_token
    plain, forged = (encode_chat(tokenizer, [Message("user", f"hi the{text}")]) for text in ("", end))
    shared = next(n for n, (a, b) in enumerate(zip(plain, forged, strict=False)) if a != b)
    assert read(tokenizer, plain[:shared]).endswith("hi the"), "the same tokens, with the same space before"
    assert (
        read(tokenizer, forged)
        == read(tokenizer, plain[:shared])
        + end
        + read(tokenizer, plain)[len(read(tokenizer, plain[:shared])) :]
    )


@each
def test_the_first_piece_of_a_text_begins_as_the_tokenizer_begins_texts(tokenizer: Any) -> None:
    mark = f"{OPEN}0{OPEN}0{CLOSE}"
    ids = encode_marked(tokenizer, f"hi the {mark}", {mark: tokenizer.eos_token})
    begun = whole(tokenizer, "hi the")
    assert ids[: len(begun)] == begun and tokenizer.eos_token_id not in ids


@each
def test_a_demonstration_has_the_tokens_of_the_rollout(tokenizer: Any) -> None:
    segments = [{"text": " hi", "kind": "turn"}, {"text": "b the", "kind": "observation"}]
    row = validated({"prompt": [{"role": "user", "content": "a"}], "segments": segments})
    tokens = [*encode_plain(tokenizer, " hi"), *encode_plain(tokenizer, "b the")]
    (shown,) = encode([row], tokenizer)
    prompt = encode_chat(tokenizer, [Message("user", "a")])
    assert list(shown.token_ids) == prompt + tokens
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hi"}]
    (shown,) = encode([validated({"messages": chat})], tokenizer)
    assert list(shown.token_ids) == [*prompt, *encode_plain(tokenizer, "hi"), tokenizer.eos_token_id]


def test_only_a_tokenizer_that_needs_it_is_copied() -> None:
    """Copying a vocabulary of 150,000 takes seconds."""
    for name in ("byte level", "never"):
        core = KINDS[name].backend_tokenizer
        assert encode_plain(KINDS[name], "a b") == core.encode("a b", add_special_tokens=False).ids
        check_continues(core, name)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),  # as of GPT-2's relatives
        ("normalizer", normalizers.Strip()),
    ],
)
def test_what_a_tokenizer_does_at_the_ends_of_a_text_is_not_done_inside(part: str, value: Any) -> None:
    tokenizer = copy.deepcopy(KINDS["byte level"])
    setattr(tokenizer.backend_tokenizer, part, value)
    for text in ("a", " a ", "a\n"):
        assert decode_plain(tokenizer, encode_plain(tokenizer, text)) == text


def test_a_tokenizer_that_does_not_keep_spaces_is_refused_in_one_line() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    collapsing = Tokenizer.from_str(KINDS["always"].backend_tokenizer.to_str())
    collapsing.normalizer = normalizers.Replace(" ", "")
    pieces = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}))
    pieces.decoder = decoders.WordPiece()
    for core in (words, collapsing, pieces):
        with pytest.raises(ConfigError, match="its tokenizer does not keep spaces") as raised:
            check_continues(core, "model.path=m")
        assert str(raised.value).startswith("model.path=m: ") and "\n" not in str(raised.value)
    for tokenizer in KINDS.values():
        check_continues(tokenizer.backend_tokenizer, "m")
