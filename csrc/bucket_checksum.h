// The weights of a checksum: element i of a slice has weight element_weight(i % PIECE) * piece_weight(i / PIECE).
// All are odd: changing one element always changes the sum mod 2^64; exchanging two unequal ones does unless
// their weights agree in all the bits that matter.
#pragma once
#include "portable.h"

namespace stppo {

constexpr int CHECKSUM_PIECE = 2048;  // elements; their weights stay in a CPU's first-level cache, or in registers

// Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators": SplitMix64's output function.
STPPO_BOTH constexpr uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
STPPO_BOTH constexpr uint32_t element_weight(int k) { return uint32_t(mixed(k + 1)) | 1; }
STPPO_BOTH constexpr uint64_t piece_weight(int64_t piece) { return mixed(CHECKSUM_PIECE + 1 + piece) | 1; }

}  // namespace stppo
