// Device code of clipped_surrogate.cu where segments are turns: the work of each block, and what it writes.
#pragma once
#include "staged_tokens.cuh"
#include "surrogate_totals.cuh"

namespace stppo {
namespace {

// What a segment's sums give.
struct Finished {
  float ratio, gradient, bias;
};

struct Shared {
  alignas(16) unsigned char buffer[STAGE_BYTES];  // the columns of a run; afterwards, sums of threads
  Run run;
  float reported[SURROGATE_SUMS][SLOTS];  // sums over segments, by the thread that finishes them
  Sums of_warp[PARTS][WARPS];
  unsigned stops[WARPS];
  double result[SURROGATE_SUMS];
  float gradient, bias;  // of a long segment
  bool last;
  int64_t start;  // of the tile: its first segment, and the number of segments to look at
  int limit;
};
static_assert(sizeof(OfThread) <= STAGE_BYTES && sizeof(Shared) <= 48 * 1024, "fits");

// Return a segment's ratio and coefficients, and write the ratio. Pass what it adds to the tile's sums to
// report(index, value). The first call for split segments only writes its sums to a.part.
template <class Report>
__device__ __forceinline__ Finished finish(const Surrogate &a, int64_t segment, int64_t tokens, const Sums &s,
                                           const Report &report) {
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
  const double log_w = exponent(delta, divisor);
  const float log2 = length_log2(count, a.length_power), ratio = float(exp_of(log_w));
  const float far = compared(ratio, log_w, exp2f(log2));
  // before the coefficients, so that the bounds need no registers beside them
  report(OBJECTIVE, objective(ratio, far, exp2f(-log2), s.gain, s.loss, a.low, a.high, a.dual));
  report(CLIPPED, double((far > a.high.value ? s.up : 0) + (far < a.low.value ? s.down : 0)));
  const Coefficients c = coefficients(ratio, far, exp2f(-log2), divisor, gain, loss, a.low, a.high, a.dual);
  const double bias_sq = c.bias * c.bias, grad_sq = c.gradient * c.gradient;
  report(BIAS_SQ, double(tokens) * bias_sq);
  report(GRAD_SQ, double(tokens) * grad_sq);
  if (a.sum_p_sq) {
    report(LOGIT_BIAS_SQ, times(s.steepness, bias_sq));
    report(LOGIT_GRAD_SQ, times(s.steepness, grad_sq));
  }
  a.ratio[segment] = ratio;
  return {ratio, float(c.gradient), float(c.bias)};
}

__device__ __forceinline__ int64_t key_of(const Surrogate &a, int64_t s) { return a.offsets[s] + s; }

// Return the first segment s with offsets[s] + s >= at, on every thread. The block searches with one probe per thread.
__device__ int64_t first_segment(const Surrogate &a, int64_t at) {
  int64_t low = 0, high = a.segments;  // the answer lies in [low, high]
  while (low < high) {
    const int64_t step = (high - low + THREADS - 1) / THREADS, probe = low + threadIdx.x * step;
    const bool below = probe < high && key_of(a, probe) < at;
    const int count = __syncthreads_count(below);  // sorted: the first `count` probes are below
    if (count == 0) return low;
    const int64_t start = low + (count - 1) * step + 1;
    high = min(high, low + count * step);
    low = start;
  }
  return low;
}

// Return a segment's tokens. If offsets are not sorted, the range is empty, so nothing is read out of bounds.
__device__ __forceinline__ Range tokens_of(const Surrogate &a, int64_t s) {
  const int64_t first = a.offsets[s], last = a.offsets[s + 1];
  return first >= 0 && first <= last && last <= a.tokens ? Range{first, last} : Range{0, 0};
}

// Return whether offsets are not sorted, as far as this thread of this tile checks it. The objective is then set to
// NaN: nothing is read back to the host to raise an error.
__device__ bool is_unsorted(const Surrogate &a, int64_t tile, int64_t share) {
  bool wrong = a.offsets[0] != 0 || a.offsets[a.segments] != a.tokens;
  const int64_t end = min((tile + 1) * share, a.segments);
  for (int64_t s = tile * share + threadIdx.x; s < end; s += THREADS) wrong |= a.offsets[s + 1] < a.offsets[s];
  return wrong;
}

__device__ __forceinline__ bool is_giant(const Range &t) { return t.last - t.first > LONG; }

// Sum the parts of a giant, a warp per column. The order depends on their number alone.
// Only the block that arrives last calls this.
__device__ Sums sum_parts(const Surrogate &a, int64_t home, int64_t parts, double (&result)[SURROGATE_SUMS]) {
  const int lane = threadIdx.x % 32, column = threadIdx.x / 32;
  if (column < PART_SUMS) {
    double sum = 0;
#pragma unroll 4
    for (int64_t k = lane; k < parts; k += 32) sum += __ldcg(part_at(a, home, k) + column);
    sum = warp_sum(sum);
    if (lane == 0) result[column] = sum;
  }
  __syncthreads();
  return {result[0], result[1], result[2], result[3], int(result[4]), int(result[5])};
}
static_assert(PART_SUMS <= WARPS && PART_SUMS <= SURROGATE_SUMS, "a warp and a result for each column");

// Process a long segment with the whole block, or one block's slice of a giant: the tokens of a tile. The block that
// arrives last adds up the giant's parts and writes the results. A part has PART tokens for every tile, so the bits of
// a giant do not depend on the size of the input.
template <class Report>
__device__ __forceinline__ void long_segment(const Surrogate &a, int64_t segment, int64_t tile, Shared &shared,
                                             Monitors &m, const Report &report) {
  const Range whole = tokens_of(a, segment);
  const bool giant = is_giant(whole);
  const int log2 = a.tile_log2(), home = int(key_of(a, segment) >> log2), slice = int(tile) - home;
  const int slices = int((whole.last - whole.first + a.tile() - 1) >> log2);
  if (giant && (slice < 0 || slice >= slices)) return;  // below 0 only if offsets are not sorted
  const int64_t from = giant ? whole.first + (int64_t(slice) << log2) : whole.first;
  const int64_t to = giant ? min(from + a.tile(), whole.last) : whole.last;
  Sums sums = block_range(a, from, int(to - from), giant ? PART : int(LONG), shared.of_warp, m);
  if (giant) {
    if (from + threadIdx.x * PART < to) {
      double *part = part_at(a, home, (from - whole.first) / PART + threadIdx.x);
      part[0] = sums.delta, part[1] = sums.gain, part[2] = sums.loss, part[3] = sums.steepness;
      part[4] = sums.up, part[5] = sums.down;
    }
    if (!arrives_last(ticket_of_slices(a, home), slices, shared.last)) return;
    sums = sum_parts(a, home, (whole.last - whole.first + PART - 1) / PART, shared.result);
  }
  // Thread 0 does all this in one branch. With a branch for the giant's row before it, ptxas 12.8 to 13.5 lets lane 0
  // meet the barrier below after the other lanes of its warp. The warp is then one barrier behind the others, and uses
  // shared memory at the wrong time (test_cuda_build.py).
  if (threadIdx.x == 0) {
    double *const row = giant ? giant_row(a, home) : nullptr;
    if (giant) {
      // kept apart from this tile's sums, which must not depend on which block is last
      for (int k = 0; k < SURROGATE_SUMS; ++k) row[k] = 0;
      *ticket_of_slices(a, home) = 1;  // add_tile reads the row, and sets this to 0
      *giants(a) = 1;
    }
    const Finished f = finish(a, segment, whole.last - whole.first, sums, [&](int k, double value) {
      if (giant) row[k] = value;
      else report(k, value);
    });
    shared.gradient = f.gradient, shared.bias = f.bias;
  }
  __syncthreads();
  if (!a.part) fill(a, whole.first + threadIdx.x, whole.last, THREADS, shared.gradient, shared.bias);
}

// Why a run ends before a segment: it starts in a later tile, it is long, or it does not fit into the buffer.
enum Stop : unsigned { FULL, LATER, IS_LONG };

// Process the segments that start in a tile. Runs of short ones are staged; a long one is read by the whole block.
template <class Report>
__device__ void tile_of_segments(const Surrogate &a, int64_t tile, Shared &shared, Monitors &m, const Report &report) {
  const Columns columns = columns_in(a, shared.buffer);
  const int64_t end = (tile + 1) << a.tile_log2();
  Run &run = shared.run;
  const int slot = threadIdx.x;
  const int64_t start = first_segment(a, tile << a.tile_log2());
  // a tile holds at most a.tile() segments, unless offsets are not sorted
  if (slot == 0) shared.start = start, shared.limit = int(min(a.tile(), a.segments - start));
  bool after_long = start > 0 && is_giant(tokens_of(a, start - 1));
  __syncthreads();
  int done = 0;
  while (true) {
    if (after_long) long_segment(a, shared.start + done - 1, tile, shared, m, report);
    __syncthreads();
    if (done >= shared.limit) break;
    const int64_t segment = shared.start + done;
    const int64_t base = max(a.offsets[segment], int64_t(0)) / 4 * 4, mine = segment + slot;
    unsigned stop = SLOTS * 4 + FULL;
    if (slot < SLOTS) {
      Range t{base, base};
      bool later = done + slot >= shared.limit;
      if (!later) {
        later = key_of(a, mine) >= end;
        t = tokens_of(a, mine);
        if (t.first < base) t = {base, base};  // offsets are not sorted
      }
      if (later) stop = slot * 4 + LATER;
      else if (t.last - t.first > MEDIUM) stop = slot * 4 + IS_LONG;
      else if (t.last - base > columns.capacity) stop = slot * 4 + FULL;
      else run.begin[slot] = int(t.first - base), run.tokens[slot] = int(t.last - t.first);
    }
    const unsigned stopped = __ballot_sync(ALL, stop < SLOTS * 4);
    const unsigned first = __shfl_sync(ALL, stop, stopped ? __ffs(stopped) - 1 : 0);
    if (threadIdx.x % 32 == 0) shared.stops[threadIdx.x / 32] = first;
    __syncthreads();
    stop = shared.stops[0];
    for (int w = 1; w < WARPS; ++w) stop = min(stop, shared.stops[w]);
    const int count = int(stop / 4);
    if (count > 0) {
      stage(a, base, run.begin[0], run.begin[count - 1] + run.tokens[count - 1], columns, m);
      __syncthreads();
      sum_run(a, columns, count, run);
      __syncthreads();
      if (slot < count) {
        const Finished f = finish(a, mine, run.tokens[slot], run.sums[slot], report);
        run.gradient[slot] = f.gradient, run.bias[slot] = f.bias;
      }
      __syncthreads();
      if (!a.part) fill_run(a, base, count, run);
    }
    if (stop % 4 == LATER) break;
    after_long = stop % 4 == IS_LONG;
    done += count + after_long;
  }
}

}  // namespace
}  // namespace stppo
