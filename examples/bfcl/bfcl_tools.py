"""The simulated APIs of the package bfcl-eval, for calls that the policy writes.

The text of the policy is never evaluated: the package documents its functions in files, and only a name from
there is looked up on an object, with arguments from JSON. The objects run in the process of the engine, so a
call has limits on its arguments and on its work. They keep state in module globals and in default arguments
(credit cards, tags of a tweet); an object therefore gets copies, and no episode changes those of another.
"""

from __future__ import annotations

import copy
import decimal
import importlib
import inspect
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_stppo.base.printing import one_line
from megatron_stppo.config import ConfigError

# Each class has a module and a file of documented functions with the same name.
MODULES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
# The ground truth has numbers below 10**6, texts of up to 6,690 characters and lists of texts.
MAX_CALLS = 64  # of one reply
MAX_NUMBER = 10**12
MAX_SMALL = 100
SMALL = frozenset({"exponent", "precision", "decimal_places"})  # digits, or a power, of exact arithmetic
MAX_TEXT = 10_000  # characters
MAX_NAME = 255
NAMES = frozenset({"dir_name", "file_name", "destination"})  # become parts of paths
MAX_ITEMS = 100
MAX_DEPTH = 3
MAX_EVENTS = 100_000  # calls and returns of functions, below a tenth of a second; the ground truth has 4,652
TYPES = {"dict": "object", "float": "number"}  # the package's names of JSON types
PYTHON: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


class CallRefused(Exception):
    """A call is over a limit, or is not a call; the policy reads the message."""


@dataclass(frozen=True)
class ToolCall:
    """A call that was parsed and not yet made. Example: ToolCall("cd", {"folder": "docs"})."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class SimulatedApis:
    """The package's classes and functions. Example: apis.functions["MathAPI"]["add"] is a JSON schema."""

    classes: Mapping[str, type]
    functions: Mapping[str, Mapping[str, dict[str, Any]]]  # by class and name, in the form of OpenAI's tools
    mpmath: Any


def package() -> ModuleType:
    """Return the package. Raises ConfigError if it, or mpmath, is not installed."""
    try:
        importlib.import_module("mpmath")
        return importlib.import_module("bfcl_eval")  # optional
    except ImportError as error:
        raise ConfigError(
            f"examples/bfcl: the package bfcl-eval cannot be imported ({error}); "
            "pip install --no-deps bfcl-eval==2026.3.23 mpmath"
        ) from None


def data_folder() -> Path:
    """Return the folder of the package's files. Raises ConfigError without the package."""
    return Path(str(package().__file__)).parent / "data"


def load() -> SimulatedApis:
    """Return the classes and their documented functions. Raises ConfigError without the package."""
    documents = data_folder() / "multi_turn_func_doc"
    source = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
    classes, functions = {}, {}
    for name, module in MODULES.items():
        classes[name] = getattr(importlib.import_module(f"{source}.{module}"), name)
        lines = (documents / f"{module}.json").read_text(encoding="utf-8").splitlines()
        schemas = [json.loads(line) for line in lines]
        functions[name] = {schema["name"]: _schema(schema) for schema in schemas}
    return SimulatedApis(classes, functions, importlib.import_module("mpmath").mp)


