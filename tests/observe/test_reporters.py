from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.observe import reporters
from megatron_stppo.observe.metrics import Metrics
from megatron_stppo.observe.reporters import WeightsAndBiases
from megatron_stppo.parallel import abandon
from megatron_stppo.validation.checks import check_reporters

KEY = "0123456789abcdef" * 2 + "01234567"  # as long as a real one


def config(root: Path, **telemetry: Any) -> Config:
    given = {"run": {"name": "small", "root": root}, "model": {"path": "m"}, "telemetry": telemetry}
    return Config.model_validate(given)


def test_weights_and_biases_without_its_package_gives_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_reporters(config(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"telemetry\.wandb_project=p: .*; pip install wandb, or remove"):
        check_reporters(config(tmp_path, wandb_project="p"))


@pytest.mark.parametrize("fails", ["Settings", "init", "log", "finish", "hangs", "tensorboard"])
def test_a_reporter_that_fails_loses_its_rows_and_nothing_else(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wandb:
        def Settings(self, **given: Any) -> Any:
            return self._call("Settings")

        def init(self, **given: Any) -> Wandb:
            return self._call("init")

        def log(self, row: dict[str, Any], step: int) -> None:
            self._call("log")

        def finish(self) -> None:
            threading.Event().wait() if fails == "hangs" else self._call("finish")

        def _call(self, name: str) -> Wandb:
            if name == fails:
                raise RuntimeError("the service is gone\n")
            return self

    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    monkeypatch.setattr(reporters, "UPLOAD", 0.1)
    monkeypatch.setattr(abandon, "GRACE", 0.1)
    asked = config(tmp_path, wandb_project="p")
    if fails in ("Settings", "init"):
        with pytest.raises(ConfigError, match=r"wandb_project=p: .*gone ; set WANDB_API_KEY or .*=offline"):
            WeightsAndBiases(asked)
    if fails == "tensorboard":
        (tmp_path / "tensorboard").write_text("a file, no folder", encoding="utf-8")
    metrics = Metrics(tmp_path, 0, reporters=[WeightsAndBiases(asked, resume=True)])
    for iteration in (1, 2, 3):
        metrics.log(iteration, {"reward": 0.25})
    metrics.close()
    assert len((tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 3
    assert len(caplog.messages) == 1, "one warning"


def test_a_broken_installation_gives_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"wandb_project=p: the package wandb cannot .*ModuleNotFound"):
        WeightsAndBiases(config(tmp_path, wandb_project="p"), resume=True)
    with pytest.raises(ConfigError, match=r"^the package tensorboard cannot be imported"):
        Metrics(tmp_path, 0)


def test_weights_and_biases_gets_every_row_and_no_data_about_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses the calls of wandb's documentation. The test below makes them with the real package."""
    calls: list[tuple[str, Any]] = []

    class Run:
        def log(self, row: dict[str, Any], step: int) -> None:
            calls.append(("log", (row["reward"], step)))

        def finish(self) -> None:
            calls.append(("finish", None))

    wandb: Any = ModuleType("wandb")
    wandb.Settings = lambda **given: given
    wandb.init = lambda **given: calls.append(("init", given)) or Run()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    asked = config(tmp_path, wandb_project="p", wandb_mode="offline")
    metrics = Metrics(tmp_path, 0, reporters=[WeightsAndBiases(asked)])
    metrics.log(7, {"reward": 0.25})
    metrics.close()
    (_, given), *later = calls
    assert later == [("log", (0.25, 7)), ("finish", None)]
    assert (given["project"], given["mode"], given["group"]) == ("p", "offline", "small")
    assert given["config"]["telemetry"]["wandb_project"] == "p"
    assert given["settings"]["console"] == "off" and given["settings"]["x_disable_meta"]


def test_the_real_weights_and_biases_keeps_an_offline_run_without_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="optional")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    asked = config(tmp_path, wandb_project="p", wandb_mode="offline")
    asked.run.folder.mkdir(parents=True)
    metrics = Metrics(asked.run.folder, 0, reporters=[WeightsAndBiases(asked)])
    metrics.log(7, {"reward": 0.25, "note": None})
    metrics.close()
    kept = [path for path in asked.run.folder.rglob("*") if path.is_file()]
    (record,) = (path for path in kept if path.suffix == ".wandb")
    assert b"reward" in record.read_bytes()
    assert not [path for path in kept if KEY.encode() in path.read_bytes()]
