// Device code of clipped_surrogate.cu: the work of each block, and what it writes.
#pragma once
#include "segment_sums.cuh"

namespace stppo {
namespace {

// What a segment's sums give.
struct Finished {
  Coefficients coefficients;
  float ratio;
};

// Return a segment's ratio and coefficients. The first call for split segments only writes its sums to a.part.
__device__ __forceinline__ Finished finish(const Surrogate &a, int64_t segment, int64_t tokens, const Sums &s) {
  double count = double(tokens), delta = s.delta, gain = s.gain, loss = s.loss;
  if (a.part) {
    double *part = a.part + segment * SEGMENT_SUMS;
    part[0] = count, part[1] = delta, part[2] = gain, part[3] = loss;
    return {};
  }
  if (a.whole) {
    const double *whole = a.whole + segment * SEGMENT_SUMS;
    count = whole[0], delta = whole[1], gain = whole[2], loss = whole[3];
  }
  const double divisor = a.by_sum || count == 0 ? 1 : count;
  const float ratio = float(exp_of(exponent(delta, divisor)));
  return {coefficients(ratio, divisor, gain, loss, a.low, a.high, a.dual), ratio};
}

// Pass what a segment adds to the tile's sums to add(index, value).
template <class Add>
__device__ __forceinline__ void report(const Surrogate &a, int64_t tokens, const Sums &s, const Finished &f,
                                       const Add &add) {
  const Coefficients &c = f.coefficients;
  const double bias_sq = c.bias * c.bias, grad_sq = c.gradient * c.gradient, count = double(tokens);
  add(OBJECTIVE, objective(f.ratio, s.gain, s.loss, a.low, a.high, a.dual));
  add(CLIPPED, double((c.too_high ? s.up : 0) + (c.too_low ? s.down : 0)));
  add(BIAS_SQ, count * bias_sq);
  add(GRAD_SQ, count * grad_sq);
  add(LOGIT_BIAS_SQ, times(s.steepness, bias_sq));
  add(LOGIT_GRAD_SQ, times(s.steepness, grad_sq));
}

__device__ __forceinline__ void write_ratio(const Surrogate &a, int64_t segment, const Finished &f) {
  if (!a.part) a.ratio[segment] = f.ratio;
}

// Write tokens first, first + step, .. of a segment.
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

// Set shared.own for a tile.
__device__ void find_segments(const Surrogate &a, int64_t tile, Shared &shared) {
  const int warp = threadIdx.x / 32;
  if (warp < 2) {
    const int64_t found = first_segment(a, (tile + warp) * SURROGATE_TILE);
    if (threadIdx.x % 32 == 0) (warp == 0 ? shared.own.first : shared.own.last) = found;
  }
  if (threadIdx.x == 0) shared.long_count = 0;
  __syncthreads();
}

// Return a segment's tokens. If offsets are not sorted, the range is empty, so nothing is read out of bounds.
__device__ __forceinline__ Range tokens_of(const Surrogate &a, int64_t s) {
  const int64_t first = a.offsets[s], last = a.offsets[s + 1];
  return first >= 0 && first <= last && last <= a.tokens ? Range{first, last} : Range{0, 0};
}

// If offsets are not sorted, make the objective NaN: nothing is read back to the host to raise an error.
__device__ void check_order(const Surrogate &a, int64_t tile, Shared &shared) {
  bool wrong = a.offsets[0] != 0 || a.offsets[a.segments] != a.tokens;
  const int64_t end = min((tile + 1) * SURROGATE_TILE, a.segments);
  for (int64_t s = tile * SURROGATE_TILE + threadIdx.x; s < end; s += THREADS) wrong |= a.offsets[s + 1] < a.offsets[s];
  if (wrong) shared.of_thread[OBJECTIVE][threadIdx.x] = NAN;
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

// The segments of a round of a warp: one per lane.
struct Round {
  int64_t begin;
  int tokens;  // -1: none, or one that the warp does not process
};

// Call visit(owner, from, count) for the lanes' segments that are `chosen`, LANES lanes for each of them: owner is its
// lane. Where no segment is left, owner is -1 and count is 0.
template <int LANES, class Visit>
__device__ __forceinline__ void for_each_chosen(const Round &mine, bool chosen, Shared &shared, const Visit &visit) {
  const int lane = threadIdx.x % 32;
  uint8_t *const listed = shared.listed[threadIdx.x / 32];
  const unsigned all = __ballot_sync(ALL, chosen);
  if (chosen) listed[__popc(all & ((1u << lane) - 1))] = uint8_t(lane);
  __syncwarp();
  for (int place = lane / LANES; place - lane / LANES < __popc(all); place += 32 / LANES) {
    const bool there = place < __popc(all);
    const int owner = there ? listed[place] : lane;
    const int64_t from = __shfl_sync(ALL, mine.begin, owner);
    const int tokens = __shfl_sync(ALL, mine.tokens, owner);
    visit(there ? owner : -1, from, there ? tokens : 0);
  }
  __syncwarp();
}

// Sum the lanes' segments that are `chosen`, and write the sums to shared.of_segment of their owners.
template <int LANES>
__device__ __forceinline__ void sum_chosen(const Surrogate &a, const Round &mine, bool chosen, Shared &shared) {
  for_each_chosen<LANES>(mine, chosen, shared, [&](int owner, int64_t from, int count) {
    const int lane = threadIdx.x % LANES;
    const Sums s = lanes_sum(add_all(a, from + lane, from + count, LANES, shared), LANES);
    if (lane == 0 && owner >= 0) shared.of_segment[threadIdx.x / 32 * 32 + owner] = s;
  });
}

template <int LANES>
__device__ __forceinline__ void fill_chosen(const Surrogate &a, const Round &mine, bool chosen, Shared &shared,
                                            float gradient, float bias) {
  for_each_chosen<LANES>(mine, chosen, shared, [&](int owner, int64_t from, int count) {
    const float g = __shfl_sync(ALL, gradient, max(owner, 0)), b = __shfl_sync(ALL, bias, max(owner, 0));
    fill(a, from + threadIdx.x % LANES, from + count, LANES, g, b);
  });
}

// Process all segments of a tile except giants. Warp w takes segments w, w + 8, ..; lane i keeps the sums of the i-th
// segment of its round.
__device__ void tile_of_segments(const Surrogate &a, Shared &shared) {
  const Range &own = shared.own;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto add = [&](int k, double value) { shared.of_thread[k][threadIdx.x] += value; };
  const int ahead = lane * WARPS;
  for (int64_t segment = own.first + warp + ahead; segment - ahead < own.last; segment += THREADS) {
    Round mine{0, -1};
    if (segment < own.last) {
      const Range range = tokens_of(a, segment);
      const int64_t tokens = range.last - range.first;
      mine.begin = range.first;
      if (tokens <= MEDIUM) mine.tokens = int(tokens);
      else if (tokens <= LONG) {
        const int place = atomicAdd(&shared.long_count, 1);
        if (place < MAX_LONG) shared.long_segments[place] = segment;  // more only if offsets are not sorted
      }
    }
    const bool tiny = mine.tokens > SINGLE && mine.tokens <= TINY, medium = mine.tokens > TINY;
    Sums &kept = shared.of_segment[threadIdx.x];
    if (mine.tokens <= SINGLE) kept = add_all(a, mine.begin, mine.begin + mine.tokens, 1, shared);
    sum_chosen<8>(a, mine, tiny, shared);
    sum_chosen<32>(a, mine, medium, shared);
    Finished f{};
    if (mine.tokens >= 0) {
      f = finish(a, segment, mine.tokens, kept);
      report(a, mine.tokens, kept, f, add);
      write_ratio(a, segment, f);
    }
    const float gradient = float(f.coefficients.gradient), bias = float(f.coefficients.bias);
    if (mine.tokens <= SINGLE) fill(a, mine.begin, mine.begin + mine.tokens, 1, gradient, bias);
    fill_chosen<8>(a, mine, tiny, shared, gradient, bias);
    fill_chosen<32>(a, mine, medium, shared, gradient, bias);
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
    const Sums s = block_range(a, first, last, shared);
    const Finished f = finish(a, next, last - first, s);
    if (threadIdx.x == 0) {
      report(a, last - first, s, f, add);
      write_ratio(a, next, f);
    }
    fill(a, first + threadIdx.x, last, THREADS, float(f.coefficients.gradient), float(f.coefficients.bias));
    previous = next;
  }
}

// Sum one block's slice of a giant. The block that arrives last adds up the slices in order and writes the results.
__device__ void slice_of_giant(const Surrogate &a, int64_t segment, int64_t tile, Shared &shared) {
  const auto [first, last] = tokens_of(a, segment);
  const int64_t home = key_of(a, segment) / SURROGATE_TILE, slice = tile - home;
  const int64_t slices = (last - first + SURROGATE_TILE - 1) / SURROGATE_TILE;
  if (slice < 0 || slice >= slices) return;  // below 0 only if offsets are not sorted
  const int64_t from = first + slice * SURROGATE_TILE;
  const Sums mine = block_range(a, from, min(from + SURROGATE_TILE, last), shared);
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
  const Finished f = finish(a, segment, last - first, total);
  // kept apart from this tile's sums, which must not depend on which block is last
  if (threadIdx.x == 0) {
    report(a, last - first, total, f, [&](int k, double value) { giant_row(a, home)[k] = value; });
    write_ratio(a, segment, f);
  }
  fill(a, first + threadIdx.x, last, THREADS, float(f.coefficients.gradient), float(f.coefficients.bias));
}

__device__ void write_totals(const Surrogate &a, int64_t tiles, Shared &shared) {
  for (int k = 0; k < SURROGATE_SUMS; ++k) {
    double sum = 0;
    for (int64_t row = threadIdx.x; row < 2 * tiles; row += THREADS) sum += __ldcg(tile_row(a, row) + k);
    shared.of_thread[k][threadIdx.x] = sum;
  }
  block_sum(shared);
  if (threadIdx.x == 0 && !a.part) surrogate_totals(shared.result, a.totals);
  // already 0, unless offsets were not sorted
  for (int64_t tile = threadIdx.x; tile < tiles; tile += THREADS) a.tickets[1 + tile] = 0;
}

}  // namespace
}  // namespace stppo
