"""Checks the shapes in the names of tensors while tests run: in one call, equal letters have equal sizes.

Covers the functions of algorithm/ in CHECKED, with arguments and fields of results, and every Batch. The
letters are those of CONTRIBUTING: logprob_T has as many entries as every other tensor of the call that ends
with _T. The forked programs of tests/forking are covered too. A wrong shape raises TypeError.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from megatron_stppo.base.types import Batch, DividedBatch, EstimatedBatch, ScoredBatch, UpdatedBatch

PACKAGE = "megatron_stppo"
CHECKED = (
    "aggregation",
    "baselines",
    "correction",
    "gae",
    "penalties",
    "rate",
    "ratio",
    "selection",
    "surrogate",
)
SHAPE = re.compile(r"_([A-Z]{1,2})$")


def check(where: str, named: Iterable[tuple[str, Any]]) -> None:
    """Raise TypeError if two of the tensors give a letter different sizes."""
    sizes: dict[str, tuple[int, str]] = {}
    for name, value in named:
        found = SHAPE.search(name)
        if found is None or not isinstance(value, Tensor):
            continue
        if value.dim() < len(found[1]):
            raise TypeError(f"{where}: {name} has the shape {list(value.shape)}")
        for letter, size in zip(found[1], value.shape, strict=False):
            first = sizes.setdefault(letter, (size, name))
            if first[0] != size:
                raise TypeError(f"{where}: {name} has {size} entries, {first[1]} has {first[0]}")


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the check of its arguments, and of the fields of its result."""
    names = inspect.signature(function)

    @functools.wraps(function)
    def call(*given: Any, **by_name: Any) -> Any:
        arguments = list(names.bind(*given, **by_name).arguments.items())
        check(function.__qualname__, arguments)
        result = function(*given, **by_name)
        check(function.__qualname__, [*arguments, *getattr(result, "__dict__", {}).items()])
        return result

    return call


def install() -> None:
    """Replace the functions in all modules of the package, also in those that have imported them."""
    for name in CHECKED:
        module = importlib.import_module(f"{PACKAGE}.algorithm.{name}")
        for function in [value for value in vars(module).values() if inspect.isfunction(value)]:
            if function.__module__ == module.__name__ and not hasattr(function, "__wrapped__"):
                wrapped = checked(function)
                for other in [m for n, m in sys.modules.items() if n.partition(".")[0] == PACKAGE]:
                    for key in [key for key, value in vars(other).items() if value is function]:
                        setattr(other, key, wrapped)
    for record in (Batch, DividedBatch, ScoredBatch, EstimatedBatch, UpdatedBatch):
        record.__init__ = checked_batch(record.__init__)


def checked_batch(begin: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(begin)
    def call(self: Batch, *given: Any, **by_name: Any) -> None:
        begin(self, *given, **by_name)
        check(type(self).__name__, vars(self).items())

    return call


install()
