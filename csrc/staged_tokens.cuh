// The tokens of a run of short segments, in shared memory. All threads of a block copy them there 16 bytes at a time,
// wherever segments begin and end, so many loads are in flight; then each segment's tokens are added up in an order that
// depends on the segment alone.
#pragma once
#include "segment_sums.cuh"

namespace stppo {
namespace {

struct alignas(16) Quad {
  float value[4];
};

__device__ __forceinline__ bool aligned(const void *x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; }

// Return tokens i .. i + count - 1 of a column. The others are `otherwise`.
__device__ __forceinline__ Quad read(const float *column, int64_t i, int count, bool wide, float otherwise) {
  Quad q{{otherwise, otherwise, otherwise, otherwise}};
  if (!column) return q;
  if (wide && count >= 4) {
    const float4 four = __ldcs(reinterpret_cast<const float4 *>(column + i));
    return {{four.x, four.y, four.z, four.w}};
  }
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (k < count) q.value[k] = __ldcs(column + i + k);
  return q;
}

constexpr int SLOTS = 128;  // segments of a run
constexpr int STAGE_BYTES = 34800;

// The columns in the buffer: the differences in float64, the advantages, and, if the caller passes them, the weights
// and the squared norms of d logprob / d logits. All take `capacity` tokens.
struct Columns {
  float *buffer;
  int capacity;
  __device__ double &delta(int j) const { return reinterpret_cast<double *>(buffer)[j]; }
  __device__ float &advantage(int j) const { return buffer[2 * capacity + j]; }
  __device__ float &weight(int j) const { return buffer[3 * capacity + j]; }
  __device__ float &steepness(int j) const { return buffer[STAGE_BYTES / 4 - capacity + j]; }
};

constexpr int capacity_of(int bytes_per_token) { return STAGE_BYTES / bytes_per_token / 4 * 4; }

__device__ __forceinline__ Columns columns_in(const Surrogate &a, unsigned char *buffer) {
  const int spare = (a.weight ? 1 : 0) + (a.sum_p_sq ? 1 : 0);
  const int capacity = spare == 0 ? capacity_of(12) : spare == 1 ? capacity_of(16) : capacity_of(20);
  return {reinterpret_cast<float *>(buffer), capacity};
}
static_assert(capacity_of(20) >= MEDIUM + 3, "a segment fits");

constexpr int QUADS = 1;  // that a thread loads before it uses the first of them; 2 is slower on an H100

// Copy tokens base + from .. base + to - 1 to the buffer, and add them to the monitors. `base` is a multiple of 4.
__device__ __forceinline__ void stage(const Surrogate &a, int64_t base, int from, int to, const Columns &c, Monitors &m) {
  const bool wide = aligned(a.logprob) && aligned(a.old_logprob) && aligned(a.advantage) && aligned(a.weight) &&
                    aligned(a.sum_p_sq);
  const int there = int(min(a.tokens - base, int64_t(1 << 30)));
  const float *const logprob_at = a.logprob + base, *const old_at = a.old_logprob + base;
  const float *const advantage_at = a.advantage + base;
  for (int first = 4 * threadIdx.x; first < to; first += QUADS * 4 * THREADS) {
    Quad logprob[QUADS], old_logprob[QUADS], advantage[QUADS];
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      const int j = first + q * 4 * THREADS;
      if (j >= to) continue;
      logprob[q] = read(logprob_at, j, there - j, wide, 0), old_logprob[q] = read(old_at, j, there - j, wide, 0);
      advantage[q] = read(advantage_at, j, there - j, wide, 0);
    }
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      const int j = first + q * 4 * THREADS;
      if (j >= to) continue;
      const int64_t i = base + j;
      const int count = there - j;
      Quad weight{{a.uniform_weight, a.uniform_weight, a.uniform_weight, a.uniform_weight}}, sum_p_sq{};
      if (a.weight) {
        weight = read(a.weight, i, count, wide, 0);
        *reinterpret_cast<Quad *>(&c.weight(j)) = weight;
      }
      if (a.sum_p_sq) sum_p_sq = read(a.sum_p_sq, i, count, wide, 0);
      *reinterpret_cast<Quad *>(&c.advantage(j)) = advantage[q];
      double delta[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const Token t{logprob[q].value[k], old_logprob[q].value[k], advantage[q].value[k], weight.value[k],
                      sum_p_sq.value[k]};
        delta[k] = difference(t);
        if (j + k >= from && j + k < to) monitor(t, m);
        if (a.sum_p_sq) c.steepness(j + k) = float(slope(t.logprob, t.sum_p_sq));
      }
      reinterpret_cast<double2 *>(&c.delta(j))[0] = make_double2(delta[0], delta[1]);
      reinterpret_cast<double2 *>(&c.delta(j))[1] = make_double2(delta[2], delta[3]);
    }
  }
}

