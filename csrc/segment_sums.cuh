// The sums of a block of clipped_surrogate.cu: over tokens, then over lanes and warps.
#pragma once
#include "clipped_surrogate.h"

namespace stppo {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int64_t SINGLE = 4, TINY = 32, MEDIUM = 1024;  // longest segment for a lane, for 8 lanes, and for a warp
constexpr int64_t LONG = 32768;                          // longest segment for one block; a longer one is a giant
constexpr int PART = SMALLEST_TILE;                      // tokens of a giant that are summed together, for every tile
constexpr int PARTS = LARGEST_TILE / PART;               // of a giant in one tile, at most
constexpr int PART_SUMS = 6;                             // the fields of Sums
constexpr unsigned ALL = 0xffffffffu;
static_assert(SURROGATE_ROWS * SURROGATE_SUMS >= 2 * SURROGATE_SUMS + PARTS * 2 * PART_SUMS, "the workspace suffices");
static_assert(LONG >= LARGEST_TILE, "a tile starts at most one giant");

struct Range {
  int64_t first, last;
};

// The sums over a segment's tokens.
struct Sums {
  double delta, gain, loss, steepness;
  int up, down;  // tokens of nonzero weight with advantage above 0, and below 0
};

// The partial sums of each thread, in float32: a thread adds up a few hundred tokens at most. The sums over the threads
// of a block are in float64 (write_row).
using OfThread = float[SURROGATE_SUMS][THREADS];

struct Token {
  float logprob, old_logprob, advantage, weight, sum_p_sq;
};

__device__ __forceinline__ Token load(const Surrogate &a, int64_t i) {
  return {__ldcs(a.logprob + i), __ldcs(a.old_logprob + i), __ldcs(a.advantage + i),
          a.weight ? __ldcs(a.weight + i) : a.uniform_weight, a.sum_p_sq ? __ldcs(a.sum_p_sq + i) : 0};
}

// A thread's sums over the tokens that it reads, whatever their segments: live tokens, and their KL to the old policy.
struct Monitors {
  float live, k1, k3;
};

__device__ __forceinline__ void monitor(const Token &t, Monitors &m) {
  if (t.weight == 0) return;
  const float delta = t.logprob - t.old_logprob;
  m.live += 1, m.k1 -= delta;
  m.k3 += is_near_zero(delta) ? expm1_minus_near_zero(delta) : expm1_minus(delta);
}

__device__ __forceinline__ double difference(const Token &t) { return double(t.logprob) - double(t.old_logprob); }

// Add a token to its segment's sums. `product` is its weight times its advantage.
__device__ __forceinline__ void add(double delta, float advantage, double product, bool live, Sums &s) {
  s.delta += delta;
  if (advantage < 0) s.loss += product;
  else s.gain += product;
  s.up += live && advantage > 0;
  s.down += live && advantage < 0;
}

constexpr int DEPTH = 2;  // tokens that a thread loads before it adds the first of them; 1: 1.2 times slower on an H100

// Return a thread's sums over every THREADS-th of `count` tokens from `first` on, read from the device's memory.
__device__ __forceinline__ Sums add_all(const Surrogate &a, int64_t first, int count, Monitors &m) {
  Sums s{};
  for (int i = threadIdx.x; i < count; i += DEPTH * THREADS) {
    Token t[DEPTH];
#pragma unroll
    for (int k = 0; k < DEPTH; ++k)
      if (i + k * THREADS < count) t[k] = load(a, first + i + k * THREADS);
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
      if (i + k * THREADS >= count) continue;
      const bool live = t[k].weight != 0;
      add(difference(t[k]), t[k].advantage, live ? double(t[k].weight) * double(t[k].advantage) : 0, live, s);
      if (a.sum_p_sq) s.steepness += slope(t[k].logprob, t[k].sum_p_sq);
      monitor(t[k], m);
    }
  }
  return s;
}

// Sum over the `width` lanes that hold parts of one segment. Each of these lanes gets the result.
template <int WIDTH>
__device__ __forceinline__ Sums lanes_sum(Sums s, bool with_steepness) {
  int counts = s.up | s.down << 16;  // below 2^16 each: a warp sums at most LONG / WARPS tokens
#pragma unroll
  for (int distance = WIDTH / 2; distance > 0; distance /= 2) {
    s.delta += __shfl_xor_sync(ALL, s.delta, distance);
    s.gain += __shfl_xor_sync(ALL, s.gain, distance);
    s.loss += __shfl_xor_sync(ALL, s.loss, distance);
    if (with_steepness) s.steepness += __shfl_xor_sync(ALL, s.steepness, distance);
    counts += __shfl_xor_sync(ALL, counts, distance);
  }
  s.up = counts & 0xffff, s.down = counts >> 16;
  return s;
}

__device__ __forceinline__ void combine(Sums &s, const Sums &other) {
  s.delta += other.delta, s.gain += other.gain, s.loss += other.loss, s.steepness += other.steepness;
  s.up += other.up, s.down += other.down;
}

// Sum `count` tokens from `first` on with the whole block, in parts of `part` tokens: one part, or up to PARTS parts of
// PART tokens. Thread p gets the sums of part p.
__device__ __forceinline__ Sums block_range(const Surrogate &a, int64_t first, int count, int part,
                                            Sums (*of_warp)[WARPS], Monitors &m) {
#pragma unroll 1
  for (int at = 0; at < count; at += part) {
    const Sums mine = lanes_sum<32>(add_all(a, first + at, min(part, count - at), m), a.sum_p_sq);
    if (threadIdx.x % 32 == 0) of_warp[at / PART][threadIdx.x / 32] = mine;
  }
  __syncthreads();
  Sums total{};
  if (int(threadIdx.x) * part < count)
#pragma unroll 1
    for (int w = 0; w < WARPS; ++w) combine(total, of_warp[threadIdx.x][w]);
  __syncthreads();
  return total;
}

// Sum over a warp's lanes in a fixed order.
__device__ __forceinline__ double warp_sum(double sum) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL, sum, distance);
  return sum;
}

// Write the sums over all threads to a row, in a fixed order.
__device__ __forceinline__ void write_row(const float (&mine)[SURROGATE_SUMS], OfThread &of_thread, double *row) {
#pragma unroll
  for (int k = 0; k < SURROGATE_SUMS; ++k) of_thread[k][threadIdx.x] = mine[k];
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int k = threadIdx.x / 32; k < SURROGATE_SUMS; k += WARPS) {
    double sum = 0;
#pragma unroll
    for (int j = 0; j < WARPS; ++j) sum += of_thread[k][lane + 32 * j];
    sum = warp_sum(sum);
    if (lane == 0) __stcg(row + k, sum);
  }
}

// Return whether this block is the last of `count` blocks to arrive here. For the last block, everything that the
// others wrote before is visible to reads that bypass the L1 cache. The ticket starts at 0 and is 0 again afterwards.
// Only thread 0 executes the fences: together with the barriers they order the writes of all threads, and a fence in
// every warp would make each of them wait for its own writes.
__device__ bool arrives_last(unsigned *ticket, int64_t count, bool &last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(ticket, 1u) == unsigned(count - 1);
    if (last) *ticket = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

}  // namespace
}  // namespace stppo
