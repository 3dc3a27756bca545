"""Malicious configuration files are refused immediately, with one line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron_stppo.config import ConfigError
from megatron_stppo.config.file import load

# Nine nested lists of nine are 9^9 strings when expanded. With merge keys, loading would expand them.
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {k: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (LAUGHS, "alias *a, write its value out"),
        (MERGES, "alias *a, write its value out"),
        ("run: &a {name: *a}\n", "alias *a, write its value out"),
        ("a: " + "[" * 30_000, "is not YAML"),
        ("a: " + "{" * 30_000, "is not YAML"),
        ("x" * 65_537, "is longer than 65536 bytes"),
        ("run: {seed: " + "9" * 5_000 + "}\n", "is not YAML (Exceeds the limit"),
        ("run: {seed: 2026-13-01}\n", "is not YAML (month must be in 1..12)"),
        ("run: !!python/name:os.system\n", "is not YAML"),
        ("run: !!python/object/apply:os.system ['true']\n", "is not YAML"),
        ("run: !!python/object/new:subprocess.Popen [['true']]\n", "is not YAML"),
        ("run: \x00\n", "is not YAML"),
        ("run: \x1b[2J\n", "is not YAML"),
        ("run: {name: " + "x" * 60_000 + "}\nmodel: {path: m}\n", "run.name='xxx"),
        ("run: {iterations: [" + "[1], " * 2_000 + "]}\nmodel: {path: m}\n", "run.iterations=[[1], [1]"),
        ("model: {path: m}\nx: {y: " + "x" * 60_000 + "}\n", "x={'y': 'xxx"),
    ],
)
def test_a_hostile_file_is_refused_at_once_with_one_short_line(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    start = time.process_time()
    with pytest.raises(ConfigError) as raised:
        load(path)
    message = str(raised.value).removeprefix(f"config={path}: ")
    assert part in message
    assert len(message) < 500 and len(message.splitlines()) == 1
    assert time.process_time() - start < 5.0, "expanding one of them would take hours"


def test_an_endless_or_binary_file_is_refused_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is longer than 65536 bytes"):
        load(Path("/dev/zero"))
    (tmp_path / "run.yaml").write_bytes(b"run: \xff\xfe\n")
    with pytest.raises(ConfigError, match="is not YAML"):
        load(tmp_path / "run.yaml")


@pytest.mark.parametrize("value", ["[&a x, *a]", "!!python/name:os.system", "[" * 3_000, "9" * 5_000])
def test_a_hostile_override_is_refused_too(tmp_path: Path, value: str) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: m}\n")
    with pytest.raises(ConfigError, match="the value is not YAML; quote it") as raised:
        load(tmp_path / "run.yaml", [f"run.seed={value}"])
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    "name",
    ["..", ".", ".hidden", "a/b", "/etc", "../../etc", "a\\\\b", "a b", "", "x" * 65, "a\\n", "é", "\\0"],
)
def test_a_runs_name_stays_inside_the_root(tmp_path: Path, name: str) -> None:
    (tmp_path / "run.yaml").write_text(f'run: {{name: "{name}"}}\nmodel: {{path: m}}\n')
    with pytest.raises(ConfigError, match=r"^run\.name="):
        load(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    "url", ["http://user:hunter2@host/retrieve", "https://hunter2@host:8000", "user:hunter2@host/retrieve"]
)
def test_a_password_in_an_address_is_refused_and_not_repeated(tmp_path: Path, url: str) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: m}\n")
    with pytest.raises(
        ConfigError, match=r"^environment\.retrieval: url holds .* token_env instead$"
    ) as raised:
        load(tmp_path / "run.yaml", [f"environment.retrieval.url={url}"])
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("override", ["url=[{}", "ur={}", "url.x={}"])
def test_a_password_in_an_invalid_value_is_not_repeated(tmp_path: Path, override: str) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: m}\n")
    text = "environment.retrieval." + override.format("http://user:hunter2@host")
    with pytest.raises(ConfigError, match=r"://\.\.@host") as raised:
        load(tmp_path / "run.yaml", [text])
    assert "hunter2" not in str(raised.value)
