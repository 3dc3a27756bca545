"""The command `cold-start`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_stppo.commands.open_run import importing, open_config
from megatron_stppo.commands.options import File, Overrides, command_group, examples

if TYPE_CHECKING:
    pass

commands = command_group()


@commands.command(
    "cold-start",
    epilog=examples(
        "megatron-stppo cold-start config.yaml cold_start.output=runs/cold-start",
        "megatron-stppo cold-start config.yaml cold_start.output=runs/adapters model.lora.rank=16",
        "megatron-stppo train config.yaml model.lora.path=runs/adapters",
    ),
)
def cold_start(config: File, overrides: Overrides = None) -> None:
    """Teach a model the format from scripted trajectories (data.demonstrations). With model.lora only
    adapters are trained and written."""
    settings = open_config(config, overrides, "cold-start")
    from megatron_stppo.cluster.launch import process

    with importing():
        process.prepare(engine=False)
        from megatron_stppo.training import cold_start as stage
    stage.cold_start(settings)
