"""`audit-tokens` of dumps that transformers computed: healthy ones pass, planted faults are named."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_stppo.config import ConfigError
from megatron_stppo.evidence.audit.dumps import Recorded, read
from megatron_stppo.weights.sharding.hf_names import read_shape
from tests.replicas.test_promises import start
from tests.rollout.vllm.tiny import build_model

EPISODES = 12
Ids = list[int]


class Engine:
    """The model of a folder in a type, which gives the log-probs of a turn after a context."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def logprobs(self, context: Ids, turn: Ids, temperature: float = 1.0) -> list[float]:
        with torch.no_grad():
            logits = self.model(torch.tensor([context + turn])).logits[0, len(context) - 1 : -1].float()
        return (logits / temperature).log_softmax(-1)[range(len(turn)), turn].tolist()

    def spelled(self, text: str) -> Ids:
        """Return the letters of a text, which are not the tokens of its encoding."""
        return [token for letter in text for token in self.tokenizer(letter)["input_ids"]]

    def encoded(self, text: str) -> Ids:
        return list(self.tokenizer(text)["input_ids"])


def played(engine: Engine, seed: int) -> tuple[Ids, Ids, Ids, Ids]:
    """Return a prompt, a turn, an observation and a turn."""
    draw = random.Random(seed)
    words = [draw.choice(("capital", "France", "Paris", "city", "search")) for _ in range(9)]
    message = [{"role": "user", "content": " ".join(words[:5])}]
    prompt = engine.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    observed = f"<|im_end|>\n<|im_start|>user\n{words[5]}<|im_end|>\n<|im_start|>assistant\n"
    return prompt, engine.spelled(words[6]), engine.encoded(observed), engine.spelled(" ".join(words[7:]))


def lines(engine: Engine, other: Engine) -> Iterator[dict[str, Any]]:
    for seed in range(EPISODES):
        prompt, first, observed, second = played(engine, seed)
        whole = prompt + first + observed
        mask = [0] * len(prompt) + [1] * len(first) + [0] * len(observed) + [1] * len(second)

        def line(
            version: str, logprobs: list[float], ids: Ids = whole + second, mask: Ids = mask
        ) -> dict[str, Any]:
            return {"token_ids": ids, "action_mask": mask, "logprobs": logprobs, "version": version}

        own = engine.logprobs(prompt, first), engine.logprobs(whole, second)
        yield line("healthy", own[0] + own[1])
        cool = engine.logprobs(prompt, first, 0.7) + engine.logprobs(whole, second, 0.7)
        yield line("cool", cool) | {"temperature": 0.7}
        yield line("shifted", [*own[0][1:], -1.0, *own[1][1:], -1.0])
        yield line("temperature", cool)
        again = prompt + engine.encoded(engine.tokenizer.decode(first)) + observed
        yield line("encoded", own[0] + engine.logprobs(again, second))
        yield line("cut by engine", engine.logprobs(prompt[5:], first) + engine.logprobs(whole[5:], second))
        yield line("cut by dump", own[0] + own[1], (whole + second)[3:], mask[3:])
        yield line("weights", other.logprobs(prompt, first) + other.logprobs(whole, second))


