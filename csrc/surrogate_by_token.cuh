// Device code of clipped_surrogate.cu where every token is a segment: four tokens per thread and 16 bytes per load.
#pragma once
#include "clipped_surrogate.cuh"

namespace stppo {
namespace {

struct alignas(16) Quad {
  float value[4];
};

__device__ __forceinline__ bool aligned(const void *x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; }

// Return whether all columns can be read and written 16 bytes at a time.
__device__ __forceinline__ bool is_wide(const Surrogate &a) {
  return aligned(a.logprob) && aligned(a.old_logprob) && aligned(a.advantage) && aligned(a.weight) &&
         aligned(a.sum_p_sq) && aligned(a.ratio) && aligned(a.gradient) && aligned(a.bias);
}

// Return tokens i .. i + count - 1 of a column. The others are `otherwise`.
__device__ __forceinline__ Quad read(const float *column, int64_t i, int count, bool wide, float otherwise) {
  Quad q{{otherwise, otherwise, otherwise, otherwise}};
  if (!column) return q;
  if (wide && count == 4) {
    const float4 four = __ldcs(reinterpret_cast<const float4 *>(column + i));
    return {{four.x, four.y, four.z, four.w}};
  }
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (k < count) q.value[k] = __ldcs(column + i + k);
  return q;
}

__device__ __forceinline__ void write(float *column, int64_t i, int count, bool wide, const Quad &q) {
  if (!column) return;
  if (wide && count == 4) {
    __stcs(reinterpret_cast<float4 *>(column + i), make_float4(q.value[0], q.value[1], q.value[2], q.value[3]));
    return;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (k < count) __stcs(column + i + k, q.value[k]);
}

__device__ void tile_of_tokens(const Surrogate &a, int64_t begin, Shared &shared) {
  const int64_t end = min(begin + SURROGATE_TILE, a.tokens);
  const bool wide = is_wide(a);
  for (int64_t i = begin + 4 * int64_t(threadIdx.x); i < end; i += 4 * THREADS) {
    const int count = int(min(end - i, int64_t(4)));
    const Quad logprob = read(a.logprob, i, count, wide, 0), old_logprob = read(a.old_logprob, i, count, wide, 0);
    const Quad advantage = read(a.advantage, i, count, wide, 0);
    const Quad weight = read(a.weight, i, count, wide, a.uniform_weight);
    const Quad sum_p_sq = read(a.sum_p_sq, i, count, wide, 0);
    Quad ratio{}, gradient{}, bias{};
    Monitors m{};
    float sums[SURROGATE_SUMS] = {};  // of four tokens
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k >= count) continue;
      const Token t{logprob.value[k], old_logprob.value[k], advantage.value[k], weight.value[k], sum_p_sq.value[k]};
      Sums s{};
      add(a, t, s, m);
      const Finished f = finish(a, i + k, 1, s);
      report(a, 1, s, f, [&](int sum, double value) { sums[sum] += float(value); });
      ratio.value[k] = f.ratio;
      gradient.value[k] = float(f.coefficients.gradient), bias.value[k] = float(f.coefficients.bias);
    }
    flush(m, shared);
#pragma unroll
    for (int k = 0; k < SURROGATE_SUMS; ++k)
      if (k != LIVE && k != K1 && k != K3) shared.of_thread[k][threadIdx.x] += sums[k];
    if (a.part) continue;
    write(a.ratio, i, count, wide, ratio);
    write(a.gradient, i, count, wide, gradient);
    write(a.bias, i, count, wide, bias);
  }
}

}  // namespace
}  // namespace stppo
