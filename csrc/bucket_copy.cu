// Gather, cast and scatter many two-dimensional slices in one launch. Block (i, j) copies every gridDim.y-th piece
// of slice i.
#include "bucket_copy.cuh"
#include "ops.h"

namespace stppo {
namespace {

constexpr int THREADS = 256;
constexpr int64_t PIECE = 16384;  // in elements; a block copies one piece per stride of the grid

template <class S, class T>
__global__ void __launch_bounds__(THREADS) copy_kernel(const Slice *slices) {
  const Slice s = slices[blockIdx.x];
  const S *source = static_cast<const S *>(s.source);
  T *target = static_cast<T *>(s.target);
  const bool wide = s.width % 4 == 0 && aligned(source, s.source_stride) && aligned(target, s.target_stride);
  const int64_t step = wide ? 4 : 1, per_row = s.width / step, total = s.rows * per_row;
  if (total == 0) return;
  // There are few divisions, because those of 64 bits are slow. A thread advances by THREADS steps, which are `rows`
  // rows and `rest` steps.
  const int64_t rows = THREADS / per_row, rest = THREADS - rows * per_row;
  for (int64_t start = blockIdx.y * PIECE; start < total; start += gridDim.y * PIECE) {
    const int64_t end = min(start + PIECE, total);
    int64_t i = start + threadIdx.x, row = i / per_row, at = i - row * per_row;
    for (; i < end; i += THREADS) {
      const S *from = source + row * s.source_stride + at * step;
      T *to = target + row * s.target_stride + at * step;
      if (wide) {
        const Four<S> in = *reinterpret_cast<const Four<S> *>(from);
        Four<T> out;
#pragma unroll
        for (int k = 0; k < 4; ++k) convert(in.value[k], out.value[k]);
        *reinterpret_cast<Four<T> *>(to) = out;
      } else {
        convert(*from, *to);
      }
      row += rows, at += rest;
      if (at >= per_row) at -= per_row, ++row;
    }
  }
}

}  // namespace

Status bucket_copy_cuda(const BucketCopy &a, void *stream) {
  if (a.count == 0) return OK;
  const dim3 grid(unsigned(a.count), 64);
  const auto kernel = a.source == FLOAT32 ? a.target == FLOAT32 ? copy_kernel<float, float> : copy_kernel<float, __nv_bfloat16>
                      : a.target == FLOAT32 ? copy_kernel<__nv_bfloat16, float>
                                            : copy_kernel<__nv_bfloat16, __nv_bfloat16>;
  kernel<<<grid, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a.slices);
  return cudaGetLastError() == cudaSuccess ? OK : LAUNCH_FAILED;
}

}  // namespace stppo
