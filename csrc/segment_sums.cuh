// The sums of a block of clipped_surrogate.cu: over tokens, then over lanes and warps.
#pragma once
#include "clipped_surrogate.h"

namespace stppo {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int64_t TINY = 32, MEDIUM = 512;  // longest segment for 8 lanes, and for a warp
constexpr int64_t LONG = 32768;             // longest segment for one block; a longer one is a giant
constexpr int MAX_LONG = int(SURROGATE_TILE / MEDIUM) + 1;
constexpr int SLICE_SUMS = 4 + 1;  // the fields of Sums; the two counts share one double
constexpr unsigned ALL = 0xffffffffu;
static_assert(SURROGATE_ROWS * SURROGATE_SUMS >= 2 * SURROGATE_SUMS + 2 * SLICE_SUMS, "the workspace's parts fit");
static_assert(LONG >= SURROGATE_TILE, "a tile starts at most one giant");

struct Range {
  int64_t first, last;
};

// The sums over a segment's tokens.
struct Sums {
  double delta, gain, loss, steepness;
  int up, down;  // tokens of nonzero weight with advantage above 0, and below 0
};

struct Shared {
  double result[SURROGATE_SUMS], of_warp[WARPS][SURROGATE_SUMS];
  Sums sums_of_warp[WARPS];
  int64_t bounds[2], long_segments[MAX_LONG];
  int long_count;
  bool last;
};

struct Token {
  float logprob, old_logprob, advantage, weight;
};

__device__ __forceinline__ Token load(const Surrogate &a, int64_t i) {
  return {__ldcs(a.logprob + i), __ldcs(a.old_logprob + i), __ldcs(a.advantage + i),
          a.weight ? __ldcs(a.weight + i) : a.uniform_weight};
}

// Add a token to the sums that do not depend on segments: live tokens, and their KL to the old policy.
__device__ __forceinline__ void monitor(const Token &t, double *sums) {
  if (t.weight == 0) return;
  const float delta = t.logprob - t.old_logprob;
  sums[LIVE] += 1, sums[K1] -= delta, sums[K3] += expm1_minus(delta);
}

__device__ __forceinline__ void add(const Surrogate &a, int64_t i, const Token &t, Sums &s, double *sums) {
  const double product = t.weight == 0 ? 0 : double(t.weight) * double(t.advantage);
  s.delta += double(t.logprob) - double(t.old_logprob);
  if (t.advantage < 0) s.loss += product;
  else s.gain += product;
  s.up += t.weight != 0 && t.advantage > 0;
  s.down += t.weight != 0 && t.advantage < 0;
  if (a.sum_p_sq) s.steepness += slope(t.logprob, __ldcs(a.sum_p_sq + i));
  monitor(t, sums);
}

// Return the sums over tokens first, first + step, .. of a segment, with four loads in flight.
__device__ __forceinline__ Sums add_all(const Surrogate &a, int64_t first, int64_t last, int step, double *sums) {
  Sums s{};
  int64_t i = first;
  for (; i + 3 * step < last; i += 4 * step) {
    Token t[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) t[k] = load(a, i + k * step);
#pragma unroll
    for (int k = 0; k < 4; ++k) add(a, i + k * step, t[k], s, sums);
  }
  for (; i < last; i += step) add(a, i, load(a, i), s, sums);
  return s;
}

// Sum over the `width` lanes that hold parts of one segment. Each of these lanes gets the result.
__device__ __forceinline__ Sums lanes_sum(Sums s, int width, unsigned mask) {
  for (int distance = width / 2; distance > 0; distance /= 2) {
    s.delta += __shfl_xor_sync(mask, s.delta, distance);
    s.gain += __shfl_xor_sync(mask, s.gain, distance);
    s.loss += __shfl_xor_sync(mask, s.loss, distance);
    s.steepness += __shfl_xor_sync(mask, s.steepness, distance);
    s.up += __shfl_xor_sync(mask, s.up, distance);
    s.down += __shfl_xor_sync(mask, s.down, distance);
  }
  return s;
}

__device__ __forceinline__ void combine(Sums &s, const Sums &other) {
  s.delta += other.delta, s.gain += other.gain, s.loss += other.loss, s.steepness += other.steepness;
  s.up += other.up, s.down += other.down;
}

// Sum tokens [first, last) with the whole block. Every thread gets the result.
__device__ Sums block_range(const Surrogate &a, int64_t first, int64_t last, double *sums, Shared &shared) {
  const Sums mine = lanes_sum(add_all(a, first + threadIdx.x, last, THREADS, sums), 32, ALL);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.sums_of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  Sums total = shared.sums_of_warp[0];
  for (int w = 1; w < WARPS; ++w) combine(total, shared.sums_of_warp[w]);
  return total;
}

// Sum over all threads into shared.result, in a fixed order.
__device__ void block_sum(double *sums, Shared &shared) {
  for (int k = 0; k < SURROGATE_SUMS; ++k)
    for (int distance = 16; distance > 0; distance /= 2) sums[k] += __shfl_xor_sync(ALL, sums[k], distance);
  __syncthreads();
  if (threadIdx.x % 32 == 0)
    for (int k = 0; k < SURROGATE_SUMS; ++k) shared.of_warp[threadIdx.x / 32][k] = sums[k];
  __syncthreads();
  if (threadIdx.x < SURROGATE_SUMS) {
    double total = 0;
    for (int w = 0; w < WARPS; ++w) total += shared.of_warp[w][threadIdx.x];
    shared.result[threadIdx.x] = total;
  }
  __syncthreads();
}

// Return whether this block is the last of `count` blocks to arrive here. For the last block, everything that the
// others wrote before is visible. The ticket starts at 0 and is 0 again afterwards.
__device__ bool arrives_last(unsigned *ticket, int64_t count, Shared &shared) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.last = atomicAdd(ticket, 1u) == unsigned(count - 1);
    if (shared.last) *ticket = 0;
  }
  __syncthreads();
  if (shared.last) __threadfence();
  return shared.last;
}

}  // namespace
}  // namespace stppo
