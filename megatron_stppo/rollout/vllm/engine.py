"""The serving engine: vLLM in this process, driven step by step.

Every rank holds one shard of one replica: rank r serves replica r // tensor as tensor rank r % tensor. All
ranks of a replica must add and abort the same requests in the same order between the same steps. They then
produce the same tokens without exchanging requests or tokens. Every COMPARED_EVERY steps they compare a hash.

Differences from vLLM's own front end (LLM, LLMEngine), which is bypassed:
- vLLM's output processor renders a string per token and per log-prob, which costs more than the forward pass
  of a small model. Here tokens stay ids (requests.py).
- A turn keeps every token that the model emitted, with one log-prob each (requests.py).

The weights come from the reshard (load_format="dummy"). The engine generates only after `published` returns
their version without an error.

New weights may arrive between two steps while requests are running: call `settle`, write the weights, and
call `refresh(recompute=True)`. Then the same turns continue, and every token has the version of the
weights that computed it.
"""

import gc
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, FinishReason

from megatron_stppo.rollout.vllm.engine_adapters import REQUEST, EngineAdapters
from megatron_stppo.rollout.vllm.generation import EngineFailure, Finished, RecordedTurn, RolloutError
from megatron_stppo.rollout.vllm.requests import Requests, Sampling, given_id

# vllm_setup sets the environment variables that vLLM reads while it is imported.
from megatron_stppo.rollout.vllm.vllm_setup import (
    EngineSettings,
    build_vllm,
    end_of_text_ids,
    join_world,
    on_cpu,
    tear_down,
    weights,
)
from megatron_stppo.weights.sharding.hf_load import load_config, load_tokenizer

COMPARED_EVERY = 8  # steps between two comparisons of the tokens of an engine's ranks


