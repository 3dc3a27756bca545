"""Files that cannot be read give exit code 2 and one line with field, value and remedy.

They are all detected before torch is imported. A scheduler would requeue a crash (exit code 1) again and
again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from megatron_stppo.commands import open_run
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config.file import load
from megatron_stppo.validation import checks, model_folder
from tests.broken_inputs.inputs import ROW, SHAPE, Said

LATIN = '{"id": 1, "contents": "caf\u00e9"}\n'.encode("latin-1")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda m: (m / "config.json").write_bytes(b'{"a": "\xe9"}'), "config.json is not JSON in UTF-8"),
        (lambda m: (m / "config.json").write_text("[]"), "config.json holds list, not an object"),
        (lambda m: edit(m, num_hidden_layers=None), "config.json's num_hidden_layers is missing"),
        (
            lambda m: edit(m, hidden_size="64"),
            "config.json's hidden_size is '64', not a whole number above 0",
        ),
        (
            lambda m: edit(m, num_attention_heads=0),
            "config.json's num_attention_heads is 0, not a whole number",
        ),
        (lambda m: edit(m, rms_norm_eps="x"), "config.json's rms_norm_eps is 'x', not above 0"),
        (lambda m: edit(m, rope_scaling="linear"), "config.json's rope_scaling is 'linear', not an object"),
        (lambda m: (m / "tokenizer_config.json").write_text("{"), "tokenizer_config.json: cannot be read"),
        (lambda m: (m / "tokenizer_config.json").write_text("[]"), "tokenizer_config.json: holds list"),
        (lambda m: (m / "tokenizer.json").unlink(), "holds no tokenizer.json; add the model's own"),
        (lambda m: edit(m, eos_token_id="x"), "config.json: eos_token_id='x', not token ids below"),
        (lambda m: ends(m, "{"), "generation_config.json: cannot be read"),
        (lambda m: ends(m, "[]"), "generation_config.json: holds list, not an object"),
        (lambda m: ends(m, '{"eos_token_id": "</s>"}'), "eos_token_id='</s>', not token ids below"),
        (lambda m: ends(m, '{"eos_token_id": [2, 1024]}'), "eos_token_id=[2, 1024], not token ids below"),
        (lambda m: ends(m, '{"eos_token_id": true}'), "eos_token_id=True, not token ids below"),
        (lambda m: edit(m, architectures=["LlamaForCausalLM"]), "with only 'Qwen3ForCausalLM'"),
        (lambda m: (m / "adapter_config.json").write_text("{}"), "holds an adapter (adapter_config.json)"),
    ],
)
def test_a_model_folder_with_a_broken_file_is_refused(
    root: Path, said: Said, change: Callable[[Path], None], part: str
) -> None:
    change(root / "model")
    assert part in said("train", root / "run.yaml")


def ends(model: Path, text: str) -> None:
    (model / "generation_config.json").write_text(text)


@pytest.mark.parametrize("command", ["train", "evaluate", "cold-start"])
@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("", "its chat_template 'default' is empty; copy it again from the model's source"),
        ("{# #}", "its chat_template 'default' rejects every chat (renders nothing); copy it"),
        ("{% for m in messages %}", "its chat_template 'default' is not jinja (line 1: Unexpected end"),
        ("{{ raise_exception('no') }}", "its chat_template 'default' rejects every chat (no); copy it"),
        ("{{ messages[1]['content'] + bos_token }}", ""),  # the check gives it no special tokens
        (None, "its tokenizer has no chat_template; add chat_template.jinja"),
        (5, "its chat_template 'default' is 5, not a text; copy it again"),
        ([{"name": "tool_use", "template": "a"}], "has no chat_template but ['tool_use']; add chat_template"),
        (
            [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "{% if %}"}],
            "its chat_template 'tool_use' is not jinja (line 1: ",
        ),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_refused(
    root: Path, command: str, template: Any, part: str
) -> None:
    config = load(root / "run.yaml", [])
    (root / "model" / "chat_template.jinja").unlink()
    (root / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    if not part:
        return model_folder.check_chat_template(config)
    with pytest.raises(ConfigError) as caught:
        checks.check(with_output(config, root), 1, command)
    assert part in str(caught.value)


@pytest.mark.parametrize("folder", [".", "additional_chat_templates"])
def test_a_file_with_a_chat_template_that_cannot_be_used_is_refused(
    root: Path, said: Said, folder: str
) -> None:
    path = root / "model" / folder / "chat_template.jinja"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"{{ '\xe9' }}")
    assert "chat_template.jinja: cannot be read ('utf-8' codec" in said("train", root / "run.yaml")
    path.write_text("{% endif %}")
    assert " is not jinja (line 1: Encountered unknown tag" in said("train", root / "run.yaml")


def with_output(config: Config, root: Path) -> Config:
    section = config.cold_start.model_copy(update={"output": root / "out"})
    data = config.data.model_copy(update={"demonstrations": root / "tasks.jsonl"})
    return config.model_copy(update={"cold_start": section, "data": data})


def edit(model: Path, **changes: Any) -> None:
    given = {name: value for name, value in (SHAPE | changes).items() if value is not None}
    (model / "config.json").write_text(json.dumps(given))


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_tokenizer_that_is_larger_than_the_vocabulary_is_refused(
    root: Path, said: Said, command: str
) -> None:
    remedy = "config.json's vocab_size=1024 allows ids below it; give the tokenizer of this model"
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1024}, unk_token="a"))
    tokenizer.save(str(root / "model" / "tokenizer.json"))
    assert said(command, root / "run.yaml").endswith(f"its tokenizer has the token id 1024, {remedy}")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(root / "model" / "tokenizer.json"))
    added = {"added_tokens_decoder": {"1030": {"content": "<pad>"}}}
    (root / "model" / "tokenizer_config.json").write_text(json.dumps(added))
    assert said(command, root / "run.yaml").endswith(f"its tokenizer has the token id 1030, {remedy}")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"\xff\xfe\x00", "row 1: is not UTF-8 (byte 0xff at position 1); save the file as UTF-8"),
        (json.dumps(ROW).encode() + b"\n" + LATIN, "row 2: is not UTF-8 (byte 0xe9 at position 27)"),
        (b"\xef\xbb\xbf{}\n", "row 1: begins with a byte order mark"),
        (json.dumps(ROW).encode() + b"\n\n", "row 2: is empty; remove the line"),
        (b'{"a": 1,}\n', "row 1: is not JSON (Expecting property name enclosed in double quotes, column 9)"),
        (b'[\n{"a": 1}\n]\n', "row 1: is not JSON (Expecting value, column 2); give one object per line"),
        (b"5\n", "row 1: is int, not an object"),
        (
            json.dumps(ROW | {"prompt": [{"role": "user", "content": "\ud800"}]}).encode(),
            "unpaired surrogate",
        ),
    ],
)
def test_tasks_that_cannot_be_read_are_named_by_their_row(
    root: Path, said: Said, content: bytes, part: str
) -> None:
    (root / "tasks.jsonl").write_bytes(content)
    message = said("train", root / "run.yaml")
    assert message.startswith(f"{root}/tasks.jsonl row ") and part in message


def test_fewer_tasks_than_an_iteration_needs_give_a_warning(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "tasks.jsonl").write_text(json.dumps(ROW) + "\n")
    open_run._read_tasks(load(root / "run.yaml"), ("train",))
    assert capsys.readouterr().err == (
        f"megatron-stppo: data.train={root}/tasks.jsonl: holds 1 tasks, fewer than "
        "rollout.tasks_per_iteration=4: every iteration plays a task several times; add tasks, or set "
        "rollout.tasks_per_iteration=1 and more samples_per_task\n"
    )
    open_run._read_tasks(load(root / "run.yaml", ["rollout.tasks_per_iteration=1"]), ("train",))
    assert capsys.readouterr().err == ""


def test_held_out_tasks_that_are_also_trained_on_give_a_warning(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ROW | {"prompt": [{"role": "user", "content": "another question"}]}
    copy = ROW | {"extra_info": {"split": "test", "index": 3}}
    (root / "tasks.jsonl").write_text(json.dumps(ROW) + "\n")
    (root / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (other, copy)))
    few = "rollout.tasks_per_iteration=1"
    config = load(root / "run.yaml", [few, f"data.evaluate={root}/test.jsonl"])
    open_run._read_tasks(config, ("train", "evaluate"))
    assert capsys.readouterr().err == (
        f"megatron-stppo: data.evaluate={root}/test.jsonl: 1 of 2 tasks are also in "
        f"data.train={root}/tasks.jsonl, with the same prompt and target: evaluations do not measure "
        "held-out tasks; remove them from one of the files\n"
    )
    (root / "test.jsonl").write_text(json.dumps(other) + "\n")
    open_run._read_tasks(config, ("train", "evaluate"))
    (root / "tasks.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps(copy) + "\n")
    (root / "test.jsonl").write_text(json.dumps(ROW) + "\n")
    open_run._read_tasks(config, ("train", "evaluate"))
    (root / "tasks.jsonl").write_text(json.dumps(ROW | {"data_source": "another"}) + "\n")
    open_run._read_tasks(config, ("train", "evaluate"))
    given = ["data.train=null", "evaluate.samples=4"]
    open_run._read_tasks(load(root / "run.yaml", given), ("evaluate",))
    assert capsys.readouterr().err.startswith(
        "megatron-stppo: evaluate.samples=4 with evaluate.temperature=0: the model answers greedily, so that "
    )
    open_run._read_tasks(load(root / "run.yaml", [*given, "evaluate.temperature=1"]), ("evaluate",))
    assert capsys.readouterr().err == ""
    same_file = load(root / "run.yaml", [few, f"data.evaluate={root}/tasks.jsonl"])
    open_run._read_tasks(same_file, ("train", "evaluate"))
    assert capsys.readouterr().err == "", (
        "another question; a prompt that does not identify a task; another data set; one file for both"
    )


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"\xff\xfe\x00\x80", "row 1: is not UTF-8 (byte 0xff at position 1)"),
        (LATIN, "row 1: is not UTF-8 (byte 0xe9 at position 27)"),
        (b'{"id": 1}\n', "row 1: id is missing, or contents are not text; give both"),
        (b'{"id": 1, "contents": "..."}\n', "holds no document; give rows with an id and non-empty contents"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_refused(root: Path, said: Said, content: bytes, part: str) -> None:
    (root / "corpus.jsonl").write_bytes(content)
    assert part in said("build-index", root / "corpus.jsonl", root / "new")
    assert not (root / "new").exists()


def test_an_index_that_cannot_be_written_is_refused(root: Path, said: Said) -> None:
    (root / "corpus.jsonl").write_text('{"id": 1, "contents": "Paris"}\n')
    message = said("build-index", root / "corpus.jsonl", root / "corpus.jsonl" / "index")
    assert (
        message
        == f"index={root}/corpus.jsonl/index: cannot be written (Not a directory); name another folder"
    )


def test_a_missing_index_names_the_command_that_writes_one(root: Path, said: Said) -> None:
    message = said("train", root / "run.yaml", f"environment.retrieval.index={root}/none")
    assert message == (
        f"environment.retrieval.index={root}/none: no BM25 index there; write one with `megatron-stppo "
        f"build-index CORPUS.jsonl {root}/none`"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("run:\n  name: a\n iterations: 3\n", "line 3, column 2: expected <block end>, but found"),
        ("run:\n\tname: a\n", "line 2, column 1: found character '\\t' that cannot start any token"),
        ("run:\n  name: a\n  name: b\n", "line 3, column 3: name appears twice, remove one"),
        ("run: &a {}\nupdate: *a\n", "line 2, column 9: alias *a, write its value out"),
    ],
)
def test_yaml_that_cannot_be_read_is_named_by_its_line(
    root: Path, said: Said, text: str, reason: str
) -> None:
    (root / "run.yaml").write_text(text)
    message = said("train", root / "run.yaml")
    assert message.startswith(f"config={root}/run.yaml: is not YAML ({reason}")
    assert message.endswith("; correct the file")
