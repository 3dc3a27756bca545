"""Checks what the engine is asked for: the requests of two draws of training and of an evaluation.

A request is recorded where vLLM gets it. Every field of its sampling parameters is compared, also those that
no field of the configuration names: they must be vLLM's defaults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from megatron_stppo.base.types import Task
from megatron_stppo.config import Config
from megatron_stppo.data import tasks
from megatron_stppo.data.exchange import Played
from megatron_stppo.data.text.plain_text import decode_plain
from megatron_stppo.environments import choose
from megatron_stppo.evidence.bench.stage import Checked, Stage, judged, of_every_rank
from megatron_stppo.parallel.collectives import gather_records
from megatron_stppo.rollout.episodes.fitting import FittingTasks
from megatron_stppo.training.colocated import Worker
from megatron_stppo.training.rollouts import evaluate_tasks, held_out_tasks
from megatron_stppo.weights.sharding.hf_names import read_shape
from megatron_stppo.weights.sharding.low_rank import served_adapters

ASKED, PLACES, ENDS = "the engine is asked as configured", "tasks are where they belong", "turns end"
DRAWS, FEW, SAMPLES = 2, 3, 2  # iterations that are drawn; tasks of each, at least; episodes of a task
# Those that differ between requests, or say how vLLM returns its tokens.
FREE = ("temperature", "top_p", "seed", "max_tokens", "logprobs", "detokenize", "output_kind")
REMEDY = "rollout, evaluate, data: report this line; the episodes are not sampled as configured"


@dataclass(frozen=True)
class Asked:
    """A request that vLLM got. Example: Asked(7, 1.0, 0.9, 64, False, "top_k=20")."""

    seed: int
    temperature: float
    top_p: float
    tokens: int  # at most
    adapter: bool
    others: str  # sampling parameters that are not vLLM's defaults

    @classmethod
    def of(cls, request: EngineCoreRequest, ends: Collection[int]) -> Asked:
        """ends: the tokens that must end a turn."""
        given, adapter = request.sampling_params, request.lora_request is not None
        assert given is not None and given.seed is not None and given.max_tokens is not None
        usual = SamplingParams(**{name: getattr(given, name) for name in FREE}, stop_token_ids=list(ends))
        names = [name for name in given.__struct_fields__ if not name.startswith("_")]
        values = {name: getattr(given, name) for name in names}
        others = [f"{name}={value}" for name, value in values.items() if value != getattr(usual, name)]
        return cls(given.seed, given.temperature, given.top_p, given.max_tokens, adapter, ", ".join(others))


def asked(stage: Stage) -> Iterator[Checked]:
    """Draw two iterations, evaluate, and compare requests, tasks and ends of turns. Collective."""
    yield _ends(stage)
    rollouts, config = stage.rollouts, stage.config
    if not isinstance(rollouts, Worker):
        yield from (
            Checked(line, "skipped", "replicas have engines of their own") for line in (ASKED, PLACES)
        )
        return
    rollouts.publish(stage.version)  # wakes the engine
    learner, before = stage.learner, rollouts.state()
    count = max(FEW, rollouts.engine.replicas)  # each engine has some
    few = {"tasks_per_iteration": count, "samples_per_task": SAMPLES, "resample": 0}
    rollouts.learner = replace(learner, config=config.changed(rollout=few))
    draws = [_recorded(rollouts, lambda n=n: rollouts.draw(n)) for n in range(DRAWS)]  # type: ignore[misc]
    rollouts.restore(before)
    evaluated = list[Task](), list[Asked]()
    if config.data.evaluate is not None:
        rollouts.learner = replace(learner, config=config.changed(evaluate={"samples": SAMPLES}))
        evaluated = _recorded(rollouts, lambda: _evaluation(rollouts, count))
    rollouts.learner = learner
    drawn = [request for _, requests in draws for request in requests]
    wrong = [*wrong_requests(config, drawn), *wrong_requests(config, evaluated[1], evaluates=True)]
    counts = f"{len(drawn)} requests of {DRAWS} draws, {len(evaluated[1])} of an evaluation"
    yield judged(ASKED, not wrong, "; ".join(wrong[:3]) or counts, REMEDY)
    yield _places(config, [task for played, _ in draws for task in played], evaluated[0])


def _recorded(rollouts: Worker, play: Callable[[], Played]) -> tuple[list[Task], list[Asked]]:
    """Return the tasks that this rank keeps, and the requests of all engines, each once. Collective."""
    engine, requests = rollouts.engine, list[Asked]()
    core, ask = engine._core, engine._core.add_request  # vLLM's, so that nothing comes after

    def asked_and_recorded(request: EngineCoreRequest) -> None:
        requests.append(Asked.of(request, engine.end_ids))
        ask(request)

    core.add_request = asked_and_recorded
    try:
        played = play()
    finally:
        del core.add_request  # that of the instance
    first = dist.get_rank(engine.group) == 0  # the ranks of an engine get the same requests
    every = gather_records(requests if first else [], Asked)
    return [t.task for t in played.own], [request for of_rank in every for request in of_rank]


def _evaluation(rollouts: Worker, count: int) -> Played:
    """Evaluate `count` held-out tasks, and return what was played."""
    plays, play = list[Played](), rollouts.play
    rollouts.play = lambda *given: plays.append(play(*given)) or plays[0]  # type: ignore[method-assign, func-returns-value]
    try:
        held_out = held_out_tasks(rollouts.learner.config, shown=False)
        evaluate_tasks(rollouts, FittingTasks(held_out.tasks[:count]))
    finally:
        del rollouts.play
    return plays[0]


def wrong_requests(config: Config, requests: Sequence[Asked], evaluates: bool = False) -> Iterator[str]:
    """Yield what the requests of all engines have that is not configured."""
    what, r = ("an evaluation" if evaluates else "training"), config.rollout
    temperature, top_p = (config.evaluate.temperature, 1.0) if evaluates else (r.temperature, r.top_p)
    for field, needed in (("temperature", temperature), ("top_p", top_p)):
        values = {getattr(request, field) for request in requests}
        if values - {needed}:
            yield f"{what}: {field} is {', '.join(f'{x:g}' for x in sorted(values))}, not {needed:g}"
    seeds = len({request.seed for request in requests})
    if seeds < len(requests):
        yield f"{what}: {len(requests)} requests have {seeds} different seeds"
    most = max((request.tokens for request in requests), default=0)
    if most > r.max_turn_tokens and config.environment.kind != choose.AGENT:
        yield f"{what}: turns may have {most} tokens, and rollout.max_turn_tokens is {r.max_turn_tokens}"
    if others := sorted({request.others for request in requests} - {""}):
        yield f"{what}: sampling parameters that nobody configured: {others[0]}"
    adapters = served_adapters(config.model.lora, read_shape(config.model.path))
    served = adapters is not None and adapters.alone  # beside the weights
    if any(request.adapter != served for request in requests):
        yield f"{what}: requests {'without' if served else 'with'} the adapter (model.lora.sync)"


def _places(config: Config, trained: Sequence[Task], evaluated: Sequence[Task]) -> Checked:
    """Return whether the tasks are of their files. A task that both files have is right in both places."""
    assert config.data.train is not None, "validation/checks.py requires it"
    files = {"train": config.data.train, "evaluate": config.data.evaluate}
    own = {name: {repr(task) for task in tasks.read(path)} for name, path in files.items() if path}
    if own["train"] == own.get("evaluate"):
        return Checked(PLACES, "skipped", "data.train and data.evaluate have the same tasks")
    wrong = []
    for name, played in (("train", trained), ("evaluate", evaluated)):
        foreign = [task for task in played if repr(task) not in own[name]]
        if foreign:
            text = f"{len(foreign)} of {len(played)} episodes of data.{name} have tasks that it lacks"
            wrong.append(f"{text}, such as {foreign[0].data_source} {foreign[0].index}")
    wrong = of_every_rank(wrong)
    other = "of data.evaluate" if "evaluate" in own else "evaluated: data.evaluate is not given"
    counts = f"{len(trained)} episodes of data.train, {len(evaluated) or 'none'} {other}"
    return judged(PLACES, not wrong, "; ".join(wrong[:2]) or counts, REMEDY)


def _ends(stage: Stage) -> Checked:
    """Return whether each turn has an end-of-text token or a stop string at its end, or the largest length,
    and none before."""
    rollouts, reasons, wrong = stage.rollouts, Counter[str](), list[str]()
    if not isinstance(rollouts, Worker) or stage.config.environment.kind == choose.AGENT:
        return Checked(ENDS, "skipped", "the stop strings of agents and of replicas are not known here")
    for n, trajectory in enumerate(stage.episodes):
        record, length = stage.record(n), len(trajectory.prompt_ids)
        stops = record.stop_strings if record is not None else ()
        for number, turn in enumerate(trajectory.turns, 1):
            room = min(stage.config.rollout.max_turn_tokens, stage.config.max_context - length)
            reason = ended(
                partial(decode_plain, rollouts.tokenizer),
                turn.token_ids,
                rollouts.engine.end_ids,
                stops,
                room,
            )
            length += len(turn.token_ids) + len(turn.observation_ids)
            reasons[reason] += 1
            if reason not in ("end", "stop", "limit"):
                wrong.append(f"episode {n}, turn {number} of {len(turn.token_ids)} tokens {reason}")
    counts = ", ".join(f"{count} by {reason}" for reason, count in sorted(reasons.items()))
    return judged(ENDS, not wrong, wrong[0] if wrong else f"turns: {counts}", REMEDY)


def ended(
    decode: Callable[[Sequence[int]], str],
    ids: Sequence[int],
    ends: Collection[int],
    stops: Sequence[str],
    room: int,
) -> str:
    """Return why a turn ended: "end", "stop" or "limit"; or what is wrong."""
    *before, last = ids
    if set(before) & set(ends):
        return "goes on after its end"
    if any(stop in decode(before) for stop in stops):
        return "goes on after a stop string"
    if last in ends:
        return "end"
    if any(stop in decode(ids) for stop in stops):
        return "stop"
    return "limit" if len(ids) == room else f"ends without a reason, and may have {room}"
