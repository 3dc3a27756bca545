"""README.md and the documents that it leads to agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from megatron_stppo.config import Config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)


def test_the_readme_has_at_most_150_lines() -> None:
    assert len(README.splitlines()) <= 150


def test_the_example_of_a_run_is_a_valid_configuration() -> None:
    block = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert block is not None and len(block[1].splitlines()) <= 20
    config = Config.model_validate(yaml.safe_load(block[1]))
    assert (config.parallel.tensor, config.algorithm.preset) == (4, "st_ppo")


def test_links_lead_to_files() -> None:
    wrong = []
    for page in PAGES:
        links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8"))
        wrong += [f"{page.name}: {link}" for link in links if not (page.parent / link).exists()]
    assert not wrong


def test_links_lead_to_headings() -> None:
    """The part after # is the heading as GitHub makes it: lower case, no punctuation, - for a space."""
    linked, wrong = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)"), []
    for page in [*PAGES, *(ROOT / "examples").rglob("README.md")]:
        for link, part in linked.findall(page.read_text(encoding="utf-8")):
            target = page.parent / link if link else page
            headings = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.MULTILINE)
            made = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
            wrong += [f"{page.relative_to(ROOT)}: {link}#{part}"] if part not in made else []
    assert not wrong


def test_files_that_documents_name_exist() -> None:
    """A name begins with a folder of the repository, or with a folder of the package and ends with .py."""
    units = "|".join(path.parent.name for path in (ROOT / "megatron_stppo").glob("*/__init__.py"))
    folders = re.compile(r"`((?:megatron_stppo|tools|tests|examples|docs)/[\w./-]+)`")
    modules = re.compile(rf"`((?:{units})/[\w./]+\.py)`")
    named = [
        (page.name, name)
        for page in PAGES
        for text in [page.read_text(encoding="utf-8")]
        for name in folders.findall(text) + [f"megatron_stppo/{name}" for name in modules.findall(text)]
    ]
    assert len(named) > 100
    assert not [(page, name) for page, name in named if "NAME" not in name and not (ROOT / name).exists()]


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"^\| \[([\w.-]+)\]", index, re.MULTILINE))
