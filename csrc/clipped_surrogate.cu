// Clipped surrogate: ratio, gradient and all monitored sums in one launch that reads each token once.
//
// A block processes one tile of segments. The bounds of a tile depend on the offsets only. Within a tile, one lane, 8
// lanes, one warp or the whole block process a segment, depending on its length. A segment longer than LONG (a "giant") is summed
// in slices by the blocks of the tiles that it covers, which have no other work; the last of these blocks to finish
// writes its coefficients. Tickets determine which block is last, but never the order of a sum. So the bits depend only
// on a segment's tokens, and not on the grid.
#include "surrogate_by_token.cuh"

namespace stppo {
namespace {

// Blocks per multiprocessor that the registers must suffice for. With 4 there are 32 warps, which hide the latency of
// memory. For sm_100 the compiler needs more registers and would spill 400 bytes.
#if __CUDA_ARCH__ >= 1000
constexpr int BLOCKS = 2;
#else
constexpr int BLOCKS = 4;
#endif

// BY_TOKEN: every token is a segment, and there are no offsets.
template <bool BY_TOKEN>
__global__ void __launch_bounds__(THREADS, BLOCKS) surrogate_kernel(Surrogate a, unsigned tiles) {
  __shared__ Shared shared;
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    for (int k = 0; k < SURROGATE_SUMS; ++k) shared.of_thread[k][threadIdx.x] = 0;
    if (threadIdx.x < SURROGATE_SUMS) giant_row(a, tile)[threadIdx.x] = 0;
    if constexpr (BY_TOKEN) {
      tile_of_tokens(a, int64_t(tile) * SURROGATE_TILE, shared);
    } else {
      find_segments(a, tile, shared);
      check_order(a, tile, shared);
      tile_of_segments(a, shared);
      const Range &own = shared.own;
      if (is_giant(a, own.first - 1)) slice_of_giant(a, own.first - 1, tile, shared);
      if (own.first < own.last && is_giant(a, own.last - 1)) slice_of_giant(a, own.last - 1, tile, shared);
    }
    block_sum(shared);
    if (threadIdx.x < SURROGATE_SUMS) tile_row(a, tile)[threadIdx.x] = shared.result[threadIdx.x];
    if (arrives_last(a.tickets, tiles, shared)) write_totals(a, tiles, shared);
    __syncthreads();
  }
}

}  // namespace

Status clipped_surrogate_cuda(const Surrogate &a, void *stream) {
  const int64_t tiles = a.tiles();
  const unsigned grid = unsigned(tiles < a.max_blocks ? tiles : a.max_blocks);
  const auto kernel = a.offsets ? surrogate_kernel<false> : surrogate_kernel<true>;
  kernel<<<grid, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a, tiles);
  return cudaGetLastError() == cudaSuccess ? OK : LAUNCH_FAILED;
}

}  // namespace stppo
