"""The examples whose agents the study trains, and how the cold start of a seed is made from each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
DRIVER = ("run.py", "stages.py", "ledger.py")  # the quickstart's driver; the built files do not depend on it


@dataclass(frozen=True)
class Base:
    """An example. All runs of a seed share its build and cold start.

    Example: the build of SUMS with seed 5 is the task build-sums-5, with its files in seed-5-sums/data.
    """

    label: str  # in the names of its tasks and folders; "" for the quickstart
    builder: Path  # the script that writes data/ of a seed
    tokens: int  # of demonstrations
    recipe: tuple[str, ...] = ()  # overrides of the cold start
    # {field: file in data/ of the seed}, besides the tasks
    data: Mapping[str, str] = field(default_factory=dict)
    build_seconds: float = 20.0  # expected time of the build and the cold start on one core
    cold_start_seconds: float = 620.0

    @property
    def config(self) -> Path:
        """The configuration that the runs change."""
        return self.builder.parent / "config.yaml"

    def sources(self) -> list[str]:
        """Return the sources on which the built files depend. The builders use that of the quickstart."""
        paths = {*QUICKSTART.glob("*.py"), *self.builder.parent.glob("*.py")}
        return [path.read_text(encoding="utf-8") for path in sorted(paths) if path.name not in DRIVER]

    def task(self, stage: str, seed: int) -> str:
        """Return the name of a task. Example: SUMS.task("build", 5) is "build-sums-5"."""
        return "-".join(part for part in (stage, self.label, f"{seed}") if part)

    def folder(self, seed: int) -> str:
        """Return the name of the folder of a seed. Example: SUMS.folder(5) is "seed-5-sums"."""
        return f"seed-{seed}" + (f"-{self.label}" if self.label else "")


# The cold start of the study's results. The quickstart's own is shorter.
SEARCH = Base(
    label="",
    builder=QUICKSTART / "build.py",
    tokens=3_200_000,
    recipe=("cold_start.lr=3.0e-3", "cold_start.batch_tokens=1024", "cold_start.context_weight=1.0"),
    data={"environment.retrieval.index": "index"},
)
# The third task, with the example's own cold start.
SUMS = Base(label="sums", builder=ROOT / "examples" / "reasoning_gym" / "build_sums.py", tokens=3_000_000)
