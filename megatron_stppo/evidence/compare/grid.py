"""The file that `compare` reads: arms x settings x seeds of a configuration, and the declared contrasts.

docs/study/search.yaml is an example.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from megatron_stppo.base.printing import did_you_mean
from megatron_stppo.config import ConfigError
from megatron_stppo.config.file import read_yaml
from megatron_stppo.config.section import Section

AT = "@"  # in a contrast: ARM@SETTING
Overrides = dict[str, Any]
Side = tuple[str, dict[str, float]]  # an arm, and the weights of its settings
Sides = tuple[Side, Side]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+]{0,47}$")]


class Outcome(Section):
    """The number of a run that is compared, from its metrics.jsonl."""

    metric: str = "evaluate/exact_match"
    at: Literal["last", "mean"] = "last"
    first: int = Field(0, ge=0)  # iterations before it do not count
    last: int | None = Field(None, ge=0)  # nor those after it

    def of(self, recorded: Mapping[int, float]) -> float:
        """Return the outcome of {iteration: value}. Raises ValueError if no iteration counts.

        A mean counts 0 for what a run lacks that ended early for good.
        Example, mean from 2 to 8: 0.5 at 0, 2 and 4 of a run that ended there: (0.5 + 0.5 + 0 + 0) / 4.
        """
        end = max(recorded, default=0) if self.last is None else self.last
        within = {i: value for i, value in recorded.items() if self.first <= i <= end}
        if self.at == "last" and within:
            return within[max(within)]
        apart = sorted(recorded)[:2]
        if self.at == "mean" and len(apart) == 2:
            step, ended = apart[1] - apart[0], max(recorded)
            lost = sum(i >= self.first for i in range(ended + step, end + 1, step))
            if within or lost:
                return sum(within.values()) / (len(within) + lost)
        raise ValueError(f"{self.metric} has no value from iteration {self.first} on")


class ContrastFamily(Section):
    """Contrasts whose p values are adjusted together."""

    family: str
    pairs: list[tuple[str, str]] = Field(min_length=1)  # left - right; ARM, or ARM@SETTING without `over`
    # {label: settings, or their weights}; each pair is a contrast under each label
    over: dict[str, list[str] | dict[str, float]] = Field(default_factory=dict)
    post_hoc: bool = False  # declared when results of these arms were known


@dataclass(frozen=True)
class Cell:
    """One run of the grid. Example: Cell("st_ppo", "high", 3).name is "high-st_ppo-3"."""

    arm: str
    setting: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.setting}-{self.arm}-{self.seed}"


class Grid(Section):
    config: Path  # relative to the file, as all paths
    folder: Path = Path("runs")  # for runs and results; default: runs/ and the name of the file
    processes: int = Field(1, ge=1)  # of one run
    overrides: Overrides = Field(default_factory=dict)  # of every run; "{seed}" in a text is replaced
    arms: dict[Name, Overrides | None] = Field(min_length=1)
    settings: dict[Name, Overrides | None] = Field({"base": None}, min_length=1)
    seeds: list[int] = Field(min_length=1)
    outcome: Outcome = Field(default_factory=Outcome)
    contrasts: list[ContrastFamily] = Field(default_factory=list)

    def cells(self) -> list[Cell]:
        """Return the cells that the contrasts need, or all if there are none; seed by seed, so that the
        finished ones can be compared."""
        sides = [side for family in self.contrasts for _, of in self.declared(family) for side in of]
        needed = {(arm, setting) for arm, weights in sides for setting in weights}
        places = [p for p in itertools.product(self.arms, self.settings) if p in needed or not sides]
        return [Cell(*place, seed) for seed in self.seeds for place in places]

    def declared(self, family: ContrastFamily) -> Iterator[tuple[str, Sides]]:
        """Yield each contrast of a family as (label, its left and right side)."""
        over = family.over or {"": list(self.settings)}
        for pair in family.pairs:
            for label, settings in over.items():
                weights = settings if isinstance(settings, dict) else dict.fromkeys(settings, 1.0)
                sides = (side.partition(AT) for side in pair)
                left, right = ((arm, {own: 1.0} if own else weights) for arm, _, own in sides)
                yield " - ".join(pair) + (f", {label}" if label else ""), (left, right)

    def fields(self, cell: Cell) -> list[str]:
        """Return the overrides of a cell for the command line, without its name and folder."""
        own = self.overrides | (self.settings[cell.setting] or {}) | (self.arms[cell.arm] or {})
        fields = []
        for field, value in ({"run.seed": cell.seed} | own).items():
            text = value.replace("{seed}", str(cell.seed)) if isinstance(value, str) else json.dumps(value)
            fields.append(f"{field}={text}")  # JSON is a flow of YAML
        return fields

    def digest(self, cell: Cell) -> str:
        """Return a hash of the configuration's text and the cell's overrides: two runs with the same one are
        equal but for data and code."""
        text = self.config.read_text(encoding="utf-8") + "\n".join(self.fields(cell))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load(path: Path) -> Grid:
    """Return the grid of a YAML file, with paths relative to it. Raises ConfigError."""
    try:
        grid = Grid.model_validate({"folder": f"runs/{path.stem}"} | read_yaml(path, "GRID"))
    except ValidationError as error:
        raise ConfigError(
            "\n".join(dict.fromkeys(_explained(path, fault) for fault in error.errors()))
        ) from None
    grid = grid.changed(config=path.parent / grid.config, folder=path.parent / grid.folder)
    for fault in _faults(grid):
        raise ConfigError(f"{path}: {fault}")
    return grid


def _explained(path: Path, error: Any) -> str:
    where, what = ".".join(str(part) for part in error["loc"]), error["msg"]
    if error["type"] == "extra_forbidden":
        known = Grid.model_fields | Outcome.model_fields | ContrastFamily.model_fields
        what = _unknown(str(error["loc"][-1]), known, "field")
    return f"{path}: {where}: {what}"


def _faults(grid: Grid) -> Iterator[str]:
    """Yield what is wrong in the grid as a whole."""
    if not grid.config.is_file():
        yield f"config={grid.config}: no such file; give the YAML file of a run, relative to the grid"
    if len(set(grid.seeds)) < len(grid.seeds):
        yield f"seeds={grid.seeds}: holds a seed twice; remove one"
    every = [grid.overrides, *grid.arms.values(), *grid.settings.values()]
    if own := {"run.name", "run.root", "run.seed"} & {field for of in every for field in of or ()}:
        yield f"{min(own)}: compare sets it for each run; remove it, and give `folder` or `seeds`"
    for family in grid.contrasts:
        where = f"contrasts of {family.family!r}"
        for arm, weights in (side for _, sides in grid.declared(family) for side in sides):
            if arm not in grid.arms:
                yield f"{where}: {arm}: {_unknown(arm, grid.arms, 'arm')}"
            for name in weights.keys() - grid.settings.keys():
                yield f"{where}: {name}: {_unknown(name, grid.settings, 'setting')}"


def _unknown(name: str, known: Mapping[str, Any], kind: str) -> str:
    return f"no such {kind}; {did_you_mean(name, known) or 'known: ' + ', '.join(known)}"
