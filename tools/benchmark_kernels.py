"""Compare every op of megatron_stppo.ops with other implementations: time, memory traffic, float64 error.

    python tools/benchmark_kernels.py [--quick] [--device cpu|cuda] [--threads N] [--output FOLDER]

Prints tables, and writes kernels.json and kernels.png into FOLDER. docs/performance.md explains the numbers.
STPPO_OPS is set for each variant: to `extension` for "fused", so that it raises an error instead of using a
fallback, and to `torch` for "fallback". Exits with 2 if the extension is not built for the device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmark_copies import Copies, copy_rows
from benchmark_logprobs import linear_rows, vocab_rows
from benchmark_measure import Bench, Row, Variant, implementation, machine, scratch_bytes
from benchmark_opponents import (
    CLIP,
    bare_ppo,
    exact_ppo,
    no_compiler,
    token_ppo,
)
from benchmark_report import draw, save, show
from torch import Tensor

from megatron_stppo import ops
from megatron_stppo.algorithm.ratio import segment_ratio, spread
from megatron_stppo.ops import extension


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure. `budget` is in seconds per group of variants that are called in turn."""

    turns: int  # tokens of each turn-length set
    sets: Sequence[str]
    curve: Sequence[int]  # tokens
    vocab: Sequence[tuple[int, int, torch.dtype]]  # rows, columns
    passes: Sequence[str]
    linear: Sequence[tuple[int, int, int, torch.dtype]]  # T, H, V
    valid: Sequence[float]
    copies: Sequence[Copies]
    budget: float
    cold: bool


