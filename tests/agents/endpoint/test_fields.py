"""The table of docs/agents.md has the rules of agents/endpoint/fields.py."""

from __future__ import annotations

from megatron_stppo.agents.endpoint.fields import ACCEPTED, IGNORED
from tests.documented import NAME, rows


def test_every_accepted_and_ignored_field_has_its_row() -> None:
    table = [cells for cells in rows("agents.md") if len(cells) == 2]
    written = {
        rule: [name for first, text in table if rule in text.split(":")[0] for name in NAME.findall(first)]
        for rule in ("accepted", "ignored")
    }
    assert sorted(written["ignored"]) == sorted(IGNORED)
    assert sorted(written["accepted"]) == sorted(ACCEPTED["chat"] | ACCEPTED["text"])