// Return the sums over tokens first, first + step, .. in the buffer.
__device__ __forceinline__ Sums add_staged(const Surrogate &a, const Columns &c, int first, int last, int step) {
  Sums s{};
  if (a.weight) {
#pragma unroll 2
    for (int j = first; j < last; j += step) {
      const float weight = c.weight(j), advantage = c.advantage(j);
      const bool live = weight != 0;
      add(c.delta(j), advantage, live ? double(weight) * double(advantage) : 0, live, s);
    }
  } else {
#pragma unroll 4
    for (int j = first; j < last; j += step) add(c.delta(j), c.advantage(j), c.advantage(j), true, s);
    s.gain *= a.uniform_weight, s.loss *= a.uniform_weight;
  }
  if (a.sum_p_sq)
#pragma unroll 1
    for (int j = first; j < last; j += step) s.steepness += c.steepness(j);
  return s;
}

// Call visit(slot, lane) for the slots of this warp that are `chosen`, LANES lanes for each of them: `lane` is the
// place among them. All lanes come together: where no slot is left, slot is -1.
template <int LANES, class Visit>
__device__ __forceinline__ void for_each_chosen(bool chosen, const Visit &visit) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (unsigned all = __ballot_sync(ALL, chosen); all;) {
    unsigned mine = all;
#pragma unroll
    for (int k = 0; k < 32 / LANES; ++k) {
      if (k < lane / LANES) mine &= mine - 1;
      all &= all - 1;
    }
    visit(mine ? warp + WARPS * (__ffs(mine) - 1) : -1, lane % LANES);
  }
}

// The segments of a run by slot. Tokens count from the run's base.
struct Run {
  int begin[SLOTS], tokens[SLOTS];
  float gradient[SLOTS], bias[SLOTS];
  Sums sums[SLOTS];
};
static_assert(SLOTS <= THREADS, "a lane for each of a warp's slots");

// Sum all segments of a run. Warp w takes slots w, w + 8, ..
__device__ __forceinline__ void sum_run(const Surrogate &a, const Columns &c, int count, Run &run) {
  const int slot = threadIdx.x / 32 + WARPS * (threadIdx.x % 32);
  const int tokens = slot < count ? run.tokens[slot] : -1;
  if (tokens >= 0 && tokens <= SINGLE) run.sums[slot] = add_staged(a, c, run.begin[slot], run.begin[slot] + tokens, 1);
  for_each_chosen<8>(tokens > SINGLE && tokens <= TINY, [&](int at, int lane) {
    const int begin = at < 0 ? 0 : run.begin[at], end = at < 0 ? 0 : begin + run.tokens[at];
    const Sums s = lanes_sum<8>(add_staged(a, c, begin + lane, end, 8), a.sum_p_sq);
    if (lane == 0 && at >= 0) run.sums[at] = s;
  });
  for_each_chosen<32>(tokens > TINY, [&](int at, int lane) {
    const int begin = run.begin[at], end = begin + run.tokens[at];
    const Sums s = lanes_sum<32>(add_staged(a, c, begin + lane, end, 32), a.sum_p_sq);
    if (lane == 0) run.sums[at] = s;
  });
}

// Write the coefficients of tokens first, first + step, .. of a segment.
__device__ __forceinline__ void fill(const Surrogate &a, int64_t first, int64_t last, int step, float gradient,
                                     float bias) {
#pragma unroll 1
  for (int64_t i = first; i < last; i += step) __stcs(a.gradient + i, gradient);
  if (a.bias)
#pragma unroll 1
    for (int64_t i = first; i < last; i += step) __stcs(a.bias + i, bias);
}

__device__ __forceinline__ void fill_run(const Surrogate &a, int64_t base, int count, const Run &run) {
  const int own = threadIdx.x / 32 + WARPS * (threadIdx.x % 32);
  const int tokens = own < count ? run.tokens[own] : -1;
  const auto write = [&](int slot, int lane, int step) {
    if (slot < 0) return;
    const int64_t begin = base + run.begin[slot];
    fill(a, begin + lane, begin + run.tokens[slot], step, run.gradient[slot], run.bias[slot]);
  };
  if (tokens >= 0 && tokens <= SINGLE) write(own, 0, 1);
  for_each_chosen<8>(tokens > SINGLE && tokens <= TINY, [&](int slot, int lane) { write(slot, lane, 8); });
  for_each_chosen<32>(tokens > TINY, [&](int slot, int lane) { write(slot, lane, 32); });
}

}  // namespace
}  // namespace stppo