# Turn lengths. The number of turns per trajectory does not matter: at turn level a segment is a turn.
TURN_SETS: dict[str, Callable[[int], Tensor]] = {
    "lognormal, median 150": lambda n: torch.empty(n).log_normal_(5.0106, 0.8),
    "fixed 256": lambda n: torch.full((n,), 256.0),
    "search agent, 40-150": lambda n: torch.empty(n).uniform_(40, 151),
    "SWE agent, 60-400": lambda n: torch.empty(n).uniform_(60, 401),
    "single turns, 8-32K": lambda n: torch.empty(n).uniform_(8192, 32769),
    "turns of 131,072": lambda n: torch.full((n,), 131072.0),
    "turns of one": lambda n: torch.ones(n),
    "30 % empty": lambda n: torch.empty(n).log_normal_(5.0106, 0.8) * (torch.rand(n) > 0.3),
}
PASSES = ("forward", "backward", "forward + backward")
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def sizes(device: str, quick: bool) -> Sizes:
    sets = list(TURN_SETS)[: 2 if quick else None]
    valid = (1.0,) if quick else (1.0, 0.5, 0.25)
    if device == "cpu":
        vocab = [(1024, 32768, FLOAT32), (1024, 32768, BFLOAT16)]
        linear = [(512, 256, 8192, FLOAT32)] if quick else [(1024, 512, 32768, FLOAT32)]
        curve = [2**k for k in ((12, 15, 18) if quick else range(12, 23, 2))]
        passes = PASSES[2:] if quick else PASSES
        budget, tokens = (0.4, 131072) if quick else (4.0, 131072)
    else:
        shards = [18992] if quick else [18992, 151936]
        vocab = [(rows, n, BFLOAT16) for n in shards for rows in ((4096,) if quick else (512, 4096, 32768))]
        heads = [(2048, 151936), (3584, 152064), (5120, 151936), (8192, 128256), (7168, 129280)]
        linear = [(8192, h, v, BFLOAT16) for h, v in heads[: 1 if quick else None]]
        linear += [] if quick else [(32768, 8192, 128256 // 8, BFLOAT16)]  # a local shard, no collective
        curve = [2**k for k in range(12, 25, 4 if quick else 2)]
        passes = PASSES
        budget, tokens = 0.3, 2**22
    # one whole weight, columns of weights, norms
    copies = [(1, 4096, 4096, 4096), (16, 1024, 512, 1024), (400, 1, 4096, 4096)]
    return Sizes(tokens, sets, curve, vocab, passes, linear, valid, copies, budget, cold=not quick)


def main(arguments: Sequence[str] | None = None, chosen: Sizes | None = None, scratch: int = 0) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: at most 40 s on 2 CPU cores")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available")
    parser.add_argument("--output", type=Path, default=Path("runs/kernels"), metavar="FOLDER")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; default 2")
    given = parser.parse_args(arguments)
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(given.threads)
    try:
        with implementation("extension"):
            extension.serves(torch.device(device))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    torch.manual_seed(0)
    chosen = chosen or sizes(device, given.quick)
    bench = Bench(device, chosen.budget, 3 if given.quick else 7, scratch or scratch_bytes(device))
    rows: list[Row] = []
    s, missing = chosen, no_compiler(given.quick, device)
    for section in (
        surrogate_rows(bench, s.turns, s.sets, s.curve, missing, s.cold),
        vocab_rows(bench, s.vocab, s.passes, missing, s.cold),
        linear_rows(bench, s.linear, s.valid, s.cold),
        copy_rows(bench, s.copies, s.cold),
    ):
        bench.copy()
        for found in section:
            rows += found
            print(f"measured {found[0].section}, {found[0].size}", file=sys.stderr, flush=True)
    bench.copy()
    about = machine(device, extension.parts()) | {
        "quick": given.quick,
        "copy_bandwidth": bench.copy_bandwidth,
    }
    given.output.mkdir(parents=True, exist_ok=True)
    show(about, rows)
    save(about, rows, given.output / "kernels.json")
    draw(about, rows, given.output / "kernels.png")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def surrogate_rows(
    bench: Bench, tokens: int, sets: Sequence[str], curve: Sequence[int], missing: str, cold: bool
) -> Iterator[list[Row]]:
    """Compare fused ST-PPO with token-level PPO, forward and backward, over turn lengths and token counts."""
    for name in sets:
        yield surrogate_group(bench, "clipped_surrogate", name, tokens, name, missing, cold)
    for count in curve:
        yield surrogate_group(
            bench, "clipped_surrogate by tokens", f"{count:,}", count, sets[0], missing, cold
        )


def surrogate_group(
    bench: Bench, section: str, size: str, tokens: int, turns: str, missing: str, cold: bool
) -> list[Row]:
    """Return the rows of one size. `missing` is the reason why torch.compile is not measured, or empty."""
    offsets = turn_offsets(turns, tokens).to(bench.device)
    logprob, old, advantage = (x.to(bench.device) for x in surrogate_inputs(offsets.cpu(), tokens))
    logprob.requires_grad_()
    mask, weight = torch.ones_like(old), torch.full_like(old, 1 / tokens)
    by_token, by_turn = (exact_ppo(logprob, old, advantage, given) for given in (None, offsets))
    by_length = exact_ppo(logprob, old, advantage, offsets, power=1.0)
    moved = 24 * tokens + 12 * (len(offsets) - 1)  # per token 12 read, 4 written; backward 4 and 4

    def ours(name: str, mode: str, reference: list[Tensor], **given: Any) -> Variant:
        def run(_: None) -> Sequence[Tensor]:
            with implementation(mode):
                objective = ops.clipped_surrogate(
                    logprob, old, advantage, clip_low=CLIP, clip_high=CLIP, **given
                ).objective
                return objective, *torch.autograd.grad(objective, logprob)

        return Variant(name, run, reference=[-x for x in reference], ours=True)

    def theirs(name: str, function: Callable[..., tuple[Tensor, ...]], missing: str = "") -> Variant:
        def run(_: None) -> Sequence[Tensor]:
            loss = function(logprob, old, advantage, mask)[0]
            return loss, *torch.autograd.grad(loss, logprob)

        return Variant(name, run, reference=by_token, missing=missing)

    variants = [
        ours("fused ST-PPO", "extension", by_turn, segment_offsets=offsets),
        ours("fused ST-PPO, weight per token", "extension", by_turn, segment_offsets=offsets, weight=weight),
        ours(
            *("fused ST-PPO, bounds by length", "extension", by_length),
            segment_offsets=offsets,
            clip_length_power=1.0,
        ),
        ours("fused token-level PPO", "extension", by_token),
        ours("fallback of ST-PPO", "torch", by_turn, segment_offsets=offsets),
        theirs("token-level PPO, eager", token_ppo),
        theirs("token-level PPO, bare", bare_ppo),
        theirs("token-level PPO, torch.compile", torch.compile(token_ppo, dynamic=False), missing),
        theirs("bare, torch.compile", torch.compile(bare_ppo, dynamic=False), missing),
    ]
    return bench.rows(section, size, tokens, moved, variants, cold)


def turn_offsets(turns: str, tokens: int) -> Tensor:
    """Return int64 [S+1]: turns of the set, up to `tokens` tokens in total. The last turn is cut."""
    lengths = TURN_SETS[turns](tokens + 64).long().clamp(max=tokens)
    ends = lengths.cumsum(0)
    count = int((ends < tokens).sum()) + 1
    return torch.cat([ends.new_zeros(1), ends[:count].clamp(max=tokens)])


def surrogate_inputs(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logprob, old_logprob, advantage) [T].

    At token and at turn level, some ratios are beyond a bound of the clip, and none is on it.
    """
    logprob, advantage = -3 * torch.rand(tokens), torch.randn(tokens)
    old = logprob + 0.1 * torch.randn(tokens) + spread(0.15 * torch.randn(len(offsets) - 1), offsets, tokens)
    for _ in range(3):  # float64 and float32 must agree on what is clipped
        for given, power in ((offsets, 0), (offsets, 1), (None, 0)):
            ratio_T = spread(segment_ratio(logprob, old, given)[0], given, tokens)
            length_T = spread(offsets.diff(), offsets, tokens) ** power
            near_T = ((ratio_T - 1).abs() * length_T - CLIP).abs() < 1e-4
            old += 1e-3 * near_T
    return logprob, old, advantage


if __name__ == "__main__":
    sys.exit(main())
