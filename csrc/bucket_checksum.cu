// Compute a checksum of the bits of many two-dimensional slices, after a cast. Block (i, j) sums every gridDim.y-th
// piece of slice i. The integer atomics at the end commute exactly, so the result does not depend on their order.
#include <bit>

#include "bucket_checksum.h"
#include "bucket_copy.cuh"
#include "ops.h"

namespace stppo {
namespace {

constexpr int THREADS = 256;

__device__ __forceinline__ uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
__device__ __forceinline__ uint32_t bits(__nv_bfloat16 x) { return std::bit_cast<uint16_t>(x); }

template <class S, class T>
__global__ void __launch_bounds__(THREADS) checksum_kernel(const SummedSlice *slices, uint32_t *sums) {
  constexpr int NUMBERS = sizeof(T) / 2, ELEMENTS = CHECKSUM_PIECE / NUMBERS, FOURS = ELEMENTS / (4 * THREADS);
  const SummedSlice s = slices[blockIdx.x];
  const S *source = static_cast<const S *>(s.source);
  const bool wide = s.width % 4 == 0 && aligned(source, s.stride);
  const int64_t total = s.rows * s.width, pieces = (total + ELEMENTS - 1) / ELEMENTS;
  if (blockIdx.y >= pieces) return;
  Weights<int16_t> weight[FOURS][4 * NUMBERS];
#pragma unroll
  for (int j = 0; j < FOURS; ++j)
#pragma unroll
    for (int k = 0; k < 4 * NUMBERS; ++k)
      weight[j][k] = number_weights((j * THREADS + threadIdx.x) * 4 * NUMBERS + k);
  uint32_t low = blockIdx.y == 0 && threadIdx.x == 0 ? uint32_t(total * sizeof(T)) : 0, high = 0;
  for (int64_t piece = blockIdx.y; piece < pieces; piece += gridDim.y) {
    uint32_t first = 0, second = 0;
#pragma unroll
    for (int j = 0; j < FOURS; ++j) {
      const int64_t i = piece * ELEMENTS + (j * THREADS + threadIdx.x) * 4;
      if (i >= total) continue;
      const int64_t row = s.rows == 1 ? 0 : i / s.width;
      Four<S> in;
      if (wide) in = *reinterpret_cast<const Four<S> *>(source + row * s.stride + (i - row * s.width));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (i + k >= total) continue;
        if (!wide) {
          const int64_t own = s.rows == 1 ? 0 : (i + k) / s.width;
          in.value[k] = source[own * s.stride + (i + k - own * s.width)];
        }
        T cast;
        convert(in.value[k], cast);
#pragma unroll
        for (int n = 0; n < NUMBERS; ++n) {
          const int number = int16_t(bits(cast) >> 16 * n);
          first += uint32_t(number * weight[j][k * NUMBERS + n].first);
          second += uint32_t(number * weight[j][k * NUMBERS + n].second);
        }
      }
    }
    const Weights<uint32_t> of_piece = piece_weights(piece);
    low += first * of_piece.first;
    high += second * of_piece.second;
  }
  for (int distance = 16; distance; distance /= 2) {
    low += __shfl_down_sync(~0u, low, distance);
    high += __shfl_down_sync(~0u, high, distance);
  }
  if (threadIdx.x % 32 != 0) return;
  atomicAdd(sums + 2 * s.place, low);
  atomicAdd(sums + 2 * s.place + 1, high);
}

}  // namespace

Status bucket_checksum_cuda(const BucketChecksum &a, void *stream) {
  if (a.count == 0) return OK;
  const dim3 grid(unsigned(a.count), 64);
  const auto kernel = a.source == FLOAT32 ? a.target == FLOAT32 ? checksum_kernel<float, float> : checksum_kernel<float, __nv_bfloat16>
                      : a.target == FLOAT32 ? checksum_kernel<__nv_bfloat16, float>
                                            : checksum_kernel<__nv_bfloat16, __nv_bfloat16>;
  kernel<<<grid, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a.slices, a.sums);
  return cudaGetLastError() == cudaSuccess ? OK : LAUNCH_FAILED;
}

}  // namespace stppo
