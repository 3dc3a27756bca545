// CPU twin of vocab_logprob.cu. A row is read twice, the second time from the cache: its maximum, then its sums.
#include <cmath>
#include <limits>

#include "ops.h"
#include "simd.h"
#include "vocab_merge.h"

namespace stppo {
namespace {

constexpr float INF = std::numeric_limits<float>::infinity(), LOWEST = std::numeric_limits<float>::lowest();
constexpr int64_t BLOCK = 4096;  // float32 partial sums end here and go on in float64

STPPO_INLINE float load(const float *x, int64_t i) { return x[i]; }
STPPO_INLINE float load(const uint16_t *x, int64_t i) { return std::bit_cast<float>(uint32_t(x[i]) << 16); }
STPPO_INLINE void store(float *x, int64_t i, float value) { x[i] = value; }
STPPO_INLINE void store(uint16_t *x, int64_t i, float value) {  // to the nearest, ties to even
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

template <bool UNIT, class T>
STPPO_INLINE RowSums row_sums(const T *row, int64_t valid, float temperature) {
  float top = -INF;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < valid; ++i) {
    const float x = load(row, i);
    top = x > top ? x : top;
  }
  top = UNIT ? top : top / temperature;
  const float shift = top == -INF ? 0 : top;
  RowSums out{top, 0, 0, 0};
  for (int64_t start = 0; start < valid; start += BLOCK) {
    const int64_t stop = start + BLOCK < valid ? start + BLOCK : valid;
    float sum = 0, moment = 0, squares = 0;
#pragma omp simd reduction(+ : sum, moment, squares)
    for (int64_t i = start; i < stop; ++i) {
      const float x = scaled<UNIT>(row, i, temperature) - shift, e = exp_of(x);
      sum += e;
      moment += (x < LOWEST ? LOWEST : x) * e;  // exp(-inf) is 0, and 0 * -inf would be NaN
      squares += e * e;
    }
    out.sum += sum, out.moment += moment, out.squares += squares;
  }
  return out;
}

struct Row {
  float temperature, g, h, c, logprob, entropy, sum_p_sq, max, log_sum;
  int64_t column;  // the target's, or -1
};

// p (h and c terms); the g term of all columns but the target's is -g p.
STPPO_INLINE float other_terms(float log_p, float p, const Row &r) {
  const float finite = log_p < -1e30f ? -1e30f : log_p;  // p is 0 there, and 0 * -inf would be NaN
  return -r.h * (finite + r.entropy) + 2 * r.c * (p - r.sum_p_sq);
}

template <bool UNIT, class T>
STPPO_INLINE void row_gradient(const T *row, T *out, int64_t valid, const Row r) {  // by value: out is not it
  const float at_target = r.column < 0 ? 0 : scaled<UNIT>(row, r.column, r.temperature);  // out may be row
#pragma omp simd
  for (int64_t i = 0; i < valid; ++i) {
    const float log_p = scaled<UNIT>(row, i, r.temperature) - r.max - r.log_sum, p = exp_of(log_p);
    const float value = p * (other_terms(log_p, p, r) - r.g);
    store(out, i, UNIT ? value : value / r.temperature);
  }
  if (r.column >= 0) {
    const float log_p = at_target - r.max - r.log_sum, p = exp_of(log_p);
    const float value = p * other_terms(log_p, p, r) - r.g * std::expm1(r.logprob);  // 1 - p_y, exact near 1
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

// The target's column in this shard, or -1.
int64_t column_of(const Logits &a, int64_t row) {
  const int64_t column = a.target[row] - a.vocab_start;
  return column >= 0 && column < a.valid ? column : -1;
}

template <class T>
void statistics(const VocabStatistics &a, int threads) {
  const Logits &l = a.logits;
#pragma omp parallel for schedule(static) num_threads(threads) if (l.rows * l.columns > BLOCK)
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
#pragma omp parallel for schedule(static) num_threads(threads) if (l.rows * l.columns > BLOCK)
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
