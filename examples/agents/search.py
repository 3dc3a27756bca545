"""The quickstart's search agent as a script of OpenAI's SDK, with the tokens of the built-in environment.

    make quickstart-agent

The model was taught to go on writing after a document, inside one message of the assistant. Chat completions
cannot express this, so the script sends token ids to text completions: the ids so far, those of the turn as
they were sampled, and those of the document.
"""

import os
import ssl
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from transformers import AutoTokenizer

from megatron_stppo.environments.answers import exact_match, parse_action
from megatron_stppo.environments.retrieval import BM25Retriever
from megatron_stppo.environments.search import CORRECTION, STOP_STRINGS, render

DATA = Path(os.environ.get("SEARCH_DATA", "runs/quickstart-agent/data"))
TOKENIZER: Any = AutoTokenizer.from_pretrained(DATA / "model", trust_remote_code=False)
INDEX = BM25Retriever(DATA / "index")
SEARCHES = 3  # after which only an answer counts
CERTIFICATES = ssl.create_default_context()  # reading them for every episode would take longer than a turn


async def agent(episode: Any) -> dict[str, Any]:
    chat = [m.as_dict() for m in episode.task.prompt]
    ids = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    more: Any = {"include_stop_str_in_output": True, "return_token_ids": True}
    http = DefaultAsyncHttpxClient(verify=CERTIFICATES)
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, http_client=http) as client:
        for searches in range(SEARCHES + 1):
            more["prompt"] = ids  # as prompt=ids, the SDK would check every id, longer than the turn takes
            reply = await client.completions.create(
                model=episode.model, prompt="", stop=list(STOP_STRINGS), extra_body=more
            )
            turn: Any = reply.choices[0]
            kind, content = parse_action(turn.text)
            if kind == "answer":
                right = exact_match(content, episode.task.targets)
                return {"reward": float(right), "detail": content, "searches": searches}
            found = await INDEX.search(content, 1) if kind == "search" else []
            seen = render(found, max_characters=768) if kind == "search" else CORRECTION
            ids = ids + turn.token_ids + TOKENIZER.encode(seen, split_special_tokens=True)
    return {"reward": 0.0, "outcome": "truncated", "detail": "no answer", "searches": searches}
