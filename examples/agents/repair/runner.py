"""Calls functions of the policy's module, and prints a line of JSON for each. It runs inside the sandbox."""

import importlib
import json
import sys

out, sys.stdout = sys.stdout, sys.stderr  # what the module prints is no result
print("ready", file=out, flush=True)
sys.path.insert(0, ".")
for test in json.load(sys.stdin):
    try:
        module = importlib.import_module(sys.argv[1])
        line = json.dumps(getattr(module, test["call"])(*test["arguments"]))
    except Exception as error:  # the policy may write anything
        line = f"{type(error).__name__}: {error}"[:200].replace("\n", " ")
    print(line, file=out, flush=True)