class Engine:
    """One rank's shard of a vLLM replica; see the module.

    `published` returns the version of the weights. The loop sets it; before that the engine refuses to
    generate.
    """

    published: Callable[[], int]

    def __init__(self, settings: EngineSettings) -> None:
        """Build this rank's shard. Collective over the default process group, which is made here if missing.

        With `routes`, the experts of every token are recorded (Finished.routes). With `adapters`,
        `parameters` returns A and B too. vLLM re-seeds torch, numpy and random: restore their states after
        building the engine. Raises ConfigError as build_vllm does.
        """
        join_world()
        self._settings, config = settings, load_config(settings.model_path)
        self.tokenizer = load_tokenizer(settings.model_path, settings.template_arguments)
        self.vocabulary = int(config.vocab_size)
        self.replica = dist.get_rank() // settings.tensor
        self.replicas = dist.get_world_size() // settings.tensor
        self.published = _never_published
        self.end_ids = end_of_text_ids(settings.model_path, config, self.tokenizer)
        self._requests = Requests(self.tokenizer, self.end_ids, settings.max_context, self.vocabulary)
        self._version: int | None = None
        self._start()

    def _start(self) -> None:
        self._llm = build_vllm(self._settings)
        self._core: Any = self._llm.engine_core  # the client of an engine in this process
        worker = self._llm.model_executor.driver_worker.worker
        self._routes = worker.routes if self._settings.routes else None
        if self._routes is not None:
            self._routes.follow(self._core)
        served = self._settings.adapters
        self._adapters = EngineAdapters(worker, served) if served is not None else None
        self._asleep: set[Literal["weights", "kv_cache"]] = set()  # whose memory is released
        self._steps = 0  # of this rollout
        self._hash = 0  # of all tokens of this engine; equal on its ranks
        self._failed = False
        # gloo group of this replica's ranks, over which the environments' answers are broadcast
        self.group: dist.ProcessGroup = get_tp_group().cpu_group

    def rebuild(self) -> None:
        """Replace vLLM by a new one after an EngineFailure. Collective over the default process group.

        Running requests are dropped. The new weights are undefined and the engine refuses to generate:
        `parameters()` returns new tensors, which a reshard must fill before `refresh` is called.
        """
        self._requests.clear()
        self.published, self._version = _never_published, None
        tear_down(self._llm)
        # everything that refers to the old model, or both models would be in memory at once
        del self._llm, self._core, self._routes, self._adapters
        gc.collect()  # reference cycles hold the weights and the key-value cache
        torch.cuda.empty_cache()  # the new engine takes its memory from the driver
        self._start()

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return this rank's shard by vLLM's names. Writing into the tensors changes the engine's weights.

        Stacked experts are returned one by one: "...w13_weight.3" is a view of the fourth expert.
        """
        own = weights(self._llm.model_executor.driver_worker.worker.get_model())
        return own if self._adapters is None else own | self._adapters.tensors()

    def settle(self) -> list[Finished]:
        """Complete the steps that vLLM has under way, without a new one. Return the complete generations.

        Call this before the weights change while requests are running: afterwards nothing reads the weights.
        Raises RolloutError as `step` does, and EngineFailure if vLLM raises an error.
        """
        if not self._requests:  # _drain has waited for the steps
            return []
        self._synchronised()
        finished: list[Finished] = []
        scheduler = self._core.engine_core.scheduler
        scheduler.set_pause_state(PauseState.PAUSED_ALL)  # steps only return those that are under way
        try:
            while self._under_way:
                finished += self._complete(self._output())
        finally:
            scheduler.set_pause_state(PauseState.UNPAUSED)
        return finished

    def refresh(self, *, recompute: bool = False) -> int:
        """Drop the key-value blocks that older weights wrote, and return the published version.

        Call this after each sync. With `recompute`, running requests lose their blocks too: the next steps
        compute them again with the new weights, and the requests continue. Raises RolloutError if requests
        are running, and `recompute` is False or the engine records routes; if a step is under way; or if vLLM
        keeps its prefix cache.
        """
        version = self.published()
        if self._requests and not recompute:
            raise RolloutError(f"{len(self._requests)} requests are running; abort them before refreshing")
        if self._requests and self._routes is not None:
            raise RolloutError(
                f"{len(self._requests)} requests are running; their recorded experts would be of several "
                "versions; complete the requests before refreshing"
            )
        if self._under_way:
            raise RolloutError("a step is under way while the weights change; call settle() before each sync")
        if not self._core.reset_prefix_cache(reset_running_requests=recompute):
            raise RolloutError("vLLM kept its prefix cache because blocks are in use; abort requests first")
        if self._routes is not None:
            self._routes.clear()
        self._version = version
        return version

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        begun: RecordedTurn | None = None,
        **sampling: Unpack[Sampling],
    ) -> None:
        """Queue a generation that continues `token_ids`.

        At most max_context - len(token_ids) tokens are generated. begun: the first tokens of the generation,
        fewer than max_tokens, which are not generated again. `request_id` may be used again after the
        generation is complete: vLLM gets an id that is never used twice. Raises ValueError if `request_id`
        is running, a token id is outside the vocabulary or the context is full; RolloutError if the weights
        are not synchronised.
        """
        self._synchronised()
        lora = None if self._adapters is None else REQUEST
        request = self._requests.begin(request_id, token_ids, begun, lora, **sampling)
        try:
            self._core.add_request(request)
        except BaseException:
            self._requests.drop(request_id)
            raise

    def step(self) -> list[Finished]:
        """Run one forward pass, which adds a token to the running sequences.

        Return the complete generations. With asynchronous scheduling (on a GPU), these are the generations
        that the pass before completed. Raises EngineFailure if vLLM raises an error, or if the ranks of this
        engine have sampled different tokens.
        """
        if not self._requests:
            return []
        self._synchronised()
        self._steps += 1
        outputs = self._output()
        sampled = (token_id for output in outputs for token_id in output.new_token_ids)
        self._hash = hash((self._hash, *sampled))  # of integers: the same in every process
        finished = self._complete(outputs)
        if self._steps % COMPARED_EVERY == 0 or not self._requests:
            self._compare()
        self._drain()
        return finished

    def _compare(self) -> None:
        """Compare the tokens of the ranks of this engine. Collective over `group`.

        Ranks whose tokens differ form different batches sooner or later, and a collective of vLLM would never
        end. Raises EngineFailure on all of them.
        """
        if self._settings.tensor == 1:
            return
        of_ranks = [torch.empty(1, dtype=torch.int64) for _ in range(self._settings.tensor)]
        dist.all_gather(of_ranks, torch.tensor([self._hash]), group=self.group)
        first, *others = torch.cat(of_ranks).tolist()
        differing = [rank for rank, other in enumerate(others, 1) if other != first]
        if differing:
            self._requests.clear()
            self._failed = True
            said = f"tensor-parallel ranks {differing} of replica {self.replica} differ in step {self._steps}"
            raise EngineFailure(
                f"the ranks of an engine sampled different tokens: {said} or before, from rank 0; if it "
                "occurs again, check the GPUs of these ranks",
                said,
            )

    def _complete(self, outputs: Sequence[EngineCoreOutput]) -> list[Finished]:
        """Append a step's tokens to their requests. Return the complete generations, which vLLM drops."""
        assert self._version is not None, "step() refuses to run without a version"
        finished, stopped = [], []
        for output in filter(self._requests.awaits, outputs):
            if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                self._failed = True
                said = f"request {given_id(output)} ended with {output.finish_reason} in step {self._steps}"
                raise EngineFailure(f"vLLM failed: {said}", said)
            done = self._requests.take(output, self._version, self._routes)
            if done is not None:
                finished.append(done)
                stopped += [output.request_id] if done.reason == "stop" else []
        # vLLM gets no stop strings and would continue. Of several at once it makes a set, whose order differs
        # between processes, and frees their cache in this order: the schedulers of two ranks would diverge.
        for request in stopped:
            self._core.abort_requests([request])
        return finished

    def _output(self) -> list[EngineCoreOutput]:
        """Return vLLM's outputs of one step.

        Raises EngineFailure if vLLM raises an error, because vLLM's state is then undefined.
        """
        try:
            outputs: list[EngineCoreOutput] = self._core.get_output().outputs
        except Exception as error:  # the caller rebuilds the engine, and restarts are counted
            self._requests.clear()
            self._failed = True
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno} in step {self._steps}"
            said = f"{type(error).__name__} at {where}"
            raise EngineFailure(f"vLLM failed: {said}: {error}", said) from error
        return outputs

    def _drain(self) -> None:
        """Wait for the steps that vLLM has under way, if no request is running.

        With asynchronous scheduling, vLLM begins a step before it returns the tokens of the step before. The
        tokens of the last steps belong to requests that have ended, and are dropped. Afterwards the engine
        may sleep and its cache may be reset: nothing reads the weights.
        Raises EngineFailure if vLLM raises an error.
        """
        while not self._requests and self._under_way:
            self._output()

    def abort(self, request_id: str) -> None:
        """Drop a running request and its tokens. Unknown ids are ignored: the request may have finished."""
        vllm_id = self._requests.drop(request_id)
        if vllm_id is not None:
            self._core.abort_requests([vllm_id])
            self._drain()

    def abort_all(self) -> None:
        """End a rollout: drop all running requests. Raises EngineFailure if vLLM raises an error."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._steps = 0

    def close(self) -> None:
        """Shut down vLLM and the process groups. No collective may follow."""
        self.abort_all()
        self._core.shutdown()

    def recorded(self, request_id: str) -> RecordedTurn | None:
        """Return what was generated so far for a running request; None if that is nothing."""
        return self._requests.recorded(request_id)

    @property
    def unfinished(self) -> int:
        return len(self._requests)

    @property
    def prefix_block(self) -> int:
        """The number of tokens of a block of the prefix cache, which holds whole blocks; 0: there is none."""
        cache = self._llm.vllm_config.cache_config
        return int(cache.block_size) if cache.enable_prefix_caching else 0

    @property
    def computed_tokens(self) -> int:
        """The number of tokens of running requests whose keys and values have been computed.

        This many tokens are computed again after `refresh(recompute=True)`; fewer if requests share a prefix.
        """
        return sum(request.num_computed_tokens for request in self._core.engine_core.scheduler.running)

    def sleep(self) -> None:
        """Release the GPU memory of the weights and of the key-value cache. On a CPU both stay in memory.

        vLLM drops everything that was allocated while it loaded the model, and keeps a copy of the buffers
        only. The parameters come back with undefined content, which the reshard overwrites; so does any
        tensor that a layer keeps as a plain attribute, which nothing overwrites.
        """
        if self._requests:
            raise RolloutError(f"{len(self._requests)} requests are running; the engine cannot sleep")
        if not self._asleep and not on_cpu():
            # After an error the state of vLLM's scheduler is undefined: only the memory is released.
            released = self._core.engine_core.model_executor if self._failed else self._core
            released.sleep(2)  # the level
        self._asleep = {"weights", "kv_cache"}
        self._version = None

    def wake_weights(self) -> bool:
        """Allocate memory for the weights. Return whether their content is undefined, until a reshard fills
        it, because the engine has slept; on a CPU, it never is."""
        dropped = self._wake("weights")
        if dropped and self._adapters is not None:  # its layers keep tensors that no reshard fills
            self._adapters.clear()
        return dropped

    def wake(self) -> None:
        """Allocate memory for the rest. After this and `refresh` the engine generates again."""
        self.wake_weights()
        self._wake("kv_cache")

    def _wake(self, part: Literal["weights", "kv_cache"]) -> bool:
        """Allocate a part whose memory is released. Return whether its content is undefined."""
        dropped = part in self._asleep and not on_cpu()
        if dropped:
            self._core.wake_up([part])
        self._asleep.discard(part)
        return dropped

    @property
    def _under_way(self) -> bool:
        """Whether vLLM has begun steps whose tokens it has not returned; never on a CPU (see _drain)."""
        return bool(self._core.engine_core.batch_queue)

    def _synchronised(self) -> None:
        """Raise RolloutError if the engine is asleep or was not refreshed for the published version.
        Exceptions of `published` are passed on."""
        version = self.published()
        if self._asleep:
            raise RolloutError("the engine is asleep; wake it before generating")
        if version != self._version:
            raise RolloutError(
                f"weights of version {version} are published but the engine was refreshed for "
                f"{self._version}; call refresh() after each sync, or the prefix cache serves old weights"
            )


def _never_published() -> int:
    raise RolloutError("no weights were published to the engine; reshard first (Engine.published is not set)")
