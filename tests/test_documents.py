"""docs/algorithms.md agrees with the settings, and docs/glossary.md with the other pages.

tests/training/loop compares docs/metrics.md with real rows.
"""

from __future__ import annotations

import re

import yaml

from megatron_stppo.algorithm.variants import VARIANTS
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.observe.run_files import played_path
from tests.documented import DOCS, NAME, metrics, rows, undocumented
from tools.write_reference import commands, configuration, default


def test_every_field_of_the_algorithm_has_a_row_with_its_default() -> None:
    written = {}
    for cells in rows("algorithms.md"):
        if len(cells) == 5:  # field, default, formula, source, remarks
            written |= dict(zip(NAME.findall(cells[0]), NAME.findall(cells[1]), strict=False))
    fields = {name: field for name, field in AlgorithmConfig.model_fields.items() if name != "preset"}
    assert written == {name: default(field).strip("`") for name, field in fields.items()}


def test_every_preset_has_one_row() -> None:
    presets = [NAME.findall(cells[0]) for cells in rows("algorithms.md") if len(cells) == 4]
    named = [names[0] for names in presets if names]
    assert sorted(named) == sorted(VARIANTS)


def test_every_algorithm_on_the_page_can_be_configured() -> None:
    written = re.findall(r"`(\{preset:.*?\})`", (DOCS / "algorithms.md").read_text(encoding="utf-8"))
    assert len(written) >= 8
    for section in written:
        AlgorithmConfig.model_validate(yaml.safe_load(section))


def test_every_aggregation_has_a_row() -> None:
    kinds = AlgorithmConfig.model_fields["aggregation"].annotation.__args__  # type: ignore[union-attr]
    first = [NAME.findall(cells[2])[:1] for cells in rows("algorithms.md") if len(cells) == 5]
    assert set(kinds) <= {names[0].rstrip(":") for names in first if names}


def test_no_metric_is_described_twice() -> None:
    assert len(metrics()) == len(set(metrics()))
    assert undocumented(["actor/clip_fraction_turn_12", "seconds/update", "actor/clip"]) == ["actor/clip"]


def test_the_references_of_fields_and_commands_are_current() -> None:
    for name, text in (("configuration.md", configuration()), ("commands.md", commands())):
        assert (DOCS / name).read_text(encoding="utf-8") == text, "call python tools/write_reference.py"


def test_files_of_an_iteration_have_the_names_that_the_run_gives_them() -> None:
    assert played_path(DOCS, 12).stem == "iteration-00012"
    for page in (*DOCS.rglob("*.md"), DOCS.parent / "README.md"):
        names = re.findall(r"\biteration-[0-9N*]+", page.read_text(encoding="utf-8"))
        assert all(re.fullmatch(r"iteration-(\d{5}|NNNNN)", name) for name in names), page


def test_every_term_of_the_glossary_is_used_on_another_page_and_the_terms_are_sorted() -> None:
    terms = [cells[0] for cells in rows("glossary.md")][2:]  # below the heading and its line
    pages = [page for page in DOCS.rglob("*.md") if page.name != "glossary.md"]
    text = " ".join(page.read_text(encoding="utf-8") for page in pages)
    used = re.compile(r"\s").sub(" ", text).lower()
    assert not [term for term in terms if not re.search(rf"\b{term}", used)]
    assert terms == sorted(terms)
