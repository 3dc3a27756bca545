"""Text that follows other tokens has the ids and the spaces that it has inside a whole text."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_stppo.base.types import Message
from megatron_stppo.config import ConfigError
from megatron_stppo.data.demonstrations import encode, validated
from megatron_stppo.data.text.chat import CLOSE, OPEN, encode_chat, encode_marked
from megatron_stppo.data.text.plain_text import beginning, check_continues, decode_plain, encode_plain
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

WORDS = r"|'(?i:s|t|re)|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
# of pre-tokenizers: as of Llama 3; with numbers in groups from the right; capitals as in o200k; none
EXPRESSIONS = {
    "words": r"\p{N}{1,3}" + WORDS,
    "grouped": r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))" + WORDS,
    "cased": rf"{CASED}|\p{{N}}{{1,3}}{WORDS}",
    "no words": r"[\s\S]+",
}
AWKWARD = [
    *(
        "a",
        "ab",
        "A",
        "1",
        "12",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "\n ",
        "'s",
        "...",
        "=",
        "é",
        "e\u0301",
        "\u0301",
    ),
    *(
        "\u0327",
        "一",
        "二三",
        "→",
        "\u200b",
        "\u1100",
        "\u1161",
        "\u2581",
        "<|im_end|>",
        "</s>",
        "<tool>",
        "<to",
    ),
]


def byte_level(expression: str, ignore_merges: bool = False) -> PreTrainedTokenizerFast:
    """Merges of the awkward pieces, also of white space before and after a line break."""
    core = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    core.normalizer, core.decoder = normalizers.NFC(), decoders.ByteLevel()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=6,
        show_progress=False,
    )
    text = "ab ba aaaa\n \n    \n  12 345 1000000 it's AAaa 一二三 ====... 一Ac 一Ad 一Ae"
    core.train_from_iterator([text * 3], trainer)
    core.add_tokens([AddedToken("<tool>", normalized=False, special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")


def unigram() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>", max_piece_length=6, show_progress=False
    )
    core.train_from_iterator(["ab ba aaaa  12 345 1000000 it's AAaa 一二三 ====..."] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


LONG = {
    **KINDS,
    **{name: byte_level(expression) for name, expression in EXPRESSIONS.items()},
    "whole words first": byte_level(EXPRESSIONS["words"], ignore_merges=True),
    "unigram": unigram(),
}
RUNS = st.builds(str.__mul__, st.sampled_from(AWKWARD), st.sampled_from([1, 1, 2, 3, 40, 300]))
LONG_TEXTS = st.lists(RUNS, min_size=4, max_size=40).map("".join)


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


@pytest.mark.parametrize("tokenizer", LONG.values(), ids=LONG)
@settings(max_examples=60, deadline=None)
@given(text=LONG_TEXTS, count=st.sampled_from([1, 2, 5, 20]))
@example(text="\n" + " " * 3000 + "\nab", count=1)  # one word, up to the last line break
@example(text="1" * 3001, count=2)  # groups of 3 from the right
@example(text="a" + "\u0301" * 3000 + "\u0327" * 9, count=5)  # the form NFC puts the last marks first
@example(text="aaaaab" * 500, count=5)
@example(text="ab 一" + "A" * 4000 + "b", count=5)  # "一A" is a token, in the word that the last letter makes
def test_the_beginning_of_a_long_text_has_its_first_tokens(tokenizer: Any, text: str, count: int) -> None:
    begun = beginning(tokenizer, text, count)
    assert text.startswith(begun)
    assert encode_plain(tokenizer, begun)[:count] == encode_plain(tokenizer, text)[:count]


def test_the_last_character_of_a_long_text_may_decide_its_first_token() -> None:
    """Of two merges that overlap, the one further right comes first: the text is paired from its end."""
    letters = [chr(ord("A") + n) for n in range(41)]
    merges = list(itertools.pairwise(letters))[::-1]
    core = Tokenizer(models.BPE({t: n for n, t in enumerate([*letters, *map("".join, merges)])}, merges))
    core.decoder = decoders.Fuse()
    tokenizer, text = PreTrainedTokenizerFast(tokenizer_object=core), "".join(letters)
    for whole, first in ((text, "A"), (text[:-1], "AB")):
        ids = encode_plain(tokenizer, beginning(tokenizer, whole, 1))
        assert tokenizer.convert_ids_to_tokens(ids[:1]) == [first]


@pytest.mark.parametrize("name", sorted(LONG.keys() - {"unigram"}))  # which may have several best paths
def test_the_beginning_of_any_text_of_megabytes_is_short(name: str) -> None:
    for piece in ("x y ", "a", " ", "\n", "一", "ab", "1;", "</s>"):
        assert len(beginning(LONG[name], piece * 100_000, 96)) < 20_000, piece


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
