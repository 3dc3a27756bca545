"""Errors of `megatron-stppo serve` before an engine is built, and the digest of a model's folder."""

from __future__ import annotations

import json
import shutil
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.commands.serve import serve
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.replicas.wire import keys
from megatron_stppo.replicas.wire.messages import model_digest
from tests.replicas.test_keys import CONNECTION
from tests.rollout.vllm.tiny import build_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digested")
    build_model(folder)
    return folder


@pytest.fixture(autouse=True)
def _without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)  # a replica ignores it


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Iterator[Path]:
    """The folder of a run whose trainer listens."""
    with socket.create_server(("127.0.0.1", 0)) as trainer:
        keys.write(tmp_path, replace(CONNECTION, port=trainer.getsockname()[1]))
        configure(tmp_path, model, replicas=1)
        yield tmp_path


def configure(run: Path, model: Path, replicas: int | None) -> None:
    rollout = {"max_prompt_tokens": 60, "max_turn_tokens": 40, "max_context": 256}
    environment = {"kind": "tests.replicas.games:factory"}
    given = Config(
        model={"path": model},  # type: ignore[arg-type]
        rollout=rollout,  # type: ignore[arg-type]
        environment=environment,  # type: ignore[arg-type]
        serving={"replicas": replicas},  # type: ignore[arg-type]
    )
    (run / keys.FOLDER / keys.CONFIG).write_text(given.dump())


def refused(run: Path, *overrides: str, **options: Any) -> str:
    """Return the error with which the command ends, without starting a process."""
    with pytest.raises(ConfigError) as found:
        serve(run, list(overrides), **options)
    return str(found.value)


def test_only_fields_of_the_replica_itself_can_be_overridden(run: Path) -> None:
    said = refused(run, "rollout.kv_cache_gib=4", "environment.deadline=5", "rollout.temperature=0.5")
    assert said.startswith("rollout.temperature: a replica takes it from the run; only rollout.kv_cache_gib,")
    assert refused(run, "environment.max_turns=9").startswith("environment.max_turns: a replica takes it")


def test_the_number_of_ranks_must_be_the_engines_tensor_parallel_size(run: Path) -> None:
    assert refused(run, "rollout.engine_tensor=2") == (
        "rollout.engine_tensor=2: a replica has that many ranks, and 1 were started; start 2, or give "
        "rollout.engine_tensor=1"
    )


def test_a_run_that_serves_itself_needs_no_replica(run: Path, model: Path) -> None:
    configure(run, model, replicas=None)
    assert refused(run).startswith("serving.replicas=null: the run's own ranks serve")


def test_names_that_are_no_file_names_are_refused(run: Path) -> None:
    assert refused(run, name="../other").startswith("--name=../other: give up to 64 letters, digits")


def test_a_trainer_that_does_not_start_is_waited_for_and_then_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "connection.json" in refused(tmp_path, wait=0.1)
    assert capsys.readouterr().err.endswith(f"waiting up to 0.1 s for the trainer of {tmp_path}\n")


def test_the_file_of_a_trainer_that_does_not_answer_is_waited_on_and_then_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        keys.write(run, replace(CONNECTION, port=closed.getsockname()[1]))
    assert refused(run, wait=0.0) == (
        f"{run}/serving/connection.json: is of a trainer that has ended, and no other one has started, after "
        "0 s; start `megatron-stppo train` with serving.replicas for this run, or give the folder of another "
        "run"
    )
    assert "waiting up to 0 s for the trainer" in capsys.readouterr().err


def test_the_digest_depends_on_shape_tokenizer_and_end_of_text_but_not_on_weights(
    model: Path, tmp_path: Path
) -> None:
    def changed(name: str, **fields: object) -> str:
        folder = tmp_path / name
        shutil.copytree(model, folder, dirs_exist_ok=True)
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        return model_digest(folder)

    own = model_digest(model)
    assert len(own) == 64
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    assert model_digest(copy) == own
    assert changed("config.json", transformers_version="0") == own
    assert changed("config.json", transformers_version="0", eos_token_id=[2, 0]) != own
    assert changed("config.json", eos_token_id=2, rope_parameters={"rope_theta": 123.0}) != own
    assert changed("tokenizer.json", version="2") != own
    (copy / "additional_chat_templates").mkdir()
    (copy / "additional_chat_templates" / "tool_use.jinja").write_text("a")
    assert model_digest(copy) != own
