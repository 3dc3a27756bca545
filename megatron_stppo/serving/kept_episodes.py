"""The episodes of a checkpoint, which have finished and are not trained on: a list of PackedDone in msgpack.

It may be large: 12 bytes per token, and with algorithm.routing_replay=rollout the experts of every token.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from megatron_stppo.serving.messages import Done
from megatron_stppo.serving.packed_done import PackedDone, packed

_decoder = msgspec.msgpack.Decoder(list[PackedDone], strict=True)


def encode(episodes: Sequence[Done]) -> bytes:
    """Return the file's content; b"", which stands for no file, if there are no episodes."""
    return msgspec.msgpack.encode([packed(done) for done in episodes]) if episodes else b""


def decode(content: bytes) -> list[Done]:
    """Return the episodes. Raises msgspec.MsgspecError or ValueError if another version wrote them."""
    return [done.unpack() for done in _decoder.decode(content)] if content else []
