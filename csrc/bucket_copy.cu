// Gather, cast and scatter many two-dimensional slices in one launch. The caller cuts every slice into pieces of
// COPY_PIECE elements and lists, for each block, the slice that its piece belongs to. So all blocks are equally busy
// for any mix of slices.
#include "bucket_copy.cuh"
#include "ops.h"

namespace stppo {
namespace {

constexpr int THREADS = 256, LOADS = 4;  // loads of a thread in flight
constexpr int STEPS = COPY_PIECE / 4;    // of four elements
static_assert(STEPS % (THREADS * LOADS) == 0);

// Copy `steps` steps of a piece: four elements at once, or one. All loads of a round precede its stores.
template <class From, class To, int STEP, class S, class T>
__device__ __forceinline__ void copy_steps(const Slice &s, int64_t start, int steps) {
  const S *source = static_cast<const S *>(s.source);
  T *target = static_cast<T *>(s.target);
  const Places places(start / STEP, s.rows, s.width / STEP);
  for (int first = threadIdx.x; first < steps; first += LOADS * THREADS) {
    From in[LOADS];
    T *to[LOADS];
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
      const int step = first + j * THREADS;
      if (step >= steps) continue;
      const Place at = places[step];
      in[j] = *reinterpret_cast<const From *>(source + at.row * s.source_stride + at.column * STEP);
      to[j] = target + at.row * s.target_stride + at.column * STEP;
    }
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
      if (first + j * THREADS >= steps) continue;
      To out;
#pragma unroll
      for (int k = 0; k < STEP; ++k) convert(reinterpret_cast<const S *>(&in[j])[k], reinterpret_cast<T *>(&out)[k]);
      *reinterpret_cast<To *>(to[j]) = out;
    }
  }
}

template <class S, class T>
__global__ void __launch_bounds__(THREADS) copy_kernel(const Slice *slices, const int *owners) {
  const Slice s = slices[owners[blockIdx.x]];
  const bool wide = s.width % 4 == 0 && aligned(static_cast<const S *>(s.source), s.source_stride) &&
                    aligned(static_cast<const T *>(s.target), s.target_stride);
  const int64_t start = (blockIdx.x - s.first_piece) * COPY_PIECE;
  const int count = int(min(COPY_PIECE, s.rows * s.width - start));
  if (wide) copy_steps<Four<S>, Four<T>, 4, S, T>(s, start, count / 4);
  else copy_steps<S, T, 1, S, T>(s, start, count);
}

}  // namespace

Status bucket_copy_cuda(const BucketCopy &a, void *stream) {
  if (a.pieces == 0) return OK;
  const unsigned grid = unsigned(a.pieces);
  const auto kernel = a.source == FLOAT32 ? a.target == FLOAT32 ? copy_kernel<float, float> : copy_kernel<float, __nv_bfloat16>
                      : a.target == FLOAT32 ? copy_kernel<__nv_bfloat16, float>
                                            : copy_kernel<__nv_bfloat16, __nv_bfloat16>;
  kernel<<<grid, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a.slices, a.owners);
  return cudaGetLastError() == cudaSuccess ? OK : LAUNCH_FAILED;
}

}  // namespace stppo
