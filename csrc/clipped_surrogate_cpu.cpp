// CPU kernel of clipped_surrogate.cu: one pass over the tokens for the sums, and one that writes the coefficients.
//
// The work is divided into the tiles of ops.h, whose bounds depend on the offsets and the size of the input only. Each
// tile has its own partial sums, which are added in order, so any number of threads gives the same bits.
#include <algorithm>

#include "clipped_surrogate.h"
#include "simd.h"

namespace stppo {
namespace {

struct Range {
  int64_t first, last;
};

// GCC vectorises a loop only if its pointers are local variables and its loads do not depend on a condition.
#define STPPO_INPUTS(a)                                                                                          \
  const float *const logprob = (a).logprob, *const old_logprob = (a).old_logprob, *const advantage = (a).advantage, \
              *const weight = (a).weight;                                                                          \
  const float uniform = (a).uniform_weight

// Split c A into the part below 0 and the rest. The advantage of a token of weight 0 may be anything. The functions
// return plain numbers, because GCC does not vectorise a loop that uses a struct.
template <bool WEIGHTED>
STPPO_INLINE float live_advantage(float advantage, float weight) {
  return WEIGHTED ? pick(weight == 0, 0.f, advantage) : advantage;
}
STPPO_INLINE float below_zero(float advantage) { return pick(advantage < 0, advantage, 0.f); }
STPPO_INLINE float above_zero(float advantage) { return pick(advantage < 0, 0.f, advantage); }  // also keeps NaN

// Return the sums over one segment. A token of weight 0 counts in the ratio only.
template <bool WEIGHTED>
STPPO_INLINE SegmentSums segment_sums(const Surrogate &a, Range t) {
  STPPO_INPUTS(a);
  double delta = 0, gain = 0, loss = 0;
  if (t.last - t.first < 4) {  // too short: the horizontal sum of a vector costs more
    for (int64_t i = t.first; i < t.last; ++i) {
      const float c = WEIGHTED ? weight[i] : uniform, A = live_advantage<WEIGHTED>(advantage[i], c), below = below_zero(A);
      delta += double(logprob[i]) - double(old_logprob[i]);
      gain += double(c) * double(above_zero(A)), loss += double(c) * double(below);
    }
    return {delta, gain, loss};
  }
#pragma omp simd reduction(+ : delta, gain, loss)
  for (int64_t i = t.first; i < t.last; ++i) {
    const float c = WEIGHTED ? weight[i] : uniform, A = live_advantage<WEIGHTED>(advantage[i], c), below = below_zero(A);
    delta += double(logprob[i]) - double(old_logprob[i]);
    gain += double(c) * double(above_zero(A));
    loss += double(c) * double(below);
  }
  return {delta, gain, loss};
}

// Return 1 if a token of advantage A is clipped: A > 0 and the ratio is too high, or A < 0 and it is too low.
STPPO_INLINE float is_clipped(float A, bool too_high, bool too_low) {
  return pick((too_high & (A > 0)) | (too_low & (A < 0)), 1.f, 0.f);
}

template <bool WEIGHTED>
STPPO_INLINE double clipped_tokens(const Surrogate &a, Range t, bool too_high, bool too_low) {
  STPPO_INPUTS(a);
  double count = 0;
#pragma omp simd reduction(+ : count)
  for (int64_t i = t.first; i < t.last; ++i) {
    const float c = WEIGHTED ? weight[i] : uniform, A = live_advantage<WEIGHTED>(advantage[i], c);
    count += double(is_clipped(A, too_high, too_low));
  }
  (void)logprob, (void)old_logprob;
  return count;
}

STPPO_INLINE double slopes(const Surrogate &a, Range t) {
  const float *logprob = a.logprob, *sum_p_sq = a.sum_p_sq;
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = t.first; i < t.last; ++i) sum += slope(logprob[i], sum_p_sq[i]);
  return sum;
}

// Add up the sums that do not depend on segments: live tokens, and their KL to the old policy.
template <bool WEIGHTED>
STPPO_INLINE void monitors(const Surrogate &a, Range t, double *sums) {
  const float *const logprob = a.logprob, *const old_logprob = a.old_logprob, *const weight = a.weight;
  double k1 = 0, k3 = 0;
  uint32_t live = 0, far = 0;
#pragma omp simd reduction(+ : live, k1, k3) reduction(| : far)
  for (int64_t i = t.first; i < t.last; ++i) {
    const float difference = logprob[i] - old_logprob[i], w = WEIGHTED ? weight[i] : 1.f;
    const float delta = pick(w == 0, 0.f, difference);
    live += uint32_t(w != 0);
    k1 -= double(delta);
    k3 += double(expm1_minus_near_zero(delta));
    far |= uint32_t(!is_near_zero(delta));
  }
  if (far) {  // rare: compute the sum again with the exponential
    k3 = 0;
#pragma omp simd reduction(+ : k3)
    for (int64_t i = t.first; i < t.last; ++i) {
      const float difference = logprob[i] - old_logprob[i], w = WEIGHTED ? weight[i] : 1.f;
      k3 += double(expm1_minus(pick(w == 0, 0.f, difference)));
    }
  }
  sums[LIVE] += live, sums[K1] += k1, sums[K3] += k3;
}

// The coefficients of GROUP segments at once: one exp each, computed side by side in vector lanes. The last group of a
// tile is filled up to a multiple of LANES.
constexpr int64_t GROUP = 32, LANES = 8;
struct Group {
  double delta[GROUP], gain[GROUP], loss[GROUP], divisor[GROUP];
  double objective[GROUP], gradient[GROUP], bias[GROUP];
  float widening[GROUP], narrowing[GROUP], ratio[GROUP], far[GROUP];
};

STPPO_INLINE void lane_coefficients(Group &g, const Surrogate &a, int64_t first) {
  const Bound low = a.low, high = a.high, dual = a.dual;
#pragma omp simd
  for (int64_t k = first; k < first + LANES; ++k) {
    const double divisor = g.divisor[k], gain = g.gain[k], loss = g.loss[k];
    const double log_w = exponent(g.delta[k], divisor);
    const float narrowing = g.narrowing[k], ratio = float(exp_of(log_w));
    const float far = compared(ratio, log_w, g.widening[k]);
    const Coefficients c = coefficients(ratio, far, narrowing, divisor, gain, loss, low, high, dual);
    g.ratio[k] = ratio, g.far[k] = far;
    g.objective[k] = c.objective, g.gradient[k] = c.gradient, g.bias[k] = c.bias;
  }
}

STPPO_INLINE void fill(float *x, Range t, float value) {
  for (int64_t i = t.first; i < t.last; ++i) x[i] = value;
}

template <bool WEIGHTED>
STPPO_INLINE void tile_of_segments(const Surrogate &a, Range s, double *sums) {
  for (int64_t start = s.first; start < s.last; start += GROUP) {
    Group g;
    double own_gain[GROUP], own_loss[GROUP];
    const int64_t count = s.last - start < GROUP ? s.last - start : GROUP;
    const auto range = [&a, start](int64_t k) { return Range{a.offsets[start + k], a.offsets[start + k + 1]}; };
    const int64_t lanes = (count + LANES - 1) / LANES * LANES;
    for (int64_t k = 0; k < lanes; ++k) {
      const Range t = k < count ? range(k) : Range{0, 0};
      const SegmentSums own = segment_sums<WEIGHTED>(a, t);
      const double sums_of_part[SEGMENT_SUMS] = {double(t.last - t.first), own.delta, own.gain, own.loss};
      if (a.part && k < count) std::copy_n(sums_of_part, SEGMENT_SUMS, a.part + (start + k) * SEGMENT_SUMS);
      const double *of = a.whole && k < count ? a.whole + (start + k) * SEGMENT_SUMS : sums_of_part;
      g.delta[k] = of[1], g.gain[k] = of[2], g.loss[k] = of[3];
      g.divisor[k] = a.by_sum || of[0] == 0 ? 1 : of[0];
      const float log2 = length_log2(of[0], a.length_power);
      g.widening[k] = exp2f(log2), g.narrowing[k] = exp2f(-log2);
      own_gain[k] = own.gain, own_loss[k] = own.loss;
    }
    if (a.part) continue;
    for (int64_t k = 0; k < lanes; k += LANES) lane_coefficients(g, a, k);
    for (int64_t k = 0; k < count; ++k) {
      const Range t = range(k);
      const double tokens = double(t.last - t.first), bias_sq = g.bias[k] * g.bias[k], grad_sq = g.gradient[k] * g.gradient[k];
      a.ratio[start + k] = g.ratio[k];
      fill(a.gradient, t, float(g.gradient[k]));
      if (a.bias) fill(a.bias, t, float(g.bias[k]));
      sums[OBJECTIVE] += !a.whole ? g.objective[k]
                                  : objective(g.ratio[k], g.far[k], g.narrowing[k], own_gain[k], own_loss[k], a.low,
                                              a.high, a.dual);
      sums[BIAS_SQ] += tokens * bias_sq;
      sums[GRAD_SQ] += tokens * grad_sq;
      const bool too_high = g.far[k] > a.high.value, too_low = g.far[k] < a.low.value;
      if (too_high || too_low) sums[CLIPPED] += clipped_tokens<WEIGHTED>(a, t, too_high, too_low);
      if (a.sum_p_sq && (bias_sq != 0 || grad_sq != 0)) {
        const double steepness = slopes(a, t);
        sums[LOGIT_BIAS_SQ] += times(steepness, bias_sq);
        sums[LOGIT_GRAD_SQ] += times(steepness, grad_sq);
      }
    }
  }
  if (!a.part) monitors<WEIGHTED>(a, {a.offsets[s.first], a.offsets[s.last]}, sums);
}

// Every token is a segment: compute the results of `coefficients` and `monitors` in one pass with one exponential.
// Conditions compare float32 numbers. Products of three float32 numbers are rounded once, as those of a segment.
template <bool WEIGHTED, bool LOGIT>
STPPO_INLINE void tile_of_tokens(const Surrogate &a, Range t, double *sums) {
  STPPO_INPUTS(a);
  const float low = a.low.value, high = a.high.value, dual = a.dual.value, *const sum_p_sq = a.sum_p_sq;
  float *const ratios = a.ratio, *const gradient = a.gradient, *const biases = a.bias;
  double objective = 0, bias_sq = 0, grad_sq = 0, logit_bias_sq = 0, logit_grad_sq = 0, k1 = 0, k3 = 0;
  uint32_t clipped = 0, live = 0;
#pragma omp simd reduction(+ : objective, bias_sq, grad_sq, logit_bias_sq, logit_grad_sq, clipped, live, k1, k3)
  for (int64_t i = t.first; i < t.last; ++i) {
    const float w = WEIGHTED ? weight[i] : uniform, A = live_advantage<WEIGHTED>(advantage[i], w);
    const double delta = double(logprob[i]) - double(old_logprob[i]), x = exponent(delta, 1);
    double scale = 0;
    const double rest = exp_parts(x, scale);
    const float ratio = float(rest * scale + scale);
    const bool negative = A < 0, counts = A != 0;
    const bool too_high = ratio > high, too_low = ratio < low, dropped = too_low | (ratio > dual);
    const bool removed = (too_high & !negative) | (too_low & negative), lost = (too_high & !negative) | (dropped & negative);
    const double share = double(w) * double(A);
    const float slope_of_share = float(double(ratio) * share);
    const float g = pick(counts & !lost, slope_of_share, 0.f), b = pick(counts & removed, slope_of_share, 0.f);
    const float above = pick(too_high, high, ratio), below = pick(ratio > dual, dual, pick(too_low, low, ratio));
    ratios[i] = ratio;
    gradient[i] = g;
    objective += double(pick(counts, pick(negative, below, above), 0.f)) * share;
    bias_sq += double(b) * double(b);
    grad_sq += double(g) * double(g);
    clipped += uint32_t(counts & removed);
    const bool alive = !WEIGHTED | (w != 0);
    live += uint32_t(alive);
    k1 -= pick(alive, delta, 0.0);
    k3 += pick(alive, rest * scale + (scale - 1) - delta, 0.0);
    if (LOGIT) {
      const double steepness = slope(logprob[i], sum_p_sq[i]);
      logit_bias_sq += times(steepness, double(b) * double(b));
      logit_grad_sq += times(steepness, double(g) * double(g));
    }
  }
  if (biases)
    for (int64_t i = t.first; i < t.last; ++i) {
      const float w = WEIGHTED ? weight[i] : uniform, A = live_advantage<WEIGHTED>(advantage[i], w), below = below_zero(A);
      const double gain = double(w) * double(above_zero(A)), loss = double(w) * double(below);
      biases[i] = float(coefficients(ratios[i], ratios[i], 1, 1, gain, loss, a.low, a.high, a.dual).bias);
    }
  const double all[SURROGATE_SUMS] = {objective, double(clipped), double(live), bias_sq, grad_sq, k1, k3,
                                      logit_bias_sq, logit_grad_sq};
  std::copy_n(all, SURROGATE_SUMS, sums);
}

// One function per case, so that each case is compiled for every instruction set.
STPPO_CLONES void segments_weighted(const Surrogate &a, Range s, double *sums) { tile_of_segments<true>(a, s, sums); }
STPPO_CLONES void segments_uniform(const Surrogate &a, Range s, double *sums) { tile_of_segments<false>(a, s, sums); }
STPPO_CLONES void tokens_weighted(const Surrogate &a, Range t, double *sums) { tile_of_tokens<true, false>(a, t, sums); }
STPPO_CLONES void tokens_uniform(const Surrogate &a, Range t, double *sums) { tile_of_tokens<false, false>(a, t, sums); }
STPPO_CLONES void tokens_weighted_logit(const Surrogate &a, Range t, double *sums) { tile_of_tokens<true, true>(a, t, sums); }
STPPO_CLONES void tokens_uniform_logit(const Surrogate &a, Range t, double *sums) { tile_of_tokens<false, true>(a, t, sums); }

// What is found among the lengths of segments; OR of these bits.
enum Lengths : int { NEGATIVE = 1, NOT_ONE = 2 };
STPPO_CLONES int lengths_of(const int64_t *offsets, Range s) {
  bool negative = false, not_one = false;
  for (int64_t i = s.first; i < s.last; ++i) {
    const int64_t length = offsets[i + 1] - offsets[i];
    negative |= length < 0, not_one |= length != 1;
  }
  return (negative ? NEGATIVE : 0) | (not_one ? NOT_ONE : 0);
}

int lengths_of_all(const int64_t *offsets, int64_t segments, int threads) {
  constexpr int64_t PART = 16384;
  int found = 0;
#pragma omp parallel for num_threads(threads) reduction(| : found) if (segments > PART)
  for (int64_t first = 0; first < segments; first += PART)
    found |= lengths_of(offsets, {first, std::min(first + PART, segments)});
  return found;
}

// Return the first segment s with offsets[s] + s >= at. This key bounds both the tokens and the segments of a tile.
int64_t first_segment(const Surrogate &a, int64_t at) {
  int64_t low = 0, high = a.segments;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (a.offsets[middle] + middle < at) low = middle + 1;
    else high = middle;
  }
  return low;
}

