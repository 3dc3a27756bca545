"""What episodes in progress have played, as replicas have told: for checkpoints, and to continue them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megatron_stppo.replicas.trainer.expected import Expected
from megatron_stppo.replicas.wire.episodes import PackedRecord, Unfinished


class EpisodeRecords:
    """The newest record of each episode that has not ended, by its number."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._records: dict[int, PackedRecord] = {}

    def __iter__(self) -> Iterator[Unfinished]:
        return (Unfinished(number, record) for number, record in self._records.items())

    def keep(self, told: Unfinished, held: Collection[int]) -> str:
        """Keep a record. Return why it is not possible, or "".

        held: the versions that the replica has got.
        """
        known = {*held, *self.versions(told.number)}
        if why := self._expected.record_fault(told.record, known):
            return why
        self._records[told.number] = told.record
        return ""

    def of(self, number: int) -> PackedRecord:
        """Return the record of an episode; () if it has none."""
        return self._records.get(number, ())

    def versions(self, number: int) -> set[int]:
        """Return the versions in the record of an episode, which its next replica may name."""
        return versions_of(self.of(number))

    def drop(self, number: int) -> None:
        """Forget an episode that has ended."""
        self._records.pop(number, None)

    def recall(self, unfinished: Collection[Unfinished]) -> None:
        """Begin with the records of a checkpoint."""
        self._records = {one.number: one.record for one in unfinished}


def versions_of(record: PackedRecord) -> set[int]:
    """Return the versions of a record's tokens."""
    return {version for _, turns in record for _, _, versions, *_ in turns for version, _ in versions}
