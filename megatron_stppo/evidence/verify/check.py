"""The command `verify`: checks that exclude silently wrong training, on the run's own configuration.

Every check prints its line when it is done. The order matters: the first checks leave the weights as they
are, and the last ones change them. The very last one leaves the run's models unusable.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config
from megatron_stppo.evidence.verify.arrival import arrival
from megatron_stppo.evidence.verify.fair import fair
from megatron_stppo.evidence.verify.gradient import gradient
from megatron_stppo.evidence.verify.layouts import layouts
from megatron_stppo.evidence.verify.optimizer import adam
from megatron_stppo.evidence.verify.ratio import first_ratio
from megatron_stppo.evidence.verify.resume import resume
from megatron_stppo.evidence.verify.rewards import landing
from megatron_stppo.evidence.verify.stage import Checked, Stage
from megatron_stppo.evidence.verify.tokens import exact
from megatron_stppo.training.loop import Assemble

Check = Callable[[Stage], Iterator[Checked]]  # collective; equal findings on every rank
CHECKS: tuple[Check, ...] = (
    exact,
    landing,
    fair,
    first_ratio,
    gradient,
    adam,
    resume,
    arrival,
    layouts,
)


def verify(config: Config, assemble: Assemble, output: Path | None = None) -> bool:
    """Run all checks and print a line for each. Return whether none fails. Collective.

    assemble: as for `loop.train`. output: a JSON file for the findings. Raises ConfigError.
    """
    stage = Stage.of(config, assemble(config, False))
    findings = list(findings_of(stage, CHECKS))
    stage.rollouts.close()
    if process.rank() == 0:
        if output is not None:
            output.write_text(json.dumps([asdict(one) for one in findings], indent=1) + "\n")
        shutil.rmtree(config.run.folder, ignore_errors=True)
    return all(one.verdict != "fails" for one in findings)


def findings_of(stage: Stage, checks: tuple[Check, ...]) -> Iterator[Checked]:
    """Yield the findings of the checks, and print each on the first rank. Collective."""
    for check in checks:
        for finding in check(stage):
            if stage.learner.mesh.rank == 0:
                print(finding, flush=True)
            yield finding
