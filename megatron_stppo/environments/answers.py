"""Reading and grading what the policy wrote: linear time, capped lengths, nothing evaluated.

Exact match follows Search-R1 and SQuAD: lower case, no punctuation, no a/an/the, single spaces.
We differ in what counts as the answer: the last <answer> of the policy's own last turn, and a turn that
closes more than MAX_ANSWERS of them has none (naming everything is not answering).
"""

from __future__ import annotations

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
    """Example: normalise(" The Kingdom,  of Spain! ") == "kingdom of spain"."""
    words = text[:MAX_ANSWER].lower().translate(_NO_PUNCTUATION).split()
    return " ".join(word for word in words if word not in ARTICLES)


def exact_match(answer: str | None, targets: Iterable[str]) -> bool:
    """True if the answer equals any target after normalisation. Nothing normalised matches nothing."""
    if answer is None or len(answer) > MAX_ANSWER:
        return False
    given = normalise(answer)
    return given != "" and any(given == normalise(target) for target in targets)


def inside_last(text: str, tag: str) -> str | None:
    """Text of the last `<tag>..</tag>`; None if the last one opened is not closed.

    Example: inside_last("<answer>a<answer>b</answer></answer>", "answer") == "b".
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = text.rfind(opening)
    end = text.find(closing, start) if start >= 0 else -1
    return None if end < 0 else text[start + len(opening) : end]


def parse_action(text: str) -> tuple[ActionKind, str]:
    """What the policy asked for: the last tag it closed decides, since a turn ends where its tag closes.

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
