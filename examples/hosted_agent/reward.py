"""The command of the run: the agent answers the question of an episode, and the last line is the reward."""

import json
import string
import sys

from geographer import answer

task = json.load(sys.stdin)
said = answer(task["prompt"][-1]["content"]).strip(string.whitespace + string.punctuation)
right = said.lower() in {target.lower() for target in task["targets"]}
print(json.dumps({"reward": float(right), "detail": said}))
