// Device code of vocab_logprob.cu: read and write a row of logits, 16 bytes at a time if the rows are aligned.
#pragma once
#include <cuda_bf16.h>

#include <bit>
#include <type_traits>

#include "vocab_merge.h"

namespace stppo {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int LOADS = 5;  // of a thread, in flight together

// VALUES logits in one load: 16 bytes, or one logit if rows are not aligned. The choice depends only on the number of
// columns and the address of the first row, so it is the same for all rows. The 16 bytes are four words, because on
// parts of words the compiler spends two instructions more per logit.
struct alignas(16) Words {
  uint32_t word[4];
};
template <class T, int VALUES>
using Pack = std::conditional_t<VALUES == 1, T, Words>;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_float(float x, float &out) { out = x; }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16 &out) { out = __float2bfloat16_rn(x); }

// Sums over part of a row, relative to its maximum so far.
struct Online {
  float max, sum, moment, squares;  // of e = exp(x - max): e, (x - max) e, e^2
};

__device__ __forceinline__ float finite(float x) { return x == -INFINITY ? 0.f : x; }

// Return the same sums relative to `max`, which is not below a.max.
__device__ __forceinline__ Online relative_to(const Online &a, float max) {
  if (a.max == -INFINITY) return {max, a.sum, a.moment, a.squares};  // no terms yet, or NaN
  // shift is at least -1e30: with logits of -3e38 `shift * sum` would overflow, and 0 * -inf would be NaN
  const float shift = fmaxf(a.max - max, -1e30f), scale = __expf(shift);
  return {max, a.sum * scale, (a.moment + shift * a.sum) * scale, a.squares * scale * scale};
}

__device__ __forceinline__ Online merged_sums(const Online &a, const Online &b) {
  const float max = fmaxf(a.max, b.max);
  if (max == -INFINITY) return {max, a.sum + b.sum, a.moment + b.moment, a.squares + b.squares};
  const Online x = relative_to(a, max), y = relative_to(b, max);
  return {max, x.sum + y.sum, x.moment + y.moment, x.squares + y.squares};
}

// A row's temperature. Dividing takes a reciprocal once per row, and four instructions per logit that make up for its
// rounding; the result is that of a division, and a logit that is not finite stays as it is.
struct Temperature {
  float value, inverse;
  __device__ __forceinline__ float divide(float x) const {
    const float quotient = x * inverse, rest = fmaf(-quotient, value, x);
    return fabsf(rest) < INFINITY ? fmaf(rest, inverse, quotient) : quotient;
  }
};

__device__ __forceinline__ Temperature temperature_of(const Logits &a, int64_t row) {
  const float value = a.temperature ? a.temperature[row] : a.uniform_temperature;
  return {value, __fdiv_rn(1.f, value)};
}

// Return e^x. Results below 2^-126 are 0, which saves the four instructions that __expf scales them with.
__device__ __forceinline__ float exp_or_zero(float x) {
  const float in_base_two = x * 1.442695041f;
#ifdef __CUDA_ARCH__
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(in_base_two));
  return result;
#else
  return exp2f(in_base_two);
#endif
}

// Add logits to the sums. The logits are rescaled once for all of them.
template <bool divided, int COUNT>
__device__ __forceinline__ void add(Online &o, float (&x)[COUNT], const Temperature &temperature) {
  float top = o.max;
#pragma unroll
  for (int k = 0; k < COUNT; ++k) {
    if constexpr (divided) x[k] = temperature.divide(x[k]);
    top = fmaxf(top, x[k]);
  }
  if (top > o.max) o = relative_to(o, top);
  const float shift = finite(o.max);
#pragma unroll
  for (int k = 0; k < COUNT; ++k) {
    const float d = x[k] - shift, e = exp_or_zero(d);
    o.sum += e;
    o.moment = fmaf(fmaxf(d, -1e30f), e, o.moment);  // exp(-inf) is 0, and 0 * -inf would be NaN
    o.squares = fmaf(e, e, o.squares);
  }
}

__device__ __forceinline__ void unpack(float in, float (&x)[1]) { x[0] = in; }
__device__ __forceinline__ void unpack(__nv_bfloat16 in, float (&x)[1]) { x[0] = to_float(in); }
__device__ __forceinline__ void unpack(const Words &in, float (&x)[4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) x[k] = std::bit_cast<float>(in.word[k]);
}
__device__ __forceinline__ void unpack(const Words &in, float (&x)[8]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    x[2 * k] = std::bit_cast<float>(in.word[k] << 16);
    x[2 * k + 1] = std::bit_cast<float>(in.word[k] & 0xffff0000u);
  }
}

