"""The command `verify`: checks that exclude silently wrong training, on the run's own configuration.

A check is a function of a module in checks/ that yields its findings, and a row of CHECKS. What checks share
is in bench/: the run's models, engine and episodes (stage.py), and models that are built for a measurement
(trial.py).
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from megatron_stppo.cluster.exits import is_first_rank
from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config
from megatron_stppo.data import tasks
from megatron_stppo.evidence.bench.stage import TASKS, Checked, Stage, small
from megatron_stppo.evidence.checks.adamw import adam
from megatron_stppo.evidence.checks.adapters import added
from megatron_stppo.evidence.checks.advantages import advantages
from megatron_stppo.evidence.checks.arrival import arrival
from megatron_stppo.evidence.checks.asked import asked, batches
from megatron_stppo.evidence.checks.critic import critic
from megatron_stppo.evidence.checks.fair import fair
from megatron_stppo.evidence.checks.gradient import gradient
from megatron_stppo.evidence.checks.layouts import layouts
from megatron_stppo.evidence.checks.loss import loss
from megatron_stppo.evidence.checks.reference import first_ratio, rates, reference
from megatron_stppo.evidence.checks.resume import resume
from megatron_stppo.evidence.checks.rewards import landing
from megatron_stppo.evidence.checks.tokens import exact
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.training.loop import Assemble

Check = Callable[[Stage], Iterator[Checked]]  # collective; equal findings on every rank
# The first checks leave the weights as they are, and the last ones change them. The very last one leaves the
# run's models unusable. All begin in the phase `score`, and print their lines when they are done.
CHECKS: tuple[Check, ...] = (
    exact,
    landing,
    advantages,
    fair,
    asked,
    first_ratio,
    added,
    loss,
    critic,
    gradient,
    adam,
    rates,
    reference,
    resume,
    arrival,
    batches,
    layouts,
)


def verify(config: Config, assemble: Assemble, output: Path | None = None) -> bool:
    """Run all checks and print a line for each. Return whether none fails. Collective.

    assemble: as for `loop.train`. output: a JSON file for the findings, also if a check raises. The run's
    folder is removed. Raises ConfigError.
    """
    assert config.data.train is not None, "validation/checks.py requires it"
    layout = Layout.of_world(process.world_size(), config.parallel)
    config = small(config, layout.data, min(TASKS, len(tasks.read(config.data.train))))
    findings: list[Checked] = []
    try:
        stage = Stage.of(config, assemble(config, False))
        for finding in findings_of(stage, CHECKS):
            findings.append(finding)  # those so far are written if a later check raises
        stage.rollouts.close()
    finally:
        if is_first_rank():  # close() has ended the process groups
            if output is not None:
                output.write_text(
                    json.dumps([asdict(finding) for finding in findings], indent=1) + "\n", encoding="utf-8"
                )
            shutil.rmtree(config.run.folder, ignore_errors=True)
    return all(finding.verdict != "fails" for finding in findings)


def findings_of(stage: Stage, checks: tuple[Check, ...]) -> Iterator[Checked]:
    """Yield the findings of the checks, and print each on the first rank. Collective."""
    for check in checks:
        stage.rollouts.load_for("score")  # the engine releases its memory
        for finding in check(stage):
            if process.rank() == 0:
                print(finding, flush=True)
            yield finding
