"""YaRN: rotary embeddings with lowered low frequencies, for longer contexts (Peng et al., arXiv 2309.00071).

Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stppo.config import ConfigError
from megatron_stppo.weights.sharding.hf_fields import flag_of, rate_of

NUMBERS = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
NAMES = {*NUMBERS, "truncate", "rope_theta", "rope_type", "type"}


@dataclass(frozen=True)
class Yarn:
    """Example: that of gpt-oss-20b is Yarn(32.0, 32.0, 1.0, 4096.0, truncate=False)."""

    factor: float  # by which frequencies are divided at most
    fast: float  # rotations within `original` tokens, from which on a frequency stays as it is
    slow: float  # and up to which it is divided by the whole factor
    original: float  # tokens of the context before its extension
    truncate: bool  # whether the bounds between the pairs of elements are rounded outwards

    @classmethod
    def of(cls, folder: Path, rope: Mapping[str, Any]) -> Yarn:
        """Read the settings of the rotary embeddings, all of which vLLM needs. Raises ConfigError for other
        settings, or if one is missing."""
        kind = rope.get("rope_type", rope.get("type", "default"))
        other = sorted(name for name in rope.keys() - NAMES if rope[name] is not None)
        if kind != "yarn" or other:
            found = f"{other[0]}={rope[other[0]]!r} of " if other else ""
            raise ConfigError(
                f"{folder}: {found}rope_type={kind!r} is not supported for this model_type; use a checkpoint "
                f"with rope_type='yarn' and only {sorted(NAMES - {'rope_theta', 'rope_type', 'type'})}"
            )
        factor, fast, slow, original = (rate_of(folder, rope, name) for name in NUMBERS)
        return cls(factor, fast, slow, original, flag_of(folder, {"truncate": True, **rope}, "truncate"))

    @property
    def scale(self) -> float:
        """What queries and keys are multiplied by (equation 22)."""
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def frequencies(self, base: float, size: int) -> list[float]:
        """Return the angle per token of each pair of a head's `size` elements (equations 17 to 20)."""
        low, high = (self._pair(rotations, base, size) for rotations in (self.fast, self.slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        found = []
        for pair in range(size // 2):
            divided = min(1.0, max(0.0, (pair - low) / (high - low or 0.001)))
            found.append(base ** (-2 * pair / size) * (1 - divided + divided / self.factor))
        return found

    def _pair(self, rotations: float, base: float, size: int) -> float:
        """Return the index of the pair that turns so often within `original` tokens, not rounded."""
        return size * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(base))
