// Device code of clipped_surrogate.cu.
#pragma once
#include "clipped_surrogate.h"

namespace stppo {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int64_t TINY = 32, MEDIUM = 512;  // longest segment of 8 lanes, of a warp
constexpr int64_t LONG = 32768;             // longest segment of a block
constexpr int MAX_LONG = int(SURROGATE_TILE / MEDIUM) + 1;
constexpr int SLICE_SUMS = 4 + 1;  // of Sums, the two counts in one double
constexpr unsigned ALL = 0xffffffffu;
static_assert(SURROGATE_SUMS >= SLICE_SUMS && 2 * SURROGATE_SUMS >= 2 * SLICE_SUMS && SURROGATE_ROWS == 4);
static_assert(LONG >= SURROGATE_TILE, "a tile starts at most one giant");

struct Range {
  int64_t first, last;
};

// What a segment's tokens add up to.
struct Sums {
  double delta, gain, loss, steepness;
  int up, down;  // tokens with a weight whose advantage is above, below 0
};

struct Shared {
  double result[SURROGATE_SUMS], of_warp[WARPS][SURROGATE_SUMS];
  Sums sums_of_warp[WARPS];
  int64_t bounds[2], long_segments[MAX_LONG];
  int long_count;
  bool last;
};

__device__ double exp_of(double x) {  // csrc/simd.h, exp_of(double)
  const double magic = 0x1.8p52, shifted = __fma_rn(x, 0x1.71547652b82fep0, magic), n = shifted - magic;
  const double r = __fma_rn(n, -0x1.abc9e3b39803fp-56, __fma_rn(n, -0x1.62e42fefa39efp-1, x));
  double p = 0x1.6124613a86d09p-33;
  p = __fma_rn(p, r, 0x1.1eed8eff8d898p-29);
  p = __fma_rn(p, r, 0x1.ae64567f544e4p-26);
  p = __fma_rn(p, r, 0x1.27e4fb7789f5cp-22);
  p = __fma_rn(p, r, 0x1.71de3a556c734p-19);
  p = __fma_rn(p, r, 0x1.a01a01a01a01ap-16);
  p = __fma_rn(p, r, 0x1.a01a01a01a01ap-13);
  p = __fma_rn(p, r, 0x1.6c16c16c16c17p-10);
  p = __fma_rn(p, r, 0x1.1111111111111p-7);
  p = __fma_rn(p, r, 0x1.5555555555555p-5);
  p = __fma_rn(p, r, 0x1.5555555555555p-3);
  p = __fma_rn(p, r, 0.5);
  p = __fma_rn(p, r, 1.0);
  p = __fma_rn(p, r, 1.0);
  return p * __longlong_as_double((__double_as_longlong(shifted) << 52) + 0x3ff0000000000000ll);
}

__device__ float expm1_minus(float x) {  // csrc/simd.h
  float p = 0x1.a01a02p-16f;
  p = __fmaf_rn(p, x, 0x1.a01a02p-13f);
  p = __fmaf_rn(p, x, 0x1.6c16c2p-10f);
  p = __fmaf_rn(p, x, 0x1.111112p-7f);
  p = __fmaf_rn(p, x, 0x1.555556p-5f);
  p = __fmaf_rn(p, x, 0x1.555556p-3f);
  p = __fmaf_rn(p, x, 0.5f);
  return fabsf(x) < 0.5f ? p * x * x : expf(fminf(x, 20.f)) - 1.f - x;
}

// |d logprob / d logits|^2, never below 0 but for rounding.
__device__ double slope(float logprob, float sum_p_sq) {
  const double value = 1 - 2 * double(expf(logprob)) + double(sum_p_sq);
  return value < 0 ? 0 : value;
}

struct Token {
  float logprob, old_logprob, advantage, weight;
};

__device__ __forceinline__ Token load(const Surrogate &a, int64_t i) {
  return {__ldcs(a.logprob + i), __ldcs(a.old_logprob + i), __ldcs(a.advantage + i),
          a.weight ? __ldcs(a.weight + i) : a.uniform_weight};
}

// Sums that need no segment: live tokens and the KL to the old policy over them.
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

// Tokens first, first + step, .. of a segment; four are on their way at once.
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

// Over the `width` lanes that hold parts of one segment; every one of them gets the result.
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

// Tokens [first, last) by the whole block; every thread gets the result.
__device__ Sums block_range(const Surrogate &a, int64_t first, int64_t last, double *sums, Shared &shared) {
  const Sums mine = lanes_sum(add_all(a, first + threadIdx.x, last, THREADS, sums), 32, ALL);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.sums_of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  Sums total = shared.sums_of_warp[0];
  for (int w = 1; w < WARPS; ++w) combine(total, shared.sums_of_warp[w]);
  return total;
}

// Every thread's sums -> shared.result, in a fixed order.
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

// Whether this block is the last of `count` to come here; what all of them wrote before is then visible. The
// ticket starts at 0 and is 0 again afterwards.
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

// A segment's coefficients, its ratio, and what it adds to the tile's sums.
__device__ __forceinline__ Coefficients finish(const Surrogate &a, int64_t segment, int64_t tokens, const Sums &s,
                                               double *sums) {
  const double count = double(tokens), own[SEGMENT_SUMS] = {count, s.delta, s.gain, s.loss};
  if (a.part) {
    for (int k = 0; k < SEGMENT_SUMS; ++k) a.part[segment * SEGMENT_SUMS + k] = own[k];
    return {};
  }
  double of[SEGMENT_SUMS];
  for (int k = 0; k < SEGMENT_SUMS; ++k) of[k] = a.whole ? a.whole[segment * SEGMENT_SUMS + k] : own[k];
  const double divisor = a.by_sum || of[0] == 0 ? 1 : of[0];
  const float ratio = float(exp_of(exponent(of[1], divisor)));
  const Coefficients c = coefficients(ratio, divisor, of[2], of[3], a.low, a.high, a.dual);
  a.ratio[segment] = ratio;
  sums[OBJECTIVE] += objective(ratio, s.gain, s.loss, a.low, a.high, a.dual);
  sums[CLIPPED] += (c.too_high ? s.up : 0) + (c.too_low ? s.down : 0);
  sums[BIAS_SQ] += count * c.bias * c.bias;
  sums[GRAD_SQ] += count * c.gradient * c.gradient;
  sums[LOGIT_BIAS_SQ] += c.bias == 0 ? 0 : s.steepness * c.bias * c.bias;
  sums[LOGIT_GRAD_SQ] += c.gradient == 0 ? 0 : s.steepness * c.gradient * c.gradient;
  return c;
}

__device__ __forceinline__ void fill(const Surrogate &a, int64_t first, int64_t last, int step, float gradient,
                                     float bias) {
  if (a.part) return;
  for (int64_t i = first; i < last; i += step) __stcs(a.gradient + i, gradient);
  if (a.bias)
    for (int64_t i = first; i < last; i += step) __stcs(a.bias + i, bias);
}

__device__ __forceinline__ int64_t key_of(const Surrogate &a, int64_t s) { return a.offsets[s] + s; }

// The first segment s with offsets[s] + s >= at, by one warp: 32 probes a round. Every lane gets it.
__device__ int64_t first_segment(const Surrogate &a, int64_t at) {
  const int lane = threadIdx.x % 32;
  int64_t low = 0, high = a.segments;  // the answer lies in [low, high]
  while (low < high) {
    const int64_t step = (high - low + 31) / 32, probe = low + lane * step;
    const bool below = probe < high && key_of(a, probe) < at;
    const int count = __popc(__ballot_sync(ALL, below));  // sorted: the first `count` probes are below
    if (count == 0) return low;
    const int64_t start = low + (count - 1) * step + 1;
    high = min(high, low + count * step);
    low = start;
  }
  return low;
}

// The segments that start in a tile.
__device__ Range segments_of(const Surrogate &a, int64_t tile, Shared &shared) {
  const int warp = threadIdx.x / 32;
  if (warp < 2) {
    const int64_t found = first_segment(a, (tile + warp) * SURROGATE_TILE);
    if (threadIdx.x % 32 == 0) shared.bounds[warp] = found;
  }
  if (threadIdx.x == 0) shared.long_count = 0;
  __syncthreads();
  return {shared.bounds[0], shared.bounds[1]};
}

// A segment's tokens. Offsets that are not in order read nothing outside.
__device__ __forceinline__ Range tokens_of(const Surrogate &a, int64_t s) {
  const int64_t first = a.offsets[s], last = a.offsets[s + 1];
  return first >= 0 && first <= last && last <= a.tokens ? Range{first, last} : Range{0, 0};
}

// Offsets that are not in order make the objective NaN: nothing is read back to the host to raise an error.
__device__ void check_order(const Surrogate &a, int64_t tile, double *sums) {
  bool wrong = a.offsets[0] != 0 || a.offsets[a.segments] != a.tokens;
  const int64_t end = min((tile + 1) * SURROGATE_TILE, a.segments);
  for (int64_t s = tile * SURROGATE_TILE + threadIdx.x; s < end; s += THREADS) wrong |= a.offsets[s + 1] < a.offsets[s];
  if (wrong) sums[OBJECTIVE] = NAN;
}

__device__ __forceinline__ bool is_giant(const Surrogate &a, int64_t s) {
  if (s < 0) return false;
  const Range t = tokens_of(a, s);
  return t.last - t.first > LONG;
}

// The workspace's three parts, a row per tile: sums of the tile, sums of the giant that starts there, and two
// slices of giants.
__device__ __forceinline__ double *tile_row(const Surrogate &a, int64_t tile) { return a.workspace + tile * SURROGATE_SUMS; }
__device__ __forceinline__ double *giant_row(const Surrogate &a, int64_t tile) { return tile_row(a, a.tiles() + tile); }
__device__ __forceinline__ double *slice_at(const Surrogate &a, int64_t tile, bool starts) {
  return a.workspace + 2 * a.tiles() * SURROGATE_SUMS + tile * 2 * SLICE_SUMS + (starts ? SLICE_SUMS : 0);
}

// Everything but giants. Warp w takes segments w, w + 8, ..; lane i keeps the sums of its round's i-th.
__device__ void tile_of_segments(const Surrogate &a, Range own, double *sums, Shared &shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 8;
  for (int64_t base = own.first + warp; base < own.last; base += 32 * WARPS) {
    const int64_t mine = base + int64_t(lane) * WARPS;
    const bool there = mine < own.last;
    const Range range = there ? tokens_of(a, mine) : Range{0, LONG + 1};
    const int64_t begin = range.first, tokens = range.last - begin;
    const unsigned tiny = __ballot_sync(ALL, tokens <= TINY), medium = __ballot_sync(ALL, tokens > TINY && tokens <= MEDIUM);
    if (tokens > MEDIUM && tokens <= LONG) {
      const int place = atomicAdd(&shared.long_count, 1);
      if (place < MAX_LONG) shared.long_segments[place] = mine;  // more there are only with offsets out of order
    }
    Sums kept{};
    for (unsigned left = tiny; left;) {  // four at a time, 8 lanes each
      const unsigned found = __fns(left, 0, group + 1);  // the group's set bit, or ~0
      const int owner = found == ALL ? -1 : int(found);
      for (int g = 0; g < 4; ++g) left &= left - 1;
      const int64_t from = __shfl_sync(ALL, begin, owner & 31), held = __shfl_sync(ALL, tokens, owner & 31);
      const int64_t count = owner < 0 ? 0 : held;
      const Sums s = lanes_sum(add_all(a, from + lane % 8, from + count, 8, sums), 8, ALL);
      for (int g = 0; g < 4; ++g) {
        const int to = __shfl_sync(ALL, owner, g * 8);
        Sums of{};
        of.delta = __shfl_sync(ALL, s.delta, g * 8), of.gain = __shfl_sync(ALL, s.gain, g * 8);
        of.loss = __shfl_sync(ALL, s.loss, g * 8), of.steepness = __shfl_sync(ALL, s.steepness, g * 8);
        of.up = __shfl_sync(ALL, s.up, g * 8), of.down = __shfl_sync(ALL, s.down, g * 8);
        if (lane == to) kept = of;
      }
    }
    for (unsigned left = medium; left; left &= left - 1) {
      const int owner = __ffs(left) - 1;
      const int64_t from = __shfl_sync(ALL, begin, owner), count = __shfl_sync(ALL, tokens, owner);
      const Sums s = lanes_sum(add_all(a, from + lane, from + count, 32, sums), 32, ALL);
      if (lane == owner) kept = s;
    }
    Coefficients c{};
    if (there && tokens <= MEDIUM) c = finish(a, mine, tokens, kept, sums);
    const float gradient = float(c.gradient), bias = float(c.bias);
    for (unsigned left = tiny | medium; left; left &= left - 1) {
      const int owner = __ffs(left) - 1;
      const int64_t from = __shfl_sync(ALL, begin, owner), count = __shfl_sync(ALL, tokens, owner);
      fill(a, from + lane, from + count, 32, __shfl_sync(ALL, gradient, owner), __shfl_sync(ALL, bias, owner));
    }
  }
  __syncthreads();
  // the list came in any order; taken by rising index, the tile's sums do not depend on it
  const int count = min(shared.long_count, MAX_LONG);
  int64_t previous = -1;
  for (int k = 0; k < count; ++k) {
    int64_t next = a.segments;
    for (int j = 0; j < count; ++j)
      if (shared.long_segments[j] > previous) next = min(next, shared.long_segments[j]);
    const auto [first, last] = tokens_of(a, next);
    const Sums s = block_range(a, first, last, sums, shared);
    double ignored[SURROGATE_SUMS] = {};
    const Coefficients c = finish(a, next, last - first, s, threadIdx.x == 0 ? sums : ignored);
    fill(a, first + threadIdx.x, last, THREADS, float(c.gradient), float(c.bias));
    previous = next;
  }
}

// One block's part of a giant; the block that arrives last adds the parts up, in order, and writes it.
__device__ void slice_of_giant(const Surrogate &a, int64_t segment, int64_t tile, double *sums, Shared &shared) {
  const auto [first, last] = tokens_of(a, segment);
  const int64_t home = key_of(a, segment) / SURROGATE_TILE, slice = tile - home;
  const int64_t slices = (last - first + SURROGATE_TILE - 1) / SURROGATE_TILE;
  if (slice < 0 || slice >= slices) return;  // below 0 only with offsets out of order
  const int64_t from = first + slice * SURROGATE_TILE;
  const Sums mine = block_range(a, from, min(from + SURROGATE_TILE, last), sums, shared);
  // two giants may meet in a tile; the one that starts there writes to the second place
  if (threadIdx.x == 0) {
    double *to = slice_at(a, tile, slice == 0);
    to[0] = mine.delta, to[1] = mine.gain, to[2] = mine.loss, to[3] = mine.steepness;
    to[4] = __hiloint2double(mine.up, mine.down);
  }
  if (!arrives_last(a.tickets + 1 + home, slices, shared)) return;
  Sums total{};
  for (int64_t k = 0; k < slices; ++k) {
    const double *part = slice_at(a, home + k, k == 0);
    const double counts = __ldcg(part + 4);
    combine(total, {__ldcg(part), __ldcg(part + 1), __ldcg(part + 2), __ldcg(part + 3), __double2hiint(counts),
                    __double2loint(counts)});
  }
  double own[SURROGATE_SUMS] = {};  // not this tile's: they would depend on who was last
  const Coefficients c = finish(a, segment, last - first, total, own);
  if (threadIdx.x == 0)
    for (int k = 0; k < SURROGATE_SUMS; ++k) giant_row(a, home)[k] = own[k];
  fill(a, first + threadIdx.x, last, THREADS, float(c.gradient), float(c.bias));
}

__device__ void tile_of_tokens(const Surrogate &a, int64_t begin, double *sums) {
  const int64_t end = min(begin + SURROGATE_TILE, a.tokens);
  for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
    const Token t = load(a, i);
    Sums s{};
    add(a, i, t, s, sums);
    const Coefficients c = finish(a, i, 1, s, sums);
    __stcs(a.gradient + i, float(c.gradient));
    if (a.bias) __stcs(a.bias + i, float(c.bias));
  }
}

__device__ void write_totals(const Surrogate &a, int64_t tiles, Shared &shared) {
  double sums[SURROGATE_SUMS] = {};
  for (int64_t row = threadIdx.x; row < 2 * tiles; row += THREADS) {
    for (int k = 0; k < SURROGATE_SUMS; ++k) sums[k] += __ldcg(tile_row(a, row) + k);
  }
  block_sum(sums, shared);
  if (threadIdx.x == 0 && !a.part) surrogate_totals(shared.result, a.totals);
  // 0 already, but after offsets out of order
  for (int64_t tile = threadIdx.x; tile < tiles; tile += THREADS) a.tickets[1 + tile] = 0;
}

}  // namespace
}  // namespace stppo
