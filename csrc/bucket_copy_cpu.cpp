// CPU kernel of bucket_copy.cu. The elements of all slices are numbered in order, and every thread copies an equal
// range of them. So all threads are equally busy, with one large slice or with many small ones.
#include <algorithm>
#include <bit>
#include <cstring>

#include "bucket_copy.h"
#include "ops.h"
#include "simd.h"

namespace stppo {

STPPO_CLONES void widen(const uint16_t *__restrict source, float *__restrict target, int64_t width) {
  for (int64_t i = 0; i < width; ++i) target[i] = std::bit_cast<float>(uint32_t(source[i]) << 16);
}

// Round to nearest, ties to even. Every NaN becomes the same NaN.
STPPO_CLONES void narrow(const float *__restrict source, uint16_t *__restrict target, int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(source[i]);
    const uint16_t rounded = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    target[i] = source[i] != source[i] ? uint16_t(0x7fc0) : rounded;
  }
}

namespace {

void copy_elements(const BucketCopy &a, const Slice &s, int64_t from, int64_t to, int64_t width) {
  const auto floats = static_cast<const float *>(s.source) + from;
  const auto halves = static_cast<const uint16_t *>(s.source) + from;
  if (a.source == FLOAT32 && a.target == FLOAT32)
    std::memcpy(static_cast<float *>(s.target) + to, floats, width * sizeof(float));
  else if (a.source == BFLOAT16 && a.target == BFLOAT16)
    std::memcpy(static_cast<uint16_t *>(s.target) + to, halves, width * sizeof(uint16_t));
  else if (a.source == FLOAT32) narrow(floats, static_cast<uint16_t *>(s.target) + to, width);
  else widen(halves, static_cast<float *>(s.target) + to, width);
}

// Copy elements [start, stop) of a slice, counted row by row.
void copy_range(const BucketCopy &a, const Slice &s, int64_t start, int64_t stop) {
  for (int64_t row = start / s.width, at = start; at < stop; ++row) {
    const int64_t column = at - row * s.width, width = std::min(s.width - column, stop - at);
    copy_elements(a, s, row * s.source_stride + column, row * s.target_stride + column, width);
    at += width;
  }
}

}  // namespace

Status bucket_copy_cpu(const BucketCopy &a, int threads) {
  over_elements(a.slices, a.count, threads, [&a](const Slice &s, int64_t start, int64_t stop) { copy_range(a, s, start, stop); });
  return OK;
}

}  // namespace stppo
