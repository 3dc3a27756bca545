"""The running requests of one engine: what vLLM is asked for, the tokens so far, and where each one ends.

vLLM gets no stop strings, and tokens stay ids: only tokens that may end a stop string are decoded
(stop_strings.py). A generation keeps every token that the model emitted, with one log-prob each. This
includes the token that completes the stop string and the end-of-text token.
"""

import functools
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Required, TypedDict

from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from megatron_stppo.base.types import Versions
from megatron_stppo.rollout.vllm.engine_routes import EngineRoutes
from megatron_stppo.rollout.vllm.generation import Finished, Reason, RecordedTurn
from megatron_stppo.rollout.vllm.stop_strings import StopFinder

FINDERS = 256  # stop strings of so many kinds of request are kept; an agent may invent new ones for each turn


class Sampling(TypedDict, total=False):
    """The named arguments of Requests.begin."""

    seed: Required[int]
    max_tokens: Required[int]
    temperature: float  # 0 is greedy; default: 1
    top_p: float
    stop_strings: Sequence[str]


@dataclass
class _Running:
    vllm_id: str
    stops: StopFinder
    prompt: int  # tokens
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights that computed each token


class Requests:
    """The running requests of one engine, by the ids that its caller gave them.

    end_ids: the tokens that end a text. context: the largest number of tokens of a prompt and its generation.
    vocabulary: the number of token ids.
    """

    def __init__(self, tokenizer: Any, end_ids: Collection[int], context: int, vocabulary: int) -> None:
        self._end_ids = end_ids
        self._context, self._vocabulary = context, vocabulary
        self._running: dict[str, _Running] = {}
        self._begun = 0  # requests so far, of all rollouts
        printed: dict[int, str] = {}  # the text of each token id that was generated
        self._finder = functools.lru_cache(FINDERS)(
            lambda stop_strings: StopFinder(tokenizer, stop_strings, printed)
        )

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[str]:
        return iter(self._running)

    def begin(
        self,
        request_id: str,
        token_ids: Sequence[int],
        begun: RecordedTurn | None,
        lora: LoRARequest | None,
        *,
        seed: int,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        stop_strings: Sequence[str] = (),
    ) -> EngineCoreRequest:
        """Record a request as running, and return what vLLM is asked for. vLLM's id is never used twice.

        lora: the adapter that the request uses. The other arguments, and the errors raised, are those of
        Engine.add.
        """
        if request_id in self._running:
            raise ValueError(f"request_id={request_id!r} is already running; give a unique id")
        room = self._context - len(token_ids)
        if not token_ids or room < 1 or max_tokens < 1:
            raise ValueError(
                f"request {request_id!r}: {len(token_ids)} tokens and max_tokens={max_tokens} do not fit a "
                f"context of {self._context}; at least one token in and one out"
            )
        generated = list(begun.token_ids) if begun is not None else []
        read = [*token_ids, *generated]
        if not 0 <= min(read) <= max(read) < self._vocabulary:
            raise ValueError(f"request {request_id!r}: token ids must lie in [0, {self._vocabulary})")
        parameters = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            max_tokens=min(max_tokens, room) - len(generated),
            logprobs=0,
            stop_token_ids=list(self._end_ids),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # A step of vLLM may still be under way for a request that has finished. It returns that request's id
        # with a token, and vLLM would append the token to any new request of the same id.
        self._begun += 1
        vllm_id = f"{request_id}/{self._begun}"
        running = _Running(vllm_id, self._finder(tuple(stop_strings)), len(token_ids), generated)
        if begun is not None:
            running.logprobs = list(begun.logprobs)
            running.versions = [version for version, count in begun.versions for _ in range(count)]
        self._running[request_id] = running
        return EngineCoreRequest(
            request_id=vllm_id,
            prompt_token_ids=read,
            mm_features=None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=lora,
            cache_salt=None,
            data_parallel_rank=None,
        )

    def awaits(self, output: EngineCoreOutput) -> bool:
        """Return whether a request is running for this output; not if it was dropped during the step."""
        running = self._running.get(given_id(output))
        return running is not None and running.vllm_id == output.request_id

    def take(self, output: EngineCoreOutput, version: int, routes: EngineRoutes | None) -> Finished | None:
        """Append a step's tokens to their request, which `awaits` the output.

        version: of the weights that computed the tokens. Return the generation if it is complete, else None.
        """
        request_id = given_id(output)
        running = self._running[request_id]
        reason: Reason | None = None
        for row, token_id in enumerate(output.new_token_ids):
            assert output.new_logprobs is not None, "logprobs=0 asks for the sampled token's"
            running.token_ids.append(token_id)
            running.logprobs.append(float(output.new_logprobs.logprobs[row][0]))
            running.versions.append(version)
            if token_id in self._end_ids:
                reason = "end"
            elif running.stops.completed(running.token_ids):
                reason = "stop"
            if reason is not None:
                break  # later tokens (speculative ones) do not belong to the turn
        if reason is None and output.finish_reason is not None:
            reason = "length"
        if reason is None:
            return None
        del self._running[request_id]
        read = running.prompt + len(running.token_ids) - 1  # the engine never reads the last token
        return Finished(
            request_id,
            tuple(running.token_ids),
            tuple(running.logprobs),
            reason,
            version_runs(running.versions),
            b"" if routes is None else routes.read(running.vllm_id, read),
        )

    def recorded(self, request_id: str) -> RecordedTurn | None:
        """Return the tokens of a running request so far; None if there are none."""
        running = self._running.get(request_id)
        if running is None or not running.token_ids:
            return None
        versions = version_runs(running.versions)
        return RecordedTurn(tuple(running.token_ids), tuple(running.logprobs), versions)

    def drop(self, request_id: str) -> str | None:
        """Forget a running request and its tokens. Return vLLM's id of it; None if it is not running."""
        running = self._running.pop(request_id, None)
        return None if running is None else running.vllm_id

    def clear(self) -> None:
        self._running.clear()


def given_id(output: EngineCoreOutput) -> str:
    """Return the caller's id of the request that an output of vLLM belongs to."""
    return output.request_id.rpartition("/")[0]


def version_runs(of_tokens: Iterable[int]) -> Versions:
    """Return the runs of the versions of single tokens. Example: [3, 3, 4] gives ((3, 2), (4, 1))."""
    return tuple((version, len(list(tokens))) for version, tokens in groupby(of_tokens))
