"""The serving engine: real vLLM, in this process, driven step by step.

Every rank owns one shard of one replica: rank r serves replica r // tensor as tensor rank r % tensor. All
ranks of a replica must add and abort the same requests in the same order between the same steps; then they
produce the same tokens without talking to each other about it.

Differences from vLLM's own front end (LLM, LLMEngine), which we bypass:
- its output processor renders a string per token and per log-prob, which for a small model costs more than
  the model; here tokens stay ids and only what may end a stop string is decoded (stop_strings.py);
- a turn keeps every token the model emitted, the one that completes the stop string and the end-of-text
  token included, with one log-prob each.

Weights come from the reshard (load_format="dummy"); until `published` says they are in step, nothing
generates.
"""

from __future__ import annotations

import functools
import gc
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer
from vllm.distributed.parallel_state import get_tp_group
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from megatron_stppo.rollout.generation import EngineFailure, Finished, Reason, RolloutError
from megatron_stppo.rollout.stop_strings import StopFinder

# First of what imports vLLM: it sets the environment that vLLM reads while it is imported.
from megatron_stppo.rollout.vllm_setup import build_vllm, end_of_text_ids, join_world, on_cpu, tear_down


@dataclass
class _Running:
    stops: StopFinder
    version: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Engine:
    """See the module. `published` is set by the loop; without it the engine refuses to generate."""

    published: Callable[[], int]

    def __init__(
        self,
        model_path: Path | str,
        *,
        tensor: int = 1,
        dtype: Literal["float32", "bfloat16"] = "float32",
        seed: int = 0,
        max_context: int = 4096,
        max_sequences: int = 256,
        kv_cache_gib: float = 1.0,
        gpu_memory_utilization: float = 0.6,
    ) -> None:
        """Builds this rank's shard. Collective over the default process group (made here if there is none).

        Re-seeds torch, numpy and random, as vLLM does: restore random states after building the engine.
        Raises ConfigError for a vLLM other than the pinned one, or a size the model or the world cannot have.
        """
        join_world()
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        self._build = functools.partial(
            build_vllm,
            model_path,
            tensor=tensor,
            dtype=dtype,
            seed=seed,
            max_context=max_context,
            max_sequences=max_sequences,
            kv_cache_gib=kv_cache_gib,
            gpu_memory_utilization=gpu_memory_utilization,
        )
        self.tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
        self.max_context = max_context
        self.vocabulary = int(config.vocab_size)
        self.replica, self.replicas = dist.get_rank() // tensor, dist.get_world_size() // tensor
        self.published = _never_published
        self._end_ids = end_of_text_ids(model_path, config, self.tokenizer)
        self._running: dict[str, _Running] = {}
        self._finders: dict[tuple[str, ...], StopFinder] = {}
        self._version: int | None = None
        self._start()

    def _start(self) -> None:
        self._llm = self._build()
        self._core = self._llm.engine_core
        self._asleep: set[str] = set()  # parts given back to the GPU
        self._steps = 0  # of this rollout
        # gloo between this replica's ranks: where requests and tool answers are exchanged
        self.group: dist.ProcessGroup = get_tp_group().cpu_group

    def rebuild(self) -> None:
        """Replaces vLLM by a new one after an EngineFailure. Collective over the default process group.

        Its weights are undefined and nothing generates: `parameters()` are new tensors, which a reshard has
        to fill before `refresh`. What was running is forgotten.
        """
        self._running.clear()
        self.published, self._version = _never_published, None
        tear_down(self._llm)
        del self._llm, self._core
        gc.collect()  # weights and key-value cache hang in cycles
        torch.cuda.empty_cache()  # the new engine takes its memory from the driver
        self._start()

    def parameters(self) -> dict[str, torch.Tensor]:
        """This rank's shard by vLLM's names; writing into the tensors changes what the engine computes.

        Stacked experts come one by one: "...w13_weight.3" is a view of the fourth.
        """
        worker, shard = self._llm.model_executor.driver_worker.worker, {}
        for name, parameter in worker.get_model().named_parameters():
            slices = parameter.data.unbind() if parameter.ndim == 3 else ()
            shard |= {f"{name}.{n}": part for n, part in enumerate(slices)} or {name: parameter.data}
        return shard

    def refresh(self) -> int:
        """To be called after each sync: forgets key-value blocks that older weights wrote; the version."""
        version = self.published()
        if self._running:
            raise RolloutError(f"{len(self._running)} requests are running; abort them before refreshing")
        if not self._core.reset_prefix_cache():
            raise RolloutError("vLLM kept its prefix cache because blocks are in use; abort requests first")
        self._version = version
        return version

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        seed: int,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        stop_strings: Sequence[str] = (),
    ) -> None:
        """Queues one generation after `token_ids`; temperature 0 is greedy. `request_id` must not be running.

        At most max_context - len(token_ids) tokens are written. Raises ValueError for an id outside the
        vocabulary or a context that is full, RolloutError when the weights are not in step.
        """
        version = self._synchronised()
        if request_id in self._running:
            raise ValueError(f"request_id={request_id!r} is running; ids are unique")
        room = self.max_context - len(token_ids)
        if not token_ids or room < 1 or max_tokens < 1:
            raise ValueError(
                f"request {request_id!r}: {len(token_ids)} tokens and max_tokens={max_tokens} do not fit a "
                f"context of {self.max_context}; at least one token in and one out"
            )
        if not 0 <= min(token_ids) <= max(token_ids) < self.vocabulary:
            raise ValueError(f"request {request_id!r}: token ids must lie in [0, {self.vocabulary})")
        parameters = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            max_tokens=min(max_tokens, room),
            logprobs=0,
            stop_token_ids=self._end_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._core.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=list(token_ids),
                mm_features=None,
                sampling_params=parameters,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )
        self._running[request_id] = _Running(self._finder(tuple(stop_strings)), version)

    def step(self) -> list[Finished]:
        """One forward pass: a token for every running sequence. Returns the generations that are complete."""
        if not self._running:
            return []
        self._synchronised()
        finished, self._steps = [], self._steps + 1
        for output in self._output():
            done = self._take(output)
            if done is not None:
                finished.append(done)
        stopped = [done.request_id for done in finished if done.reason == "stop"]
        self._core.abort_requests(stopped)  # vLLM does not know about our stop strings
        return finished

    def _output(self) -> list[EngineCoreOutput]:
        """Raises EngineFailure: what vLLM holds after an error of its own cannot be trusted."""
        try:
            outputs: list[EngineCoreOutput] = self._core.get_output().outputs
        except Exception as error:  # answered by a rebuild, which is counted
            self._running.clear()
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno} in step {self._steps}"
            said = f"{type(error).__name__} at {where}"
            raise EngineFailure(f"vLLM failed: {said}: {error}", said) from error
        return outputs

    def abort(self, request_id: str) -> None:
        """Forgets a running request and its tokens; unknown ids are ignored: it may have finished."""
        if self._running.pop(request_id, None) is not None:
            self._core.abort_requests([request_id])

    def abort_all(self) -> None:
        """Ends a rollout: forgets what is running."""
        for request_id in list(self._running):
            self.abort(request_id)
        self._steps = 0

    def close(self) -> None:
        """Ends vLLM, and with it the process groups: nothing collective may follow."""
        self.abort_all()
        self._core.shutdown()

    @property
    def unfinished(self) -> int:
        return len(self._running)

    def sleep(self) -> None:
        """Gives weights and key-value cache back to the GPU; on a CPU they stay where they are."""
        if self._running:
            raise RolloutError(f"{len(self._running)} requests are running; the engine cannot sleep")
        if not self._asleep and not on_cpu():
            self._core.sleep(2)
        self._asleep, self._version = {"weights", "kv_cache"}, None

    def wake_weights(self) -> None:
        """Memory for the weights, with undefined content: the reshard fills it."""
        self._wake("weights")

    def wake(self) -> None:
        """Memory for all the rest: after this and `refresh` the engine generates again."""
        self._wake("weights")
        self._wake("kv_cache")

    def _wake(self, part: str) -> None:
        if part in self._asleep and not on_cpu():
            self._core.wake_up([part])
        self._asleep.discard(part)

    def _synchronised(self) -> int:
        """The published version. Raises what `published` raises, or RolloutError before a refresh."""
        version = self.published()
        if self._asleep:
            raise RolloutError("the engine is asleep; wake it before generating")
        if version != self._version:
            raise RolloutError(
                f"weights of version {version} are published but the engine was refreshed for "
                f"{self._version}; call refresh() after each sync, or the prefix cache serves old weights"
            )
        return version

    def _take(self, output: EngineCoreOutput) -> Finished | None:
        """Appends a step's tokens to their request; the generation, if they complete it."""
        running = self._running.get(output.request_id)
        if running is None:  # aborted while the step was under way
            return None
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            said = f"request {output.request_id} ended with {output.finish_reason} in step {self._steps}"
            raise EngineFailure(f"vLLM failed: {said}", said)
        reason: Reason | None = None
        for row, token_id in enumerate(output.new_token_ids):
            assert output.new_logprobs is not None, "logprobs=0 asks for the sampled token's"
            running.token_ids.append(token_id)
            running.logprobs.append(float(output.new_logprobs.logprobs[row][0]))
            if token_id in self._end_ids:
                reason = "end"
            elif running.stops.completed(running.token_ids):
                reason = "stop"
            if reason is not None:
                break  # tokens after it (speculative ones) were never asked for
        if reason is None and output.finish_reason is not None:
            reason = "length"
        if reason is None:
            return None
        del self._running[output.request_id]
        return Finished(
            output.request_id, tuple(running.token_ids), tuple(running.logprobs), reason, running.version
        )

    def _finder(self, stop_strings: tuple[str, ...]) -> StopFinder:
        if stop_strings not in self._finders:
            self._finders[stop_strings] = StopFinder(self.tokenizer, stop_strings)
        return self._finders[stop_strings]


def _never_published() -> int:
    raise RolloutError("no weights were published to the engine; reshard first (Engine.published is not set)")
