// Device code of vocab_logprob.cu: read and write a row of logits, 16 bytes at a time if the rows are aligned.
#pragma once
#include <cuda_bf16.h>

#include "vocab_merge.h"

namespace stppo {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;

// VALUES logits in one load. Rows that are not aligned use VALUES = 1. The choice depends only on the number of
// columns and the address of the first row, so it is the same for all rows.
template <class T, int VALUES>
struct alignas(sizeof(T) * VALUES) Pack {
  T value[VALUES];
};

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

template <class T, int VALUES>
__device__ __forceinline__ void add(Online &o, const Pack<T, VALUES> &pack, float temperature) {
  float x[VALUES], top = o.max;
#pragma unroll
  for (int k = 0; k < VALUES; ++k) {
    const float logit = to_float(pack.value[k]);
    x[k] = temperature == 1 ? logit : __fdiv_rn(logit, temperature);
    top = fmaxf(top, x[k]);
  }
  if (top > o.max) o = relative_to(o, top);
  const float shift = finite(o.max);
#pragma unroll
  for (int k = 0; k < VALUES; ++k) {
    const float d = x[k] - shift, e = __expf(d);
    o.sum += e;
    o.moment = fmaf(fmaxf(d, -1e30f), e, o.moment);  // exp(-inf) is 0, and 0 * -inf would be NaN
    o.squares = fmaf(e, e, o.squares);
  }
}

__device__ __forceinline__ float temperature_of(const Logits &a, int64_t row) {
  return a.temperature ? a.temperature[row] : a.uniform_temperature;
}

// Return the target's column in this shard, or -1 if another shard holds it.
__device__ __forceinline__ int64_t column_of(const Logits &a, int64_t row) {
  const int64_t column = a.target[row] - a.vocab_start;
  return column >= 0 && column < a.valid ? column : -1;
}

template <class T, int VALUES>
__device__ void row_statistics(const VocabStatistics &a, int64_t r) {
  using P = Pack<T, VALUES>;
  __shared__ Online of_warp[WARPS];
  const Logits &l = a.logits;
  const T *row = static_cast<const T *>(l.data) + r * l.columns;
  const float temperature = temperature_of(l, r);
  const P *packs = reinterpret_cast<const P *>(row);
  const int64_t whole = l.valid / VALUES;
  Online o{-INFINITY, 0, 0, 0};
  int64_t i = threadIdx.x;
  for (; i + 3 * THREADS < whole; i += 4 * THREADS) {  // four loads in flight
    P p[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) p[k] = packs[i + k * THREADS];
#pragma unroll
    for (int k = 0; k < 4; ++k) add(o, p[k], temperature);
  }
  for (; i < whole; i += THREADS) add(o, packs[i], temperature);
  for (int64_t c = whole * VALUES + threadIdx.x; c < l.valid; c += THREADS) add(o, Pack<T, 1>{{row[c]}}, temperature);
  for (int distance = 16; distance > 0; distance /= 2)
    o = merged_sums(o, {__shfl_down_sync(~0u, o.max, distance), __shfl_down_sync(~0u, o.sum, distance),
                        __shfl_down_sync(~0u, o.moment, distance), __shfl_down_sync(~0u, o.squares, distance)});
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = o;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < WARPS; ++w) o = merged_sums(o, of_warp[w]);
    const int64_t column = column_of(l, r);
    const float logit = column < 0 ? NAN : to_float(row[column]);
    const float values[5] = {o.max, o.sum, o.moment, o.squares, temperature == 1 ? logit : __fdiv_rn(logit, temperature)};
    for (int k = 0; k < 5; ++k) a.out[k * l.rows + r] = values[k];
  }
  __syncthreads();  // the next row reuses of_warp
}

struct Row {
  float temperature, g, h, c, log_prob, entropy, sum_p_sq, max, log_sum;
  int64_t column;
};

__device__ __forceinline__ float gradient_of(float logit, bool is_target, const Row &r) {
  const float x = r.temperature == 1 ? logit : __fdiv_rn(logit, r.temperature);
  const float log_p = x - r.max - r.log_sum, p = __expf(log_p);
  const float others = p * (-r.h * (fmaxf(log_p, -1e30f) + r.entropy) + 2 * r.c * (p - r.sum_p_sq));
  // 1 - p at the target, accurate for p near 1
  const float value = is_target ? others - r.g * expm1f(r.log_prob) : others - r.g * p;
  const float poisoned = log_p == log_p ? value : log_p;  // fmaxf drops NaN
  return r.temperature == 1 ? poisoned : __fdiv_rn(poisoned, r.temperature);
}

template <class T, int VALUES>
__device__ void row_gradient(const VocabGradient &a, int64_t r) {
  using P = Pack<T, VALUES>;
  const Logits &l = a.logits;
  const VocabMerged &m = a.merged;
  const P *packs = reinterpret_cast<const P *>(static_cast<const T *>(l.data) + r * l.columns);
  P *out = reinterpret_cast<P *>(static_cast<T *>(a.out) + r * l.columns);
  const bool ignored = l.target[r] == l.ignore_index;
  const auto at = [r](const float *x) { return x ? x[r] : 0.f; };
  const Row row{temperature_of(l, r), at(a.g), at(a.h), at(a.c), m.logprob[r], m.entropy[r], m.sum_p_sq[r],
                m.max[r], m.log_sum[r], column_of(l, r)};
  const auto gradient = [&](int64_t i, const P &in) {
    P result;
#pragma unroll
    for (int k = 0; k < VALUES; ++k) {
      const int64_t column = i * VALUES + k;
      const bool live = !ignored && column < l.valid;
      from_float(live ? gradient_of(to_float(in.value[k]), column == row.column, row) : 0.f, result.value[k]);
    }
    return result;
  };
  const int64_t whole = l.columns / VALUES;
  int64_t i = threadIdx.x;
  for (; i + THREADS < whole; i += 2 * THREADS) {  // two loads in flight
    const P first = packs[i], second = packs[i + THREADS];
    out[i] = gradient(i, first);
    out[i + THREADS] = gradient(i + THREADS, second);
  }
  if (i < whole) out[i] = gradient(i, packs[i]);
}

}  // namespace
}  // namespace stppo
