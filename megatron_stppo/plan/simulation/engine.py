"""The clock of a simulation, and an engine and its speed in simulated time.

The engine counts many steps as one event if nothing changes between them. It follows vLLM: prompts wait in
order of arrival, a step computes all running sequences and as many tokens of prompts as fit, and a prompt
that is complete gets its first token in the same step.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

PREFILL = 8192  # most tokens of one step, as rollout/vllm/vllm_setup.py sets them


class Clock:
    """Makes calls in order of their times. Calls of the same time are made in the order they were added,
    those added with `last` after all others."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._calls: list[tuple[float, bool, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, seconds: float, call: Callable[[], None], *, last: bool = False) -> None:
        assert seconds >= self.now, (seconds, self.now)
        heapq.heappush(self._calls, (seconds, last, next(self._count), call))

    def run(self, done: Callable[[], bool]) -> None:
        """Make calls until `done()`. Some call must be left until then."""
        while not done():
            assert self._calls, "nothing is left to do: the simulation is stuck"
            self.now, _, _, call = heapq.heappop(self._calls)
            call()


@dataclass(frozen=True)
class EngineSpeed:
    """The time of one engine step, a linear function of what the step computes. All times are in seconds.

    Every running sequence gets one token per step. A step with 10 running sequences of 100 tokens each and no
    prompt takes step + 10 sequence + 1000 context seconds.
    """

    step: float  # of every step
    sequence: float = 0.0  # for every running sequence
    prefill: float = 0.0  # for every token of a prompt or an observation
    context: float = 0.0  # for every token before the new one, of every running sequence
    most_sequences: int = 256  # running sequences; others wait
    most_tokens: int = PREFILL  # of a step; longer prompts take several steps

    def elapsed(self, steps: int, running: int, context: int, prefill: int) -> float:
        """Return the seconds of `steps` steps.

        context: tokens of all running sequences before the first step; each step adds one per sequence.
        prefill: tokens of prompts, all of them in the first step.
        """
        each = self.step + self.sequence * running + self.context * context
        growth = self.context * running * (steps * (steps - 1) / 2)
        return steps * each + growth + self.prefill * prefill


@dataclass(frozen=True)
class TrainerSpeed:
    """The time from a complete batch to new weights: scores, advantages and updates.

    Example: TrainerSpeed(0.5, 1e-4) trains on 10,000 tokens in 1.5 s.
    """

    batch: float  # seconds for every batch
    token: float = 0.0  # seconds for every token of the batch, prompts and observations included

    def seconds(self, tokens: int) -> float:
        return self.batch + self.token * tokens


@dataclass
class Generation:
    """One turn of an episode in the engine."""

    context: int  # tokens before it
    fresh: int  # of these, tokens whose keys and values have to be computed
    left: int  # tokens to generate, at least 1
    finished: Callable[[], None]
    begun: Callable[[], None]  # called when the first token is generated
    last_step: int = field(default=0, init=False)  # number of the step that generates the last token


@dataclass(frozen=True)
class _Span:
    """Steps that are counted together: the same sequences run in all of them."""

    begin: float  # seconds
    steps: int
    running: int
    context: int  # before the first step
    prefill: int

    def end(self, speed: EngineSpeed, steps: int) -> float:
        return self.begin + speed.elapsed(steps, self.running, self.context, self.prefill)


