"""Parsing and grading of the policy's text, in linear time and with limited lengths. Nothing is evaluated.

Exact match follows Search-R1 and SQuAD: lower case, no punctuation, no a/an/the, single spaces.
A difference is which text is the answer: the last <answer> of the policy's own last turn. A turn that closes
more than MAX_ANSWERS answers has none, so that listing many candidates does not earn a reward.
"""

import string
from collections.abc import Iterable
from typing import Literal

MAX_ACTION = 32_768  # characters of an action that are read
MAX_ANSWER = 512  # characters of an answer or target that are compared
MAX_ANSWERS = 4
ARTICLES = frozenset({"a", "an", "the"})
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

ActionKind = Literal["search", "answer", "invalid"]


def normalise(text: str) -> str:
    """Return text as exact match compares it.

    Example: normalise(" The Kingdom,  of Spain! ") == "kingdom of spain".
    """
    words = text[:MAX_ANSWER].lower().translate(_NO_PUNCTUATION).split()
    return " ".join(word for word in words if word not in ARTICLES)


def exact_match(answer: str | None, targets: Iterable[str]) -> bool:
    """Return True if the answer equals any target after normalisation.

    An answer that is empty after normalisation, or longer than MAX_ANSWER characters, matches no target.
    """
    if answer is None or len(answer) > MAX_ANSWER:
        return False
    plain = normalise(answer)
    return plain != "" and any(plain == normalise(target) for target in targets)


def inside_last(text: str, tag: str) -> str | None:
    """Return the text of the last `<tag>..</tag>`, or None if the last opened tag is not closed.

    Example: inside_last("<answer>a<answer>b</answer></answer>", "answer") == "b".
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = text.rfind(opening)
    end = text.find(closing, start) if start >= 0 else -1
    return None if end < 0 else text[start + len(opening) : end]


def parse_action(text: str) -> tuple[ActionKind, str]:
    """Return the kind and the content of the policy's action.

    The last closed tag decides, because a turn ends where its tag closes.
    Example: parse_action("<think>x</think><search> Gabon</search>") == ("search", "Gabon").
    """
    if len(text) > MAX_ACTION:
        return "invalid", ""
    search, answer = text.rfind("</search>"), text.rfind("</answer>")
    kind: ActionKind = "search" if search > answer else "answer"
    if max(search, answer) < 0 or text.count(f"</{kind}>") > MAX_ANSWERS:
        return "invalid", ""
    content = (inside_last(text, kind) or "").strip()
    return (kind, content) if content else ("invalid", "")
