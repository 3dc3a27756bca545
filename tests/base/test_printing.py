"""Text from outside is safe to print, and misspelled names get a hint."""

from __future__ import annotations

import logging
import sys

from megatron_stppo.base.printing import Printable, did_you_mean, one_line, printable


def test_one_line_holds_no_control_or_direction_codes() -> None:
    assert one_line("a\x1b[2J\r\n\u202eb\u2028") == "a [2J   b "
    assert len(one_line("x" * 10**6)) == 200


def test_printable_text_keeps_its_line_breaks() -> None:
    assert printable("a\x1b[2J\nb\r\n") == "a [2J\nb \n"
    assert printable(ValueError("a\tb")) == "a b"


def test_a_log_line_and_the_traceback_below_it_hold_no_control_codes() -> None:
    try:
        raise ValueError("\x1b[31mred")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "a.py", 1, "%s", ("b\x1b]0;c",), sys.exc_info())
    text = Printable(logging.Formatter("%(name)s: %(message)s")).format(record)
    assert text.startswith("a: b ]0;c\nTraceback") and text.endswith("ValueError:  [31mred")


def test_a_misspelled_name_gets_the_most_similar_one() -> None:
    assert did_you_mean("sed", ("root", "seed"), "run.{}") == "did you mean run.seed?"
    assert did_you_mean("zzz", ("root", "seed"), "run.{}") == ""
    assert did_you_mean("sed", ()) == ""


def test_a_name_with_braces_is_shown_as_it_is() -> None:
    assert did_you_mean("{a}b", ("{a}bc",), "'{}'") == "did you mean '{a}bc'?"
