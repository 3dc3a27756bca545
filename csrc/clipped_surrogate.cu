// Clipped surrogate: ratio, gradient and all monitored sums in one launch that reads each token once.
//
// A block processes one tile of segments. The bounds of a tile depend on the offsets only. Within a tile, 8 lanes, one
// warp or the whole block process a segment, depending on its length. A segment longer than LONG (a "giant") is summed
// in slices by the blocks of the tiles that it covers, which have no other work; the last of these blocks to finish
// writes its coefficients. Tickets determine which block is last, but never the order of a sum. So the bits depend only
// on a segment's tokens, and not on the grid.
#include "clipped_surrogate.cuh"

namespace stppo {
namespace {

__global__ void __launch_bounds__(THREADS, 2) surrogate_kernel(Surrogate a, int64_t tiles) {
  __shared__ Shared shared;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    double sums[SURROGATE_SUMS] = {};
    if (threadIdx.x < SURROGATE_SUMS) giant_row(a, tile)[threadIdx.x] = 0;
    if (!a.offsets) {
      tile_of_tokens(a, tile * SURROGATE_TILE, sums);
    } else {
      const Range own = segments_of(a, tile, shared);
      check_order(a, tile, sums);
      tile_of_segments(a, own, sums, shared);
      if (is_giant(a, own.first - 1)) slice_of_giant(a, own.first - 1, tile, sums, shared);
      if (own.first < own.last && is_giant(a, own.last - 1)) slice_of_giant(a, own.last - 1, tile, sums, shared);
    }
    block_sum(sums, shared);
    if (threadIdx.x < SURROGATE_SUMS) tile_row(a, tile)[threadIdx.x] = shared.result[threadIdx.x];
    if (arrives_last(a.tickets, tiles, shared)) write_totals(a, tiles, shared);
    __syncthreads();
  }
}

}  // namespace

Status clipped_surrogate_cuda(const Surrogate &a, void *stream) {
  const int64_t tiles = a.tiles();
  const unsigned grid = unsigned(tiles < a.max_blocks ? tiles : a.max_blocks);
  surrogate_kernel<<<grid, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a, tiles);
  return cudaGetLastError() == cudaSuccess ? OK : LAUNCH_FAILED;
}

}  // namespace stppo
