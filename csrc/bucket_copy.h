// Shared by the CPU kernels over slices: casts of a row (bucket_copy_cpu.cpp), and equal ranges for all threads.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace stppo {

constexpr int64_t PER_THREAD = 1 << 15;  // with fewer elements, another thread costs more time than it saves

// Call range(slice, start, stop) for elements [start, stop) of the slices, counted row by row. The calls together
// cover every element once.
template <class Slice, class Range>
void over_elements(const Slice *slices, int64_t count, int threads, const Range &range) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += slices[i].rows * slices[i].width;
  const int used = int(std::clamp<int64_t>(total / PER_THREAD, 1, threads));
#pragma omp parallel num_threads(used) if (used > 1)
  {
    const int64_t share = (total + omp_get_num_threads() - 1) / omp_get_num_threads();
    const int64_t begin = omp_get_thread_num() * share, end = std::min(begin + share, total);
    for (int64_t i = 0, first = 0, size; i < count && first < end; ++i, first += size) {
      size = slices[i].rows * slices[i].width;
      const int64_t start = std::max<int64_t>(begin - first, 0), stop = std::min(end - first, size);
      if (start < stop) range(slices[i], start, stop);
    }
  }
}

void widen(const uint16_t *source, float *target, int64_t width);
void narrow(const float *source, uint16_t *target, int64_t width);

}  // namespace stppo
