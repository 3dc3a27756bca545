"""The running requests of one engine: what vLLM is asked for, the tokens so far, and where each one ends.

vLLM gets no stop strings, and tokens stay ids: only tokens that may end a stop string are decoded. A
generation keeps every token that the model emitted, with one log-prob each. This includes the token that
completes the stop string and the end-of-text token.

A stop string of n bytes that ends in the newest token lies within the last n tokens that print text, because
each of them holds at least one byte. Decoding and searching these n tokens is therefore exact. It is done
only if the newest token can hold the last character of a stop string. The text of each token id is cached,
for all finders of an engine together. The text is that which the environment reads (decode_plain).

Tokens of one byte (byte fallback) are decoded together: one wrong byte makes UNFINISHED of all that are side
by side. So a window that begins with such a token is extended to the first of them.
"""

import functools
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Required, TypedDict

from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from megatron_stppo.base.types import Versions
from megatron_stppo.data.text.plain_text import decode_plain, encode_plain
from megatron_stppo.rollout.vllm.engine_routes import EngineRoutes
from megatron_stppo.rollout.vllm.generation import Finished, Reason, RecordedTurn

UNFINISHED = "\ufffd"  # printed by decoders for the bytes of an incomplete character
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token of one byte (byte fallback)


class StopFinder:
    """Search for the stop strings of one kind of request.

    Raises ValueError for an empty stop string.
    Example: with one token per character, StopFinder(tokenizer, ("</a>",)).completed(ids of "x</a>")
    is True, and completed(ids of "x</a") is False.
    """

    def __init__(
        self, tokenizer: Any, stop_strings: Sequence[str], printed: dict[int, str] | None = None
    ) -> None:
        """printed: the texts of token ids that are known; new ones are added. Default: none."""
        if any(not stop for stop in stop_strings):
            raise ValueError(
                f"stop_strings={tuple(stop_strings)!r}: an empty string stops at once; remove it"
            )
        self._tokenizer = tokenizer
        self._stops = tuple(stop_strings)
        endings = {stop[-1] for stop in self._stops}
        # The bytes of a split character print as UNFINISHED; they may complete a last character of several.
        self._endings = endings if all(map(str.isascii, endings)) else endings | {UNFINISHED}
        self._window = max((len(stop.encode()) for stop in self._stops), default=0)
        self._printed = {} if printed is None else printed

    def completed(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last of `token_ids` completes a stop string.

        `token_ids` are the tokens of one turn so far. Call this after each token: a stop string that an
        earlier token completed may not be found.
        """
        if not self._stops or self._endings.isdisjoint(self._text(token_ids[-1])):
            return False
        tail = decode_plain(self._tokenizer, self._tail(token_ids))
        return any(stop in tail for stop in self._stops)

    def end_with(self, text: str) -> bool:
        """Return whether a turn of this text ends with a stop string, and no token before its last has one.

        Example: with the stop string "!", "a!" is such a text; "a" and "a! b" are not.
        """
        ids = encode_plain(self._tokenizer, text)
        return next((n for n in range(1, len(ids) + 1) if self.completed(ids[:n])), None) == len(ids)

    def _tail(self, token_ids: Sequence[int]) -> list[int]:
        start, printing = len(token_ids), 0
        while start > 0 and printing < self._window:
            start -= 1
            printing += bool(self._text(token_ids[start]))
        while start > 0 and self._is_byte(token_ids[start]) and self._is_byte(token_ids[start - 1]):
            start -= 1
        return list(token_ids[start:])

    def _is_byte(self, token_id: int) -> bool:
        return _BYTE.fullmatch(self._tokenizer.convert_ids_to_tokens(token_id) or "") is not None

    def _text(self, token_id: int) -> str:
        text = self._printed.get(token_id)
        if text is None:
            text = self._printed[token_id] = decode_plain(self._tokenizer, [token_id])
        return text


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
