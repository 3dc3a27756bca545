"""Our code contains no calls that turn data into code, or a name into a shell command.

tests/ are not checked: they use torch.multiprocessing, which pickles, and create files that must be refused.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("megatron_stppo", "tools", "examples", "setup.py")
MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
# Imported under another name, these would not be recognised in a call.
NAMES = {"torch.load", "torch.save", "yaml.load", "yaml.load_all", "os.system", "os.popen", "builtins"}
LOADERS = {"Loader", "CLoader", "UnsafeLoader", "CUnsafeLoader", "FullLoader", "CFullLoader"}
CALLS = {"eval", "exec", "compile", "__import__"}
# {last name of a call, on any object: the reason why it is banned}
METHODS = {
    "system": "a shell",
    "popen": "a shell",
    "getoutput": "a shell",
    "getstatusoutput": "a shell",
    "create_subprocess_shell": "a shell",
    "full_load": "YAML that makes objects",
    "unsafe_load": "YAML that makes objects",
    "unsafe_load_all": "YAML that makes objects",
    "read_pickle": "pickle",
    "all_gather_object": "pickle on the wire",
    "gather_object": "pickle on the wire",
    "scatter_object_list": "pickle on the wire",
    "broadcast_object_list": "pickle on the wire",
    "send_object_list": "pickle on the wire",
    "recv_object_list": "pickle on the wire",
    "all_gather_objects": "pickle on the wire",
}
# {file: calls that it may make}. doctor.py imports names that its own file lists. In megatron's checkpoints,
# which are read with weights_only, every tensor is in the format of torch.save.
ALLOWED = {
    "megatron_stppo/environments/choose.py": "a computed import",
    "megatron_stppo/launch/doctor.py": "a computed import",
    "megatron_stppo/checkpoint/host_copy.py": "torch.save",
}


def test_our_own_code_has_no_banned_call() -> None:
    paths = [path for part in OURS for path in sorted((ROOT / part).rglob("*.py")) or [ROOT / part]]
    assert len(paths) > 100
    wrong = [
        f"{name}:{line}: {what}"
        for path in paths
        for name in [str(path.relative_to(ROOT))]
        for line, what in banned(path.read_text(encoding="utf-8"))
        if ALLOWED.get(name) != what
    ]
    assert not wrong


@pytest.mark.parametrize(
    "code",
    [
        "eval('1')",
        "exec(text)",
        "__import__(config.kind)",
        "importlib.import_module(config.kind)",
        "import_module(name)",
        "import pickle",
        "import builtins",
        "from builtins import eval",
        "from os import system as run",
        "from torch import load",
        "from yaml import load",
        "from yaml import UnsafeLoader",
        "class Own(yaml.UnsafeLoader): pass",
        "yaml.FullLoader(text).get_data()",
        "from pickle import loads",
        "import torch.multiprocessing as mp",
        "import os; os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=flag)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "yaml.unsafe_load(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.save(state, path)",
        "numpy.load(path, allow_pickle=True)",
        "dist.all_gather_object(out, x)",
        "AutoTokenizer.from_pretrained(path)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        "EngineArgs(model=path, trust_remote_code=flag)",
    ],
)
def test_every_banned_form_is_detected(code: str) -> None:
    assert [line for line, _ in banned(code)] == [1]


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "build(x).eval()",
        "re.compile('a')",
        "torch.load(path, weights_only=True)",
        "subprocess.run(['ls'])",
        "importlib.import_module('wandb')",
        "AutoConfig.from_pretrained(path, trust_remote_code=False)",
        "json.load(file)",
    ],
)
def test_allowed_forms_are_not_reported(code: str) -> None:
    assert list(banned(code)) == []


def banned(code: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every import and call that is banned."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            if any(MODULES & set(name.split(".")) for name in names):
                yield node.lineno, "pickle"
            if any({name, name.partition(".")[0]} & NAMES for name in names):
                yield node.lineno, "what is banned, under a name of its own"
            if any(name in {f"yaml.{loader}" for loader in LOADERS} for name in names):
                yield node.lineno, "YAML that makes objects"
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "yaml" and node.attr in LOADERS:
                yield node.lineno, "YAML that makes objects"
        elif isinstance(node, ast.Call):
            what = _call(node)
            if what is not None:
                yield node.lineno, what


def _call(node: ast.Call) -> str | None:
    owner, name = _name(node.func)
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if not owner and name in CALLS:
        return name
    if name in METHODS:
        return METHODS[name]
    if name == "import_module" and not (node.args and isinstance(node.args[0], ast.Constant)):
        return "a computed import"
    if owner == "yaml" and name in ("load", "load_all"):
        return "YAML that makes objects"
    if owner == "torch" and name == "save":
        return "torch.save"
    if owner == "torch" and name == "load" and not _is(given.get("weights_only"), True):
        return "pickle"
    if owner.startswith("Auto") and name == "from_pretrained" and "trust_remote_code" not in given:
        return "remote code, if its user says yes"
    for flag in ("shell", "allow_pickle", "trust_remote_code"):
        if flag in given and not _is(given[flag], False):
            return f"{flag} that may be true"
    return None


def _name(function: ast.expr) -> tuple[str, str]:
    """Return ("torch", "load") for torch.load, (".", "eval") for net().eval, ("", "eval") for eval."""
    if isinstance(function, ast.Attribute):
        owner = function.value
        return owner.id if isinstance(owner, ast.Name) else ".", function.attr
    return "", function.id if isinstance(function, ast.Name) else ""


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
