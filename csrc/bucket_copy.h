// float32 to bfloat16 as the CPU twins over slices round it.
#pragma once
#include "simd.h"

namespace stppo {

// To the nearest, ties to even; every NaN becomes the same one.
STPPO_INLINE uint16_t narrowed(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t rounded = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  return x != x ? uint16_t(0x7fc0) : rounded;
}

}  // namespace stppo