template <class T>
struct alignas(2 * sizeof(T)) Two {
  T low, high;
};

__device__ __forceinline__ void pack(const float (&x)[1], float &out) { out = x[0]; }
__device__ __forceinline__ void pack(const float (&x)[1], __nv_bfloat16 &out) { from_float(x[0], out); }
__device__ __forceinline__ void pack(const float (&x)[4], Words &out) {
#pragma unroll
  for (int k = 0; k < 4; ++k) out.word[k] = std::bit_cast<uint32_t>(x[k]);
}
__device__ __forceinline__ void pack(const float (&x)[8], Words &out) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    Two<__nv_bfloat16> two;
    from_float(x[2 * k], two.low), from_float(x[2 * k + 1], two.high);
    out.word[k] = std::bit_cast<uint32_t>(two);
  }
}

// -inf in all places of a pack: no term of a sum.
template <class T, int VALUES>
__device__ __forceinline__ Pack<T, VALUES> no_logits() {
  if constexpr (VALUES == 1) {
    T none;
    from_float(-INFINITY, none);
    return none;
  } else {
    const uint32_t none = sizeof(T) == 2 ? 0xff80ff80u : 0xff800000u;
    return {none, none, none, none};
  }
}

// Return this thread's sums over the first `valid` logits of a row.
template <bool divided, class T, int VALUES>
__device__ __forceinline__ Online sums_of(const T *row, int64_t valid, const Temperature &temperature) {
  using P = Pack<T, VALUES>;
  const P *packs = reinterpret_cast<const P *>(row);
  const int64_t whole = valid / VALUES;
  Online o{-INFINITY, 0, 0, 0};
  for (int64_t i = threadIdx.x; i < whole; i += LOADS * THREADS) {
    P p[LOADS];
#pragma unroll
    for (int j = 0; j < LOADS; ++j) p[j] = i + j * THREADS < whole ? packs[i + j * THREADS] : no_logits<T, VALUES>();
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
      float x[VALUES];
      unpack(p[j], x);
      add<divided>(o, x, temperature);
    }
  }
  for (int64_t c = whole * VALUES + threadIdx.x; c < valid; c += THREADS) {
    float x[1] = {to_float(row[c])};
    add<divided>(o, x, temperature);
  }
  return o;
}

// Return the target's column in this shard, or -1 if another shard holds it.
__device__ __forceinline__ int64_t column_of(const Logits &a, int64_t row) {
  const int64_t column = a.target[row] - a.vocab_start;
  return column >= 0 && column < a.valid ? column : -1;
}

template <class T, int VALUES>
__device__ void row_statistics(const VocabStatistics &a, int64_t r) {
  __shared__ Online of_warp[WARPS];
  const Logits &l = a.logits;
  const T *row = static_cast<const T *>(l.data) + r * l.columns;
  const Temperature temperature = temperature_of(l, r);
  Online o = temperature.value == 1 ? sums_of<false, T, VALUES>(row, l.valid, temperature)
                              : sums_of<true, T, VALUES>(row, l.valid, temperature);
  for (int distance = 16; distance > 0; distance /= 2)
    o = merged_sums(o, {__shfl_down_sync(~0u, o.max, distance), __shfl_down_sync(~0u, o.sum, distance),
                        __shfl_down_sync(~0u, o.moment, distance), __shfl_down_sync(~0u, o.squares, distance)});
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = o;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < WARPS; ++w) o = merged_sums(o, of_warp[w]);
    const int64_t column = column_of(l, r);
    const float logit = column < 0 ? NAN : to_float(row[column]);
    const float values[5] = {o.max, o.sum, o.moment, o.squares, temperature.divide(logit)};
    for (int k = 0; k < 5; ++k) a.out[k * l.rows + r] = values[k];
  }
  __syncthreads();  // the next row reuses of_warp
}

struct Row {
  Temperature temperature;
  float g, h, c, log_prob, entropy, sum_p_sq, max, log_sum;
  int64_t column;
};

