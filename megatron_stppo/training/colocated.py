"""Colocated rollouts: one rank's engine, models and reshard, and their assembly."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megatron_stppo.agents.endpoint.opening import open_environment
from megatron_stppo.base.types import Task
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config
from megatron_stppo.data.exchange import Played
from megatron_stppo.data.ledger import Terms
from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.environments.base import AnyEnvironment
from megatron_stppo.model import build
from megatron_stppo.model.layers import layer_spec
from megatron_stppo.model.learner import Learner, build_learner
from megatron_stppo.model.offload import Phase
from megatron_stppo.observe.console import timed
from megatron_stppo.parallel.abandon import on_any_rank
from megatron_stppo.parallel.groups import MeshRank
from megatron_stppo.rollout.episodes.collect import Progress, RolloutSettings, collect
from megatron_stppo.rollout.episodes.failures import FailureLimit
from megatron_stppo.rollout.episodes.fitting import fitting_tasks
from megatron_stppo.rollout.vllm.engine import Engine
from megatron_stppo.rollout.vllm.generation import EngineFailure, Restarts
from megatron_stppo.rollout.vllm.vllm_setup import EngineSettings
from megatron_stppo.training.rollouts import resampled, rollout_settings, seed_of
from megatron_stppo.validation import model_layout
from megatron_stppo.validation.run_folder import check_resumed
from megatron_stppo.weights.reshard.resharder import Resharder
from megatron_stppo.weights.sharding.hf_names import read_shape
from megatron_stppo.weights.sharding.low_rank import served_adapters, transfer
from megatron_stppo.weights.sharding.spans import serving_layouts, training_layouts


@dataclass
class Worker:
    """One rank's share of a run: learner, engine, reshard and environment.

    If the engine is rebuilt, the reshard is replaced too.
    """

    learner: Learner
    engine: Engine
    reshard: Resharder
    make_environment: Callable[[], AnyEnvironment]
    restarts: Restarts
    failures: FailureLimit
    cursor: TaskCursor | None  # over data.train; None if none of it is played
    stop: Callable[[], str]  # returns why any rank must leave, or ""; see `play`

    def __post_init__(self) -> None:
        self._position = self.cursor.state() if self.cursor is not None else {}

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.engine.tokenizer

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch that draw() has returned."""
        return {"cursor": self._position}

    def episodes(self) -> bytes:
        """Return b"": all episodes are trained on at once."""
        return b""

    def restore(self, state: Mapping[str, Any], episodes: Callable[[], bytes] = bytes) -> None:
        """Continue from a checkpoint's state. Its episodes are played again.

        Raises ConfigError if it was written in order of completion, with tasks that were trained out of
        their order.
        """
        assert self.cursor is not None, "validation/checks.py requires data.train"
        if "ledger" in state:
            check_resumed(self.learner.config, state["ledger"])
        self.cursor.restore(state["cursor"])
        self._position = self.cursor.state()

    def measure(self) -> dict[str, Any]:
        return {"engine/restarts": self.restarts.count}

    def draw(self, iteration: int) -> Played:
        """Play the next tasks of data.train, and with rollout.resample more of them."""
        assert self.cursor is not None, "validation/checks.py requires data.train"
        config, rollout = self.learner.config, self.learner.config.rollout
        settings, seed = rollout_settings(config), seed_of(config.run, iteration)

        def play(tasks: Sequence[Task], first: int) -> Played:
            samples = rollout.samples_per_task
            return self._repeated(seed, lambda: self._play(tasks, samples, settings, seed, first_group=first))

        terms = Terms(rollout.tasks_per_iteration, rollout.samples_per_task, resample=rollout.resample)
        played = resampled(self.cursor.take, play, terms)
        self.failures.check(played.with_dropped, played.own)
        self._position = self.cursor.state()
        return played

    def close(self) -> None:
        dist.barrier()  # a rank that exits early would break collectives of the others
        self.engine.close()
        process.stop()

    def publish(self, version: int) -> None:
        """Wake the engine and copy the policy's weights to it, as `version`, unless it has them."""
        self.learner.load_for("reshard")
        torch.cuda.empty_cache()  # the engine takes its memory from the driver, not from torch's cache
        if self.engine.wake_weights():
            self.reshard.forget()
        if not self.reshard.holds(version):
            self.reshard.sync(version)
        self.learner.load_for("rollout")
        torch.cuda.empty_cache()  # free the reshard's buffers before the key-value cache is allocated
        self.engine.wake()
        self.engine.refresh()

    def load_for(self, phase: Phase) -> None:
        """Put the engine to sleep and load what the phase needs from host memory."""
        self.engine.sleep()
        self.learner.load_for(phase)

    def play(
        self,
        tasks: Sequence[Task],
        samples: int,
        settings: RolloutSettings,
        seed: int,
        progress: Progress | None = None,
    ) -> Played:
        """Play `samples` episodes of each task and return their trajectories.

        The episodes are divided over the engine replicas. If vLLM fails, a new engine plays all episodes
        again and generates the same tokens, because the seeds are the same.
        Raises DoNotRestart or EngineFailure if a new engine would not help, EngineLost if it needs a new
        process (see Restarts), and TooManyFailures. Raises Abandoned if the run must leave.
        """
        stop = self.stop
        played = self._repeated(seed, lambda: self._play(tasks, samples, settings, seed, progress, stop=stop))
        self.failures.check(played.every, played.own)
        return played

    def _repeated(self, seed: int, play: Callable[[], Played]) -> Played:
        """Return what `play` returns, which a new engine plays again if vLLM fails."""
        while True:
            try:
                played = play()
                self.restarts.passed()
                return played
            except EngineFailure as failure:
                self.restarts.admit(failure, seed)
            self._renew_engine()

    def _renew_engine(self) -> None:
        """Replace the engine by a new one with the policy version that the failed one served.

        No request is sent before the reshard's checks have passed.
        """
        learner, version = self.learner, self.reshard.published()
        del self.reshard  # it holds the failed engine's weights
        self.engine.rebuild()
        self.engine.sleep()  # as after the first build: a reshard needs the key-value cache's memory
        learner.load_for("reshard")  # the new reshard takes views of the policy's weights
        self.reshard = engine_sync(learner, self.engine)
        self.publish(version)

    def _play(
        self,
        tasks: Sequence[Task],
        samples: int,
        settings: RolloutSettings,
        seed: int,
        progress: Progress | None = None,
        first_group: int = 0,
        stop: Callable[[], str] | None = None,
    ) -> Played:
        """first_group: the number of the first group, which with the seed decides the random numbers."""
        engine, numbered = self.engine, enumerate(tasks, first_group)
        everything = [(task, group) for group, task in numbered for _ in range(samples)]
        cuts = [len(everything) * r // engine.replicas for r in range(engine.replicas + 1)]
        first, last = cuts[engine.replica], cuts[engine.replica + 1]
        mine = everything[first:last]
        played = collect(
            engine,
            [task for task, _ in mine],
            self.make_environment,
            settings,
            seed,
            progress,
            first_index=first_group * samples + first,
            groups=[group for _, group in mine],
            stop=stop,
        )
        # all ranks of a replica have its trajectories; each keeps an equal part
        ranks = dist.get_world_size() // engine.replicas
        place = dist.get_rank() % ranks
        return Played.of(played[len(played) * place // ranks : len(played) * (place + 1) // ranks])


def assemble(
    config: Config,
    resume: bool = False,
    *,
    training: bool = True,
    draws: bool = True,
    begun: tuple[MeshRank, Callable[[], AnyEnvironment]] | None = None,
    notice: Callable[[], str] = lambda: "",
) -> Worker:
    """Build and return the worker of this rank. Collective.

    training: False leaves optimizers, critic and reference out. draws: False leaves the tasks of data.train
    out, which only `draw` plays. resume: wait for unreachable tools. begun: the place of this rank and what
    open_environment has returned, if it has both already. notice: returns why the run must end soon, or "".
    Raises ConfigError, before anything large is built, if the configuration does not fit the model or the
    world size, or if a tool is unreachable without `resume`. Raises ToolsStayAway if tools stay unreachable
    with `resume`.
    """
    shape = read_shape(config.model.path)
    model_layout.check_parallel(config, process.world_size())
    model_layout.check_engine(config, process.world_size())
    mesh = process.start(config) if begun is None else begun[0]
    dtype = process.dtype(config)
    train = fitting_tasks(config, "train", shown=mesh.rank == 0).tasks if draws and config.data.train else ()
    make_environment = open_environment(config, resume) if begun is None else begun[1]
    with timed("engine", mesh.rank == 0):
        engine = build_engine(config, dtype, routes=training and config.replays_rollout)
        engine.sleep()  # the trainer uses its memory until the first reshard
    with timed("models", mesh.rank == 0):
        learner = build_learner(config, shape, mesh, dtype, training)
    return Worker(
        learner=learner,
        engine=engine,
        reshard=engine_sync(learner, engine),
        make_environment=make_environment,
        restarts=Restarts(config.rollout.engine_restarts, in_process=not torch.cuda.is_available()),
        failures=FailureLimit(config.environment.max_failure_rate),
        cursor=TaskCursor(train, config.run.seed) if train else None,
        stop=on_any_rank(notice),
    )


def engine_sync(learner: Learner, engine: Engine) -> Resharder:
    """Build the reshard from the policy to the engine. Collective.

    From now on the engine generates only with weights that this reshard has published.
    """
    config, shape, mesh = learner.config, learner.shape, learner.mesh
    weights = build.named_parameters(learner.policy)
    training = training_layouts(shape, mesh.layout, spec=layer_spec(config))
    serving = serving_layouts(shape, mesh.world, config.engine_tensor)
    rows = transfer(shape, training, serving, served_adapters(config.model.lora, shape))
    reshard = Resharder(
        weights,
        engine.parameters(),
        *rows[:3],
        build.adapter_terms(weights, shape, config, mesh, merged=config.model.lora.sync == "merged"),
        changed=rows.changed,
        ranks_per_node=process.ranks_per_node(),
    )
    engine.published = reshard.published
    return reshard


def build_engine(config: Config, dtype: torch.dtype, routes: bool) -> Engine:
    """Build this rank's shard of the engine. Collective."""
    r, adapters = config.rollout, served_adapters(config.model.lora, read_shape(config.model.path))
    settings = EngineSettings(
        config.model.path,
        template_arguments=config.model.template_arguments,
        tensor=config.engine_tensor,
        dtype="bfloat16" if dtype == torch.bfloat16 else "float32",
        float32_logits=config.model.float32_logits(torch.cuda.is_available()),
        seed=config.run.seed,
        max_context=config.max_context,
        max_sequences=r.max_sequences,
        kv_cache_gib=r.kv_cache_gib,
        gpu_memory_utilization=r.gpu_memory_utilization,
        timeout=config.timeout,
        routes=routes,
        adapters=adapters if adapters is not None and adapters.alone else None,
        options=r.vllm,
    )
    return Engine(settings)
