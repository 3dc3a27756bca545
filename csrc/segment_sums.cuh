// The sums of a block of clipped_surrogate.cu: over tokens, then over lanes and warps.
#pragma once
#include "clipped_surrogate.h"

namespace stppo {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int64_t SINGLE = 4, TINY = 32, MEDIUM = 512;  // longest segment for a lane, for 8 lanes, and for a warp
constexpr int64_t LONG = 32768;                         // longest segment for one block; a longer one is a giant
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
  // The sums of the tile by thread. They are here and not in registers, so that more warps fit on a multiprocessor.
  double of_thread[SURROGATE_SUMS][THREADS];
  double result[SURROGATE_SUMS], of_warp[WARPS][SURROGATE_SUMS];
  Sums sums_of_warp[WARPS];
  Range own;  // the segments that start in the tile
  int64_t long_segments[MAX_LONG];
  int long_count;
  Sums of_segment[THREADS];   // of the segment that a lane owns
  uint8_t listed[WARPS][32];  // lanes whose segments the warp processes together
  bool last;
};

struct Token {
  float logprob, old_logprob, advantage, weight, sum_p_sq;
};

__device__ __forceinline__ Token load(const Surrogate &a, int64_t i) {
  return {__ldcs(a.logprob + i), __ldcs(a.old_logprob + i), __ldcs(a.advantage + i),
          a.weight ? __ldcs(a.weight + i) : a.uniform_weight, a.sum_p_sq ? __ldcs(a.sum_p_sq + i) : 0};
}

constexpr int DEPTH = 3;  // tokens that a thread loads before it adds the first of them

// The sums over up to DEPTH tokens that do not depend on segments: live tokens, and their KL to the old policy.
struct Monitors {
  float live, k1, k3;
};

__device__ __forceinline__ void monitor(const Token &t, Monitors &m) {
  if (t.weight == 0) return;
  const float delta = t.logprob - t.old_logprob;
  m.live += 1, m.k1 -= delta;
  m.k3 += is_near_zero(delta) ? expm1_minus_near_zero(delta) : expm1_minus(delta);
}

__device__ __forceinline__ void flush(const Monitors &m, Shared &shared) {
  shared.of_thread[LIVE][threadIdx.x] += m.live;
  shared.of_thread[K1][threadIdx.x] += m.k1;
  shared.of_thread[K3][threadIdx.x] += m.k3;
}

__device__ __forceinline__ void add(const Surrogate &a, const Token &t, Sums &s, Monitors &m) {
  const double product = t.weight == 0 ? 0 : double(t.weight) * double(t.advantage);
  s.delta += double(t.logprob) - double(t.old_logprob);
  if (t.advantage < 0) s.loss += product;
  else s.gain += product;
  s.up += t.weight != 0 && t.advantage > 0;
  s.down += t.weight != 0 && t.advantage < 0;
  if (a.sum_p_sq) s.steepness += slope(t.logprob, t.sum_p_sq);
  monitor(t, m);
}

// Return the sums over tokens first, first + step, .. of a segment.
__device__ __forceinline__ Sums add_all(const Surrogate &a, int64_t first, int64_t last, int step, Shared &shared) {
  Sums s{};
  for (int64_t i = first; i < last; i += DEPTH * step) {
    Token t[DEPTH];
    Monitors m{};
#pragma unroll
    for (int k = 0; k < DEPTH; ++k)
      if (i + k * step < last) t[k] = load(a, i + k * step);
#pragma unroll
    for (int k = 0; k < DEPTH; ++k)
      if (i + k * step < last) add(a, t[k], s, m);
    flush(m, shared);
  }
  return s;
}

// Sum over the `width` lanes that hold parts of one segment. Each of these lanes gets the result.
__device__ __forceinline__ Sums lanes_sum(Sums s, int width) {
#pragma unroll
  for (int distance = width / 2; distance > 0; distance /= 2) {
    s.delta += __shfl_xor_sync(ALL, s.delta, distance);
    s.gain += __shfl_xor_sync(ALL, s.gain, distance);
    s.loss += __shfl_xor_sync(ALL, s.loss, distance);
    s.steepness += __shfl_xor_sync(ALL, s.steepness, distance);
    s.up += __shfl_xor_sync(ALL, s.up, distance);
    s.down += __shfl_xor_sync(ALL, s.down, distance);
  }
  return s;
}

__device__ __forceinline__ void combine(Sums &s, const Sums &other) {
  s.delta += other.delta, s.gain += other.gain, s.loss += other.loss, s.steepness += other.steepness;
  s.up += other.up, s.down += other.down;
}

// Sum tokens [first, last) with the whole block. Every thread gets the result.
__device__ Sums block_range(const Surrogate &a, int64_t first, int64_t last, Shared &shared) {
  const Sums mine = lanes_sum(add_all(a, first + threadIdx.x, last, THREADS, shared), 32);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.sums_of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  Sums total = shared.sums_of_warp[0];
  for (int w = 1; w < WARPS; ++w) combine(total, shared.sums_of_warp[w]);
  return total;
}

// Sum shared.of_thread over all threads into shared.result, in a fixed order.
__device__ void block_sum(Shared &shared) {
  for (int k = 0; k < SURROGATE_SUMS; ++k) {
    double sum = shared.of_thread[k][threadIdx.x];
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL, sum, distance);
    if (threadIdx.x % 32 == 0) shared.of_warp[threadIdx.x / 32][k] = sum;
  }
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
