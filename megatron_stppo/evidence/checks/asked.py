"""Checks what the engine is asked for: the requests of two draws of training and of an evaluation.

A request is recorded where vLLM gets it. Every field of its sampling parameters is compared, also those that
no field of the configuration names: they must be vLLM's defaults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from vllm.sampling_params import SamplingParams

from megatron_stppo.base.types import Task, Trajectory
from megatron_stppo.config import Config
from megatron_stppo.data import tasks
from megatron_stppo.data.exchange import Played
from megatron_stppo.environments import choose
from megatron_stppo.evidence.bench.stage import Checked, Stage, judged, of_every_rank
from megatron_stppo.parallel.collectives import gather_records
from megatron_stppo.rollout.episodes.fitting import FittingTasks, fitting_tasks
from megatron_stppo.training.colocated import Worker
from megatron_stppo.training.rollouts import evaluate_tasks
from megatron_stppo.weights.sharding.hf_names import read_shape
from megatron_stppo.weights.sharding.low_rank import served_adapters

ASKED, TASKS, ENDS = "the engine is asked as configured", "each task is where it belongs", "turns end"
DRAWS, FEW, SAMPLES = 2, 3, 2  # iterations that are drawn; tasks of each, and of the evaluation; samples
# those that differ between requests, or say how vLLM returns its tokens
FREE = ("temperature", "top_p", "seed", "max_tokens", "logprobs", "detokenize", "output_kind")
REMEDY = "rollout, evaluate: report this line; the episodes are not sampled as configured"


@dataclass(frozen=True)
class Asked:
    """A request that vLLM got. Example: Asked(7, 1.0, 0.9, 64, False, "top_k=20")."""

    seed: int
    temperature: float
    top_p: float
    tokens: int  # at most
    adapter: bool
    others: str  # sampling parameters that are not vLLM's defaults


def asked(stage: Stage) -> Iterator[Checked]:
    """Draw two iterations, evaluate, and compare requests, tasks and ends of turns. Collective."""
    yield _ends(stage)
    rollouts, config = stage.rollouts, stage.config
    if not isinstance(rollouts, Worker):
        for check in (ASKED, TASKS):
            yield Checked(check, "skipped", "replicas have engines of their own")
        return
    rollouts.publish(stage.version)  # wakes the engine
    train, held_out = _files(config)
    few = {"tasks_per_iteration": min(FEW, len(train)), "samples_per_task": SAMPLES, "resample": 0}
    learner, before = stage.learner, rollouts.state()
    rollouts.learner = replace(learner, config=config.changed(rollout=few))
    drawn = [_recorded(rollouts, lambda n=n: rollouts.draw(n)) for n in range(DRAWS)]  # type: ignore[misc]
    rollouts.restore(before)
    evaluated: tuple[list[Played], list[Asked]] = ([], [])
    if held_out:
        once = {"samples": min(SAMPLES, config.evaluate.samples)}
        rollouts.learner = replace(learner, config=config.changed(evaluate=once))
        fitting = fitting_tasks(config, "evaluate", shown=False).tasks[:FEW]
        evaluated = _recorded(rollouts, lambda: evaluate_tasks(rollouts, FittingTasks(fitting)))
    rollouts.learner = learner
    requests = [request for _, of_draw in drawn for request in of_draw]
    wrong = of_every_rank([*wrong_requests(config, requests), *wrong_requests(config, evaluated[1], True)])
    counts = f"{len(requests)} requests of {DRAWS} draws, {len(evaluated[1])} of an evaluation"
    yield judged(ASKED, not wrong, "; ".join(wrong[:3]) or counts, REMEDY)
    wrong = of_every_rank(
        [
            *misplaced("training", _tasks(p for plays, _ in drawn for p in plays), train, held_out),
            *misplaced("an evaluation", _tasks(evaluated[0]), held_out, train),
        ]
    )
    known = "" if held_out else "; data.evaluate is not given"
    yield judged(TASKS, not wrong, wrong[0] if wrong else f"{counts}{known}", REMEDY)


def wrong_requests(config: Config, requests: Sequence[Asked], evaluates: bool = False) -> Iterator[str]:
    """Yield what the requests of all engines have that is not configured."""
    what, r = ("an evaluation" if evaluates else "training"), config.rollout
    temperature, top_p = (config.evaluate.temperature, 1.0) if evaluates else (r.temperature, r.top_p)
    for field, needed in (("temperature", temperature), ("top_p", top_p)):
        values = {getattr(request, field) for request in requests}
        if values - {needed}:
            yield f"{what}: {field} is {', '.join(f'{x:g}' for x in sorted(values))}, not {needed:g}"
    agent = config.environment.kind == choose.AGENT
    if not agent and (most := max((request.tokens for request in requests), default=0)) > r.max_turn_tokens:
        yield f"{what}: turns may have {most} tokens, and rollout.max_turn_tokens is {r.max_turn_tokens}"
    if others := sorted({request.others for request in requests} - {""}):
        yield f"{what}: sampling parameters that nobody configured: {others[0]}"
    seeds = len({request.seed for request in requests})
    if seeds < len(requests):
        yield f"{what}: {len(requests)} requests have {seeds} different seeds"
    served = served_alone(config)
    if any(request.adapter != served for request in requests):
        yield f"{what}: requests {'without' if served else 'with'} the adapter (model.lora.sync)"


def served_alone(config: Config) -> bool:
    """Return whether the engine has the adapters beside its weights."""
    adapters = served_adapters(config.model.lora, read_shape(config.model.path))
    return adapters is not None and adapters.alone


def misplaced(
    what: str, played: Sequence[Task], own: Sequence[Task], others: Sequence[Task]
) -> Iterator[str]:
    """Yield a line if tasks of other files than `own` were played. Tasks that both files have are right."""
    mine, foreign = ({_key(task) for task in of_file} for of_file in (own, others))
    wrong = [task for task in played if _key(task) not in mine]
    if wrong:
        where = "of the other file" if any(_key(task) in foreign for task in wrong) else "of no file"
        yield f"{what}: {len(wrong)} of {len(played)} episodes have tasks {where}, such as {wrong[0].index}"


def _key(task: Task) -> tuple[str, str, tuple[str, ...]]:
    return task.data_source, repr(task.prompt), task.targets


def _files(config: Config) -> tuple[Sequence[Task], Sequence[Task]]:
    assert config.data.train is not None, "validation/checks.py requires it"
    held_out = config.data.evaluate
    return tasks.read(config.data.train), () if held_out is None else tasks.read(held_out)


def _tasks(plays: Iterator[Played] | Sequence[Played]) -> list[Task]:
    return [trajectory.task for played in plays for trajectory in played.own]


def _recorded(rollouts: Worker, play: Callable[[], object]) -> tuple[list[Played], list[Asked]]:
    """Return what was played, and the requests of all engines, each once. Collective."""
    requests, plays, of_worker = list[Asked](), list[Played](), rollouts._play

    def kept(*given: object, **by_name: object) -> Played:
        plays.append(of_worker(*given, **by_name))  # type: ignore[arg-type]
        return plays[-1]

    rollouts._play = kept  # type: ignore[method-assign]
    try:
        with rollouts.engine.heard(lambda sampling, lora: requests.append(_asked(sampling, lora))):
            play()
    finally:
        del rollouts._play
    first = dist.get_rank(rollouts.engine.group) == 0  # its ranks get the same requests
    every = gather_records(requests if first else [], Asked)
    return plays, [request for of_rank in every for request in of_rank]


def _asked(sampling: SamplingParams, lora: bool) -> Asked:
    usual = SamplingParams(**{name: getattr(sampling, name) for name in FREE})
    usual.stop_token_ids, usual._all_stop_token_ids = sampling.stop_token_ids, sampling._all_stop_token_ids
    names = [name for name in sampling.__struct_fields__ if not name.startswith("_")]
    pairs = [(name, getattr(sampling, name)) for name in names]
    others = ", ".join(f"{name}={value}" for name, value in pairs if value != getattr(usual, name))
    assert sampling.seed is not None and sampling.max_tokens is not None
    return Asked(sampling.seed, sampling.temperature, sampling.top_p, sampling.max_tokens, lora, others)


def _ends(stage: Stage) -> Checked:
    """Return whether each turn has an end-of-text token or a stop string at its end, or the largest length,
    and none before."""
    rollouts, reasons, wrong = stage.rollouts, Counter[str](), list[str]()
    if not isinstance(rollouts, Worker) or stage.config.environment.kind == choose.AGENT:
        return Checked(ENDS, "skipped", "the stop strings of agents and of replicas are not known here")
    for n, trajectory in enumerate(stage.episodes):
        record = stage.record(n)
        stops = record.stop_strings if record is not None else ()
        for number, length in enumerate(_lengths(trajectory), 1):
            ids = trajectory.turns[number - 1].token_ids
            room = min(stage.config.rollout.max_turn_tokens, stage.config.max_context - length)
            reason = ended(rollouts.tokenizer.decode, ids, rollouts.engine.end_ids, stops, room)
            reasons[reason] += 1
            if reason not in ("end", "stop", "limit"):
                wrong.append(f"episode {n}, turn {number} of {len(ids)} tokens {reason}")
    counts = ", ".join(f"{count} by {reason}" for reason, count in sorted(reasons.items()))
    return judged(ENDS, not wrong, wrong[0] if wrong else f"turns: {counts}", REMEDY)


def _lengths(trajectory: Trajectory) -> Iterator[int]:
    """Yield the number of tokens before each turn."""
    length = len(trajectory.prompt_ids)
    for turn in trajectory.turns:
        yield length
        length += len(turn.token_ids) + len(turn.observation_ids)


def ended(
    decode: Callable[..., Any], ids: Sequence[int], ends: object, stops: Sequence[str], room: int
) -> str:
    """Return why a turn ended: "end", "stop" or "limit"; or what is wrong."""
    if any(token in ends for token in ids[:-1]):  # type: ignore[operator]
        return "goes on after its end"
    if ids[-1] in ends:  # type: ignore[operator]
        return "end"
    if any(stop in decode(list(ids[:-1])) for stop in stops):
        return "goes on after a stop string"
    if any(stop in decode(list(ids)) for stop in stops):
        return "stop"
    return "limit" if len(ids) == room else f"ends without a reason, and may have {room}"
