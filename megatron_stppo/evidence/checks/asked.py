"""Checks what the engine is asked for: the requests of two draws of training and of an evaluation.

A request is recorded where vLLM gets it (bench/records.py). Every field of its sampling parameters is
compared, also those that no field of the configuration names: they must be vLLM's defaults.

The tasks of the draws must be the next ones of the run's cursor, whose epochs must have each task once, in
orders that depend on epoch and seed. With rollout.resample, the rewards of every second group are made equal,
so that others take their places.

The batches of replicas are compared with what environments said.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Literal, get_args

from vllm.sampling_params import SamplingParams

from megatron_stppo.base.types import FAILED, Message, Outcome, Task
from megatron_stppo.config import Config
from megatron_stppo.data import tasks
from megatron_stppo.data.exchange import Played
from megatron_stppo.data.tasks import TaskCursor
from megatron_stppo.data.text.plain_text import decode_plain
from megatron_stppo.environments import choose
from megatron_stppo.environments.base import StepResult
from megatron_stppo.evidence.bench.records import Asked
from megatron_stppo.evidence.bench.stage import Checked, Stage, everywhere, faultless, of_every_rank, replaced
from megatron_stppo.evidence.checks.rewards import rewarded
from megatron_stppo.evidence.checks.tokens import FAR
from megatron_stppo.rollout.episodes.episode import Episode, Limits
from megatron_stppo.rollout.episodes.fitting import FittingTasks, fitting_tasks, sample
from megatron_stppo.rollout.vllm.generation import Finished
from megatron_stppo.training.colocated import Worker
from megatron_stppo.training.rollouts import Rollouts, evaluate_tasks, held_out_tasks
from megatron_stppo.weights.sharding.low_rank import served_adapters

ASKED, PLACES, ENDS = "the engine is asked as configured", "tasks are where they belong", "turns end"
DRAWN, BATCHES = "tasks are drawn in their turn", "batches are what replicas played"
DRAWS, FEW, SAMPLES = 2, 3, 2  # iterations that are drawn; tasks of each, at least; episodes of a task
TURN = 4  # tokens, at most
MANY = 10**6  # of which samples are drawn
# Sampling parameters that differ between requests, or say how vLLM returns its tokens.
FREE = ("seed", "max_tokens", "logprobs", "detokenize", "output_kind")
Decode = Callable[[Sequence[int]], str]
REMEDY = "rollout, evaluate, data: report this line; the episodes are not sampled as configured"


def asked(stage: Stage) -> Iterator[Checked]:
    """Draw two iterations, evaluate, and compare requests, tasks and ends of turns. Collective."""
    yield _ends(stage)
    rollouts, config = stage.rollouts, stage.config
    if not isinstance(rollouts, Worker):
        cursor = TaskCursor(fitting_tasks(config, "train", shown=False).tasks, config.run.seed)
        yield _in_turn(config, cursor, [])
        yield from _of_replicas(stage)
        return
    assert rollouts.cursor is not None, "verify requires data.train"
    rollouts.publish(stage.version)  # wakes the engine
    learner, before = stage.learner, rollouts.state()
    count = max(FEW, rollouts.engine.replicas)  # each engine has some
    resample = min(1, config.rollout.resample)
    few = {"tasks_per_iteration": count, "samples_per_task": SAMPLES, "resample": resample}
    few["max_turn_tokens"] = min(TURN, config.rollout.max_turn_tokens)
    changed = config.changed(rollout=few, evaluate={"samples": SAMPLES})
    rollouts.learner = replace(learner, config=changed)
    play = rollouts._play
    stage.records.read()
    with replaced(rollouts, "_play", lambda *given, **more: _half_equal(play(*given, **more))):
        draws = [rollouts.draw(n) for n in range(DRAWS)]
    drawn, _ = stage.records.read()
    rollouts.restore(before)
    unlike = list(wrong_draws(rollouts.cursor, draws, count, resample))
    rollouts.restore(before)
    yield _in_turn(config, rollouts.cursor, unlike)
    evaluated = _evaluation(rollouts, count).own if config.data.evaluate is not None else []
    yield _requests(stage, drawn, stage.records.read()[0])
    rollouts.learner = learner
    yield _places(config, [t.task for played in draws for t in played.own], [t.task for t in evaluated])


def _of_replicas(stage: Stage) -> Iterator[Checked]:
    """Draw batches of versions that follow each other, and evaluate. Replicas record what they are asked."""
    rollouts, learner, config = stage.rollouts, stage.learner, stage.config
    stage.records.read()
    for _ in range(DRAWS):
        stage.draw()
        stage.settle()  # so that the next batch is as old as it may be
        stage.publish()
    drawn, trained = stage.records.read()
    late = {said.seed for said in trained} - places(stage).keys()
    if config.data.evaluate is not None:
        rollouts.learner = replace(learner, config=config.changed(evaluate={"samples": SAMPLES}))
        _evaluation(rollouts, FEW)
        rollouts.learner = learner
    asked, evaluated = stage.records.read()
    if not drawn:
        reason = "the replicas record nothing in this run's folder"
        yield from (Checked(line, "skipped", reason) for line in (ASKED, PLACES))
        return
    wrong = [f"training: {len(late)} episodes of later iterations, or with other seeds"] if late else []
    yield _requests(stage, drawn, asked, wrong)
    given = [[said.task for said in of] for of in (trained, evaluated)]
    yield _places(config, *given) if trained else Checked(PLACES, "skipped", "agents are not recorded")


def places(stage: Stage) -> dict[int, tuple[int, int]]:
    """Return iteration and number of the episodes that were admitted, by the seeds of their environments."""
    r, admitted = stage.config.rollout, len(stage.drawn) + stage.config.serving.max_staleness
    numbers = product(range(admitted), range(r.tasks_per_iteration * r.samples_per_task))
    return {stage.seed(*place): place for place in numbers}


def batches(stage: Stage) -> Iterator[Checked]:
    """Compare the batches of replicas with what was admitted, and what environments have said. Collective."""
    if isinstance(stage.rollouts, Worker):
        return
    stage.records.read()
    text = f"{len(stage.drawn)} batches of {len(stage.drawn[0][1])} episodes"
    remedy = "serving: report this line; other episodes are trained on than those that were admitted"
    yield faultless(BATCHES, of_every_rank(list(wrong_batches(stage))), text, remedy, shown=3)


def wrong_batches(stage: Stage) -> Iterator[str]:
    """Yield what is wrong in the batches of replicas: tasks, groups, versions, and rewards."""
    r, serving, of_seed = stage.config.rollout, stage.config.serving, places(stage)
    known: dict[tuple[Any, ...], set[tuple[int, int]]] = defaultdict(set)
    for seed, said in stage.records.said.items():
        known[repr(said.task), *said.rewards].add(of_seed.get(seed, (-1, 0)))
    ordered = serving.order == "admission"
    cursor = TaskCursor(fitting_tasks(stage.config, "train", shown=False).tasks, stage.config.run.seed)
    groups = [group for group in range(r.tasks_per_iteration) for _ in range(r.samples_per_task)]
    for i, (version, episodes) in enumerate(stage.drawn):
        batch = f"batch {i} of version {version}"
        oldest = stage.drawn[max(0, i - serving.max_staleness)][0] if ordered else 0
        versions = {v for t in episodes for turn in t.turns for v, _ in turn.versions}
        if versions - {*range(oldest, stage.version + 1)}:
            yield f"{batch}: has versions {sorted(versions)}, and the oldest may be {oldest}"
        if [t.group for t in episodes] != groups:
            yield f"{batch}: {len(episodes)} episodes, with the groups {sorted({t.group for t in episodes})}"
        tasks = cursor.take(r.tasks_per_iteration)
        if ordered and [repr(t.task) for t in episodes] != [repr(tasks[group]) for group in groups]:
            yield f"{batch}: its tasks are not those that follow"
        for n, t in enumerate(episodes):
            rewards = [turn.reward for turn in t.turns]
            while rewards and not rewards[-1]:
                del rewards[-1]  # of a turn that the environment did not answer
            owners = known.get((repr(t.task), *rewards), set())
            if known and t.outcome not in FAILED and ((i, n) not in owners if ordered else not owners):
                yield f"{batch}: episode {n} has rewards {rewards}, which its environment did not give"
                break


def _requests(
    stage: Stage, drawn: Sequence[Asked], evaluated: Sequence[Asked], wrong: Sequence[str] = ()
) -> Checked:
    wrong, counts = list(wrong), list[int]()
    for what, requests in (("training", drawn), ("an evaluation", evaluated)):
        seeds = [sampling.seed for sampling, _ in requests]
        counts.append(len(seeds))
        if len(set(seeds)) < len(seeds):
            wrong.append(f"{what}: {len(seeds)} requests have {len(set(seeds))} different seeds")
        wrong += dict.fromkeys(wrong_requests(stage, requests, what))
    text = f"{counts[0]} requests of {DRAWS} draws, {counts[1]} of an evaluation"
    return faultless(ASKED, wrong, text, REMEDY, shown=3)


def _half_equal(played: Played) -> Played:
    """Return the episodes with equal results in every second group, and others in the rest."""
    results = [1.0 if summary.group % 2 else float(n) for n, summary in enumerate(played.every)]
    counts = [len(summary.turns) for summary in played.every]
    return rewarded(played, [[*[0.0] * (k - 1), x][:k] for k, x in zip(counts, results, strict=True)])


def wrong_draws(cursor: TaskCursor, draws: Sequence[Played], count: int, resample: int) -> Iterator[str]:
    """Yield which draws do not have the cursor's next tasks, or drop other groups than those of equal
    results. Collective."""
    for number, played in enumerate(draws, 1):
        dropped = {summary.group for summary in played.dropped or ()}
        tasks = cursor.take(count)
        needed = [task for n, task in enumerate(tasks) if n not in dropped] + cursor.take(len(dropped))
        drawn = Counter(repr(t.task) for t in everywhere(played) if not t.branch)
        if drawn != Counter(map(repr, needed * SAMPLES)):
            yield f"draw {number}: {len(drawn)} tasks, not the {count} that follow, each {SAMPLES} times"
        failed = any(not s.turns or s.outcome in FAILED for s in played.with_dropped)
        if resample and not failed and dropped != set(range(1, count, 2)):
            yield f"draw {number}: drops the groups {sorted(dropped)}, some of which differ"


def wrong_epochs(cursor: TaskCursor, seed: int) -> Iterator[str]:
    """Yield which epoch lacks tasks, and whether epochs or seeds share an order of the tasks. Each epoch is
    resumed in the middle. Of few tasks, as many orders are drawn as are all equal once in a million cases.
    """
    state, orders = cursor.state(), dict[tuple[int, int], tuple[int, ...]]()
    count, bits = state["tasks"], math.lgamma(state["tasks"] + 1) / math.log(2)
    needed = max(3, 1 + math.ceil(22 / bits)) if bits else 1
    if state["seed"] != seed:
        yield f"tasks have the seed {state['seed']}, not run.seed={seed}"
    for n, epoch in [*((0, epoch) for epoch in range(needed)), *((n, 0) for n in range(1, needed))]:
        other = TaskCursor(cursor._tasks, seed + n)
        other.restore(other.state() | {"epoch": epoch})
        first = other.take(count // 2)
        other.restore(other.state())
        order = orders[n, epoch] = tuple(map(id, first + other.take(count - count // 2)))
        if len(set(order)) < count:
            yield f"an epoch has {len(set(order))} of {count} tasks"
    for place, what in enumerate(("run.seed", "the epoch")):
        different = len({order for key, order in orders.items() if key[1 - place] == 0})
        if different < (needed if bits > 24 else min(2, needed)):
            yield f"the order of the tasks does not depend on {what}"


def wrong_samples(config: Config, drawn: int) -> Iterator[str]:
    """Yield which file has tasks that are not played, or other held-out ones than evaluate.tasks. drawn: the
    tasks of data.train."""
    files: dict[Literal["train", "evaluate"], tuple[int, int | None]] = {"train": (drawn, None)}
    if config.data.evaluate is not None:
        files["evaluate"] = (len(held_out_tasks(config, shown=False).tasks), config.evaluate.tasks)
    for name, (count, most) in files.items():
        rows = len(tasks.read(getattr(config.data, name)))
        needed = min(rows, most or rows)
        overlong = fitting_tasks(config, name, shown=False).overlong if count < needed else 0
        if count + overlong != needed:
            yield f"{count} tasks of data.{name} are played, not {needed - overlong}"
    if sample(range(MANY), FEW) != sample(range(MANY), FEW):
        yield "evaluate.tasks: each evaluation has other tasks"


def _in_turn(config: Config, cursor: TaskCursor, wrong: Sequence[str]) -> Checked:
    count = cursor.state()["tasks"]
    wrong = [*wrong, *wrong_epochs(cursor, config.run.seed), *wrong_samples(config, count)]
    return faultless(DRAWN, of_every_rank(wrong), f"epochs of {count} tasks", REMEDY, shown=3)


def _evaluation(rollouts: Rollouts, count: int) -> Played:
    """Evaluate `count` held-out tasks, and return what was played."""
    plays, play = list[Played](), rollouts.play
    held_out = held_out_tasks(rollouts.learner.config, shown=False)

    def recorded(*given: Any) -> Played:
        plays.append(play(*given))
        return plays[0]

    with replaced(rollouts, "play", recorded):
        evaluate_tasks(rollouts, FittingTasks(held_out.tasks[:count]))
    return plays[0]


def wrong_requests(stage: Stage, requests: Sequence[Asked], what: str) -> Iterator[str]:
    """Yield what the requests have that is not configured."""
    config, ends = stage.learner.config, list(stage.ends)
    r, trains = config.rollout, what == "training"
    temperature, top_p = (r.temperature, r.top_p) if trains else (config.evaluate.temperature, 1.0)
    adapters = served_adapters(config.model.lora, stage.learner.shape)
    served = adapters is not None and adapters.alone  # beside the weights
    for given, for_adapter in requests:
        free = {name: getattr(given, name) for name in FREE}
        needed = SamplingParams(temperature=temperature, top_p=top_p, stop_token_ids=ends, **free)
        for name in given.__struct_fields__:
            value, right = getattr(given, name), getattr(needed, name)
            if value != right and not name.startswith("_"):
                yield f"{what}: {name} is {value}, not {right}"
        if (given.max_tokens or 0) > r.max_turn_tokens and config.environment.kind != choose.AGENT:
            yield f"{what}: turns may have {given.max_tokens} tokens, not {r.max_turn_tokens}"
        if for_adapter != served:
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
    counts = ", ".join(f"{len(of_file)} tasks of data.{name}" for name, of_file in own.items())
    return faultless(PLACES, of_every_rank(wrong), counts, REMEDY, shown=2)


def _ends(stage: Stage) -> Checked:
    """Return whether each turn has an end-of-text token or a stop string at its end, or the largest length,
    and none before."""
    rollouts, reasons, wrong = stage.rollouts, Counter[str](), list(wrong_ends(stage))
    if stage.config.environment.kind == choose.AGENT or stage.record(0) is None:
        return Checked(ENDS, "skipped", "the stop strings are not known here")
    decode = partial(decode_plain, rollouts.tokenizer)
    for n, trajectory in enumerate(stage.episodes):
        record, length = stage.record(n), len(trajectory.prompt_ids)
        stops = record.stop_strings if record is not None else ()
        for number, turn in enumerate(trajectory.turns, 1):
            room = min(stage.config.rollout.max_turn_tokens, stage.config.max_context - length)
            reason = ended(decode, turn.token_ids, stage.ends, stops, room)
            length += len(turn.token_ids) + len(turn.observation_ids)
            reasons[reason] += 1
            if reason not in ("end", "stop", "limit"):
                wrong.append(f"episode {n}, turn {number} of {len(turn.token_ids)} tokens {reason}")
        outcome = record.outcome or "truncated" if record is not None else trajectory.outcome
        if trajectory.outcome not in {outcome, *FAILED}:
            wrong.append(f"episode {n} has the outcome {trajectory.outcome}, not {outcome}")
    counts = ", ".join(f"{count} by {reason}" for reason, count in sorted(reasons.items()))
    return faultless(ENDS, wrong, f"turns: {counts}", REMEDY)


def wrong_ends(stage: Stage) -> Iterator[str]:
    """Yield which scripted episodes have another outcome than docs/environments.md names: their context is
    full, or has no room for an observation; they go on; or the environment ends them."""
    read = StepResult("the observation", 0.0, False, True)
    done = [StepResult("", 0.0, True, True, outcome=outcome) for outcome in get_args(Outcome)]
    rooms = [(TURN, None, "truncated"), (TURN + 1, read, "truncated"), (FAR, read, None)]
    for room, result, needed in [*rooms, *((FAR, last, last.outcome) for last in done)]:
        episode = Episode(stage.tasks[0], 0, Limits(FAR, FAR, FAR, FAR, False), stage.rollouts.tokenizer)
        episode.start((Message("user", "the prompt"),), ())
        episode.limits = replace(episode.limits, max_context=len(episode.context) + room)
        turn = Finished("0", tuple(episode.context[:1] * TURN), (0.0,) * TURN, "stop", ((0, TURN),))
        episode.add_turn(turn if result is not None else replace(turn, reason="length"))
        if result is not None:
            episode.answer(result)
        if episode.outcome != needed:
            yield f"with room for {room} tokens, an episode has the outcome {episode.outcome}, not {needed}"


def ended(decode: Decode, ids: Sequence[int], ends: Collection[int], stops: Sequence[str], room: int) -> str:
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
