"""Our code contains no calls that turn data into code, or a name into a shell command, and none whose text
depends on the user's locale.

ruff refuses most of them: see [tool.ruff.lint] in pyproject.toml. This file checks that it does, and finds
the calls that depend on an argument, for which ruff has no rule.
tests/ are not checked: they use torch.multiprocessing, which pickles, and create files that must be refused.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("megatron_stppo", "tools", "examples", "setup.py")
# {file: what it may do}. __init__.py and doctor.py import names that their own file lists, packages.py those
# of the package.
ALLOWED = {
    "megatron_stppo/__init__.py": "a computed import",
    "megatron_stppo/agents/endpoint/environment.py": "the encoding of the locale",  # of a session, not a file
    "megatron_stppo/agents/command.py": "a computed import",  # of environment.command's module
    "megatron_stppo/config/user_code.py": "a computed import",
    "megatron_stppo/environments/choose.py": "a computed import",
    "megatron_stppo/cluster/launch/doctor.py": "a computed import",
    "megatron_stppo/model/layers.py": "a computed import",  # of a class that a family of the package names
    "megatron_stppo/ops/products.py": "a computed import",  # of the kernel of apex, by a constant
    "megatron_stppo/rollout/vllm/vllm_setup.py": "a computed import",  # of a module that a family names
    "megatron_stppo/weights/sharding/hf_names.py": "a computed import",  # of the modules of families/
    "examples/bfcl/bfcl_tools.py": "a computed import",  # of the eight modules that it lists
    "examples/agents/repair/runner.py": "a computed import",  # of the code of the policy, in a sandbox
    "tools/cuda_environment/packages.py": "a computed import",
    "tools/gpu_checks/__main__.py": "a computed import",  # of the modules beside it
    "tools/mutate.py": "a computed import",  # of tests and of what they import
}
# Objects whose open() and the like are not those of files.
NOT_TEXT = ("os", "tarfile", "lzma")
TEXT = ("text", "universal_newlines")
REFUSED_BY_RUFF = (
    "eval('1')",
    "exec(text)",
    "import pickle",
    "from pickle import loads",
    "import builtins",
    "from builtins import eval",
    "from os import system as run",
    "import os; os.system('ls')",
    "import asyncio; asyncio.create_subprocess_shell('ls')",
    "import subprocess; subprocess.run('ls', shell=True)",
    "import subprocess as s; s.getoutput('ls')",
    "from yaml import load",
    "from yaml import UnsafeLoader",
    "import yaml; yaml.load(text, Loader=yaml.SafeLoader)",
    "import yaml; yaml.unsafe_load(text)",
    "import yaml; yaml.FullLoader(text).get_data()",
    "import torch.multiprocessing as mp",
    "import torch; torch.save(state, path)",
    "import torch.distributed as dist; dist.all_gather_object(out, x)",
)


def test_ruff_refuses_pickles_shells_and_unsafe_yaml(tmp_path: Path) -> None:
    for number, code in enumerate(REFUSED_BY_RUFF):
        (tmp_path / f"{number}.py").write_text(f"{code}\n", encoding="utf-8")
    ruff = Path(sys.executable).with_name("ruff")
    command = (ruff, "check", "--config", ROOT / "pyproject.toml", "--select", "S,TID", "--no-cache")
    done = subprocess.run([*command, "--output-format", "json", tmp_path], capture_output=True, text=True)
    found = {Path(finding["filename"]).stem for finding in json.loads(done.stdout)}
    assert [code for number, code in enumerate(REFUSED_BY_RUFF) if str(number) not in found] == []


def test_our_own_code_has_no_banned_call() -> None:
    paths = [path for part in OURS for path in sorted((ROOT / part).rglob("*.py")) or [ROOT / part]]
    assert len(paths) > 100
    wrong = [
        f"{name}:{line}: {what}"
        for path in paths
        for name in [str(path.relative_to(ROOT))]
        for line, what in banned(path.read_text(encoding="utf-8"))
        if ALLOWED.get(name) != what and not path.name.startswith("test_")
    ]
    assert not wrong


@pytest.mark.parametrize(
    "code",
    [
        "compile(text, name, 'eval')",
        "__import__(config.kind)",
        "importlib.import_module(config.kind)",
        "import_module(name)",
        "from torch import load",
        "subprocess.run('ls', shell=flag)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "AutoTokenizer.from_pretrained(path)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        "EngineArgs(model=path, trust_remote_code=flag)",
        "open(path)",
        "path.open('a')",
        "path.read_text()",
        "path.write_text(text)",
        "os.fdopen(file, 'w')",
        "subprocess.run(['ls'], text=True)",
        "tempfile.NamedTemporaryFile('w')",
        "logging.FileHandler(path)",
        "locale.getpreferredencoding()",
    ],
)
def test_every_banned_form_is_detected(code: str) -> None:
    assert [line for line, _ in banned(code)] == [1]


@pytest.mark.parametrize(
    "code",
    [
        "re.compile('a')",
        "torch.load(path, weights_only=True)",
        "subprocess.run(['ls'])",
        "importlib.import_module('wandb')",
        "AutoConfig.from_pretrained(path, trust_remote_code=False)",
        "json.load(file)",
        "path.open('rb')",
        "open(path, 'wb')",
        "os.open(path, os.O_RDONLY)",
        "tarfile.open(path)",
        "path.read_text(encoding='utf-8')",
        "subprocess.run(['ls'], stdout=subprocess.PIPE)",
    ],
)
def test_allowed_forms_are_not_reported(code: str) -> None:
    assert list(banned(code)) == []


def banned(code: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every import and call that is banned and that ruff has no rule for."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            if any(alias.name == "load" for alias in node.names):
                yield node.lineno, "torch.load, whose calls would not be recognised"
        elif isinstance(node, ast.Call):
            what = _call(node)
            if what is not None:
                yield node.lineno, what


def _call(node: ast.Call) -> str | None:
    owner, name = _name(node.func)
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if not owner and name in ("compile", "__import__"):
        return name
    if name in ("import_module", "resolve_name") and not (
        node.args and isinstance(node.args[0], ast.Constant)
    ):
        return "a computed import"
    if owner == "torch" and name == "load" and not _is(given.get("weights_only"), True):
        return "pickle"
    if owner.startswith("Auto") and name == "from_pretrained" and "trust_remote_code" not in given:
        return "remote code, if its user says yes"
    for flag in ("shell", "allow_pickle", "trust_remote_code"):
        if flag in given and not _is(given[flag], False):
            return f"{flag} that may be true"
    if "encoding" not in given and _is_text(owner, name, node.args, given):
        return "the encoding of the locale"
    return None


def _is_text(owner: str, name: str, positional: list[ast.expr], given: dict[str | None, ast.expr]) -> bool:
    """Return whether a call reads or writes text, in the encoding of the locale if it names none."""
    place = 1 if owner in ("", "os") else 0  # of the mode of a function; a method of a path has it first
    mode = given.get("mode", positional[place] if len(positional) > place else None)
    is_binary = isinstance(mode, ast.Constant) and "b" in str(mode.value)
    if name in ("open", "fdopen"):
        return not is_binary and (name == "fdopen" or owner not in NOT_TEXT)
    if name in ("NamedTemporaryFile", "TemporaryFile"):
        return bool(positional or mode) and not is_binary
    if name in ("run", "Popen", "check_output"):
        return any(not _is(given.get(flag, ast.Constant(False)), False) for flag in TEXT)
    return name in ("read_text", "write_text", "FileHandler", "TextIOWrapper", "getpreferredencoding")


def _name(function: ast.expr) -> tuple[str, str]:
    """Return ("torch", "load") for torch.load, (".", "load") for net().load, ("", "eval") for eval."""
    if isinstance(function, ast.Attribute):
        owner = function.value
        return owner.id if isinstance(owner, ast.Name) else ".", function.attr
    return "", function.id if isinstance(function, ast.Name) else ""


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
