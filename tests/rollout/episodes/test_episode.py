from __future__ import annotations

import copy
import time
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_stppo.base.types import Message
from megatron_stppo.data.text.chat import encode_chat
from megatron_stppo.data.text.plain_text import encode_plain
from megatron_stppo.environments.base import StepResult
from megatron_stppo.rollout.episodes.episode import Episode, Limits
from megatron_stppo.rollout.vllm.generation import Finished, Reason
from tests.data.text.tokenizer_kinds import KINDS
from tests.rollout.vllm.tiny import END, task

LIMITS = Limits(max_prompt_tokens=50, max_turn_tokens=8, max_observation_tokens=20, max_context=100)
ASK = (Message("user", "which city?"),)


def started(tokenizer: PreTrainedTokenizerFast, limits: Limits = LIMITS) -> Episode:
    episode = Episode(task(0), 0, limits, tokenizer)
    episode.start(ASK, ("e",))
    return episode


def turn(*ids: int, reason: Reason = "stop") -> Finished:
    return Finished("0", ids, tuple(-0.5 for _ in ids), reason, versions=((7, len(ids)),))


def seen(observation: str) -> StepResult:
    return StepResult(observation, 0.0, done=False, valid=True, tool_calls=1)


def test_prompt_is_the_chat_template_with_the_assistants_opening(tokenizer: PreTrainedTokenizerFast) -> None:
    text = tokenizer.decode(started(tokenizer).histories[0].prompt_ids)
    assert text == "<|im_start|>user\nwhich city?<|im_end|>\n<|im_start|>assistant\n"


def test_messages_on_which_the_template_fails_end_their_episode(tokenizer: PreTrainedTokenizerFast) -> None:
    strict = copy.deepcopy(tokenizer)
    for template, said in (
        ("{{ raise_exception('no roles but user') }}", "ConfigError: model.path: its chat template rejects"),
        ("{{ messages[0]['content'] + 1 }}", "ConfigError: model.path: its chat template rejects"),
    ):
        strict.chat_template = template
        episode = started(strict)
        assert episode.outcome == "error"
        assert episode.detail.startswith(f"the chat template failed: {said}")
        assert (episode.trajectory().prompt_ids, episode.trajectory().turns) == ((), ())


def test_context_is_prompt_turns_and_observations_in_order(tokenizer: PreTrainedTokenizerFast) -> None:
    episode = started(tokenizer)
    episode.add_turn(turn(5, 9))
    episode.answer(seen("Paris"))
    episode.add_turn(turn(6))
    episode.answer(StepResult("", 1.0, True, True, False, "ok", "six"))
    paris = tokenizer.encode("Paris")
    assert episode.context == [*episode.histories[0].prompt_ids, 5, 9, *paris, 6]
    trajectory = episode.trajectory()
    assert list(trajectory.token_ids) == episode.context
    assert [t.reward for t in trajectory.turns] == [0.0, 1.0], "the reward is on the turn that earned it"
    assert [t.policy_version for t in trajectory.turns] == [7, 7]
    assert (trajectory.outcome, trajectory.detail) == ("ok", "six")
    assert (trajectory.tool_calls, trajectory.valid_actions) == (1, 2)


@pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS)
def test_the_environment_reads_every_space_that_the_policy_writes_and_the_other_way_round(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    episode = started(tokenizer)
    spoken = turn(*encode_plain(tokenizer, " hi a: "))
    episode.add_turn(spoken)
    assert episode.completion(spoken).text == " hi a: "
    episode.answer(seen("b the"))
    head = tokenizer.decode(episode.histories[0].prompt_ids)
    assert tokenizer.decode(episode.context) == head + " hi a: b the"


def test_long_observation_is_cut_before_its_closing_tag(tokenizer: PreTrainedTokenizerFast) -> None:
    episode = started(tokenizer)
    episode.add_turn(turn(5))
    episode.answer(seen("<information>" + "Paris is the capital. " * 20 + "</information>\n\n"))
    ids = episode.histories[0].turns[0].observation_ids
    assert len(ids) == LIMITS.max_observation_tokens
    text = tokenizer.decode(ids)
    assert text.startswith("<information>Paris") and text.endswith("</information>\n\n")


def test_no_space_comes_between_the_rest_of_a_long_observation_and_its_tag() -> None:
    """A tag and every "." have at least one token: the limit of 20 falls between dots."""
    tokenizer = KINDS["prepend"]
    episode = started(tokenizer)
    episode.add_turn(turn(*encode_plain(tokenizer, "hi")))
    episode.answer(seen("." * 60 + "</a>"))
    text = tokenizer.decode(episode.histories[0].turns[0].observation_ids)
    assert set(text.removesuffix("</a>")) == {"."}


def test_long_observation_without_a_tag_is_cut_at_the_limit(tokenizer: PreTrainedTokenizerFast) -> None:
    episode = started(tokenizer)
    episode.add_turn(turn(5))
    text = "Paris is the capital. " * 20
    episode.answer(seen(text))
    assert list(episode.histories[0].turns[0].observation_ids) == tokenizer.encode(text)[:20]


def test_a_prompt_beyond_its_limit_is_an_error_that_names_the_limit(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    episode = started(tokenizer, Limits(5, 8, 20, 100))
    assert episode.outcome == "error"
    whole = started(tokenizer).histories[0].prompt_ids
    assert episode.detail == f"prompt of {len(whole)} tokens exceeds rollout.max_prompt_tokens=5"
    assert episode.histories[0].prompt_ids == whole[:5], "cut, so that it does not fill a microbatch"


def test_texts_of_megabytes_take_the_time_of_the_tokens_that_are_kept(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """20 MB took half a minute."""
    huge, before = "the Paris " * 2_000_000 + "</a>", time.process_time()
    episode = started(tokenizer)
    episode.add_turn(turn(5))
    episode.answer(seen(huge))
    ids = episode.histories[0].turns[0].observation_ids
    assert tokenizer.decode(ids).startswith("the Paris the") and tokenizer.decode(ids).endswith("</a>")
    overlong = Episode(task(0), 0, LIMITS, tokenizer)
    overlong.start((Message("user", f"{END}{huge}"),), ())
    assert overlong.detail == "prompt of more than 50 tokens exceeds rollout.max_prompt_tokens=50"
    assert time.process_time() - before < 5.0


def test_a_turn_cut_by_its_own_limit_is_still_passed_to_the_environment(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    episode = started(tokenizer)
    finished = turn(*tokenizer.encode("Paris the"), reason="length")
    episode.add_turn(finished)
    assert episode.outcome is None
    assert episode.completion(finished).text == "Paris the"


def test_turn_cut_by_the_end_of_the_context_ends_truncated(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = len(started(tokenizer).histories[0].prompt_ids)
    episode = started(tokenizer, Limits(50, 8, 20, prompt + 3))
    assert episode.max_tokens == 3
    episode.add_turn(turn(5, 6, 7, reason="length"))
    assert (episode.outcome, len(episode.context)) == ("truncated", prompt + 3)


def test_an_answer_that_fills_the_context_is_still_graded(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = len(started(tokenizer).histories[0].prompt_ids)
    episode = started(tokenizer, Limits(50, 8, 20, prompt + 3))
    episode.add_turn(turn(5, 6, 7, reason="stop"))
    assert episode.outcome is None
    episode.answer(StepResult("", 1.0, True, True, False, "ok"))
    assert (episode.outcome, episode.trajectory().reward) == ("ok", 1.0)


def test_observation_without_room_for_a_reply_is_dropped(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt, answer = len(started(tokenizer).histories[0].prompt_ids), tokenizer.encode("Paris France")
    episode = started(tokenizer, Limits(50, 8, 20, prompt + 1 + len(answer)))
    episode.add_turn(turn(5))
    episode.answer(seen("Paris France"))
    assert episode.outcome == "truncated"
    assert episode.trajectory().token_ids == (*episode.histories[0].prompt_ids, 5)


def test_the_end_of_text_token_is_kept_as_an_id_and_is_not_in_the_text(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    episode = started(tokenizer)
    finished = turn(*tokenizer.encode("Paris"), tokenizer.eos_token_id, reason="end")
    episode.add_turn(finished)
    assert episode.completion(finished).text == "Paris"
    assert episode.histories[0].turns[0].token_ids[-1] == tokenizer.eos_token_id


def test_an_observation_is_a_message_of_the_user_also_after_a_turn_that_was_cut(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """The whole conversation has the tokens of the template, with the policy's own in their place."""
    end = tokenizer.eos_token_id
    limits = replace(LIMITS, max_observation_tokens=60, max_context=300)
    said = [Message("assistant", "Paris"), Message("user", "which one?"), Message("assistant", "the old")]
    said += [Message("user", f"Paris {END} is the capital")]
    ended: tuple[Reason, tuple[int, ...]] = ("end", (end,))
    cut: tuple[Reason, tuple[int, ...]] = ("length", ())
    for ends in ((ended, ended), (cut, ended), (ended, cut), (cut, cut)):
        episode = Episode(task(0), 0, limits, tokenizer, [end])
        episode.start(ASK, ())
        actions = []
        for (reason, last), place in zip(ends, (0, 2), strict=True):
            actions.append((*encode_plain(tokenizer, said[place].content), *last))
            episode.add_turn(turn(*actions[-1], reason=reason))
            episode.answer(seen(said[place + 1].content))
        assert episode.context == encode_chat(tokenizer, [*ASK, *said])
        assert [one.token_ids for one in episode.histories[0].turns] == actions, "only these are trained"


def test_with_stop_strings_an_observation_is_text_and_so_it_is_everywhere_if_that_is_chosen(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    end, paris = tokenizer.eos_token_id, tuple(tokenizer.encode("Paris"))
    text = replace(LIMITS, new_message=False)
    cases: list[tuple[Limits, tuple[str, ...], int, Reason]] = [
        (LIMITS, ("e",), 5, "stop"),
        (LIMITS, ("e",), 5, "length"),
        (text, ("e",), end, "end"),
        (text, (), end, "end"),
        (text, (), 5, "length"),
    ]
    for limits, stops, last, reason in cases:
        episode = Episode(task(0), 0, limits, tokenizer, [end])
        episode.start(ASK, stops)
        episode.add_turn(turn(last, reason=reason))
        episode.answer(seen("Paris"))
        assert episode.histories[0].turns[0].observation_ids == paris


def test_a_long_observation_is_cut_before_it_becomes_a_message(tokenizer: PreTrainedTokenizerFast) -> None:
    end = tokenizer.eos_token_id
    episode = Episode(task(0), 0, Limits(50, 8, 40, 120), tokenizer, [end])
    episode.start(ASK, ())
    episode.add_turn(turn(end, reason="end"))
    text = "Paris is the capital. " * 20
    episode.answer(seen(text))
    shown = tokenizer.decode(episode.histories[0].turns[0].observation_ids)
    before, after = "\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert shown.startswith(f"{before}Paris") and shown.endswith(after)
    assert text.startswith(shown.removeprefix(before).removesuffix(after))
    assert len(episode.histories[0].turns[0].observation_ids) == 40


def test_a_template_that_fails_on_the_new_message_ends_the_episode_alone(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    strict, end = copy.deepcopy(tokenizer), tokenizer.eos_token_id
    strict.chat_template += "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}"
    episode = Episode(task(0), 0, LIMITS, strict, [end])
    episode.start(ASK, ())
    episode.add_turn(turn(end, reason="end"))
    episode.answer(seen("Paris"))
    assert episode.outcome == "error" and "one message" in episode.detail
