"""The base of all sections of a configuration, and rules about fields that do not fit together."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from megatron_stppo.base.errors import ConfigError

# A limit in seconds, at most four months. Limits are added up, and faulthandler cannot wait for 9.3e9 s.
Seconds = Annotated[float, Field(gt=0, le=10_000_000)]


def finite(value: Any) -> Any:
    """Return `value`; raise if it is or contains an infinity or NaN. For fields without a declared type,
    which pydantic's allow_inf_nan does not check."""
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("finite_number", "Input should be a finite number")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        finite(part)
    return value


class Rule(NamedTuple):
    """Settings that are refused.

    Example: Rule(a.gamma > 1, f"gamma={a.gamma}: returns would grow without end", "choose 1 or less").
    """

    broken: bool
    problem: str  # the fields with their values, and why they are refused
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}"


def enforce(rules: Iterable[Rule]) -> None:
    """Raise ConfigError for the first rule that is broken."""
    for rule in rules:
        if rule.broken:
            raise ConfigError(str(rule))


class Section(BaseModel):
    # a field's description is the text below it
    model_config = ConfigDict(
        extra="forbid", validate_default=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def _home(cls, value: Any) -> Any:
        """Replace a leading ~ of a path by the home folder. The shell does not, in run.root=~/runs."""
        if not isinstance(value, Path) or not str(value).startswith("~"):
            return value
        try:
            return value.expanduser()
        except RuntimeError:
            raise ValueError(f"{value} names a user who has no home folder here; give the path") from None

    def rules(self) -> Iterable[Rule]:
        """Return the rules about this section's own fields."""
        return ()

    @model_validator(mode="after")
    def _keeps_rules(self) -> Self:
        enforce(self.rules())
        return self

    def changed(self, **given: Any) -> Self:
        """Return a copy with these values, which are not checked. A dict changes fields of a section.

        Example: changed(run={"seed": 1}, parallel=ParallelConfig(tensor=2)).
        """
        own = {name: getattr(self, name) for name in given}
        update = {
            name: own[name].changed(**value)
            if isinstance(own[name], Section) and isinstance(value, dict)
            else value
            for name, value in given.items()
        }
        return self.model_copy(update=update)

    def absolute(self) -> Self:
        """Return a copy whose relative paths begin at the root: they are relative to the current folder."""
        paths = {name: value for name, value in self if isinstance(value, Path | Section)}
        return self.changed(**{name: value.absolute() for name, value in paths.items()})