EXPECTED = {
    "shifted": "log-probs shifted by",
    "temperature": "another temperature",
    "encoded": "text decoded and enc",
    "cut by engine": "a cut prompt or cont",
    "cut by dump": "a cut prompt or cont",
    "weights": "other weights, missi",
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_healthy_episodes_pass_and_each_fault_is_named(tmp_path: Path, dtype: str) -> None:
    build_model(tmp_path / "model")
    engine = Engine(tmp_path / "model", getattr(torch, dtype))
    other = copy.deepcopy(engine)
    with torch.no_grad():
        for weight in other.model.parameters():
            weight.mul_(1 + 0.2 * torch.randn(weight.shape).to(weight.dtype))
    dump = tmp_path / "dump.jsonl"
    dump.write_text("".join(json.dumps(line) + "\n" for line in lines(engine, other)))
    said = start(["audit-tokens", str(dump), str(tmp_path / "model"), f"model.dtype={dtype}"], status=1)
    rows = [line.split("│") for line in said.splitlines() if line.startswith("│")]
    named = {version: cause for _, version, cause, count, *_ in rows if "examined" in count}
    assert {version.strip(): cause.strip()[:20] for version, cause in named.items()} == EXPECTED
    assert "tokens cannot have the recorded log-probs" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [5, 320]}, "token_ids: 320 is not below vocab_size=320"),
        ({"token_ids": [5] * 257}, "token_ids: 257 tokens, max_position_embeddings=256"),
        ({"action_mask": [0, 0, 1]}, "action_mask: 3 numbers for 2 token_ids"),
        ({"action_mask": [0, 0, 2]}, "Expected `int` <= 1 - at `$.action_mask[2]`"),
        ({"action_mask": [0, 0]}, "action_mask: has no 1"),
        ({"action_mask": [1, 0]}, "action_mask: begins with 1"),
        ({"logprobs": [-1.0, -2.0]}, "logprobs: 2 numbers for 1 tokens with action_mask 1"),
        ({"logprobs": [float("nan")]}, "JSON is malformed"),
        ({"temperature": 0}, "Expected `float` > 0.0 - at `$.temperature`"),
    ],
)
def test_what_cannot_be_scored_is_refused_with_line_field_and_remedy(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    build_model(tmp_path / "model")
    dump, row = tmp_path / "dump.jsonl", {"token_ids": [5, 6], "action_mask": [0, 1], "logprobs": [-1.0]}
    dump.write_text(json.dumps(row) + "\n" + json.dumps(row | change) + "\n")
    with pytest.raises(ConfigError) as error:
        read(dump, read_shape(tmp_path / "model"))
    where, _, rest = str(error.value).partition(" line 2")
    assert where == f"FILE={dump}" and message in rest and "; " in rest and "\n" not in rest


def test_a_file_or_model_that_is_missing_ends_with_code_2(tmp_path: Path) -> None:
    build_model(tmp_path / "model")
    said = start(["audit-tokens", str(tmp_path / "no.jsonl"), str(tmp_path / "model")], status=2)
    assert "no.jsonl: cannot be read (No such file or directory); give lines of" in said
    assert "model.path=nowhere: no such folder; " in start(["audit-tokens", "no.jsonl", "nowhere"], status=2)


def test_the_converters_of_the_page_make_episodes_of_what_verl_and_slime_save() -> None:
    """verl pads prompts on the left and responses on the right, slime has log-probs of 0 for observations."""
    page = (Path(__file__).parents[3] / "docs" / "audit.md").read_text()
    names: dict[str, Any] = {"torch": torch}
    exec("".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), names)
    row = {
        "input_ids": [0, 5, 6, 7, 8, 9, 0],
        "attention_mask": [0, 1, 1, 1, 1, 1, 0],
        "response_mask": [1, 0, 1, 0],
        "rollout_log_probs": [-0.5, 0.0, -2.0, 0.0],
    }
    padded = {name: torch.tensor(values) for name, values in row.items()}
    sample = {"tokens": [5, 6, 7, 8, 9], "response_length": 3, "loss_mask": [1, 0, 1]}
    sample |= {"rollout_log_probs": [-0.5, 0.0, -2.0], "weight_versions": ["40"]}
    needed = Recorded((5, 6, 7, 8, 9), (0, 0, 1, 0, 1), (-0.5, -2.0), 0.7)
    (verl,) = names["from_verl"]([padded], 0.7)
    (slime,) = names["from_slime"]([sample], 0.7)
    assert msgspec.json.decode(json.dumps(verl), type=Recorded) == needed
    assert msgspec.json.decode(json.dumps(slime), type=Recorded) == msgspec.structs.replace(
        needed, version="40"
    )
