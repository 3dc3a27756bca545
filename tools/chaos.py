"""Try to lose a checkpoint or a task, and write the results into docs/reliability.md.

    python tools/chaos.py [--kills 50] [--examples 2000] [--calls N] [--seed 0] [--only PART]

There are four parts, whose random numbers come from the seed:

    saves     a save is killed at each of its system calls
    damage    a folder of checkpoints is damaged at random
    training  the training program on four gloo ranks gets SIGKILL
    serving   ranks and replicas of asynchronous training get SIGKILL

If something is lost, the first loss is also written into the document, and the program exits with code 1.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the cases are in the tests

import psutil
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn

from tests.training.loop import small_run
from tests.training.update import layouts
from tools import processes

BEGIN, END = "<!-- begin: tools/chaos.py -->\n", "<!-- end -->\n"
SAVES = {
    False: "killed at each call of a save, in the foreground",
    True: "killed at each call of a save, in the background",
}
DAMAGE, TRAINING = "a damaged folder", "the training program, killed"
SERVING = "asynchronous training, killed"
TITLES = (*SAVES.values(), DAMAGE, TRAINING, SERVING)
PARTS = ("saves", "damage", "training", "serving")


def main() -> int:
    arguments = parse()
    # the run's environment is a module of the tests; its tools take 0.1 s in asynchronous runs
    os.environ.update(PYTHONPATH=str(small_run.ROOT), LATE="0.1")
    rows, failed = earlier(arguments.output), ""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        config, model = small_run.write(root), root / "small"
        layouts.write_model(
            model, num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2
        )
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
                    for done, so_far in part:
                        result = so_far
                        bar.update(task, completed=done)
                except Exception:
                    failed = traceback.format_exc()
                    result += " **failed, see below**"
                seconds, load = time.monotonic() - started, os.getloadavg()[0]
                today = datetime.date.today()
                rows[title] = f"| {title} | {result} | {seconds:.0f} | {today} | {load:.0f} | {machine()} |"
                write(arguments, rows, failed)  # keep the results even if the rest is interrupted
                if failed:
                    break
        console.print("\n".join(rows.values()), highlight=False)
    finally:
        processes.end(processes.tree(psutil.Process())[:-1])
        if failed:
            print(f"{failed}\nThe runs and their logs are in {root}", file=sys.stderr)
        else:
            shutil.rmtree(root)
    return int(bool(failed))


def machine() -> str:
    """Return the number of cores and the processor. Example: "2 cores, AMD EPYC"."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{os.cpu_count()} cores, {next(names, platform.machine())}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills", type=int, default=50, help="SIGKILLs of all four ranks, and of one rank or replica"
    )
    parser.add_argument("--examples", type=int, default=2000, help="number of damaged folders")
    parser.add_argument(
        "--every", type=int, default=40, help="of the writes into a buffer, kill at every n-th"
    )
    parser.add_argument("--calls", type=int, help="at most so many calls, evenly spaced; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=PARTS, action="append", help="run this part; keep other results")
    about = "an existing document; the results replace those between its marks"
    parser.add_argument("--output", type=Path, default=Path("docs/reliability.md"), help=about)
    return parser.parse_args()


Part = Iterator[tuple[int, str]]  # (number of cases done, the result so far)


def parts(
    arguments: argparse.Namespace, root: Path, config: Path, model: Path
) -> Iterator[tuple[str, int, Part]]:
    """Yield (title, number of cases, results) of each part.

    A part is created after the one before has ended, because its imports stay in the process.
    """
    from megatron_stppo.cluster.launch import process

    process.prepare()
    import torch

    from tests.chaos import corruption, killed_saves, one_rank

    wanted = arguments.only or PARTS
    torch.set_num_threads(1)
    gc.freeze()
    for background in (False, True) if "saves" in wanted else ():
        (root / f"{background}").mkdir()
        bench = killed_saves.Bench(root / f"{background}", model, background)
        chosen = bench.worth(arguments.every)
        chosen = chosen[:: -(-len(chosen) // arguments.calls)] if arguments.calls else chosen
        yield SAVES[background], len(chosen), deaths(bench, chosen)

    def damage() -> Part:
        batch = 100
        for n in range(-(-arguments.examples // batch)):
            folder = root / f"damage-{n}"
            code = one_rank.in_child(corruption.always_noticed, folder, batch, arguments.seed + n)
            assert code == 0, f"damage with seed {arguments.seed + n}: see above"
            yield (n + 1) * batch, f"{(n + 1) * batch} folders, all damage detected"

    if "damage" in wanted:
        yield DAMAGE, arguments.examples, damage()
    if "training" in wanted:
        yield TRAINING, arguments.kills, kills(config, arguments.kills, arguments.seed)
    if "serving" in wanted:
        yield SERVING, arguments.kills, serving(config, arguments.kills, arguments.seed)


def deaths(bench: Any, chosen: list[int]) -> Part:
    left = {1: 0, 2: 0}
    for done, call in enumerate(chosen, 1):
        step, wrong = bench.die_at(call)
        assert not wrong, wrong
        left[step] += 1
        before, own = left.values()
        tried = f"{done} of its {len(bench.calls)} calls"
        yield done, f"{tried}: {before} times step N-1 could be loaded, {own} times step N"


def kills(config: Path, wanted: int, seed: int) -> Part:
    from tests.chaos import killed_ranks

    count, saving, seconds, runs = 0, 0, 0.0, set()
    for name, attempt in killed_ranks.kill_often(config, wanted, seed):
        count, saving = count + attempt.killed, saving + attempt.saving
        runs.add(name)
        seconds = seconds or attempt.seconds
        yield (
            count,
            (
                f"{count} SIGKILLs of 4 ranks, {saving} of them during a save, {len(runs) - 1} runs of "
                f"{killed_ranks.ITERATIONS} iterations ({seconds:.0f} s undisturbed): every "
                "published step could be loaded, all runs ended with the same bytes as undisturbed"
            ),
        )


def serving(config: Path, wanted: int, seed: int) -> Part:
    from tests.chaos import killed_serving

    for toll in killed_serving.kill_often(config, wanted, seed):
        yield toll.kills.total(), str(toll)


def earlier(document: Path) -> dict[str, str]:
    """Return the rows of the document's table, by title."""
    table = document.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()}
    return {title: rows[title] for title in TITLES if title in rows}


def write(arguments: argparse.Namespace, rows: Mapping[str, str], failed: str) -> None:
    """Write the results between the marks of the document."""
    left_out = ("output", "only")
    given = {n: value for n, value in vars(arguments).items() if n not in left_out and value is not None}
    command = " ".join(f"--{name} {value}" for name, value in given.items())
    text = [
        f"`python tools/chaos.py {command}`, Python {platform.python_version()}, no GPU; the load average is "
        "that at the end of a part:",
        "",
        "| what | result | seconds | date | load average | machine |",
        "|---|---|---|---|---|---|",
        *(rows[title] for title in TITLES if title in rows),
        *(["", "```", failed.strip(), "```"] if failed else []),
        "",
    ]
    before, _, rest = arguments.output.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    arguments.output.write_text(before + BEGIN + "\n".join(text) + END + after, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
