"""Functions that run on a rank: checks of a tiny model without an engine, healthy and with planted bugs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_stppo.cluster.launch import process
from tests.evidence.checks import plants_of_update as planted
from tests.training.update import layouts

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 67, "head_dim": 8}
# a multiple of 8 times the largest tensor-parallel size
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def write(folder: Path, family: str = "qwen3", **changes: Any) -> str:
    layouts.write_model(folder, family, **(SMALL | (EXPERTS if family == "qwen3_moe" else {}) | changes))
    return str(folder)


def examine(
    check: str, model: str, names: tuple[str, ...], given: dict[str, Any], role: str = ""
) -> dict[str, list[Any]]:
    """Return {planted bug: [(verdict, text) of actor, of critic]}; "" is without one. check: `gradient`,
    `optimizer` or `layouts`. given: sections of the configuration. role: the only model that is examined."""
    process.prepare(engine=False)
    from megatron_stppo.config import Config
    from megatron_stppo.evidence.checks import adamw, gradient
    from megatron_stppo.evidence.checks import layouts as of_layouts
    from megatron_stppo.parallel import groups
    from megatron_stppo.weights.sharding.hf_names import read_shape

    section = {"path": model} | given.pop("model", {})
    config = Config.model_validate({"model": section, "algorithm": {"advantage": "gae"}} | given)
    asked = [r for r in gradient.roles(config) if role in ("", r)]
    mesh, shape, found = groups.initialize(config.parallel), read_shape(Path(model)), {}
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            getattr(planted, name)(patch) if name else None
            if check == "layouts":
                lines = [of_layouts.finding(config, shape, mesh.world)]
            elif check == "optimizer":
                lines = [adamw.compared(r, config, shape, mesh) for r in asked]
            else:
                lines = [gradient.finding(r, gradient.slopes(r, config, shape, mesh)) for r in asked]
        found[name] = [(line.verdict, f"{line.measured} {line.remedy}") for line in lines]
    return found


def verdicts(found: dict[str, list[Any]]) -> dict[str, list[str]]:
    return {name: [verdict for verdict, _ in lines] for name, lines in found.items()}
