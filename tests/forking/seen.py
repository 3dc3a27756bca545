"""A program that prints what it was given, and ends as its first argument says."""

import json
import os
import signal
import sys
import time


def main() -> None:
    umask = os.umask(0)
    given = (sys.argv[1:], os.getcwd(), umask, os.getppid(), os.environ.get("GIVEN"), sys.path[:2])
    signal.signal(signal.SIGUSR1, lambda number, frame: print("signalled", flush=True))
    print(json.dumps([*given, sys.stdin.readline()]), flush=True)
    print("said", file=sys.stderr)
    if sys.argv[1] == "wait":
        time.sleep(60)
    sys.exit("as planned" if sys.argv[1] == "text" else int(sys.argv[1]))


if __name__ == "__main__":
    main()
