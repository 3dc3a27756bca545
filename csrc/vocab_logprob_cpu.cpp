// CPU kernel of vocab_logprob.cu. A row is read once, block by block. The sums of a block are relative to the largest
// logit so far; if the block exceeds it by much, the sums so far are scaled down and the block is summed again.
#include <cmath>
#include <limits>

#include "ops.h"
#include "simd.h"
#include "vocab_merge.h"

namespace stppo {
namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr int64_t BLOCK = 2048;  // columns; partial sums are float32 within a block and float64 over blocks
constexpr float SLACK = 8;       // sums relative to a logit that is this far below the maximum are accurate enough
constexpr int64_t AHEAD = 512, STEP = 128;  // columns; the gradient prefetches STEP logits at a distance of AHEAD
// e^x is 0 below this x. It is volatile because, for a constant, GCC makes a copy of the loop's body for smaller x.
const volatile float ZERO_BELOW = -88;

// Return max(x, lowest), a finite number where e^x is 0. One instruction; NaN stays NaN.
STPPO_INLINE float above(float x, float lowest) { return x < lowest ? lowest : x; }

STPPO_INLINE float load(const float *x, int64_t i) { return x[i]; }
STPPO_INLINE float load(const uint16_t *x, int64_t i) { return std::bit_cast<float>(uint32_t(x[i]) << 16); }
// bfloat16 is the upper half of float32. Adding half of its last place rounds to the nearest, and a tie away from 0.
STPPO_INLINE uint32_t rounded(float value) { return std::bit_cast<uint32_t>(value) + 0x8000; }
STPPO_INLINE void store(float *x, int64_t i, float value) { x[i] = value; }
STPPO_INLINE void store(uint16_t *x, int64_t i, float value) { x[i] = uint16_t(rounded(value) >> 16); }

// Degrees of exponentials. For bfloat16 their errors are far below the rounding of the logits and of the gradient.
template <class T>
constexpr int SUM_DEGREE = sizeof(T) == 4 ? 5 : 4;
template <class T>
constexpr int GRADIENT_DEGREE = sizeof(T) == 4 ? 5 : 3;

// Loops run over words of one float32 or two bfloat16. A shift and a mask take the halves apart; loading or storing
// 16-bit elements would also move them between the lanes of vectors.
using Word [[gnu::may_alias, gnu::aligned(2)]] = uint32_t;
template <class T>
constexpr int64_t PER_WORD = sizeof(Word) / sizeof(T);
constexpr uint32_t UPPER = 0xffff0000;

template <class T>
STPPO_INLINE Word word(const T *x, int64_t i) {
  return reinterpret_cast<const Word *>(x)[i];
}
template <class T>
STPPO_INLINE float part_of(uint32_t word, int64_t part) {
  if (PER_WORD<T> == 1) return std::bit_cast<float>(word);
  return std::bit_cast<float>(part == 0 ? word << 16 : word & UPPER);
}

struct RowSums {
  float max;
  double sum, moment, squares;
};

template <bool UNIT>
STPPO_INLINE float scaled(float logit, float temperature) {
  return UNIT ? logit : logit / temperature;
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

struct BlockSums {
  float top, sum, moment, squares;
};

// Return the largest logit of a block, and its sums relative to `shift`. If a logit is NaN, `top` may be too small; the
// sums are then NaN.
template <bool UNIT, class T>
STPPO_INLINE BlockSums block_sums(const T *block, int64_t count, float temperature, float shift) {
  const float lowest = ZERO_BELOW;
  float top = -INF, sum = 0, moment = 0, squares = 0;
#pragma omp simd reduction(+ : sum, moment, squares) reduction(max : top)
  for (int64_t i = 0; i < count / PER_WORD<T>; ++i) {
    const uint32_t logits = word(block, i);
#pragma GCC unroll 2
    for (int64_t k = 0; k < PER_WORD<T>; ++k) {
      const float logit = scaled<UNIT>(part_of<T>(logits, k), temperature);
      const float x = above(logit - shift, lowest), e = exp_in_range<SUM_DEGREE<T>>(x);
      sum += e;
      moment += x * e;
      squares += e * e;
      top = logit > top ? logit : top;
    }
  }
  if (count % PER_WORD<T>) {
    const float logit = scaled<UNIT>(load(block, count - 1), temperature);
    const float x = above(logit - shift, lowest), e = exp_in_range<SUM_DEGREE<T>>(x);
    return {logit > top ? logit : top, sum + e, moment + x * e, squares + e * e};
  }
  return {top, sum, moment, squares};
}

template <bool UNIT, class T>
STPPO_INLINE RowSums row_sums(const T *row, int64_t valid, float temperature) {
  RowSums out{-INF, 0, 0, 0};
  float top = -INF;
  for (int64_t start = 0; start < valid; start += BLOCK) {
    const int64_t count = start + BLOCK < valid ? BLOCK : valid - start;
    if (out.max == -INF) {
      const float first = largest(row + start, count);
      rescale(out, UNIT ? first : first / temperature);
    }
    const float shift = out.max == -INF ? 0 : out.max;
    BlockSums block = block_sums<UNIT>(row + start, count, temperature, shift);
    if (block.top > out.max + SLACK) {
      rescale(out, block.top);
      block = block_sums<UNIT>(row + start, count, temperature, block.top);
    }
    out.sum += block.sum, out.moment += block.moment, out.squares += block.squares;
    top = block.top > top ? block.top : top;
  }
  if (top > out.max) rescale(out, top);
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

// Set word i of `out` to the values of its columns.
template <bool UNIT, class T, class Value>
STPPO_INLINE void set_word(const T *row, T *out, int64_t i, float temperature, Value value) {
  const uint32_t logits = word(row, i);
  Word *to = reinterpret_cast<Word *>(out) + i;
  const float low = value(scaled<UNIT>(part_of<T>(logits, 0), temperature));
  if constexpr (PER_WORD<T> == 1) *to = std::bit_cast<uint32_t>(low);
  else {
    const float high = value(scaled<UNIT>(part_of<T>(logits, 1), temperature));
    *to = (rounded(high) & UPPER) | rounded(low) >> 16;
  }
}

// Set out[i] = value(x_i), STEP columns at a time, and prefetch the logits ahead: the loop's body is so long that
// out-of-order execution reaches only a few cache lines ahead. `out` may be `row`.
template <bool UNIT, class T, class Value>
STPPO_INLINE void each_column(const T *row, T *out, int64_t valid, float temperature, Value value) {
  const int64_t step = STEP / PER_WORD<T>, words = valid / PER_WORD<T>;
  int64_t start = 0;
  for (; start + step <= words; start += step) {
    for (int64_t i = 0; i < STEP; i += 64 / sizeof(T)) __builtin_prefetch(row + start * PER_WORD<T> + AHEAD + i, 1);
#pragma omp simd
    for (int64_t i = start; i < start + step; ++i) set_word<UNIT>(row, out, i, temperature, value);
  }
#pragma omp simd
  for (int64_t i = start; i < words; ++i) set_word<UNIT>(row, out, i, temperature, value);
  if (valid % PER_WORD<T>) store(out, valid - 1, value(scaled<UNIT>(load(row, valid - 1), temperature)));
}

template <bool UNIT, class T>
STPPO_INLINE void row_gradient(const T *row, T *out, int64_t valid, const Row r) {  // by value: no alias of out
  const float at_target = r.column < 0 ? 0 : scaled<UNIT>(load(row, r.column), r.temperature);  // out may be row
  if (r.h == 0 && r.c == 0) {
    const float lowest = ZERO_BELOW, max = r.max;
    const float factor = float(-double(r.g) * std::exp(-double(r.log_sum)) / double(r.temperature));
    each_column<UNIT>(row, out, valid, r.temperature, [=](float x) {
      return exp_in_range<GRADIENT_DEGREE<T>>(above(x - max, lowest), factor);
    });
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
      const auto at = [r](const float *x) {
        const float value = x ? x[r] : 0;
        return value == value ? value : NAN;  // a NaN of ones only would be rounded to 0
      };
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
