"""Read a run's YAML file and `section.field=value` overrides. Errors name field, value and remedy."""

import re
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from megatron_stppo.base.printing import did_you_mean
from megatron_stppo.config import EXPONENT, AlgorithmConfig, Config, ConfigError, RunConfig, peft_folder

MAX_BYTES = 65_536  # largest configuration file
MAX_SHOWN = 200  # characters of a wrong value in a message
PRESET = "algorithm.preset="
PARTS = ("configs", "serving")  # folders of a run's folder that hold configurations


def load(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file, apply `a.b=value` overrides, check every field. Raises ConfigError.

    An override of algorithm.preset also replaces the fields that have the values of the file's preset. So it
    works with a run's config.yaml, which has all fields. A configuration in a run's folder is that of the run
    in this folder, wherever it was written: the folder may be a copy, or may have been moved.
    """
    raw = read_yaml(path, "config")
    _name_folder(raw, Path(path), overrides or [])
    return overridden(raw, overrides or [])


def overridden(raw: dict[str, Any], overrides: list[str]) -> Config:
    """Return the configuration of sections as in a file, after the overrides. Raises ConfigError."""
    for override in sorted(overrides, key=lambda given: not given.startswith(PRESET)):
        if override.startswith(PRESET):
            _forget_row(raw)
        _override(raw, override)
    return validate(raw)


def _name_folder(raw: dict[str, Any], path: Path, overrides: list[str]) -> None:
    """Set run.root and run.name of a configuration in a run's folder to this folder.

    Without configs/ it is not certain that the folder is a run's. Raises ConfigError if it has checkpoints,
    the file names another folder, and no override decides.
    """
    folder, run = path.parent.resolve(), raw.get("run") or {}
    if folder.name in PARTS and _is_run(folder.parent):
        folder = folder.parent
    if not isinstance(run, dict) or not (_is_run(folder) or (folder / "checkpoints" / "LATEST").is_file()):
        return
    default = RunConfig()
    root, name = str(run.get("root", default.root)), str(run.get("name", default.name))
    if _is_same(Path(root, name), folder):
        return
    if _is_run(folder):
        raw["run"] = run | {"root": str(folder.parent), "name": folder.name}
    elif not any(given.startswith(("run.root=", "run.name=")) for given in overrides):
        given = _short(str(Path(root, name)))
        raise ConfigError(
            f"config={path}: its folder has checkpoints, but its run is {given}; give run.root="
            f"{folder.parent} run.name={folder.name} for the run in its folder, or run.name={_short(name)} "
            "for the other"
        )


def _is_same(named: Path, folder: Path) -> bool:
    try:
        return named.expanduser().resolve() == folder
    except (OSError, RuntimeError, ValueError):  # not a path of this machine
        return False


def _is_run(folder: Path) -> bool:
    return (folder / "configs" / "attempt-1.yaml").is_file()


def read_yaml(path: Path, field: str) -> dict[str, Any]:
    """Return the sections of a YAML file. field: what an error calls the file. Raises ConfigError."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{field}={path}: cannot be read ({error.strerror}); give the path of a YAML file"
        ) from None
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{field}={path}: is longer than {MAX_BYTES} bytes; give a run's YAML file")
    try:
        raw = parse(text)
    except NOT_YAML as error:
        raise ConfigError(
            f"{field}={path}: is not YAML ({_short(_reason(error))}); correct the file"
        ) from None
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{field}={path}: {'is empty' if raw is None else f'holds {type(raw).__name__}'}, and must have "
            "sections; see examples/quickstart/config.yaml"
        )
    return raw


def validate(raw: dict[str, Any]) -> Config:
    """Return the configuration of sections as in a file, with every field checked, and with the fields of
    model.lora that its path determines. Raises ConfigError."""
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_explain(e) for e in error.errors()))) from None
    return config.changed(model={"lora": peft_folder.completed(config.model.lora)})


