"""Word problems of one or two operations. The held-out problems have other wordings, and other numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

NAMES = ("Tom", "Ana", "Raj", "Mia", "Leo", "Zoe", "Sam", "Ida")
THINGS = ("apples", "pens", "coins", "cards", "books", "shells")
HELD_OUT = 2  # wordings of each kind


class Kind(NamedTuple):
    """A kind of problem: its expression, and its wordings; the last ones are held out."""

    expression: str
    wordings: tuple[str, ...]


KINDS: Mapping[str, Kind] = {
    "add": Kind(
        "{a}+{b}",
        (
            "{n} has {a} {o} and gets {b} more. How many {o} does {n} have?",
            "There are {a} {o} in a box and {b} {o} in a bag. How many {o} are there in all?",
            "{n} finds {a} {o}, and later {b} others. How many {o} did {n} find?",
            "A shop sold {a} {o} yesterday and {b} today. How many {o} did it sell?",
            "{n} owns {a} {o}. A friend owns {b}. How many {o} do both own together?",
            "A jar held {a} {o} before {n} put in {b} more. How many {o} does it hold?",
            "{n} counts {a} {o} on Monday and {b} {o} on Friday. How many {o} is that together?",
            "To {a} {o} on a table, {n} adds {b}. How many {o} are on the table now?",
        ),
    ),
    "subtract": Kind(
        "{c}-{b}",
        (
            "{n} had {c} {o} and gave away {b}. How many {o} are left?",
            "A shop has {c} {o} and sells {b} of them. How many {o} remain?",
            "From a pile of {c} {o}, {n} takes {b}. How many {o} stay in the pile?",
            "There were {c} {o}, but {b} broke. How many {o} are still whole?",
            "{n} needs {c} {o} and has {b}. How many {o} are missing?",
            "{n} bought {c} {o} and returned {b}. How many {o} does {n} keep?",
            "Of {c} {o}, {n} loses {b}. How many {o} does {n} still have?",
            "{n} packed {c} {o} and took {b} out again. How many {o} are packed?",
        ),
    ),
    "multiply": Kind(
        "{d}*{a}",
        (
            "{n} buys {d} bags with {a} {o} each. How many {o} is that?",
            "Each of {d} rows has {a} {o}. How many {o} are there?",
            "There are {d} shelves, and every shelf holds {a} {o}. How many {o} are there in all?",
            "On {d} days, {n} sells {a} {o} per day. How many {o} does {n} sell?",
            "{d} children have {a} {o} each. How many {o} do they have together?",
            "A crate has {d} layers of {a} {o}. How many {o} are in the crate?",
            "{n} fills {d} boxes, and puts {a} {o} into each. How many {o} does {n} need?",
            "In {d} rooms there are {a} {o} per room. How many {o} is that in total?",
        ),
    ),
    "add_product": Kind(
        "{a}+{d}*{e}",
        (
            "{n} has {a} {o} and buys {d} bags with {e} {o} each. How many {o} does {n} have now?",
            "A shelf has {a} {o}. {n} adds {d} packs of {e} {o}. How many {o} are on the shelf?",
            "{n} starts with {a} {o} and gets {e} more on each of {d} days. How many {o} is that?",
            "There are {a} {o} on the floor and {d} boxes with {e} {o} each. How many {o} are there?",
            "To {a} {o}, {n} adds {d} rows of {e}. How many {o} are there now?",
            "{n} keeps {a} {o} at home and {d} sets of {e} at work. How many {o} does {n} have?",
            "Beside {a} loose {o} there are {d} bags of {e} {o}. How many {o} are there in all?",
            "{n} owned {a} {o} before {d} friends brought {e} each. How many {o} does {n} own?",
        ),
    ),
}


def problems(split: str, generator: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, question, expression) without end. split: "train", or "test" for the held-out wordings.

    Some questions name the numbers in another order than the expression.
    """
    while True:
        for name, kind in KINDS.items():
            b = generator.randint(5, 40)
            values = {
                "n": generator.choice(NAMES),
                "o": generator.choice(THINGS),
                "a": generator.randint(12, 99),
                "b": b,
                "c": b + generator.randint(10, 90),
                "d": generator.randint(3, 11),
                "e": generator.randint(4, 30),
            }
            held_out = split == "test"
            choices = kind.wordings[-HELD_OUT:] if held_out else kind.wordings[:-HELD_OUT]
            yield name, generator.choice(choices).format(**values), kind.expression.format(**values)
