// Compute a checksum of the bits of many two-dimensional slices, after a cast. A block sums CHECKSUM_BLOCK numbers of
// one slice. If a slice has several blocks, they add their sums up in counters that are zero between calls; the last
// block to finish moves them to the result. These integer additions commute exactly, so the result does not depend on
// their order.
#include <bit>

#include "bucket_checksum.h"
#include "bucket_copy.cuh"
#include "ops.h"

namespace stppo {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int PIECES = CHECKSUM_BLOCK / CHECKSUM_PIECE;  // of a block
constexpr int ROUND = 2;                                 // pieces whose loads are in flight together
static_assert(PIECES % ROUND == 0 && PIECES <= 32);

__device__ __forceinline__ uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
__device__ __forceinline__ uint32_t bits(__nv_bfloat16 x) { return std::bit_cast<uint16_t>(x); }

struct Sums {
  uint32_t low, high;
};

// Return the four elements from element i of this block on; 0 beyond its `count` elements.
template <bool wide, class S>
__device__ __forceinline__ Four<S> four(const S *source, const Places &places, int64_t stride, int i, int count) {
  Four<S> in{};
  if constexpr (wide) {
    if (i >= count) return in;
    const Place at = places[i / 4];
    in = *reinterpret_cast<const Four<S> *>(source + at.row * stride + at.column * 4);
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (i + k >= count) continue;
      const Place at = places[i + k];
      in.value[k] = source[at.row * stride + at.column];
    }
  }
  return in;
}

// Return this thread's part of the sums over `count` elements from `start` on.
template <class S, class T, bool wide>
__device__ __forceinline__ Sums sums_of(const SummedSlice &s, int64_t start, int count) {
  constexpr int NUMBERS = sizeof(T) / 2, ELEMENTS = CHECKSUM_PIECE / NUMBERS, FOURS = ELEMENTS / (4 * THREADS);
  constexpr int STEP = wide ? 4 : 1;
  const Places places(start / STEP, s.rows, s.width / STEP);
  const Weights<uint32_t> of_lane = piece_weights(start / ELEMENTS + threadIdx.x % 32);  // of this block's pieces
  Weights<int16_t> weight[FOURS][4 * NUMBERS];
#pragma unroll
  for (int j = 0; j < FOURS; ++j)
#pragma unroll
    for (int k = 0; k < 4 * NUMBERS; ++k)
      weight[j][k] = number_weights((j * THREADS + threadIdx.x) * 4 * NUMBERS + k);
  Sums sums{0, 0};
  for (int round = 0; round * ELEMENTS < count; round += ROUND) {
    Four<S> in[ROUND][FOURS];
#pragma unroll
    for (int p = 0; p < ROUND; ++p)
#pragma unroll
      for (int j = 0; j < FOURS; ++j)
        in[p][j] = four<wide>(static_cast<const S *>(s.source), places, s.stride,
                              (round + p) * ELEMENTS + (j * THREADS + int(threadIdx.x)) * 4, count);
#pragma unroll
    for (int p = 0; p < ROUND; ++p) {
      uint32_t first = 0, second = 0;
#pragma unroll
      for (int j = 0; j < FOURS; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          T cast;
          convert(in[p][j].value[k], cast);
#pragma unroll
          for (int n = 0; n < NUMBERS; ++n) {
            const int number = int16_t(bits(cast) >> 16 * n);
            first += uint32_t(number * weight[j][k * NUMBERS + n].first);
            second += uint32_t(number * weight[j][k * NUMBERS + n].second);
          }
        }
      sums.low += first * __shfl_sync(~0u, of_lane.first, round + p);
      sums.high += second * __shfl_sync(~0u, of_lane.second, round + p);
    }
  }
  return sums;
}

template <class S, class T>
__global__ void __launch_bounds__(THREADS, 4) checksum_kernel(BucketChecksum a) {
  __shared__ Sums of_warp[WARPS];
  constexpr int64_t ELEMENTS = CHECKSUM_BLOCK * 2 / sizeof(T);
  const int owner = a.owners[blockIdx.x];
  const SummedSlice s = a.slices[owner];
  const int64_t start = (blockIdx.x - s.first_piece) * ELEMENTS, total = s.rows * s.width;
  const int count = int(min(ELEMENTS, total - start));
  const bool wide = s.width % 4 == 0 && aligned(static_cast<const S *>(s.source), s.stride);
  Sums own = wide ? sums_of<S, T, true>(s, start, count) : sums_of<S, T, false>(s, start, count);
  own = {__reduce_add_sync(~0u, own.low), __reduce_add_sync(~0u, own.high)};
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x) return;
  uint32_t low = start == 0 ? uint32_t(total * sizeof(T)) : 0, high = 0;
  for (const Sums &of : of_warp) low += of.low, high += of.high;
  uint32_t *sum = a.sums + 2 * s.place, *counter = a.counters + 3 * owner;
  const uint32_t blocks = uint32_t((total + ELEMENTS - 1) / ELEMENTS);
  if (blocks > 1) {
    atomicAdd(counter + 1, low);
    atomicAdd(counter + 2, high);
    __threadfence();  // other blocks see the sums before the count
    if (atomicAdd(counter, 1u) != blocks - 1) return;
    __threadfence();
    counter[0] = 0, low = atomicExch(counter + 1, 0u), high = atomicExch(counter + 2, 0u);
  }
  sum[0] = low, sum[1] = high;
}

}  // namespace

Status bucket_checksum_cuda(const BucketChecksum &a, void *stream) {
  if (a.pieces == 0) return OK;
  const unsigned grid = unsigned(a.pieces);
  const auto kernel = a.source == FLOAT32 ? a.target == FLOAT32 ? checksum_kernel<float, float> : checksum_kernel<float, __nv_bfloat16>
                      : a.target == FLOAT32 ? checksum_kernel<__nv_bfloat16, float>
                                            : checksum_kernel<__nv_bfloat16, __nv_bfloat16>;
  kernel<<<grid, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a);
  return cudaGetLastError() == cudaSuccess ? OK : LAUNCH_FAILED;
}

}  // namespace stppo
