"""Record the configuration of every attempt at a run, and show what a resumed run changes in it.

config.yaml is the configuration of the newest attempt, configs/attempt-N.yaml that of the N-th. Their paths
are absolute, so that commands can use them in any folder.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_stppo.base.files import replacing
from megatron_stppo.base.printing import say
from megatron_stppo.config import Config
from megatron_stppo.config.file import NOT_YAML, load, parse
from megatron_stppo.observe.run_files import set_aside

CONFIG = "config.yaml"
UNREAD = ("data.demonstrations", "cold_start.")  # fields that training does not read
ATTEMPT = "attempt"  # column of metrics.jsonl: the number of the attempt that trained the iteration


def record(config: Config, rank: int, continued: int = 0) -> int:
    """Write the resolved configuration of the newest attempt, on rank 0. Return its number; 0 elsewhere.

    continued: the iteration that this attempt continues after. The trajectories of later iterations are moved
    to trajectories/attempt-N/, where N is the number of the attempt before.
    """
    if rank:
        return 0
    folder = config.run.folder
    (folder / "configs").mkdir(parents=True, exist_ok=True)
    numbers = [int(path.stem.removeprefix("attempt-")) for path in folder.glob("configs/attempt-*.yaml")]
    before = max(numbers, default=0)
    set_aside(folder, continued, f"attempt-{before}")
    resolved = config.absolute().dump()
    for path in (attempt_path(folder, before + 1), folder / CONFIG):
        with replacing(path) as scratch:
            scratch.write_text(resolved, encoding="utf-8")
    return before + 1


def attempt_path(run: Path, number: int) -> Path:
    """Return the path of an attempt's configuration, of the folder `run`."""
    return run / "configs" / f"attempt-{number}.yaml"


def as_begun(config: Config, run: Path) -> Config:
    """Return `config` with the run.iterations with which the run in the folder `run` began.

    Its warm-up is a share of them: later attempts may add iterations, but do not change it.
    Raises ConfigError if the configuration of the run's first attempt cannot be read.
    """
    first = attempt_path(run, 1)
    if not first.exists():
        return config
    return config.changed(run={"iterations": load(first).run.iterations})


def say_changes(config: Config) -> None:
    """Print a line for every field of training whose value differs from that of the previous attempt."""
    path = config.run.folder / CONFIG
    try:
        before = parse(path.read_bytes()) if path.exists() else None
    except NOT_YAML:
        return say(f"{path} is damaged; the settings that --resume changes are unknown")
    if isinstance(before, dict):
        for change in changes(before, parse(config.absolute().dump())):
            if not change.startswith(UNREAD):
                say(f"--resume changes {change}")


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the changed fields.

    Example: {"run": {"seed": 0}} and {"run": {"seed": 1}} give ["run.seed: 0 -> 1"].
    """
    old, new = dict(_fields(before)), dict(_fields(now))
    return [
        f"{name}: {old.get(name, 'not given')} -> {new.get(name, 'not given')}"
        for name in dict.fromkeys((*new, *old))
        if name not in old or name not in new or old[name] != new[name]
    ]


def _fields(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
