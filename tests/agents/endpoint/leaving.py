"""A command of an agent that leaves processes and files behind: python leaving.py WORD ends|fails|hangs.

Every process that it starts has WORD as an argument, ignores SIGTERM and holds the output of the command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

word, end = sys.argv[1:]
SLEEPS = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"
)
sleeper = [sys.executable, "-c", SLEEPS, word]
PARENT = f"import subprocess; subprocess.run({sleeper!r}, env={{}}, start_new_session=True)"

url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
content = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
urllib.request.urlopen(urllib.request.Request(url, content, headers)).read()

folder = Path(os.environ["TMPDIR"])
empty = not list(folder.iterdir())
(folder / "locked").mkdir(mode=0)
with subprocess.Popen([sys.executable, "-c", "", word]):
    subprocess.Popen(sleeper, start_new_session=True)  # its environment has the key
    subprocess.Popen(sleeper, env={})  # it is in the session of the command
    subprocess.Popen([sys.executable, "-c", PARENT, word])  # its child has neither
time.sleep(0.5)
if end == "fails":
    raise SystemExit("no")
if end == "hangs":
    time.sleep(99)
print(json.dumps({"reward": 1, "detail": f"{folder} {empty}"}), flush=True)
os._exit(0)  # Popen objects need not be waited for
