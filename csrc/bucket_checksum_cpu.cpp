// CPU kernel of bucket_checksum.cu. As in bucket_copy_cpu.cpp, every thread takes an equal range of all elements.
#include <algorithm>
#include <array>
#include <cstddef>

#include "bucket_checksum.h"
#include "bucket_copy.h"
#include "ops.h"
#include "simd.h"

namespace stppo {
namespace {

struct Sums {
  uint32_t low = 0, high = 0;
};

template <auto which>
constexpr auto table() {
  std::array<int16_t, CHECKSUM_PIECE> weights{};
  for (int k = 0; k < CHECKSUM_PIECE; ++k) weights[k] = number_weights(k).*which;
  return weights;
}
constexpr auto FIRST = table<&Weights<int16_t>::first>(), SECOND = table<&Weights<int16_t>::second>();

STPPO_CLONES Sums sum_numbers(const int16_t *__restrict x, const int16_t *__restrict first,
                              const int16_t *__restrict second, int64_t n) {
  uint32_t low = 0, high = 0;
  for (int64_t i = 0; i < n; ++i) {
    low += uint32_t(int32_t(x[i]) * first[i]);
    high += uint32_t(int32_t(x[i]) * second[i]);
  }
  return {low, high};
}

// Return the bits of elements [from, from + n) in the target's type: in place if no cast is needed, else in `room`.
const int16_t *numbers(const BucketChecksum &a, const SummedSlice &s, int64_t from, int64_t n, void *room) {
  const auto floats = static_cast<const float *>(s.source) + from;
  const auto halves = static_cast<const uint16_t *>(s.source) + from;
  if (a.source != a.target && a.source == FLOAT32) narrow(floats, static_cast<uint16_t *>(room), n);
  else if (a.source != a.target) widen(halves, static_cast<float *>(room), n);
  else return reinterpret_cast<const int16_t *>(a.source == FLOAT32 ? static_cast<const void *>(floats) : halves);
  return static_cast<const int16_t *>(room);
}

// Return the sums over elements [start, stop) of a slice, counted row by row.
Sums sum_range(const BucketChecksum &a, const SummedSlice &s, int64_t start, int64_t stop) {
  alignas(64) std::byte room[2 * CHECKSUM_PIECE];
  const int64_t per_element = a.target == FLOAT32 ? 2 : 1, elements = CHECKSUM_PIECE / per_element;
  Sums total;
  if (start == 0) total.low = uint32_t(s.rows * s.width * per_element * 2);  // the slice's bytes are added once
  for (int64_t at = start; at < stop;) {
    const int64_t row = at / s.width, column = at - row * s.width, piece = at / elements;
    const int64_t n = std::min({s.width - column, stop - at, (piece + 1) * elements - at});
    const int64_t within = (at - piece * elements) * per_element;
    const Sums part = sum_numbers(numbers(a, s, row * s.stride + column, n, room), FIRST.data() + within,
                                  SECOND.data() + within, n * per_element);
    const Weights<uint32_t> of_piece = piece_weights(piece);
    total.low += part.low * of_piece.first;
    total.high += part.high * of_piece.second;
    at += n;
  }
  return total;
}

}  // namespace

Status bucket_checksum_cpu(const BucketChecksum &a, int threads) {
  over_elements(a.slices, a.count, threads, [&a](const SummedSlice &s, int64_t start, int64_t stop) {
    const Sums sums = sum_range(a, s, start, stop);
#pragma omp atomic
    a.sums[2 * s.place] += sums.low;
#pragma omp atomic
    a.sums[2 * s.place + 1] += sums.high;
  });
  return OK;
}

}  // namespace stppo
