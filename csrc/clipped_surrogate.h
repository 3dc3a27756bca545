// From the sums over one segment to its ratio, coefficients and clipping. Shared by the CPU and the CUDA kernels.
// Specification: megatron_stppo/algorithm/surrogate.py, ratio.py, penalties.py.
#pragma once
#include <cmath>

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
};

// Return x, limited to [-MAX_LOG_RATIO, MAX_LOG_RATIO]. NaN stays NaN.
template <class Float>
STPPO_BOTH Float limited(Float x) {
  const Float most = Float(MAX_LOG_RATIO);
  return pick(x > most, most, pick(x < -most, -most, x));
}

// Return the logarithm of the ratio: the mean or the sum of the log ratios of its tokens.
STPPO_BOTH double exponent(double delta, double divisor) { return limited(delta / divisor); }

// Return log2(n^power) for a segment of n tokens; an empty one counts as one token. In float32, because pow in float64
// needs more registers than the kernel may use on a GPU.
STPPO_BOTH float length_log2(double tokens, double power) {
  return power == 0 || tokens <= 1 ? 0 : float(power) * log2f(float(tokens));
}

// Return what is compared with the bounds: w^(n^power), from the ratio w, its logarithm and n^power, the `widening`. For
// 1 it is w as rounded to float32: a ratio that equals a bound in float32 is not clipped. Otherwise the power is taken
// before rounding, because float32 has few values between 1 and a narrow bound.
STPPO_BOTH float compared(float ratio, double log_w, float widening) {
  return pick(widening == 1, ratio, exp_of(limited(float(log_w * double(widening)))));
}

// Return a bound of the ratio of a segment; `narrowing` is n^-power. For 1 it is exactly the bound. Only the objective
// needs it, so float32 is enough.
STPPO_BOTH float narrowed(Bound bound, float narrowing) {
  return pick(narrowing == 1, bound.value, exp2_of(bound.log2 * narrowing));
}

// Return factor * sum, or 0 if `sum` is zero: a factor that is not used may be NaN.
STPPO_BOTH double times(double factor, double sum) { return pick(sum == 0, 0, factor * sum); }

// Return the segment's sum of c min(w A, clip(w) A) for a ratio w, whose compared() is `far`. A NaN ratio gives NaN.
STPPO_BOTH double objective(float ratio, float far, float narrowing, double gain, double loss, Bound low, Bound high,
                            Bound dual) {
  const bool beyond = far > dual.value;
  const Bound lost{pick(beyond, dual.value, low.value), pick(beyond, dual.log2, low.log2)};
  const double w = ratio;
  const double of_gain = pick(far > high.value, double(narrowed(high, narrowing)), w);
  const double of_loss = pick((far < low.value) | beyond, double(narrowed(lost, narrowing)), w);
  return times(of_gain, gain) + times(of_loss, loss);
}

// `ratio` is exp(exponent(..)) rounded to float32, and `far` is compared() of the same exponent.
STPPO_BOTH Coefficients coefficients(float ratio, float far, float narrowing, double divisor, double gain, double loss,
                                     Bound low, Bound high, Bound dual) {
  const double w = ratio, slope = w / divisor;
  // a NaN ratio is not clipped, so it reaches the gradient, where it is detected
  const bool too_high = far > high.value, too_low = far < low.value, dropped = too_low | (far > dual.value);
  const double kept = pick(too_high, 0, gain) + pick(dropped, 0, loss);
  const double removed = pick(too_high, gain, 0) + pick(too_low, loss, 0);
  const double gives = objective(ratio, far, narrowing, gain, loss, low, high, dual);
  return {gives, times(slope, kept), times(slope, removed)};
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
