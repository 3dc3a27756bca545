// Arithmetic that the CPU and the CUDA kernels share: a selection and exponentials without calls or branches.
#pragma once
#include <bit>
#include <cstdint>

#ifdef __CUDACC__
#define STPPO_BOTH __host__ __device__ __forceinline__
#else
#define STPPO_BOTH inline __attribute__((always_inline))
#endif

namespace stppo {

// condition ? a : b, on the CPU in bits: GCC follows what a condition implies into copies of a loop's body, and
// leaves a loop with such branches scalar.
template <class Value, class Bits>
STPPO_BOTH Value pick_of(bool condition, Value a, Value b) {
#ifdef __CUDA_ARCH__
  return condition ? a : b;
#else
  const Bits mask = Bits(0) - Bits(condition);
  return std::bit_cast<Value>((std::bit_cast<Bits>(a) & mask) | (std::bit_cast<Bits>(b) & ~mask));
#endif
}
STPPO_BOTH float pick(bool condition, float a, float b) { return pick_of<float, uint32_t>(condition, a, b); }
STPPO_BOTH double pick(bool condition, double a, double b) { return pick_of<double, uint64_t>(condition, a, b); }

// e^x for x in [-700, 700], relative error below 3e-16. x = n ln 2 + r, |r| <= ln(2)/2; Taylor series of degree
// 13 (next term: 1.2e-17); 2^n goes into the exponent. Adding 1.5 * 2^52 rounds to an integer and leaves n in the
// low bits of the mantissa. NaN gives NaN.
STPPO_BOTH double exp_of(double x) {
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
STPPO_BOTH float exp_of(float x) {
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

// e^x - 1 - x where `is_near_zero`: a series, because the difference would cancel.
STPPO_BOTH bool is_near_zero(float x) { return x * x < 1.f; }
STPPO_BOTH float expm1_minus_near_zero(float x) {
  float p = 0x1.ae6456p-26f;  // 1/11!; the next term is below 3e-9 of the sum
  p = p * x + 0x1.27e4fcp-22f;
  p = p * x + 0x1.71de3ap-19f;
  p = p * x + 0x1.a01a02p-16f;
  p = p * x + 0x1.a01a02p-13f;
  p = p * x + 0x1.6c16c2p-10f;
  p = p * x + 0x1.111112p-7f;
  p = p * x + 0x1.555556p-5f;
  p = p * x + 0x1.555556p-3f;
  p = p * x + 0.5f;
  return p * x * x;
}

// e^x - 1 - x for x <= 20.
STPPO_BOTH float expm1_minus(float x) {
  const float far = exp_of(pick(x > 20.f, 20.f, x)) - 1.f - x;
  return pick(is_near_zero(x), expm1_minus_near_zero(x), far);
}

}  // namespace stppo
