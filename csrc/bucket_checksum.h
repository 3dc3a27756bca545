// The weights of a checksum. After the cast, the bits of a slice are signed 16-bit numbers x_i. The checksum of the
// slice is two sums mod 2^32,
//   low  = bytes + sum_i x_i * first(i % PIECE) * first(i / PIECE),    high = sum_i x_i * second(..) * second(..)
// with odd weights. A change of one number always changes both sums. An exchange of two unequal numbers goes
// unnoticed only if both of their weights agree, with probability 2^-28. The weights have 15 bits because processors
// multiply and add such numbers in one step.
#pragma once
#include "portable.h"

namespace stppo {

constexpr int CHECKSUM_PIECE = 2048;  // in numbers; their weights fit in a CPU's L1 cache, or in registers

template <class Number>
struct Weights {
  Number first, second;
};

// The output function of SplitMix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
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
