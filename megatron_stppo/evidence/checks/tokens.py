"""Checks that the trainer reads the tokens that the engine wrote, and the engine those that the model knows.

The first check compares the log-probs of the engine with the trainer's for the same ids. Tokens that both of
them read wrongly are equal there. So the second one compares prompts and observations with the chat template
of the model, rendered as a whole conversation and encoded at once. The tokens of the policy are not compared
with it: the policy may write a text with other tokens than the tokenizer does.
"""

import random
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from megatron_stppo.base.types import FAILED, Message, Turn
from megatron_stppo.data.text.plain_text import beginning, decode_plain, encode_plain
from megatron_stppo.environments import choose
from megatron_stppo.environments.base import StepResult
from megatron_stppo.evidence.bench.stage import Checked, Stage, faultless, judged
from megatron_stppo.rollout.episodes.episode import Episode, Limits
from megatron_stppo.rollout.vllm.generation import Finished, Reason

TOKENS, TEMPLATE = "tokens are exact", "turns follow the chat template"
PLACE = "verifyplace"  # stands for an answer of the policy
TEXT = "\n\nIt is 21 km.\n  Go on: "
ANSWER, CUT = 6, 24  # tokens of a scripted answer, and of an observation that is cut
FAR = 10**7  # a limit that nothing reaches
MERGED = 8  # tokens that a text may have more or less within a message
Conversation = list[dict[str, Any]]


def exact(stage: Stage) -> Iterator[Checked]:
    """Compare the tokens of the episodes, and of scripted ones. Collective."""
    agreement = stage.agreement(stage.episodes)
    yield judged(
        TOKENS,
        not agreement.fault(0),
        f"{agreement}; {agreement.scored.beyond} tokens are above their own limits",
        "rollout.temperature, rollout.vllm: engine and trainer read other tokens, or compute other "
        "distributions of them",
    )
    if stage.config.environment.kind == choose.AGENT:
        yield Checked(TEMPLATE, "skipped", "an agent sends conversations of its own")
        return
    reader = _Reader(stage)
    wrong = [*reader.scripted(), *reader.episodes()]
    yield faultless(
        TEMPLATE,
        wrong,
        f"{reader.prompts} prompts, {reader.observations} observations",
        "environment.after_end, model.path: report this line; the policy reads other tokens than the "
        "template of the model has",
    )