// How the gradient is computed. PLAIN: temperature 1, and cotangents of the log-prob only.
enum Kind { PLAIN, UNDIVIDED, DIVIDED };

template <Kind kind>
__device__ __forceinline__ float gradient_of(float logit, const Row &r) {
  const float x = kind == DIVIDED ? r.temperature.divide(logit) : logit;
  const float log_p = x - r.max - r.log_sum, p = exp_or_zero(log_p);  // a NaN in log_p makes the result NaN through p
  if constexpr (kind == PLAIN) return -r.g * p;
  const float others = -r.h * (fmaxf(log_p, -1e30f) + r.entropy) + 2 * r.c * (p - r.sum_p_sq);
  const float value = p * others - r.g * p;
  return kind == DIVIDED ? r.temperature.divide(value) : value;
}

// The gradient at the target has 1 - p in place of -p, computed so that it is accurate for p near 1.
template <Kind kind>
__device__ __forceinline__ float gradient_at_target(float logit, Row r) {
  const float of_logprob = -r.g * expm1f(r.log_prob);
  r.g = 0;
  const float others = gradient_of<kind>(logit, r);
  return others + (kind == DIVIDED ? r.temperature.divide(of_logprob) : of_logprob);
}

// Write the gradient of a row. Every pack is read and written by one thread, which also corrects the target's logit.
template <Kind kind, class T, int VALUES>
__device__ __forceinline__ void gradient_of_row(const T *logits, T *out, int64_t columns, int64_t valid, const Row &row) {
  using P = Pack<T, VALUES>;
  const P *from = reinterpret_cast<const P *>(logits);
  P *to = reinterpret_cast<P *>(out);
  const int64_t whole = valid / VALUES, all = columns / VALUES;
  const bool has_target = row.column >= 0 && row.column / VALUES % THREADS == threadIdx.x;
  const float target = has_target ? to_float(logits[row.column]) : 0;
  for (int64_t i = threadIdx.x; i < whole; i += LOADS * THREADS) {
    P in[LOADS];
#pragma unroll
    for (int j = 0; j < LOADS; ++j)
      if (i + j * THREADS < whole) in[j] = from[i + j * THREADS];
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
      float x[VALUES];
      unpack(in[j], x);
#pragma unroll
      for (int k = 0; k < VALUES; ++k) x[k] = gradient_of<kind>(x[k], row);
      P result;
      pack(x, result);
      if (i + j * THREADS < whole) to[i + j * THREADS] = result;
    }
  }
  for (int64_t i = whole / THREADS * THREADS + threadIdx.x; i < all; i += THREADS) {  // padding begins in these
    if (i < whole) continue;
    float x[VALUES];
    unpack(from[i], x);
#pragma unroll
    for (int k = 0; k < VALUES; ++k) x[k] = i * VALUES + k < valid ? gradient_of<kind>(x[k], row) : 0;
    P result;
    pack(x, result);
    to[i] = result;
  }
  if (has_target) from_float(gradient_at_target<kind>(target, row), out[row.column]);
}

template <class T, int VALUES>
__device__ void row_gradient(const VocabGradient &a, int64_t r) {
  const Logits &l = a.logits;
  const VocabMerged &m = a.merged;
  const T *logits = static_cast<const T *>(l.data) + r * l.columns;
  T *out = static_cast<T *>(a.out) + r * l.columns;
  const auto at = [r](const float *x) { return x ? x[r] : 0.f; };
  const Row row{temperature_of(l, r), at(a.g), at(a.h), at(a.c), m.logprob[r], m.entropy[r], m.sum_p_sq[r],
                m.max[r], m.log_sum[r], column_of(l, r)};
  if (l.target[r] == l.ignore_index) {
    for (int64_t i = threadIdx.x; i < l.columns / VALUES; i += THREADS)
      reinterpret_cast<Pack<T, VALUES> *>(out)[i] = Pack<T, VALUES>{};
  } else if (row.temperature.value != 1) {
    gradient_of_row<DIVIDED, T, VALUES>(logits, out, l.columns, l.valid, row);
  } else if (row.h != 0 || row.c != 0) {  // true for NaN
    gradient_of_row<UNDIVIDED, T, VALUES>(logits, out, l.columns, l.valid, row);
  } else {
    gradient_of_row<PLAIN, T, VALUES>(logits, out, l.columns, l.valid, row);
  }
}

}  // namespace
}  // namespace stppo
