"""Build the files of the calculator example's long form: a turn thinks before its call or its answer.

    python examples/smollm2/build_reasoned.py --output DIR [--seed 0] [--tokens 15000]

The problems are those of build_problems.py. In the demonstrations, a line of about 50 tokens repeats the
problem and names the operators of the call, which are random as in the short form: it shows where the choice
stands, not which one is right.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import partial

import build_problems  # adds the folder of build to the path
from build import command
from calculator import REASONED

VERSION = 1  # raise it if the same arguments now give different files
SPOKEN = {"+": "plus", "-": "minus", "*": "times"}
FIRST = (
    "{facts} I have to find {asked}. The numbers are {numbers}. I should take {spoken}.",
    "The question is {asked}. {facts} So I need {numbers}, and I compute {spoken}.",
    "Let me think about {asked}. I know this: {facts} From {numbers} I get {spoken}.",
)
LAST = (
    "I had {numbers}. The calculator says that {spoken} is {value}. I was asked {asked}. So it is {value}.",
    "From {numbers} I took {spoken}, and it is {value}. I wanted to know {asked}. Now I know it: {value}.",
    "I used {numbers}, and {spoken} gives {value}. To the question {asked}, I therefore say {value}.",
)


def thoughts(
    question: str, numbers: list[str], expression: str, value: str, generator: random.Random
) -> tuple[str, str]:
    """Return what stands before the call and before the answer.

    Example of the first: "Tom has 12 pens and gets 5 more. I have to find how many pens does Tom have. The
    numbers are 12 and 5. I should take 12 plus 5. "
    """
    *facts, asked = re.split(r"(?<=[.?]) ", question)
    words = {
        "facts": " ".join(facts),
        "asked": asked[0].lower() + asked[1:-1],
        "numbers": f"{', '.join(numbers[:-1])} and {numbers[-1]}",
        "spoken": " ".join(SPOKEN.get(part, part) for part in re.findall(r"\d+|\D", expression)),
        "value": value,
    }
    first, last = (generator.choice(forms).format(**words) for forms in (FIRST, LAST))
    return f"{first} ", f"{last} "


LONG = build_problems.Form(REASONED, thoughts)


def main(argv: Sequence[str] | None = None) -> None:
    command(partial(build_problems.build, form=LONG), __doc__.splitlines()[0], VERSION, 15_000, argv)


if __name__ == "__main__":
    main()