class _Reader:
    """Compares what the policy reads with the chat template."""

    def __init__(self, stage: Stage) -> None:
        self.prompts = self.observations = 0  # compared
        self._stage, self._limits = stage, Limits.of(stage.config)
        self._tokenizer: Any = stage.rollouts.tokenizer
        self._ends = stage.ends
        added = self._tokenizer.added_tokens_decoder.items()
        self._special = {number: str(token) for number, token in added if token.special}

    def episodes(self) -> Iterator[str]:
        """Yield what is wrong in the episodes that the engine has played."""
        for number, trajectory in enumerate(self._stage.episodes):
            record = self._stage.record(number)
            # without a record of a replica: its environment may have changed the prompt
            if record is None or trajectory.outcome in FAILED or trajectory.overlong_prompt:
                continue
            messages, context = record.messages, list(trajectory.prompt_ids)
            conversation, stops = [message.as_dict() for message in messages], bool(record.stop_strings)
            if not any(self._has_special(message.content) for message in messages):
                yield from self._prompt(f"episode {number}", conversation, context)
            for place, turn in enumerate(trajectory.turns):
                where = f"episode {number}, observation {place + 1}"
                context += turn.token_ids
                text = record.observations[place] if place < len(record.observations) else ""
                limit = self._limits.max_observation_tokens
                if turn.observation_ids:
                    yield from self._observation(where, conversation, context, turn, text, stops, limit)
                context += turn.observation_ids

    def scripted(self) -> Iterator[str]:
        """Yield what is wrong in episodes of two turns, with answers and observations of this file.

        Some of the texts contain control tokens, which must be read as text, and some are cut. The turns end
        with the end-of-text token, with a stop string, or by their limit, which leaves the message open.
        """
        special = TEXT + "".join(self._special.values()) + "."
        cut = self._frame + CUT
        for text, limit in ((TEXT, FAR), (special, FAR), (4 * TEXT, cut), (4 * TEXT + "</a>\n", cut)):
            for reason in ("end", "stop", "length"):
                yield from self._script(text, reason, limit)

    def _script(self, text: str, reason: Reason, limit: int) -> Iterator[str]:
        task, draw = self._stage.tasks[0], random.Random(text + reason)
        limits = Limits(FAR, FAR, limit, FAR, self._limits.new_message)
        episode = Episode(task, 0, limits, self._tokenizer, self._ends)
        message, stops = Message("user", text), reason == "stop"
        episode.start((message,), ("x",) if stops else ())
        conversation, context = [message.as_dict()], list(episode.context)
        if not self._has_special(text):
            yield from self._prompt("a prompt of one message", conversation, context)
        else:
            yield from self._plain("a prompt of one message", context, conversation, text)
        known = sorted(set(self._tokenizer.get_vocab().values()) - set(self._special) - set(self._ends))
        for number in (1, 2):
            where = f"a scripted observation {number} after a turn that ends by {reason}"
            ids = tuple(draw.choices(known, k=ANSWER))
            ids += (self._tokenizer.eos_token_id,) if reason == "end" else ()
            logprobs = tuple(-draw.random() for _ in ids)
            episode.add_turn(Finished("0", ids, logprobs, reason, ((0, len(ids)),)))
            episode.answer(StepResult(text, 0.0, False, True))
            if episode.outcome is not None:
                yield f"{where}: {episode.detail}"
                return
            turn = episode.histories[0].turns[-1]
            if (turn.token_ids, turn.rollout_logprob) != (ids, logprobs):
                yield f"{where}: the turn has other tokens or log-probs than the engine returned"
            context += ids
            yield from self._observation(where, conversation, context, turn, text, stops, limit)
            context += turn.observation_ids

    def _prompt(self, where: str, conversation: Conversation, ids: Sequence[int]) -> Iterator[str]:
        needed = self._tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        self.prompts += 1
        yield from self._compared(where, ids, needed)

    def _observation(
        self,
        where: str,
        conversation: Conversation,
        context: Sequence[int],
        turn: Turn,
        text: str,
        stops: bool,
        limit: int,
    ) -> Iterator[str]:
        """Yield what is wrong in the observation after a turn. context: the tokens up to the turn's end.

        stops: whether the environment has stop strings. limit: of its tokens. The conversation is continued,
        if the observation is a message.
        """
        self.observations += 1
        ids, last = turn.observation_ids, turn.token_ids[-1]
        if not self._limits.new_message or (stops and last not in self._ends):
            text = self._cut(text, limit)
            read = self._decoded([*context, *ids])
            if not read.endswith(self._normal(text)):
                yield f"{where}: is read as {read[-len(text) :][:60]!r}, and its text is {text[:60]!r}"
            if control := [self._special[i] for i in ids if i in self._special]:
                yield f"{where}: has the control token {control[0]} of its text"
            return
        # the text's limit is known up to the tokens that it shares with its frame
        rooms = sorted(range(2 * MERGED + 1), key=lambda n: abs(n - MERGED))
        cuts = dict.fromkeys(self._cut(text, max(1, limit - self._frame + n)) for n in rooms)
        conversation += [{"role": "assistant", "content": PLACE}, {}]
        for shown in cuts:
            conversation[-1] = {"role": "user", "content": shown}
            if self._has_special(shown):
                wrong = [*self._plain(where, ids, conversation, shown, last)]
            else:
                wrong = [*self._compared(where, ids, self._after(conversation, last))]
            if not wrong:
                return
        yield wrong[0]

    def _plain(
        self, where: str, ids: Sequence[int], conversation: Conversation, text: str, last: int | None = None
    ) -> Iterator[str]:
        """Yield a line if the tokens have more control tokens than with another text, or another text."""
        tame = [*conversation[:-1], conversation[-1] | {"content": TEXT}]
        own, needed = (sum(i in self._special for i in of) for of in (ids, self._after(tame, last)))
        if own != needed:
            yield f"{where}: has {own} control tokens, not {needed}: text became control tokens"
        if self._normal(text).strip() not in self._tokenizer.decode(list(ids), skip_special_tokens=False):
            yield f"{where}: its text is not in its tokens"

    def _cut(self, text: str, limit: int) -> str:
        """Return the beginning of a text that has too many tokens, with a closing tag at its end."""
        ids = encode_plain(self._tokenizer, beginning(self._tokenizer, text, limit + 1))
        closing = re.search(r"</[A-Za-z_]{1,32}>\s{0,8}\Z", text)
        tag = encode_plain(self._tokenizer, closing[0]) if closing else []
        tag = tag if len(tag) < limit else []
        return text if len(ids) <= limit else decode_plain(self._tokenizer, ids[: limit - len(tag)] + tag)

    @cached_property
    def _frame(self) -> int:
        """The tokens of a message of the environment beside its text, a few more for merged ones."""
        if not self._limits.new_message:
            return 0
        conversation = [{"role": role, "content": PLACE} for role in ("user", "assistant")]
        message = self._after([*conversation, {"role": "user", "content": TEXT}], -1)
        return len(message) - len(self._encoded(TEXT)) + MERGED

    def _encoded(self, text: str) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return list(encoded["input_ids"])

    def _normal(self, text: str) -> str:
        """Return the text as the tokenizer reads it: some bring characters into another form."""
        return self._decoded(self._encoded(text))

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def _after(self, conversation: Conversation, last: int | None) -> list[int]:
        """Return the ids of the template's text after the policy's last answer; `last` is its last token.

        None: the ids of the whole text.
        """
        text = self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        start = text.rfind(PLACE) + len(PLACE) if last is not None else 0
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ids = [number for number, (begin, _) in pairs if begin >= start]
        return ids[1:] if ids[:1] == [last] else ids

    def _has_special(self, text: str) -> bool:
        return any(token in text for token in self._special.values())

    def _compared(self, where: str, own: Sequence[int], needed: Sequence[int]) -> Iterator[str]:
        """Yield a line with the first difference, if there is one."""
        if list(own) == list(needed):
            return
        pairs = enumerate(zip(own, needed, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(own), len(needed)))
        shown = [self._tokenizer.convert_ids_to_tokens(list(ids[at : at + 3])) for ids in (own, needed)]
        sizes = f"{len(own)} tokens, {len(needed)} in the template"
        yield f"{where}: {sizes}; token {at}: {shown[0]}, not {shown[1]}"
