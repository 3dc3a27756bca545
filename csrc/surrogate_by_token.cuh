// Device code of clipped_surrogate.cu where every token is a segment: four tokens per thread and 16 bytes per load.
// Only the ratio is computed in float64, because it decides whether a token is clipped.
#pragma once
#include "staged_tokens.cuh"

namespace stppo {
namespace {

__device__ __forceinline__ void write(float *column, int64_t i, int count, bool wide, const Quad &q) {
  if (!column) return;
  if (wide && count >= 4) {
    __stcs(reinterpret_cast<float4 *>(column + i), make_float4(q.value[0], q.value[1], q.value[2], q.value[3]));
    return;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (k < count) __stcs(column + i + k, q.value[k]);
}

__device__ __forceinline__ float times(float factor, float sum) { return sum == 0 ? 0 : factor * sum; }

struct OfToken {
  float ratio, gradient, bias;
};

// Return what `coefficients` of clipped_surrogate.h gives for a segment of one token, and add to the tile's sums.
__device__ __forceinline__ OfToken one_token(const Surrogate &a, const Token &t, float (&sums)[SURROGATE_SUMS]) {
  const bool live = t.weight != 0, negative = t.advantage < 0;
  const float product = live ? t.weight * t.advantage : 0;
  const float ratio = float(exp_of(exponent(difference(t), 1)));
  const float low = a.low.value, high = a.high.value, dual = a.dual.value;
  const bool too_high = ratio > high, too_low = ratio < low, beyond = ratio > dual;
  const bool outside = negative ? too_low : too_high, dropped = outside | (negative & beyond);
  const float gradient = times(ratio, dropped ? 0 : product), bias = times(ratio, outside ? product : 0);
  const float bound = negative ? (beyond ? dual : low) : high;
  sums[OBJECTIVE] += times(outside | (negative & beyond) ? bound : ratio, product);
  sums[CLIPPED] += outside && live && t.advantage != 0 ? 1 : 0;
  const float bias_sq = bias * bias, grad_sq = gradient * gradient;
  sums[BIAS_SQ] += bias_sq, sums[GRAD_SQ] += grad_sq;
  if (a.sum_p_sq) {
    const float steepness = float(slope(t.logprob, t.sum_p_sq));
    sums[LOGIT_BIAS_SQ] += times(steepness, bias_sq), sums[LOGIT_GRAD_SQ] += times(steepness, grad_sq);
  }
  return {ratio, gradient, bias};
}

constexpr int TOKEN_QUADS = 1;  // that a thread loads before it uses the first of them

__device__ __forceinline__ void tile_of_tokens(const Surrogate &a, int64_t begin, float (&sums)[SURROGATE_SUMS],
                                               Monitors &m) {
  const int64_t end = min(begin + a.tile(), a.tokens);
  const bool wide = aligned(a.logprob) && aligned(a.old_logprob) && aligned(a.advantage) && aligned(a.weight) &&
                    aligned(a.sum_p_sq) && aligned(a.ratio) && aligned(a.gradient) && aligned(a.bias);
  for (int64_t first = begin + 4 * int64_t(threadIdx.x); first < end; first += TOKEN_QUADS * 4 * THREADS) {
    Quad logprob[TOKEN_QUADS], old_logprob[TOKEN_QUADS], advantage[TOKEN_QUADS];
#pragma unroll
    for (int q = 0; q < TOKEN_QUADS; ++q) {
      const int64_t i = first + q * 4 * THREADS;
      const int count = int(end - i);
      if (count <= 0) continue;
      logprob[q] = read(a.logprob, i, count, wide, 0), old_logprob[q] = read(a.old_logprob, i, count, wide, 0);
      advantage[q] = read(a.advantage, i, count, wide, 0);
    }
#pragma unroll
    for (int q = 0; q < TOKEN_QUADS; ++q) {
      const int64_t i = first + q * 4 * THREADS;
      const int count = int(end - i);
      if (count <= 0) continue;
      Quad weight{{a.uniform_weight, a.uniform_weight, a.uniform_weight, a.uniform_weight}};
      if (a.weight) weight = read(a.weight, i, count, wide, 0);
      const Quad sum_p_sq = read(a.sum_p_sq, i, count, wide, 0);
      Quad ratio{}, gradient{}, bias{};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k >= count) continue;
        const Token t{logprob[q].value[k], old_logprob[q].value[k], advantage[q].value[k], weight.value[k],
                      sum_p_sq.value[k]};
        const OfToken f = one_token(a, t, sums);
        monitor(t, m);
        ratio.value[k] = f.ratio, gradient.value[k] = f.gradient, bias.value[k] = f.bias;
      }
      write(a.ratio, i, count, wide, ratio);
      write(a.gradient, i, count, wide, gradient);
      write(a.bias, i, count, wide, bias);
    }
  }
}

}  // namespace
}  // namespace stppo
