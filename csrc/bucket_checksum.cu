// Sums the bits of many two-dimensional slices, cast on the way: block (i, j) sums every gridDim.y-th piece of slice
// i. The integer atomics at the end commute exactly, so that no result depends on their order.
#include <bit>

#include "bucket_checksum.h"
#include "bucket_copy.cuh"
#include "ops.h"

namespace stppo {
namespace {

constexpr int THREADS = 256;
constexpr int FOURS = CHECKSUM_PIECE / (4 * THREADS);  // of neighbouring elements, per thread and piece

__device__ __forceinline__ uint64_t bits(float x) { return std::bit_cast<uint32_t>(x); }
__device__ __forceinline__ uint64_t bits(__nv_bfloat16 x) { return std::bit_cast<uint16_t>(x); }

template <class S, class T>
__global__ void __launch_bounds__(THREADS) checksum_kernel(const SummedSlice *slices, unsigned long long *sums) {
  const SummedSlice s = slices[blockIdx.x];
  const S *source = static_cast<const S *>(s.source);
  const bool wide = s.width % 4 == 0 && aligned(source, s.stride);
  const int64_t total = s.rows * s.width, pieces = (total + CHECKSUM_PIECE - 1) / CHECKSUM_PIECE;
  if (blockIdx.y >= pieces) return;
  uint64_t weight[FOURS][4], sum = blockIdx.y == 0 && threadIdx.x == 0 ? total * sizeof(T) : 0;
#pragma unroll
  for (int j = 0; j < FOURS; ++j)
#pragma unroll
    for (int k = 0; k < 4; ++k) weight[j][k] = element_weight((j * THREADS + threadIdx.x) * 4 + k);
  for (int64_t piece = blockIdx.y; piece < pieces; piece += gridDim.y) {
    uint64_t of_piece = 0;
#pragma unroll
    for (int j = 0; j < FOURS; ++j) {
      const int64_t i = piece * CHECKSUM_PIECE + (j * THREADS + threadIdx.x) * 4;
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
        of_piece += bits(cast) * weight[j][k];
      }
    }
    sum += of_piece * piece_weight(piece);
  }
  for (int distance = 16; distance; distance /= 2) sum += __shfl_down_sync(~0u, sum, distance);
  if (threadIdx.x % 32 == 0) atomicAdd(sums + s.place, static_cast<unsigned long long>(sum));
}

}  // namespace

Status bucket_checksum_cuda(const BucketChecksum &a, void *stream) {
  if (a.count == 0) return OK;
  const dim3 grid(unsigned(a.count), 64);
  const auto kernel = a.source == FLOAT32 ? a.target == FLOAT32 ? checksum_kernel<float, float> : checksum_kernel<float, __nv_bfloat16>
                      : a.target == FLOAT32 ? checksum_kernel<__nv_bfloat16, float>
                                            : checksum_kernel<__nv_bfloat16, __nv_bfloat16>;
  const auto sums = reinterpret_cast<unsigned long long *>(a.sums);
  kernel<<<grid, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a.slices, sums);
  return cudaGetLastError() == cudaSuccess ? OK : LAUNCH_FAILED;
}

}  // namespace stppo
