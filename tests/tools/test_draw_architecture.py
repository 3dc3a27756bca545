"""docs/architecture.svg shows the folders of the package as they are."""

from __future__ import annotations

from tools import draw_architecture as picture


def test_the_picture_is_current_and_every_folder_has_a_text() -> None:
    assert all(picture.folders().values())
    assert picture.main(["--check"]) == 0, "call python tools/draw_architecture.py"


def test_a_folder_stands_above_what_it_imports_and_lines_are_direct_imports() -> None:
    of = {"top": {"middle", "ground"}, "middle": {"ground"}, "ground": set[str](), "other": set[str]()}
    assert picture.layers(of) == [["ground", "other"], ["middle"], ["top"]]
    assert picture.direct(of) == {"top": {"middle"}, "middle": {"ground"}, "ground": set(), "other": set()}
