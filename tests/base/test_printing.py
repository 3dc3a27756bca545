"""Text from outside is safe to print, misspelled names get a hint, and outputs that cannot be written do not
end a program."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


# All ways in which this program and its libraries print.
PRINTS = """
import logging, os, sys, warnings
from megatron_stppo.base.printing import drop_unwritable
drop_unwritable("stdout", "stderr")
from rich.console import Console
from tqdm import tqdm
logging.basicConfig()
logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))
for number in range(3):
    print("± one line", flush=True)
    print("± one line", file=sys.stderr)
    sys.stderr.buffer.write(b"bytes")
    sys.stderr.flush()
    logging.warning("a warning")
    warnings.warn(f"number {number}")
    Console(stderr=True).print("rich")
    list(tqdm(range(3)))
print("x" * 100_000)
with open("written", "w", encoding="utf-8") as file:
    assert file.fileno() > 2, "this file would be an output of the C libraries"
    file.write("done")
"""


@pytest.mark.parametrize("outputs", ["no reader", "a full disk", "closed", "a full pipe"])
@pytest.mark.parametrize("variables", [{}, {"PYTHONUNBUFFERED": "1"}, {"PYTHONIOENCODING": "ascii"}])
def test_a_program_whose_outputs_cannot_be_written_goes_on(
    outputs: str, variables: dict[str, str], tmp_path: Path
) -> None:
    read, write = os.pipe()
    target = str(write)
    if outputs == "no reader":
        os.close(read)
    elif outputs == "a full pipe":
        os.set_blocking(write, False)
        os.write(write, bytes(2**20))
    script = {"a full disk": 'exec "$@" >/dev/full 2>&1', "closed": 'exec "$@" >&- 2>&-'}
    line = [
        "bash",
        "-c",
        script.get(outputs, f'exec "$@" >&{target} 2>&1'),
        "bash",
        sys.executable,
        "-c",
        PRINTS,
    ]
    done = subprocess.run(line, cwd=tmp_path, pass_fds=[write], env=os.environ | variables, timeout=120)
    assert done.returncode == 0
    assert (tmp_path / "written").read_text(encoding="utf-8") == "done"


def test_what_can_be_written_is_written_with_escapes_for_what_the_encoding_lacks() -> None:
    code = "from megatron_stppo.base.printing import drop_unwritable as d; d('stdout'); print('±', end='')"
    ascii = os.environ | {"PYTHONIOENCODING": "ascii"}
    assert subprocess.check_output([sys.executable, "-c", code], env=ascii) == b"\\xb1"
