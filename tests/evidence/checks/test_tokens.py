from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.evidence.bench.stage import Stage
from megatron_stppo.evidence.checks.tokens import exact
from megatron_stppo.rollout.episodes import episode
from megatron_stppo.rollout.episodes.episode import Episode, History
from tests.evidence.checks import staged
from tests.ranks import run_ranks


def decoded_and_encoded_again(mp: pytest.MonkeyPatch) -> None:
    """trl #5224."""
    real = Episode.add_turn

    def again(self: Episode, finished: Any) -> None:
        text = episode.decode_plain(self.tokenizer, finished.token_ids)
        ids = tuple(episode.encode_plain(self.tokenizer, text))
        logprobs = (finished.logprobs + (0.0,) * len(ids))[: len(ids)]
        versions = ((finished.versions[-1][0], len(ids)),)
        real(self, replace(finished, token_ids=ids, logprobs=logprobs, versions=versions))

    mp.setattr(Episode, "add_turn", again)


def shifted_logprobs(mp: pytest.MonkeyPatch) -> None:
    """rllm #816."""
    real = History.add

    def shifted(self: History, finished: Any) -> None:
        real(self, replace(finished, logprobs=finished.logprobs[1:] + finished.logprobs[:1]))

    mp.setattr(History, "add", shifted)


def doubled_first_token(mp: pytest.MonkeyPatch) -> None:
    """trl #3856."""
    real = episode.encode_chat

    def doubled(tokenizer: Any, *given: Any) -> list[int]:
        ids = real(tokenizer, *given)
        return [ids[0], *ids]

    mp.setattr(episode, "encode_chat", doubled)


def missing_first_token(mp: pytest.MonkeyPatch) -> None:
    """marin #7179."""
    real = episode.encode_chat
    mp.setattr(episode, "encode_chat", lambda *given: real(*given)[1:])


def doubled_end_of_a_turn(mp: pytest.MonkeyPatch) -> None:
    """verl #6719."""
    real = episode.encode_after
    mp.setattr(
        episode,
        "encode_after",
        lambda tokenizer, messages, tools, at, last, ends: real(tokenizer, messages, tools, at, -1, ends),
    )


def open_message_after_a_cut_turn(mp: pytest.MonkeyPatch) -> None:
    real = episode.encode_after
    mp.setattr(
        episode,
        "encode_after",
        lambda tokenizer, messages, tools, at, last, ends: real(
            tokenizer, messages, tools, at, next(iter(ends)), ends
        ),
    )


def control_tokens_of_observations(mp: pytest.MonkeyPatch) -> None:
    """gemma #770."""
    mp.setattr(
        episode, "encode_plain", lambda tokenizer, text: tokenizer.encode(text, add_special_tokens=False)
    )


CUT, KEPT = "rollout.episodes.episode:Episode._shortened", "ids[:kept] + tail[: limit - kept]"
CUTS = {
    "the end of an observation": staged.mistaken(CUT, KEPT, "ids[-kept:] + tail[: limit - kept]"),
    "an observation without its tag": staged.mistaken(CUT, KEPT, "ids[:limit]"),
    "half of an observation": staged.mistaken(CUT, KEPT, "ids[: kept // 2] + tail[: limit - kept]"),
}
OF_THE_ENGINE = (decoded_and_encoded_again, shifted_logprobs)
OF_THE_TEMPLATE = (
    doubled_first_token,
    missing_first_token,
    doubled_end_of_a_turn,
    open_message_after_a_cut_turn,
    control_tokens_of_observations,
)


def look(path: Path) -> Any:
    every: Any = {one.__name__: one for one in (*OF_THE_ENGINE, *OF_THE_TEMPLATE)}

    def of(stage: Stage) -> Any:
        of_text = staged.with_section(stage, "environment", after_end="text")
        name = control_tokens_of_observations.__name__
        of_text_alone = {name: every[name]} | CUTS
        return staged.findings(stage, exact, every | CUTS), staged.findings(of_text, exact, of_text_alone)

    return staged.run(of, path)


def test_planted_faults_of_tokens_are_found_and_healthy_ones_are_not(tmp_path: Path) -> None:
    ((found, of_text),) = run_ranks(look, 1, staged.write(tmp_path / "project"), timeout=240)
    assert found.pop("") == [] and of_text.pop("") == []
    for one in OF_THE_ENGINE:
        assert found[one.__name__][0].startswith("tokens are exact"), found
    for one in OF_THE_TEMPLATE:
        (line,) = found[one.__name__]
        assert line.startswith("turns follow the chat template"), found
    (line,) = of_text["control_tokens_of_observations"]
    assert "control token" in line
    for name in CUTS:
        assert "a scripted observation" in found[name][0] and "a scripted observation" in of_text[name][0]