class _Plain(yaml.SafeLoader):
    """A YAML loader with restrictions, and with the numbers of YAML 1.2.

    Aliases are errors: a few lines of them can expand to gigabytes, and no section needs one. A name that
    occurs twice in a section is an error, as YAML requires; PyYAML would use the last one. Only true and
    false are booleans, as in YAML 1.2: `correction: off` is the word "off". And 2e-2 is a number, which YAML
    1.1 reads as text: no declared type would convert it in a section that is passed on.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()  # type: ignore[no-untyped-call]
            what = f"alias *{alias.anchor}, write its value out"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=alias.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                what = f"{_short(key.value)} appears twice, remove one"
                raise yaml.MarkedYAMLError(problem=what, problem_mark=key.start_mark)
            seen.add(str(key.value))
            if key.tag == _NUMBER:  # a name, such as that of a setting of `compare`
                key.tag = _TEXT
        return super().construct_mapping(node, deep)


_NUMBER, _TEXT = "tag:yaml.org,2002:float", "tag:yaml.org,2002:str"
_TRUTH = "tag:yaml.org,2002:bool"
_Plain.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TRUTH]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Plain.add_implicit_resolver(_TRUTH, re.compile("^(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Plain.add_implicit_resolver(*EXPONENT)

# What to write instead, by pydantic's type of the error.
REMEDIES = {
    "string_type": "is not text; give text, in the file in quotes",
    "list_type": "is not a list; give one, such as [FIRST, SECOND]",
    "tuple_type": "is not a list; give one, such as [FIRST, SECOND]",
    "too_short": "has too few values; give all, such as [FIRST, SECOND]",
    "too_long": "has too many values; give fewer, such as [FIRST, SECOND]",
    "path_type": "is not a path; give one, in the file in quotes",
    "dict_type": "is not a section; give fields, such as {name: value}",
    "model_type": "is not a section; give one of its fields, such as {name: value}",
    "string_pattern_mismatch": "is not a name; give 1 to 64 letters, digits, '.', '_' or '-', not beginning "
    "with '.'",
}

_PASSWORD = re.compile("://[^/@]*@")

# Values that Python cannot represent (a 13th month, a number of 5,000 digits) raise ValueError.
NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)


def parse(text: str | bytes) -> Any:
    """Return the data of a YAML text. Tags that create objects and aliases are errors: one of NOT_YAML."""
    loader = _Plain(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _reason(error: Exception) -> str:
    """Return the position, counted from 1, and the problem in one line.

    Example: "line 3, column 2: found a tab ...".
    """
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return (str(error).splitlines() or [type(error).__name__])[0]
    what = getattr(error, "problem", None) or "cannot be read"
    return f"line {mark.line + 1}, column {mark.column + 1}: {what}"


def _short(text: str) -> str:
    """Return a value for a message: cut if it is long, and without the password of an address."""
    text = _PASSWORD.sub("://..@", text)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}.."


def _override(raw: dict[str, Any], text: str) -> None:
    key, sign, value = text.partition("=")
    shown = _short(repr(text))
    if not sign or not all(key.split(".")):
        raise ConfigError(
            f"override {shown} is not of the form section.field=value; for example update.epochs=2"
        )
    *path, last = key.split(".")
    node = raw
    for part in path:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {shown}: {part!r} is a value, not a section; remove what follows it")
    try:
        given = parse(value)
    except NOT_YAML:
        raise ConfigError(f"override {shown}: the value is not YAML; quote it") from None
    if _is_text([*path, last]) and not isinstance(given, str | None):
        given = value  # a name such as 2026-11-25, which is a date in YAML
    node[last] = given


def _forget_row(raw: dict[str, Any]) -> None:
    """Remove the algorithm's fields that have the values of its preset, so that another preset sets them."""
    section = raw.get("algorithm")
    if not isinstance(section, dict):  # reported when the fields are checked
        return
    own = {"preset": section["preset"]} if "preset" in section else {}
    try:
        row = AlgorithmConfig.model_validate(own).model_dump(mode="json")
    except ValidationError:  # the preset is not known, and is about to be replaced
        return
    raw["algorithm"] = {
        name: value for name, value in section.items() if name not in row or value != row[name]
    }


def _explain(error: Any) -> str:
    path = [str(p) for p in error["loc"]]
    where = ".".join(path)
    if error["type"] == "missing" and isinstance(error["loc"][-1], int):  # a value of a list has no name
        return _explain(error | {"type": "too_short", "loc": error["loc"][:-1]})
    if error["type"] == "extra_forbidden":
        known = list(_annotation(path[:-1]).model_fields)
        asked = did_you_mean(path[-1], known, ".".join([*path[:-1], "{}"]))
        remedy = asked or f"known here: {', '.join(sorted(known))}"
        return f"{where}={_short(repr(error['input']))}: no such field; {remedy}"
    if error["type"] == "missing":
        return f"{where}: missing; add it to the file or give {where}=VALUE"
    if error["type"] in REMEDIES:
        return f"{where}={_short(repr(error['input']))}: {REMEDIES[error['type']]}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":  # its message already has the value, if it may be shown
        return f"{where}: {message}"
    return f"{where}={_short(repr(error['input']))}: {message}"


def _is_text(path: list[str]) -> bool:
    """Return whether a field has text or a path as its value, or none."""
    try:
        annotation = _annotation(path)
    except (AttributeError, KeyError):  # no such field: reported when the fields are checked
        return False
    return set(get_args(annotation) or [annotation]) <= {str, Path, type(None)}


def _annotation(path: list[str]) -> Any:
    model: Any = Config
    for part in path:
        model = model.model_fields[part].annotation
    return model