def _schema(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function's description without the form of its result, with JSON's names of types."""
    described = {key: document[key] for key in ("name", "description")}
    return described | {"parameters": _typed(document["parameters"])}


def _typed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_typed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    typed = {key: _typed(value) for key, value in schema.items()}
    if isinstance(typed.get("type"), str):
        typed["type"] = TYPES.get(typed["type"], typed["type"])
    return typed


def read_calls(action: str) -> list[ToolCall | str]:
    """Return the calls in a reply, in order; in place of one that cannot be read, what is wrong with it.

    Example: '<tool_call>{"name": "ls", "arguments": {}}</tool_call>' gives [ToolCall("ls", {})].
    """
    calls: list[ToolCall | str] = []
    for part in action.split("<tool_call>")[1:][:MAX_CALLS]:
        body, closed, _ = part.partition("</tool_call>")
        try:
            calls.append(_call(body) if closed else "</tool_call> is missing")
        except (ValueError, RecursionError, CallRefused) as error:
            calls.append(f"not a call: {one_line(str(error))[:200]}")
    return calls


def _call(body: str) -> ToolCall:
    call = json.loads(body)
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        raise CallRefused('write {"name": .., "arguments": {..}}')
    return ToolCall(call["name"], arguments)


class Simulation:
    """The objects of one episode.

    Example: Simulation(load(), ["MathAPI"], {}, False).call("add", {"a": 1, "b": 2}) == '{"result": 3}'.
    """

    def __init__(
        self, apis: SimulatedApis, classes: Sequence[str], state: Mapping[str, Any], long_context: bool
    ) -> None:
        """state: the objects' initial state, by class. long_context: with the package's long results."""
        self._mpmath = apis.mpmath
        self._objects: dict[str, Any] = {}
        self._owners: dict[str, str] = {}
        self._schemas: dict[str, dict[str, Any]] = {}
        for name in classes:
            made = apis.classes[name]()
            if hasattr(made, "_load_scenario"):  # the class of arithmetic has no state
                made._load_scenario(copy.deepcopy(state.get(name, {})), long_context=long_context)
            self._objects[name] = copy.deepcopy(made)
            self._owners |= dict.fromkeys(apis.functions[name], name)
            self._schemas |= apis.functions[name]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a documented function as text, as the benchmark compares it.

        A call that fails in any way has a result too: an object with the key `error`.
        """
        try:
            if name not in self._owners:
                raise CallRefused(f"no such function: {name[:80]!a}")
            _check(self._schemas[name]["parameters"], arguments)
            method = getattr(self._objects[self._owners[name]], name)
            bound = inspect.signature(method).bind(**arguments)
            bound.apply_defaults()
            own = copy.deepcopy(bound.arguments)  # an object may keep and change a list of them
            with self._own_precision(), _limited_work():
                return _text(method(**own))
        except Exception as error:  # of the package's code, on arguments that it was not written for
            return json.dumps({"error": one_line(str(error))[:500]})

    def differing(self, other: Simulation) -> list[str]:
        """Return the classes whose public attributes differ from those of the same class in `other`."""
        return [name for name, mine in self._objects.items() if not _equal(mine, other._objects[name])]

    @contextmanager
    def _own_precision(self) -> Iterator[None]:
        # two functions set the precision of the process
        with decimal.localcontext(), self._mpmath.workdps(self._mpmath.dps):
            yield


def _check(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raise CallRefused unless the arguments have the declared names and types, and are within the limits."""
    properties = schema["properties"]
    for name, value in arguments.items():
        if name not in properties:
            raise CallRefused(f"no such argument: {name[:80]!a}")
        kind = properties[name]["type"]
        if not isinstance(value, PYTHON[kind]) or (isinstance(value, bool) and kind != "boolean"):
            raise CallRefused(f"{name}={str(value)[:80]!a}: must be of type {kind}")
        _limit(name, value, MAX_DEPTH)


def _limit(name: str, value: Any, depth: int) -> None:
    if isinstance(value, int | float):
        most = MAX_SMALL if name in SMALL else MAX_NUMBER
        if not (math.isfinite(value) and abs(value) <= most):
            raise CallRefused(f"{name} must be a number from -{most} to {most}")
    elif isinstance(value, str):
        most = MAX_NAME if name in NAMES else MAX_TEXT
        if len(value) > most:
            raise CallRefused(f"{name} must have at most {most} characters")
        value.encode("utf-8")  # raises for an unpaired surrogate, which JSON can contain
    elif isinstance(value, list | dict):
        if depth == 0 or len(value) > MAX_ITEMS:
            raise CallRefused(f"{name} must have at most {MAX_ITEMS} items and {MAX_DEPTH} levels")
        for each in [*value, *value.values()] if isinstance(value, dict) else value:
            _limit(name, each, depth - 1)


@contextmanager
def _limited_work() -> Iterator[None]:
    """Raise CallRefused in the code inside after MAX_EVENTS calls of functions, in this thread.

    Copies of folders share their contents, so a search can visit a number of paths that is exponential in the
    number of calls. No limit on the arguments of one call prevents that.
    """
    left = MAX_EVENTS

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise CallRefused("the call takes too long")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


def _text(result: Any) -> str:
    """Return a result as the benchmark writes it: a dict as JSON if possible, all else with str."""
    if not isinstance(result, dict):
        return str(result)
    try:
        return json.dumps(result)
    except (TypeError, ValueError):
        return str(result)


def _equal(mine: Any, true: Any) -> bool:
    # a folder of `mine` may contain itself; that of `true` comes first, so its end ends the comparison
    public = [name for name in vars(true) if not name.startswith("_")]
    return all(getattr(true, name) == getattr(mine, name) for name in public)
