"""A program that prints what it was given, and ends as its first argument says."""

import json
import multiprocessing
import os
import signal
import sys
import time


def main() -> None:
    if sys.argv[1] == "executable":
        sys.exit(print(sys.executable))
    umask = os.umask(0)
    known = [name for name in sys.modules if name.startswith("tests.") and "forking" not in name]
    process = (os.getppid(), multiprocessing.current_process().name, multiprocessing.parent_process(), known)
    files = (
        sys.stdout.line_buffering,
        sys.stdout.write_through,
        sys.stderr.line_buffering,
        sys.stdout.encoding,
    )
    given = (sys.argv[1:], os.getcwd(), umask, *process, os.environ.get("GIVEN"), sys.path, files)
    # Not print: the signal may come while the next line prints, and a stream refuses to be entered twice.
    signal.signal(signal.SIGUSR1, lambda number, frame: os.write(1, b"signalled\n"))
    print(json.dumps([*given, sys.stdin.readline()]), flush=True)
    print("said", file=sys.stderr)
    if sys.argv[1] == "wait":
        time.sleep(60)
    if sys.argv[1] == "raise":
        raise KeyError("not there")
    if sys.argv[1] == "interrupt":
        raise KeyboardInterrupt
    sys.exit("as planned" if sys.argv[1] == "text" else int(sys.argv[1]))


if __name__ == "__main__":
    main()
