// Arithmetic shared by the CPU and the CUDA kernels: a selection and exponentials without calls or branches.
#pragma once
#include <bit>
#include <cstdint>

#ifdef __CUDACC__
#define STPPO_BOTH __host__ __device__ __forceinline__
#else
#define STPPO_BOTH inline __attribute__((always_inline))
#endif

namespace stppo {

// Return condition ? a : b. On the CPU the selection works on bits: for a branch, GCC makes copies of the loop's body
// that are specialised by the condition, and does not vectorise a loop with such branches.
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

// e^x = scale + scale * rest for x in [-700, 700], relative error below 1e-10, e^0 = 1 exactly. x = n ln 2 + r,
// |r| <= ln(2)/2; rest = e^r - 1, minimax polynomial of degree 7 (5e-11); scale = 2^n. Adding 1.5 * 2^52 + 1023
// rounds to an integer and leaves n + 1023, the exponent of 2^n, in the low bits of the mantissa. NaN gives NaN.
STPPO_BOTH double exp_parts(double x, double &scale) {
  const double magic = 0x1.8p52 + 1023, shifted = x * 0x1.71547652b82fep0 + magic, n = shifted - magic;
  const double r = x - n * 0x1.62e42fefa39efp-1;
  double p = 0x1.9f085a92ffea6p-13;
  p = p * r + 0x1.6d8d5253ec918p-10;
  p = p * r + 0x1.111271453c11cp-7;
  p = p * r + 0x1.55548d74840edp-5;
  p = p * r + 0x1.55555442929b7p-3;
  p = p * r + 0x1.0000003a461bfp-1;
  p = p * r + 1;
  scale = std::bit_cast<double>(std::bit_cast<uint64_t>(shifted) << 52);
  return p * r;
}
STPPO_BOTH double exp_of(double x) {
  double scale = 0;
  const double rest = exp_parts(x, scale);
  return rest * scale + scale;
}

// factor e^x for x in [-88, 80]; 0 below -87.7, where e^x would leave the normal range. x log2(e) = n + r; 2^r is a
// minimax polynomial with 2^0 = 1, whose coefficients contain the factor. Its relative error is 1.1e-7, 2.9e-6 or 1.1e-4
// for degree 5, 4 or 3; to this 1e-7 + 1.4e-8 |x| is added, and without fused multiply-add 1e-7 + 5e-8 |x|. Adding
// 1.5 * 2^23 + 127 leaves n + 127, the exponent of 2^n, in the low bits of the mantissa; at -88 these are 0, and the
// number they make is 0.
template <int DEGREE = 5>
STPPO_BOTH float exp_in_range(float x, float factor = 1) {
  const float log2_e = 0x1.715476p0f, magic = 0x1.8p23f + 127, shifted = x * log2_e + magic, n = shifted - magic;
  const float r = x * log2_e - n;
  float p;
  if constexpr (DEGREE == 3) {
    p = factor * 0x1.c2a218p-5f;
    p = p * r + factor * 0x1.f00c4cp-3f;
    p = p * r + factor * 0x1.62f5fap-1f;
  } else if constexpr (DEGREE == 4) {
    p = factor * 0x1.3a02ccp-7f;
    p = p * r + factor * 0x1.c9fc46p-5f;
    p = p * r + factor * 0x1.ec0378p-3f;
    p = p * r + factor * 0x1.62e12cp-1f;
  } else {
    static_assert(DEGREE == 5);
    p = factor * 0x1.5bba14p-10f;
    p = p * r + factor * 0x1.3cea88p-7f;
    p = p * r + factor * 0x1.c6b752p-5f;
    p = p * r + factor * 0x1.ebf9bcp-3f;
    p = p * r + factor * 0x1.62e42ap-1f;
  }
  p = p * r + factor;
  return p * std::bit_cast<float>(std::bit_cast<uint32_t>(shifted) << 23);
}
STPPO_BOTH float exp_of(float x) { return exp_in_range(pick(x < -88.f, -88.f, x)); }

// 2^x for x in [-120, 110]. GCC does not vectorise exp2f; on a GPU it takes two instructions.
STPPO_BOTH float exp2_of(float x) {
#ifdef __CUDA_ARCH__
  return exp2f(x);
#else
  return exp_in_range(x * 0x1.62e43p-1f);
#endif
}

// e^x - 1 - x for x that `is_near_zero`. It is a series, because the difference would cancel.
STPPO_BOTH bool is_near_zero(float x) { return x * x < 1.f; }
STPPO_BOTH float expm1_minus_near_zero(float x) {
  float p = 0x1.ae6456p-26f;  // 1/11!; the next term is less than 3e-9 of the sum
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
