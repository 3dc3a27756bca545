"""Tries to lose a checkpoint, and writes what happened into docs/reliability.md.

    python tools/chaos.py [--kills 50] [--examples 2000] [--every 40] [--seed 0] [--output docs/reliability.md]

Three parts, one after the other, all drawn from the seed: saves that die at every call into the operating
system, random damage to a folder of checkpoints, and SIGKILLs of the training program on four gloo ranks. The
first thing that is lost ends it with exit code 1 and is written down too.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the cases are those of the tests

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn

from tests.loop import small_run
from tests.update import layouts

BEGIN, END = "<!-- begin: tools/chaos.py -->\n", "<!-- end -->\n"


def main() -> int:
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        root = Path(folder)
        config, model = small_run.write(root), root / "small"
        layouts.write_model(
            model, num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2
        )
        rows, failed = [], ""
        columns = (
            SpinnerColumn(),
            *Progress.get_default_columns(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        console = Console(stderr=True)
        with Progress(*columns, console=console) as bar:
            for title, total, part in parts(arguments, root, config, model):
                task, started = bar.add_task(title, total=total), time.monotonic()
                result = ""
                try:
                    for done, result in part:
                        bar.update(task, completed=done)
                except Exception:
                    failed = traceback.format_exc()
                    result += " **lost, see below**"
                rows.append(f"| {title} | {result} | {time.monotonic() - started:.0f} |")
                if failed:
                    break
        write(arguments, rows, failed)
        console.print("\n".join(rows), highlight=False)
    return int(bool(failed))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs of all four ranks")
    parser.add_argument("--examples", type=int, default=2000, help="damaged folders")
    parser.add_argument(
        "--every", type=int, default=40, help="of the writes into a buffer, die at every n-th"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("docs/reliability.md"))
    return parser.parse_args()


Part = Iterator[tuple[int, str]]  # (how many are done, the result so far)


def parts(
    arguments: argparse.Namespace, root: Path, config: Path, model: Path
) -> Iterator[tuple[str, int, Part]]:
    """(title, how many, its results), each made when the one before is over: what is imported stays."""
    from megatron_stppo.runtime import launch

    launch.prepare()
    import torch

    import megatron_stppo.loop  # noqa: F401  the ranks are forked with it
    from tests.chaos import corruption, killed_ranks, killed_saves, one_rank

    torch.set_num_threads(1)
    gc.freeze()
    null, saved = os.open(os.devnull, os.O_WRONLY), os.dup(2)
    for background in (False, True):
        os.dup2(null, 2)  # every child announces what it saves
        (root / f"{background}").mkdir()
        bench = killed_saves.Bench(root / f"{background}", model, background)
        os.dup2(saved, 2)
        chosen = bench.worth(arguments.every)
        kind = "in the background" if background else "waited for"

        def deaths(bench: killed_saves.Bench = bench, chosen: list[int] = chosen) -> Part:
            left = {1: 0, 2: 0}
            for done, call in enumerate(chosen, 1):
                os.dup2(null, 2)
                try:
                    step, wrong = bench.die_at(call)
                finally:
                    os.dup2(saved, 2)
                assert not wrong, wrong
                left[step] += 1
                yield (
                    done,
                    (
                        f"{done} calls of {len(bench.calls)}, no step lost: "
                        f"{left[1]} times step N-1 was loaded, {left[2]} times step N"
                    ),
                )

        yield f"a save, {kind}, that dies at a call", len(chosen), deaths()

    def damage() -> Part:
        batch = 100
        for n in range(-(-arguments.examples // batch)):
            folder = root / f"damage-{n}"
            code = one_rank.in_child(corruption.always_noticed, folder, batch, arguments.seed + n)
            assert code == 0, f"damage with seed {arguments.seed + n}: see above"
            yield (n + 1) * batch, f"{(n + 1) * batch} folders, all noticed"

    yield "a damaged folder", arguments.examples, damage()

    def kills() -> Part:
        count, runs, lost = 0, set(), 0.0
        for name, attempt in killed_ranks.kill_often(config, arguments.kills, arguments.seed):
            count += attempt.killed
            runs.add(name)
            if name == "undisturbed":
                lost = attempt.seconds
            yield (
                count,
                (
                    f"{count} SIGKILLs of 4 ranks in {len(runs) - 1} runs of {killed_ranks.ITERATIONS} "
                    f"iterations ({lost:.0f} s undisturbed), no announced step lost, every run ends at the bytes "
                    "of the undisturbed one"
                ),
            )

    yield "the training program, killed", arguments.kills, kills()


def write(arguments: argparse.Namespace, rows: list[str], failed: str) -> None:
    """Puts the results between the marks of the file."""
    command = f"--kills {arguments.kills} --examples {arguments.examples} --every {arguments.every}"
    text = [
        f"`python tools/chaos.py {command} --seed {arguments.seed}`, "
        f"{datetime.date.today()}, {os.cpu_count()} cores, {platform.machine()}, load average "
        f"{os.getloadavg()[0]:.0f} at the end, Python {platform.python_version()}:",
        "",
        "| what | result | seconds |",
        "|---|---|---|",
        *rows,
        *(["", "```", failed.strip(), "```"] if failed else []),
        "",
    ]
    before, _, rest = arguments.output.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    arguments.output.write_text(before + BEGIN + "\n".join(text) + END + after, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
