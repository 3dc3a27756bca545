"""Writes or reads an adapter with the package `peft`, and prints log-probs of the batch of layouts.py.

    python -m tests.checkpoint.peft_program write|read MODEL ADAPTER

It prints {"adapter": log-probs with the adapter, "merged": after merge_and_unload, "base": without it}.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.training.update import layouts


def logprobs(model: Any) -> list[float]:
    """Return the log-probs of the action tokens of layouts.batch()."""
    batch = layouts.batch()
    every = []
    with torch.no_grad():
        for first, end in pairwise(batch.sequence_offsets.tolist()):
            ids = batch.tokens_P[first:end]
            of_next = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            every += [torch.zeros(1), of_next]
    found: list[float] = torch.cat(every)[batch.action_index_T].tolist()
    return found


def main(what: str, base: str, adapter: str) -> None:
    import peft

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    found = {"base": logprobs(model)}
    if what == "write":
        torch.manual_seed(3)
        settings: Any = peft.LoraConfig(
            r=4,
            lora_alpha=6,
            lora_dropout=0.1,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            init_lora_weights=False,  # random B
        )
        model = peft.get_peft_model(model, settings).eval()
        model.save_pretrained(adapter)
    else:
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    found["adapter"] = logprobs(model)
    found["merged"] = logprobs(model.merge_and_unload())
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