void one_tile(const Surrogate &a, int64_t tile, double *sums) {
  const int64_t begin = tile << a.tile_log2(), end = begin + a.tile();
  std::fill(sums, sums + SURROGATE_SUMS, 0.0);
  if (a.offsets) {
    const Range s{first_segment(a, begin), first_segment(a, end)};
    if (s.first < s.last) (a.weight ? segments_weighted : segments_uniform)(a, s, sums);
  } else {
    const Range t{std::min(begin, a.tokens), std::min(end, a.tokens)};
    if (a.sum_p_sq) (a.weight ? tokens_weighted_logit : tokens_uniform_logit)(a, t, sums);
    else (a.weight ? tokens_weighted : tokens_uniform)(a, t, sums);
  }
}

}  // namespace

Status clipped_surrogate_cpu(Surrogate a, int threads) {
  if (a.offsets) {
    const int lengths = lengths_of_all(a.offsets, a.segments, threads);
    if (a.offsets[0] != 0 || a.offsets[a.segments] != a.tokens || (lengths & NEGATIVE)) return BAD_OFFSETS;
    if (!(lengths & NOT_ONE) && !a.part && !a.whole) a.offsets = nullptr;  // the same result in less time
  }
  const int64_t tiles = a.tiles();
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (tiles > 1)
  for (int64_t tile = 0; tile < tiles; ++tile) one_tile(a, tile, a.workspace + tile * SURROGATE_SUMS);
  if (a.part) return OK;
  double sums[SURROGATE_SUMS] = {};
  for (int64_t tile = 0; tile < tiles; ++tile)
    for (int sum = 0; sum < SURROGATE_SUMS; ++sum) sums[sum] += a.workspace[tile * SURROGATE_SUMS + sum];
  surrogate_totals(sums, a.totals);
  return OK;
}

}  // namespace stppo
