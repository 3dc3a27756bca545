"""The real engine, run once in a separate process, because a process has one vLLM. The tests check what was
recorded."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_stppo.rollout.vllm.generation import Finished
from tests.rollout.vllm.tiny import CONTEXT, VOCABULARY, fill, reference_logprobs, refused

PROMPTS = [tuple(range(5 + i, 25 + 2 * i)) for i in range(4)]
LONG = tuple(10 + i % 200 for i in range(100))  # several blocks of the prefix cache
CROWD = [tuple(5 + (i + j) % 300 for j in range(200)) for i in range(48)]  # more than fits into a step
TEMPERATURE = 0.7
# as vLLM writes it (vllm/v1/worker/utils.py)
NO_MEMORY = (
    "Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory utilization "
    "(0.6, 47.46 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)


def observe(engine: Any, folder: Path) -> dict[str, Any]:
    from megatron_stppo.rollout.vllm.vllm_setup import LLMEngine, build_vllm

    seen: dict[str, Any] = {"unpublished": refused(lambda: engine.add("a", (5,), seed=0, max_tokens=1))}
    fill(engine.parameters(), folder)
    engine.published = lambda: 1
    seen["not refreshed"] = refused(lambda: engine.add("a", (5,), seed=0, max_tokens=1))
    engine.refresh()
    seen["greedy"] = _generate(engine, PROMPTS, 16, temperature=0.0)
    seen["sampled"] = _generate(engine, PROMPTS, 64, temperature=TEMPERATURE)
    seen["again"] = _generate(engine, PROMPTS, 64, temperature=TEMPERATURE)
    seen["alone"] = _generate(engine, PROMPTS[2:3], 64, temperature=TEMPERATURE, first_seed=2)
    stops = _stop_strings(engine, seen["sampled"][0])
    seen["stopped"] = [
        (stop, _generate(engine, PROMPTS[:1], 64, temperature=TEMPERATURE, stop_strings=(stop,))[0])
        for stop in stops
    ]
    seen["freed"] = _freed(engine, stops[0])
    seen["ended"] = _generate(engine, PROMPTS * 8, 64, temperature=1.0)
    seen["full"] = _generate(engine, [LONG * 2], 999, temperature=1.0)
    seen["long"] = _generate(engine, [LONG], 4, temperature=0.0)
    seen["crowded"] = _generate(engine, CROWD, 2, temperature=TEMPERATURE)
    seen["last of the crowd"] = _generate(engine, CROWD[-1:], 2, temperature=TEMPERATURE, first_seed=47)
    seen["bad ids"] = refused(lambda: engine.add("a", (VOCABULARY,), seed=0, max_tokens=1))
    seen["no room"] = refused(lambda: engine.add("a", (5,) * CONTEXT, seed=0, max_tokens=1))
    for name, parameter in engine.parameters().items():
        if "layernorm" in name:  # also changes the contents of the prefix cache
            parameter.mul_(0.5)
    engine.published = lambda: 2
    seen["stale cache"] = refused(lambda: engine.add("a", (5,), seed=0, max_tokens=1))
    engine.refresh()
    seen["new weights"] = _generate(engine, [LONG], 4, temperature=0.0)
    engine.add("running", (5, 6), seed=0, max_tokens=50)
    engine.step()
    seen["refresh while running"] = refused(engine.refresh)
    engine.published = _poisoned
    seen["poisoned"] = refused(engine.step)
    engine.abort_all()
    seen["unfinished"] = engine.unfinished
    seen["too long"] = refused(lambda: build_vllm(replace(engine._settings, max_context=CONTEXT + 1)))
    with mock.patch.object(LLMEngine, "from_engine_args", side_effect=ValueError(NO_MEMORY)):
        seen["no memory"] = refused(lambda: build_vllm(engine._settings))
    seen["cuda"] = torch.cuda.is_available()
    return seen


def _poisoned() -> int:
    raise RuntimeError("poisoned: shard 3 is torn")


def _generate(
    engine: Any, prompts: list[tuple[int, ...]], max_tokens: int, first_seed: int = 0, **options: Any
) -> list[Finished]:
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, seed=first_seed + number, max_tokens=max_tokens, **options)
    finished: dict[str, Finished] = {}
    while engine.unfinished:
        finished.update((done.request_id, done) for done in engine.step())
    return [finished[str(number)] for number in range(len(prompts))]


def _freed(engine: Any, stop: str) -> list[list[list[str]]]:
    """Stop 8 equal requests in one step. Return, for each step, what each call gave vLLM to free."""
    options = {"seed": 0, "max_tokens": 64, "temperature": TEMPERATURE, "stop_strings": (stop,)}
    for number in range(8):
        engine.add(str(number), PROMPTS[0], **options)
    steps = []
    while engine.unfinished:
        with mock.patch.object(engine._core, "abort_requests", wraps=engine._core.abort_requests) as freed:
            engine.step()
        steps.append([list(call.args[0]) for call in freed.call_args_list])
    return [calls for calls in steps if calls]


def _stop_strings(engine: Any, finished: Finished) -> list[str]:
    """Return pairs of characters at the border of two successive tokens of a generation."""
    text = [engine.tokenizer.decode([i], skip_special_tokens=False) for i in finished.token_ids]
    pairs = itertools.pairwise(text)
    joints = [a[-1] + b[0] for a, b in pairs if a and b and (a[-1] + b[0]).isascii()]
    assert len(joints) > 6, text
    return joints[3::3]


@pytest.fixture(scope="module")
def seen(seen_alone: dict[str, Any]) -> dict[str, Any]:
    return seen_alone["engine"]


def test_requests_that_stop_in_one_step_are_freed_one_after_the_other(seen: dict[str, Any]) -> None:
    """vLLM makes a set of those that are freed in one call. Its order differs between processes."""
    ((*calls,),) = seen["freed"]
    assert [len(given) for given in calls] == [1] * 8
    assert calls == sorted(calls), "in the order of their outputs"


def test_greedy_tokens_are_those_of_transformers(seen: dict[str, Any], reference: Any) -> None:
    for prompt, finished in zip(PROMPTS, seen["greedy"], strict=True):
        ids = list(prompt)
        for token in finished.token_ids:
            with torch.no_grad():
                assert int(reference(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)


@pytest.mark.parametrize(("what", "temperature"), [("sampled", TEMPERATURE), ("greedy", 1.0)])
def test_logprobs_are_those_of_transformers_at_the_sampling_temperature(
    seen: dict[str, Any], reference: Any, what: str, temperature: float
) -> None:
    for prompt, finished in zip(PROMPTS, seen[what], strict=True):
        expected = reference_logprobs(reference, prompt + finished.token_ids, temperature)
        got = torch.tensor(finished.logprobs, dtype=torch.float64)
        torch.testing.assert_close(got, expected[len(prompt) - 1 :], atol=2e-5, rtol=1e-5)


def test_same_seeds_give_the_same_bits(seen: dict[str, Any]) -> None:
    assert seen["sampled"] == seen["again"]


def test_a_request_draws_the_same_tokens_whatever_else_is_running(seen: dict[str, Any]) -> None:
    assert seen["alone"][0].token_ids == seen["sampled"][2].token_ids


def test_prompts_beyond_the_tokens_of_a_step_wait_undivided(seen: dict[str, Any]) -> None:
    assert sum(map(len, CROWD)) > 8192
    assert all(finished.token_ids for finished in seen["crowded"])
    assert seen["last of the crowd"][0].token_ids == seen["crowded"][-1].token_ids


def test_stopped_turn_is_the_unstopped_one_up_to_the_token_that_completes_the_string(
    seen: dict[str, Any], tokenizer: Any
) -> None:
    whole: Finished = seen["sampled"][0]
    for stop, finished in seen["stopped"]:
        text = [tokenizer.decode(whole.token_ids[:n]) for n in range(len(whole.token_ids) + 1)]
        length = next(n for n in range(len(text)) if stop in text[n])
        assert finished.reason == "stop"
        assert finished.token_ids == whole.token_ids[:length]
        assert finished.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-5)
        assert len(finished.logprobs) == len(finished.token_ids)


def test_end_of_text_token_is_the_last_of_its_turn_and_has_a_logprob(
    seen: dict[str, Any], tokenizer: Any
) -> None:
    ended = [finished for finished in seen["ended"] if finished.reason == "end"]
    assert ended, "a random model ends some of 32 turns"
    for finished in ended:
        assert finished.token_ids.index(tokenizer.eos_token_id) == len(finished.token_ids) - 1
        assert len(finished.logprobs) == len(finished.token_ids)
    assert {f.reason for f in seen["ended"]} <= {"end", "length"}
    assert all(len(f.token_ids) == 64 for f in seen["ended"] if f.reason == "length")


def test_generation_never_passes_the_context(seen: dict[str, Any]) -> None:
    [finished] = seen["full"]
    assert finished.reason == "end" or len(finished.token_ids) == CONTEXT - 2 * len(LONG)


def test_written_weights_are_used_and_the_prefix_cache_is_forgotten(
    seen: dict[str, Any], reference: Any
) -> None:
    [before], [after] = seen["long"], seen["new weights"]
    assert [finished.versions for finished in (before, after)] == [
        ((1, len(before.token_ids)),),
        ((2, len(after.token_ids)),),
    ]
    norms = [p for name, p in reference.named_parameters() if "layernorm" in name]
    for scale, finished in ((1.0, before), (0.5, after)):
        with torch.no_grad():
            for norm in norms:
                norm.mul_(scale)
            expected = reference_logprobs(reference, LONG + finished.token_ids)[len(LONG) - 1 :]
            for norm in norms:
                norm.div_(scale)
        assert finished.logprobs == pytest.approx(expected.tolist(), abs=2e-5)


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("unpublished", "RolloutError: no weights were published"),
        (
            "not refreshed",
            "RolloutError: weights of version 1 are published but the engine was refreshed for None",
        ),
        (
            "stale cache",
            "RolloutError: weights of version 2 are published but the engine was refreshed for 1",
        ),
        ("poisoned", "RuntimeError: poisoned: shard 3 is torn"),
        ("refresh while running", "RolloutError: 1 requests are running"),
        ("bad ids", "ValueError: request 'a': token ids must lie in [0, 320)"),
        ("no room", "ValueError: request 'a': 256 tokens and max_tokens=1 do not fit a context of 256"),
    ],
)
def test_the_engine_refuses_invalid_calls(seen: dict[str, Any], when: str, message: str) -> None:
    assert seen[when].startswith(message)


def test_sizes_that_vllm_refuses_are_named_with_its_reason(seen: dict[str, Any]) -> None:
    assert seen["too long"].startswith(
        "ConfigError: vLLM cannot be built with rollout.gpu_memory_utilization="
    )
    assert f"a context of {CONTEXT + 1} tokens" in seen["too long"]
    assert f"max_model_len ({CONTEXT + 1})" in seen["too long"]


def test_a_gpu_that_another_process_holds_is_no_error_of_the_configuration(seen: dict[str, Any]) -> None:
    assert seen["no memory"].startswith("Requeue: vLLM cannot be built with rollout.gpu_memory_utilization=")
    assert seen["no memory"].endswith(NO_MEMORY)


def test_aborting_leaves_nothing_running(seen: dict[str, Any]) -> None:
    assert seen["unfinished"] == 0


def test_engine_claims_no_cuda_device(seen: dict[str, Any]) -> None:
    assert seen["cuda"] is torch.cuda.is_available()
