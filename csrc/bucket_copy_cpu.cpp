// CPU twin of bucket_copy.cu: slices are shared out over threads, a row at a time.
#include <bit>
#include <cstring>

#include "ops.h"
#include "simd.h"

namespace stppo {
namespace {

STPPO_CLONES void widen(const uint16_t *source, float *target, int64_t width) {
  for (int64_t i = 0; i < width; ++i) target[i] = std::bit_cast<float>(uint32_t(source[i]) << 16);
}

STPPO_CLONES void narrow(const float *source, uint16_t *target, int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(source[i]);
    const uint16_t rounded = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    target[i] = source[i] != source[i] ? uint16_t(0x7fc0) : rounded;
  }
}

void copy_row(const BucketCopy &a, const Slice &s, int64_t row) {
  const int64_t from = row * s.source_stride, to = row * s.target_stride;
  const auto floats = static_cast<const float *>(s.source) + from;
  const auto halves = static_cast<const uint16_t *>(s.source) + from;
  if (a.source == FLOAT32 && a.target == FLOAT32)
    std::memcpy(static_cast<float *>(s.target) + to, floats, s.width * sizeof(float));
  else if (a.source == BFLOAT16 && a.target == BFLOAT16)
    std::memcpy(static_cast<uint16_t *>(s.target) + to, halves, s.width * sizeof(uint16_t));
  else if (a.source == FLOAT32) narrow(floats, static_cast<uint16_t *>(s.target) + to, s.width);
  else widen(halves, static_cast<float *>(s.target) + to, s.width);
}

}  // namespace

Status bucket_copy_cpu(const BucketCopy &a, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (a.count > 1)
  for (int64_t i = 0; i < a.count; ++i)
    for (int64_t row = 0; row < a.slices[i].rows; ++row) copy_row(a, a.slices[i], row);
  return OK;
}

}  // namespace stppo
