// From the sums over one segment to its ratio, coefficients and clipping. Shared by the CPU and the CUDA kernels.
// Specification: megatron_stppo/algorithm/surrogate.py, ratio.py, penalties.py.
#pragma once
#include "ops.h"
#include "portable.h"

namespace stppo {

constexpr double MAX_LOG_RATIO = 20.0;

struct SegmentSums {
  double delta;       // sum of logprob - old_logprob
  double gain, loss;  // S+ and S-: sums of c A over A > 0 and over A < 0
};

struct Coefficients {
  double objective, gradient, bias;
  bool too_high, too_low;  // whether tokens with A > 0, and with A < 0, are clipped
};

// Return the mean or the sum of the log ratios, limited to [-MAX_LOG_RATIO, MAX_LOG_RATIO]. NaN stays NaN.
STPPO_BOTH double exponent(double delta, double divisor) {
  const double x = delta / divisor;
  return pick(x > MAX_LOG_RATIO, MAX_LOG_RATIO, pick(x < -MAX_LOG_RATIO, -MAX_LOG_RATIO, x));
}

// Return factor * sum, or 0 if `sum` is zero: a factor that is not used may be NaN.
STPPO_BOTH double times(double factor, double sum) { return pick(sum == 0, 0, factor * sum); }

// Return the segment's sum of c min(w A, clip(w) A) for a ratio w. A NaN ratio gives NaN.
STPPO_BOTH double objective(float ratio, double gain, double loss, float low, float high, float dual) {
  const double w = ratio, floor = pick(ratio < low, double(low), w);
  return times(pick(ratio > high, double(high), w), gain) + times(pick(ratio > dual, double(dual), floor), loss);
}

// `ratio` is exp(exponent(..)) rounded to float32. A ratio that equals a bound in float32 is not clipped.
STPPO_BOTH Coefficients coefficients(float ratio, double divisor, double gain, double loss, float low, float high,
                                     float dual) {
  const double w = ratio, slope = w / divisor;
  // a NaN ratio is not clipped, so it reaches the gradient, where it is detected
  const bool too_high = ratio > high, too_low = ratio < low, dropped = too_low | (ratio > dual);
  const double kept = pick(too_high, 0, gain) + pick(dropped, 0, loss);
  const double removed = pick(too_high, gain, 0) + pick(too_low, loss, 0);
  const double gives = objective(ratio, gain, loss, low, high, dual);
  return {gives, times(slope, kept), times(slope, removed), too_high, too_low};
}

// Return |d logprob / d logits|^2 = 1 - 2p + sum p^2. It is below 0 only by rounding, and is then set to 0.
STPPO_BOTH double slope(float logprob, float sum_p_sq) {
  const double x = pick(logprob < -700.f, -700.0, double(logprob)), value = 1 - 2 * exp_of(x) + double(sum_p_sq);
  return pick(value < 0, 0, value);
}

// Compute the totals for the caller, in the order of ops/clipped_surrogate.py. Means are over live tokens.
STPPO_BOTH void surrogate_totals(const double *sums, float *totals) {
  const double live = sums[LIVE] < 1 ? 1 : sums[LIVE];
  const double values[SURROGATE_TOTALS] = {sums[OBJECTIVE],     sums[CLIPPED] / live, sums[BIAS_SQ],
                                           sums[GRAD_SQ],       sums[K1] / live,      sums[K3] / live,
                                           sums[CLIPPED],       sums[LIVE],           sums[LOGIT_BIAS_SQ],
                                           sums[LOGIT_GRAD_SQ]};
  for (int i = 0; i < SURROGATE_TOTALS; ++i) totals[i] = float(values[i]);
}

}  // namespace stppo
