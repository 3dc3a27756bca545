// What lets GCC vectorise the CPU twins: clones of a function per instruction set, chosen when the library is
// loaded, and an exp without calls or branches.
#pragma once
#include <bit>
#include <cstdint>

#define STPPO_INLINE inline __attribute__((always_inline))
#if defined(STPPO_CLONES)  // a test builds one instruction set at a time
#elif defined(__x86_64__)
#define STPPO_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define STPPO_CLONES
#endif

namespace stppo {

// condition ? a : b in bits. GCC follows what a condition implies into copies of a loop's body, and leaves a
// loop with such branches scalar.
STPPO_INLINE float pick(bool condition, float a, float b) {
  const uint32_t mask = 0u - uint32_t(condition);
  return std::bit_cast<float>((std::bit_cast<uint32_t>(a) & mask) | (std::bit_cast<uint32_t>(b) & ~mask));
}
STPPO_INLINE double pick(bool condition, double a, double b) {
  const uint64_t mask = uint64_t(0) - uint64_t(condition);
  return std::bit_cast<double>((std::bit_cast<uint64_t>(a) & mask) | (std::bit_cast<uint64_t>(b) & ~mask));
}

// e^x for x in [-700, 700], relative error below 3e-16. x = n ln 2 + r, |r| <= ln(2)/2; Taylor series of degree
// 13 (next term: 1.2e-17); 2^n goes into the exponent. Adding 1.5 * 2^52 rounds to an integer and leaves n in the
// low bits of the mantissa. NaN gives NaN.
STPPO_INLINE double exp_of(double x) {
  const double magic = 0x1.8p52, shifted = x * 0x1.71547652b82fep0 + magic, n = shifted - magic;
  const double r = (x - n * 0x1.62e42fefa39efp-1) - n * 0x1.abc9e3b39803fp-56;
  double p = 0x1.6124613a86d09p-33;  // 1/13!
  p = p * r + 0x1.1eed8eff8d898p-29;
  p = p * r + 0x1.ae64567f544e4p-26;
  p = p * r + 0x1.27e4fb7789f5cp-22;
  p = p * r + 0x1.71de3a556c734p-19;
  p = p * r + 0x1.a01a01a01a01ap-16;
  p = p * r + 0x1.a01a01a01a01ap-13;
  p = p * r + 0x1.6c16c16c16c17p-10;
  p = p * r + 0x1.1111111111111p-7;
  p = p * r + 0x1.5555555555555p-5;
  p = p * r + 0x1.5555555555555p-3;
  p = p * r + 0.5;
  p = p * r + 1;
  p = p * r + 1;
  const uint64_t scale = (std::bit_cast<uint64_t>(shifted) << 52) + 0x3ff0000000000000u;
  return p * std::bit_cast<double>(scale);
}

// e^x for x <= 80, relative error below 2e-7; 0 below -87, where the result would leave the normal range.
STPPO_INLINE float exp_of(float x) {
  const float magic = 0x1.8p23f, clamped = pick(x < -87.f, -87.f, x);
  const float shifted = clamped * 0x1.715476p0f + magic, n = shifted - magic;
  const float r = (clamped - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // the first part of ln 2 has few bits
  float p = 0x1.6c16c2p-10f;  // 1/6!
  p = p * r + 0x1.111112p-7f;
  p = p * r + 0x1.555556p-5f;
  p = p * r + 0x1.555556p-3f;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  const uint32_t scale = (std::bit_cast<uint32_t>(shifted) << 23) + 0x3f800000u;
  const float e = p * std::bit_cast<float>(scale);
  return pick(x < -87.f, 0.f, e);
}

// e^x - 1 - x for x <= 20; a series near 0, where the difference would cancel.
STPPO_INLINE float expm1_minus(float x) {
  float p = 0x1.a01a02p-16f;  // 1/8!
  p = p * x + 0x1.a01a02p-13f;
  p = p * x + 0x1.6c16c2p-10f;
  p = p * x + 0x1.111112p-7f;
  p = p * x + 0x1.555556p-5f;
  p = p * x + 0x1.555556p-3f;
  p = p * x + 0.5f;
  const float near_zero = p * x * x, far = exp_of(pick(x > 20.f, 20.f, x)) - 1.f - x;
  return pick(x * x < 0.25f, near_zero, far);
}

}  // namespace stppo