class StepEngine:
    """Runs generations on a Clock. `stop` and `resume` make room for an update of the weights."""

    def __init__(self, clock: Clock, speed: EngineSpeed) -> None:
        self.steps = 0  # so far
        self.generated = 0  # tokens; also the sum of running sequences over steps
        self.blocked = False  # by a caller: no step begins until `wake`
        self._clock, self._speed = clock, speed
        self._waiting: deque[Generation] = deque()
        self._running: list[tuple[int, int, Generation]] = []  # heap of (last step, order, generation)
        self._order = self._context = 0
        self._spent = 0.0  # seconds in steps that have ended
        self._span: _Span | None = None
        self._number = 0  # of spans; an end of an earlier span is out of date
        self._kicked = False
        self._stopped: Callable[[], None] | None = None  # a stop is due, or is in force
        self._still = False

    @property
    def seconds(self) -> float:
        """The seconds in steps so far."""
        return self._spent + (self._clock.now - self._span.begin if self._span else 0.0)

    def add(self, generation: Generation) -> None:
        """Queue a generation. It enters at the next end of a step."""
        self._waiting.append(generation)
        if self._span is not None and len(self._running) < self._speed.most_sequences:
            self._cut()
        self.wake()

    def wake(self) -> None:
        """Begin to step after all other calls of this instant, if there is anything to do."""
        if self._span is None and not self._kicked:
            self._kicked = True
            self._clock.at(self._clock.now, self._begin, last=True)

    def stop(self, stopped: Callable[[], None]) -> None:
        """Call `stopped` at the next end of a step; no step begins after it until `resume`."""
        assert self._stopped is None
        self._stopped = stopped
        if self._span is None:
            self._stand_still()
        else:
            self._cut()

    def go_on(self) -> None:
        """Continue after a stop without an update."""
        assert self._still
        self._stopped, self._still = None, False
        self.wake()

    def resume(self) -> int:
        """Continue after an update: the keys and values of everything that runs are computed again.

        Return the number of tokens that this takes.
        """
        assert self._still
        self._stopped, self._still = None, False
        again = [generation for _, _, generation in sorted(self._running, key=lambda entry: entry[1])]
        for generation in again:
            done = self.steps + generation.left - generation.last_step
            generation.context += done
            generation.left -= done
        lost = sum(turn.context for turn in again) + sum(turn.context - turn.fresh for turn in self._waiting)
        self._running.clear()
        self._context = 0
        self._waiting.extendleft(reversed(again))
        for generation in self._waiting:
            generation.fresh = generation.context
        self.wake()
        return lost

    def _begin(self) -> None:
        self._kicked = False
        if self._span is not None or self._still or self.blocked or not (self._waiting or self._running):
            return
        prefill = self._enter()
        steps = 1 if prefill or not self._running else self._running[0][0] - self.steps
        self._span = _Span(self._clock.now, steps, len(self._running), self._context, prefill)
        self._schedule()

    def _enter(self) -> int:
        """Let waiting generations in. Return the tokens of prompts that the next step computes."""
        room, prefill = self._speed.most_tokens - len(self._running), 0
        while self._waiting and room > 0 and len(self._running) < self._speed.most_sequences:
            turn = self._waiting[0]
            taken = min(room, turn.fresh)
            turn.fresh -= taken
            prefill, room = prefill + taken, room - taken
            if turn.fresh:
                break
            self._waiting.popleft()
            turn.begun()
            turn.last_step = self.steps + turn.left
            self._order += 1
            heapq.heappush(self._running, (turn.last_step, self._order, turn))
            self._context += turn.context
        return prefill

    def _cut(self) -> None:
        """End the current span with the step that is being computed."""
        span, now = self._span, self._clock.now
        assert span is not None
        low, high = 1, span.steps  # the first number of steps that does not end before now
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if span.end(self._speed, middle) >= now else (middle + 1, high)
        if low < span.steps:
            self._span = _Span(span.begin, low, span.running, span.context, span.prefill)
            self._schedule()

    def _schedule(self) -> None:
        assert self._span is not None
        self._number += 1
        number = self._number
        end = max(self._clock.now, self._span.end(self._speed, self._span.steps))
        self._clock.at(end, lambda: self._end(number))

    def _end(self, number: int) -> None:
        span = self._span
        if span is None or number != self._number:
            return
        self._span = None
        self.steps += span.steps
        self.generated += span.steps * span.running
        self._spent += self._speed.elapsed(span.steps, span.running, span.context, span.prefill)
        self._context += span.steps * len(self._running)
        while self._running and self._running[0][0] <= self.steps:
            _, _, done = heapq.heappop(self._running)
            self._context -= done.context + done.left
            done.finished()
        if self._stopped is None:
            self.wake()
        elif not self._still:  # otherwise one of the calls above has stopped the engine
            self._stand_still()

    def _stand_still(self) -> None:
        assert self._stopped is not None
        self._still = True
        self._stopped()
