// CPU twin of bucket_checksum.cu. As in bucket_copy_cpu.cpp every thread takes an equal range of all elements.
#include <omp.h>

#include <algorithm>
#include <array>

#include "bucket_checksum.h"
#include "bucket_copy.h"
#include "ops.h"

namespace stppo {
namespace {

constexpr int64_t PER_THREAD = 1 << 15;  // elements below which another thread costs more than it brings

constexpr auto WEIGHTS = [] {
  std::array<uint32_t, CHECKSUM_PIECE> weights{};
  for (int k = 0; k < CHECKSUM_PIECE; ++k) weights[k] = element_weight(k);
  return weights;
}();

STPPO_CLONES uint64_t sum32(const uint32_t *__restrict x, const uint32_t *__restrict weight, int64_t n) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += uint64_t(x[i]) * weight[i];
  return sum;
}

STPPO_CLONES uint64_t sum16(const uint16_t *__restrict x, const uint32_t *__restrict weight, int64_t n) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += uint64_t(uint32_t(x[i])) * weight[i];
  return sum;
}

STPPO_CLONES uint64_t sum_narrowed(const float *__restrict x, const uint32_t *__restrict weight, int64_t n) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += uint64_t(uint32_t(narrowed(x[i]))) * weight[i];
  return sum;
}

uint64_t sum_elements(const BucketChecksum &a, const SummedSlice &s, int64_t from, const uint32_t *weight, int64_t n) {
  const auto words = static_cast<const uint32_t *>(s.source) + from;
  const auto halves = static_cast<const uint16_t *>(s.source) + from;
  if (a.source == FLOAT32 && a.target == FLOAT32) return sum32(words, weight, n);
  if (a.source == FLOAT32) return sum_narrowed(static_cast<const float *>(s.source) + from, weight, n);
  return sum16(halves, weight, n) << (a.target == FLOAT32 ? 16 : 0);  // widened, the bits lie 16 higher
}

// Of elements [start, stop) of a slice, counted row by row.
uint64_t sum_range(const BucketChecksum &a, const SummedSlice &s, int64_t start, int64_t stop) {
  uint64_t sum = 0;
  for (int64_t at = start; at < stop;) {
    const int64_t row = at / s.width, column = at - row * s.width, piece = at / CHECKSUM_PIECE;
    const int64_t within = at - piece * CHECKSUM_PIECE;
    const int64_t n = std::min({s.width - column, stop - at, CHECKSUM_PIECE - within});
    sum += sum_elements(a, s, row * s.stride + column, WEIGHTS.data() + within, n) * piece_weight(piece);
    at += n;
  }
  return sum;
}

}  // namespace

Status bucket_checksum_cpu(const BucketChecksum &a, int threads) {
  int64_t total = 0;
  for (int64_t i = 0; i < a.count; ++i) total += a.slices[i].rows * a.slices[i].width;
  const int used = int(std::clamp<int64_t>(total / PER_THREAD, 1, threads));
#pragma omp parallel num_threads(used) if (used > 1)
  {
    const int64_t share = (total + omp_get_num_threads() - 1) / omp_get_num_threads();
    const int64_t begin = omp_get_thread_num() * share, end = std::min(begin + share, total);
    for (int64_t i = 0, first = 0, size; i < a.count && first < end; ++i, first += size) {
      const SummedSlice &s = a.slices[i];
      size = s.rows * s.width;
      const int64_t start = std::max<int64_t>(begin - first, 0), stop = std::min(end - first, size);
      if (start >= stop) continue;
      uint64_t sum = sum_range(a, s, start, stop);
      if (start == 0) sum += size * (a.target == FLOAT32 ? sizeof(float) : sizeof(uint16_t));
#pragma omp atomic
      a.sums[s.place] += sum;
    }
  }
  return OK;
}

}  // namespace stppo
