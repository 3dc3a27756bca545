"""Files and names of the package that CONTRIBUTING.md, docstrings and comments mention exist."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pydantic

import megatron_stppo
from megatron_stppo.config import Config

ROOT = Path(megatron_stppo.__file__).parents[1]
SOURCES = sorted((ROOT / "megatron_stppo").rglob("*.py"))
FILE = re.compile(r"(?<![\w./:-])((?:[\w-]+/)+[\w-]+\.(?:pyi?|cuh?|cpp|h|md|js))\b")
NAME = re.compile(r"(?<![\w./(-])([a-z]\w*(?:\.[A-Za-z_]\w*)+)")
# of files, and of tensors in a checkpoint
EXTENSIONS = set(
    "weight bias py cpp md js json jsonl yaml html txt msgpack npz gguf safetensors tmp so".split()
)
# variables of examples in docstrings, and megatron's names of tensors
EXAMPLES = {"a", "decoder", "episode", "link", "lost", "retriever", "table", "tree", "x"}
# files of other packages, which comments cite
ELSEWHERE = ("torch/", "megatron/", "vllm/", "transformers/")


def test_files_exist() -> None:
    known = [
        path.relative_to(ROOT).as_posix()
        for folder in ("megatron_stppo", "csrc", "docs", "examples", "tests", "tools")
        for path in (ROOT / folder).rglob("*.*")
    ]
    wrong = [
        f"{source}: {name}"
        for source, text in written()
        for name in FILE.findall(text)
        if "NAME" not in name
        and not name.startswith(ELSEWHERE)
        and not any(f"/{path}".endswith(f"/{name}") for path in known)
    ]
    assert not wrong


def test_dotted_names_exist() -> None:
    """A dotted name is a field of a run, a name of the package, or begins with a name that its file uses."""
    wrong = [
        f"{source}: {name}"
        for source, text in written()
        for name in NAME.findall(text)
        if name.rsplit(".", 1)[-1] not in EXTENSIONS
        and not (
            is_field(name.split("."))
            or is_defined(name.split("."))
            or name.split(".")[0] in used(source) | imported() | EXAMPLES
        )
    ]
    assert not wrong


@cache
def written() -> tuple[tuple[Path, str], ...]:
    return tuple(texts())


def texts() -> Iterator[tuple[Path, str]]:
    """Yield every docstring and comment of the package, and CONTRIBUTING.md."""
    yield Path("CONTRIBUTING.md"), (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for path in SOURCES:
        source = path.relative_to(ROOT)
        for node in ast.walk(tree(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield source, ast.get_docstring(node) or ""
        with path.open("rb") as file:
            yield from (
                (source, token.string)
                for token in tokenize.tokenize(file.readline)
                if token.type == tokenize.COMMENT
            )


def is_field(parts: list[str], section: type[pydantic.BaseModel] = Config) -> bool:
    """Return whether the name is a section or field of the configuration, or in a mapping of it."""
    field = section.model_fields.get(parts[0]) or getattr(section, parts[0], None)
    inner = getattr(field, "annotation", None)
    if not isinstance(inner, type) or not issubclass(inner, pydantic.BaseModel) or len(parts) == 1:
        return field is not None and (len(parts) == 1 or "dict" in str(inner).lower())
    return is_field(parts[1:], inner)


def is_defined(parts: list[str]) -> bool:
    """Return whether `[folder.]module[.Class].name` of the package exists."""
    if (ROOT / "megatron_stppo" / "/".join(parts)).is_dir():
        return True
    return any(
        len(parts) == at + 1 or set(parts[at + 1 :]) <= defined(source)
        for at, part in enumerate(parts)
        for source in modules()[part]
        if list(source.with_suffix("").parts[-at - 1 :]) == parts[: at + 1]
    )


@cache
def modules() -> dict[str, list[Path]]:
    found = defaultdict(list)
    for path in SOURCES:
        found[path.stem].append(path.relative_to(ROOT))
    return found


@cache
def tree(source: Path) -> ast.Module:
    return ast.parse((ROOT / source).read_text(encoding="utf-8"))


@cache
def defined(source: Path) -> set[str]:
    """Return the names of functions, classes, variables and attributes that a file defines."""
    nodes = list(ast.walk(tree(source)))
    named = {
        node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    return named | {getattr(node, "id", getattr(node, "attr", "")) for node in stored}


@cache
def imported() -> set[str]:
    """Return the first names of all modules that the package imports."""
    nodes = [node for path in SOURCES for node in ast.walk(tree(path.relative_to(ROOT)))]
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    whole |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in whole}


@cache
def used(source: Path) -> set[str]:
    """Return the identifiers of a file: variables, arguments, attributes, imported names."""
    if source.suffix != ".py":
        return set()
    words: set[str] = set()
    for node in ast.walk(tree(source)):
        words |= {getattr(node, field, None) for field in ("id", "arg", "attr", "name")}  # type: ignore[arg-type]
        if isinstance(node, ast.Import | ast.ImportFrom):
            words |= set((getattr(node, "module", None) or "").split("."))
            words |= {part for alias in node.names for part in alias.name.split(".")}
    return words
