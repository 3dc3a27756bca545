// Device code of clipped_surrogate.cu: the work of each block, and what it writes.
#pragma once
#include "segment_sums.cuh"

namespace stppo {
namespace {

// Write a segment's ratio, add the segment to the tile's sums, and return its coefficients.
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

// Return the first segment s with offsets[s] + s >= at, on every lane. One warp searches with 32 probes per round.
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

// Return the range of segments that start in a tile.
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

// Return a segment's tokens. If offsets are not sorted, the range is empty, so nothing is read out of bounds.
__device__ __forceinline__ Range tokens_of(const Surrogate &a, int64_t s) {
  const int64_t first = a.offsets[s], last = a.offsets[s + 1];
  return first >= 0 && first <= last && last <= a.tokens ? Range{first, last} : Range{0, 0};
}

// If offsets are not sorted, make the objective NaN: nothing is read back to the host to raise an error.
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

// The workspace has three parts with one row per tile: the sums of the tile, the sums of the giant that starts there,
// and two slices of giants.
__device__ __forceinline__ double *tile_row(const Surrogate &a, int64_t tile) { return a.workspace + tile * SURROGATE_SUMS; }
__device__ __forceinline__ double *giant_row(const Surrogate &a, int64_t tile) { return tile_row(a, a.tiles() + tile); }
__device__ __forceinline__ double *slice_at(const Surrogate &a, int64_t tile, bool starts) {
  return a.workspace + 2 * a.tiles() * SURROGATE_SUMS + tile * 2 * SLICE_SUMS + (starts ? SLICE_SUMS : 0);
}

// Process all segments of a tile except giants. Warp w takes segments w, w + 8, ..; lane i keeps the sums of the i-th
// segment of its round.
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
      if (place < MAX_LONG) shared.long_segments[place] = mine;  // there are more only if offsets are not sorted
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
  // The order of the list varies from call to call. Segments are taken by rising index, so the sums do not depend on it.
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

// Sum one block's slice of a giant. The block that arrives last adds up the slices in order and writes the results.
__device__ void slice_of_giant(const Surrogate &a, int64_t segment, int64_t tile, double *sums, Shared &shared) {
  const auto [first, last] = tokens_of(a, segment);
  const int64_t home = key_of(a, segment) / SURROGATE_TILE, slice = tile - home;
  const int64_t slices = (last - first + SURROGATE_TILE - 1) / SURROGATE_TILE;
  if (slice < 0 || slice >= slices) return;  // below 0 only if offsets are not sorted
  const int64_t from = first + slice * SURROGATE_TILE;
  const Sums mine = block_range(a, from, min(from + SURROGATE_TILE, last), sums, shared);
  // two giants may share a tile; the one that starts there writes to the second slot
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
  double own[SURROGATE_SUMS] = {};  // kept apart from this tile's sums, which must not depend on which block is last
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
  // already 0, unless offsets were not sorted
  for (int64_t tile = threadIdx.x; tile < tiles; tile += THREADS) a.tickets[1 + tile] = 0;
}

}  // namespace
}  // namespace stppo
