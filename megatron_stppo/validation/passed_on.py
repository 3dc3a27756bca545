"""Options that are passed on to another package, checked against its own dataclass. Imports nothing of it."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_stppo.base.printing import did_you_mean
from megatron_stppo.config import ConfigError

PLAIN = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "None": (type(None),)}


def check(
    section: str, given: Mapping[str, Any], decided: Mapping[str, str], known: Mapping[str, str], owner: str
) -> None:
    """Raise ConfigError for an option that does not exist, that follows from something else, or that has
    another type than `owner` declares.

    decided: {option: what it follows from}. known: {option: its type, as Python writes it}; only types that
    are made of those in PLAIN are compared.
    """
    for name, value in given.items():
        if name in decided:
            raise ConfigError(f"{section}.{name}={value}: follows from {decided[name]}; leave it out")
        if name not in known:
            remedy = did_you_mean(name, known, section + ".{}") or f"see {owner}"
            raise ConfigError(f"{section}.{name}={value!r}: no such field; {remedy}")
        kinds = [kind.strip() for kind in known[name].split("|")]
        if not set(kinds) <= PLAIN.keys():
            continue
        allowed = tuple(python for kind in kinds for python in PLAIN[kind])
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise ConfigError(
                f"{section}.{name}={value!r}: {owner} declares {known[name]}; give one of these"
            )


@functools.cache
def declared(package: str, *classes: tuple[str, str]) -> dict[str, str]:
    """Return {field: type} of dataclasses of an installed package, from its source: an import takes seconds.

    classes: (file in the package, class). Raises ConfigError if the package is not installed.
    """
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ConfigError(f"{package} is not installed; install what tools/lock-cpu.txt lists")
    root, fields = Path(found.origin).parent, dict[str, str]()
    for file, owner in classes:
        for node in ast.parse((root / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == owner:
                of = (part for part in node.body if isinstance(part, ast.AnnAssign))
                fields |= {ast.unparse(part.target): ast.unparse(part.annotation) for part in of}
    return fields
