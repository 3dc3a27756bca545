// CPU kernel of vocab_logprob.cu. A row is read from memory once, block by block: first the maximum of a block, then
// its sums, from the L1 cache. If a block has a new maximum, the sums so far are scaled down.
#include <cmath>
#include <limits>

#include "ops.h"
#include "simd.h"
#include "vocab_merge.h"

namespace stppo {
namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr int64_t BLOCK = 1024;  // columns; partial sums are float32 within a block and float64 over blocks
constexpr int64_t AHEAD = 512, STEP = 128;  // columns; the gradient prefetches STEP logits at a distance of AHEAD
// e^x is 0 below this x. It is volatile because, for a constant, GCC makes a copy of the loop's body for smaller x.
const volatile float ZERO_BELOW = -88;

// Return max(x, lowest), a finite number where e^x is 0. One instruction; NaN stays NaN.
STPPO_INLINE float above(float x, float lowest) { return x < lowest ? lowest : x; }

STPPO_INLINE float load(const float *x, int64_t i) { return x[i]; }
STPPO_INLINE float load(const uint16_t *x, int64_t i) { return std::bit_cast<float>(uint32_t(x[i]) << 16); }
STPPO_INLINE void store(float *x, int64_t i, float value) { x[i] = value; }
STPPO_INLINE void store(uint16_t *x, int64_t i, float value) {  // round to nearest, ties to even
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  x[i] = value != value ? uint16_t(0x7fc0) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

struct RowSums {
  float max;
  double sum, moment, squares;
};

template <bool UNIT, class T>
STPPO_INLINE float scaled(const T *row, int64_t i, float temperature) {
  return UNIT ? load(row, i) : load(row, i) / temperature;
}

// Make the sums relative to a new maximum. If all logits so far were -inf, the sums are 0, or NaN.
STPPO_INLINE void rescale(RowSums &sums, float max) {
  if (sums.max != -INF) {
    const double shift = double(sums.max) - double(max), scale = std::exp(shift);
    sums.moment = (sums.moment + shift * sums.sum) * scale;
    sums.sum *= scale, sums.squares *= scale * scale;
  }
  sums.max = max;
}

// Return the maximum of `count` logits. Four are compared at a time, because a chain of single comparisons has to wait
// for each result. If a logit is NaN, the maximum may be too small; the sums are then NaN.
template <class T>
STPPO_INLINE float largest(const T *x, int64_t count) {
  const int64_t part = count / 4;
  float top = -INF;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < part; ++i) {
    const float a = load(x, i), b = load(x, i + part), c = load(x, i + 2 * part), d = load(x, i + 3 * part);
    const float ab = a > b ? a : b, cd = c > d ? c : d, all = ab > cd ? ab : cd;
    top = all > top ? all : top;
  }
  for (int64_t i = 4 * part; i < count; ++i) top = load(x, i) > top ? load(x, i) : top;
  return top;
}

template <bool UNIT, class T>
STPPO_INLINE RowSums row_sums(const T *row, int64_t valid, float temperature) {
  RowSums out{-INF, 0, 0, 0};
  for (int64_t start = 0; start < valid; start += BLOCK) {
    const int64_t stop = start + BLOCK < valid ? start + BLOCK : valid;
    float top = largest(row + start, stop - start);
    top = UNIT ? top : top / temperature;
    if (top > out.max) rescale(out, top);
    const float shift = out.max == -INF ? 0 : out.max, lowest = ZERO_BELOW;
    float sum = 0, moment = 0, squares = 0;
#pragma omp simd reduction(+ : sum, moment, squares)
    for (int64_t i = start; i < stop; ++i) {
      const float x = above(scaled<UNIT>(row, i, temperature) - shift, lowest), e = exp_in_range(x);
      sum += e;
      moment += x * e;
      squares += e * e;
    }
    out.sum += sum, out.moment += moment, out.squares += squares;
  }
  return out;
}

struct Row {
  float temperature, g, h, c, logprob, entropy, sum_p_sq, max, log_sum;
  int64_t column;  // the target's column, or -1
};

// Return the h and c terms, without the factor p. The g term is -g p in all columns except the target's.
STPPO_INLINE float other_terms(float log_p, float p, const Row &r) {
  const float finite = log_p < -1e30f ? -1e30f : log_p;  // p is 0 there, and 0 * -inf would be NaN
  return -r.h * (finite + r.entropy) + 2 * r.c * (p - r.sum_p_sq);
}

// Set out[i] = value(x_i), STEP columns at a time, and prefetch the logits ahead: the loop's body is so long that
// out-of-order execution reaches only a few cache lines ahead. `out` may be `row`.
template <bool UNIT, class T, class Value>
STPPO_INLINE void each_column(const T *row, T *out, int64_t valid, float temperature, Value value) {
  int64_t start = 0;
  for (; start + STEP <= valid; start += STEP) {
    for (int64_t i = 0; i < STEP; i += 64 / sizeof(T)) __builtin_prefetch(row + start + AHEAD + i, 1);
#pragma omp simd
    for (int64_t i = start; i < start + STEP; ++i) store(out, i, value(scaled<UNIT>(row, i, temperature)));
  }
#pragma omp simd
  for (int64_t i = start; i < valid; ++i) store(out, i, value(scaled<UNIT>(row, i, temperature)));
}

template <bool UNIT, class T>
STPPO_INLINE void row_gradient(const T *row, T *out, int64_t valid, const Row r) {  // by value: no alias of out
  const float at_target = r.column < 0 ? 0 : scaled<UNIT>(row, r.column, r.temperature);  // out may be row
  if (r.h == 0 && r.c == 0) {
    const float lowest = ZERO_BELOW, max = r.max;
    const float factor = float(-double(r.g) * std::exp(-double(r.log_sum)) / double(r.temperature));
    each_column<UNIT>(row, out, valid, r.temperature, [=](float x) { return factor * exp_in_range(above(x - max, lowest)); });
  } else {
    each_column<UNIT>(row, out, valid, r.temperature, [=](float x) {
      const float log_p = x - r.max - r.log_sum, p = exp_of(log_p), value = p * (other_terms(log_p, p, r) - r.g);
      return UNIT ? value : value / r.temperature;
    });
  }
  if (r.column >= 0) {
    const float log_p = at_target - r.max - r.log_sum, p = exp_of(log_p);
    const float value = p * other_terms(log_p, p, r) - r.g * std::expm1(r.logprob);  // 1 - p_y, accurate near 1
    store(out, r.column, value / r.temperature);
  }
}

#define STPPO_ROWS(NAME, T)                                                                                            \
  STPPO_CLONES RowSums NAME##_sums_unit(const T *row, int64_t valid) { return row_sums<true>(row, valid, 1); }         \
  STPPO_CLONES RowSums NAME##_sums(const T *row, int64_t valid, float t) { return row_sums<false>(row, valid, t); }    \
  STPPO_CLONES void NAME##_gradient_unit(const T *row, T *out, int64_t n, const Row &r) { row_gradient<true>(row, out, n, r); } \
  STPPO_CLONES void NAME##_gradient(const T *row, T *out, int64_t n, const Row &r) { row_gradient<false>(row, out, n, r); }
STPPO_ROWS(float32, float)
STPPO_ROWS(bfloat16, uint16_t)

RowSums sums_of(const float *row, int64_t n, float t) { return t == 1 ? float32_sums_unit(row, n) : float32_sums(row, n, t); }
RowSums sums_of(const uint16_t *row, int64_t n, float t) { return t == 1 ? bfloat16_sums_unit(row, n) : bfloat16_sums(row, n, t); }
void gradient_of(const float *row, float *out, int64_t n, const Row &r) {
  (r.temperature == 1 ? float32_gradient_unit : float32_gradient)(row, out, n, r);
}
void gradient_of(const uint16_t *row, uint16_t *out, int64_t n, const Row &r) {
  (r.temperature == 1 ? bfloat16_gradient_unit : bfloat16_gradient)(row, out, n, r);
}

float temperature_of(const Logits &a, int64_t row) { return a.temperature ? a.temperature[row] : a.uniform_temperature; }

// Return the target's column in this shard, or -1 if another shard holds it.
int64_t column_of(const Logits &a, int64_t row) {
  const int64_t column = a.target[row] - a.vocab_start;
  return column >= 0 && column < a.valid ? column : -1;
}

template <class T>
void statistics(const VocabStatistics &a, int threads) {
  const Logits &l = a.logits;
#pragma omp parallel for schedule(static) num_threads(threads) if (l.rows * l.columns > 4096)
  for (int64_t r = 0; r < l.rows; ++r) {
    const T *row = static_cast<const T *>(l.data) + r * l.columns;
    const float temperature = temperature_of(l, r);
    const int64_t column = column_of(l, r);
    const RowSums s = sums_of(row, l.valid, temperature);
    const float at_target = column < 0 ? NAN : load(row, column) / temperature;
    const float values[5] = {s.max, float(s.sum), float(s.moment), float(s.squares), at_target};
    for (int k = 0; k < 5; ++k) a.out[k * l.rows + r] = values[k];
  }
}

template <class T>
void gradient(const VocabGradient &a, int threads) {
  const Logits &l = a.logits;
#pragma omp parallel for schedule(static) num_threads(threads) if (l.rows * l.columns > 4096)
  for (int64_t r = 0; r < l.rows; ++r) {
    const T *row = static_cast<const T *>(l.data) + r * l.columns;
    T *out = static_cast<T *>(a.out) + r * l.columns;
    const bool ignored = l.target[r] == l.ignore_index;
    if (!ignored) {
      const auto at = [r](const float *x) { return x ? x[r] : 0.f; };
      const VocabMerged &m = a.merged;
      gradient_of(row, out, l.valid, {temperature_of(l, r), at(a.g), at(a.h), at(a.c), m.logprob[r], m.entropy[r],
                                      m.sum_p_sq[r], m.max[r], m.log_sum[r], column_of(l, r)});
    }
    for (int64_t i = ignored ? 0 : l.valid; i < l.columns; ++i) store(out, i, 0.f);
  }
}

}  // namespace

Status vocab_statistics_cpu(const VocabStatistics &a, int threads) {
  if (a.logits.dtype == FLOAT32) statistics<float>(a, threads);
  else statistics<uint16_t>(a, threads);
  return OK;
}

Status vocab_gradient_cpu(const VocabGradient &a, int threads) {
  if (a.logits.dtype == FLOAT32) gradient<float>(a, threads);
  else gradient<uint16_t>(a, threads);
  return OK;
}

Status vocab_merge_cpu(const VocabMerge &a, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (a.rows > 4096)
  for (int64_t r = 0; r < a.rows; ++r) merge_row(a, r);
  return OK;
}

}  // namespace stppo
