"""Read a run's folder as tables: the metrics of its iterations, and its episodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config.file import load
from megatron_stppo.observe.run_files import FOLDER, played_path, recorded

try:
    import pandas
except ImportError:  # an optional extra
    pandas = None

if TYPE_CHECKING:
    from pandas import DataFrame

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
# Columns of `episodes` that a line of trajectories/ has under the same name.
COPIED = (
    *("iteration", "data_source", "split", "index", "group", "branch", "outcome", "reward"),
    *("tool_calls", "valid_actions", "detail", "targets", "prompt"),
)


@dataclass(frozen=True)
class RecordedRun:
    """The folder of a run, or of an evaluation. Every access reads the files again, also during the run.

    Example: read_run("runs/first").metrics["reward/mean"].plot().
    """

    folder: Path

    @property
    def config(self) -> Config:
        """The resolved configuration of the newest attempt. Raises ConfigError if the folder has none."""
        return load(self.folder / CONFIG)

    @property
    def metrics(self) -> DataFrame:
        """One row per iteration, whose number is the index; the columns are those of metrics.jsonl.

        A number that a row does not have is NaN. Raises ConfigError without pandas, or if the file cannot be
        read.
        """
        given = list(_records(self.folder / METRICS, "a row of metrics", dict))
        return _table(given).set_index("iteration") if given else _table([], "iteration")

    @property
    def episodes(self) -> DataFrame:
        """One row per episode, in the order of trajectories/; of an agent, one per history of the episode.

        Columns: those of COPIED, `turns`, `tokens` (that the policy generated), `text` (turns and
        observations, in order), and `environment/NAME` for each of the environment's metrics. `branch` is
        the number of the history in its episode: the rows with branch 0 are one per episode, and only they
        have the metrics and tool calls of the episode. Raises ConfigError without pandas, or if a file cannot
        be read.

        Example: table[table.branch == 0].reward.mean() is the mean reward of the episodes.
        """
        paths = [played_path(self.folder, iteration) for iteration in recorded(self.folder)]
        found = [row for path in paths for row in _records(path, "an episode", _episode)]
        return _table(found, *COPIED, "turns", "tokens", "text")


def read_run(folder: Path | str) -> RecordedRun:
    """Return the run of a folder, such as the one that `train` returns. Raises ConfigError if it is none."""
    folder = Path(folder)
    if not any((folder / name).exists() for name in (METRICS, FOLDER)):
        raise ConfigError(f"{folder}: holds no {METRICS} and no {FOLDER}/; give a run's folder, runs/NAME")
    return RecordedRun(folder)


def _table(given: list[dict[str, Any]], *columns: str) -> DataFrame:
    """Return the rows as a table. columns: those that come first, also of an empty table."""
    if pandas is None:
        raise ConfigError("tables need pandas; pip install pandas")
    names = dict.fromkeys((*columns, *(name for row in given for name in row)))
    return pandas.DataFrame(given, columns=list(names))


def _records(path: Path, what: str, convert: Callable[[Any], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the converted lines of a file, without an incomplete last line, which is still being written.

    what: one of the lines. Raises ConfigError with file and line.
    """
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                number += 1
                if line.endswith("\n"):
                    yield convert(json.loads(line))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the folder of a run") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} line {number}: is not {what} ({error}); remove the line") from None


def _episode(record: dict[str, Any]) -> dict[str, Any]:
    turns = record["turns"]
    return {
        **{name: record.get(name) for name in COPIED},
        "turns": len(turns),
        "tokens": sum(len(turn["token_ids"]) for turn in turns),
        "text": "".join(turn["action"] + turn["observation"] for turn in turns),
        **{f"environment/{name}": value for name, value in record.get("metrics", {}).items()},
    }
