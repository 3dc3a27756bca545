// The weights of a checksum. A slice's bits, as cast, are 16-bit numbers x_i, signed. Its sum is two sums mod 2^32,
//   low  = bytes + sum_i x_i * first(i % PIECE) * first(i / PIECE),    high = sum_i x_i * second(..) * second(..)
// with odd weights: changing one number always changes both; exchanging two unequal ones leaves the sum as it was
// only where both weights agree, once in 2^28. 15-bit weights are what processors multiply and add in one step.
#pragma once
#include "portable.h"

namespace stppo {

constexpr int CHECKSUM_PIECE = 2048;  // numbers; their weights stay in a CPU's first-level cache, or in registers

template <class Number>
struct Weights {
  Number first, second;
};

// Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators": SplitMix64's output function.
STPPO_BOTH constexpr uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
STPPO_BOTH constexpr Weights<int16_t> number_weights(int within) {
  const uint64_t bits = mixed(within + 1);
  return {int16_t((bits & 0x7fff) | 1), int16_t((bits >> 16 & 0x7fff) | 1)};
}
STPPO_BOTH constexpr Weights<uint32_t> piece_weights(int64_t piece) {
  const uint64_t bits = mixed(CHECKSUM_PIECE + 1 + piece);
  return {uint32_t(bits) | 1, uint32_t(bits >> 32) | 1};
}

}  // namespace stppo
