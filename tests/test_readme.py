"""What README.md shows must be so."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_stppo.algorithm.variants import VARIANTS
from megatron_stppo.config import Config

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_table_of_presets_is_the_table_of_variants() -> None:
    shared = {"token": "a token", "turn": "a turn", "sequence": "a trajectory"}
    advantage = {"gae": "GAE with a critic", "group": "group-normalised outcome"}
    advantage["group_mean"] = "outcome less its group's mean"
    for name, row in VARIANTS.items():
        on = "off" if row["correction"] == "off" else "on"
        cells = [f"`{name}`", shared[row["segments"]], on, advantage[row["advantage"]]]
        assert f"| {' | '.join(cells)} |" in README


def test_the_sections_named_are_those_of_the_configuration() -> None:
    named = README[README.index("The sections are") : README.index("`megatron:` passes")]
    assert set(re.findall(r"`(\w+)`", named)) == set(Config.model_fields) - {"megatron"}


def test_files_named_exist() -> None:
    root = Path(__file__).parents[1]
    named = re.findall(
        r"`((?:megatron_stppo|tools|tests|examples)/[\w./-]+)`", README + (root / "SECURITY.md").read_text()
    )
    assert not [name for name in named if not (root / name).exists()]
