// Clipped surrogate: ratio, gradient and all monitored sums in one launch that reads each token once.
//
// A block processes one tile of segments. The bounds of a tile depend on the offsets and the size of the input only.
// Within a tile, one lane, 8 lanes, one warp or the whole block process a segment, depending on its length. A segment
// longer than LONG (a "giant") is summed in slices by the blocks of the tiles that it covers, which have no other work;
// the last of these blocks to finish writes its coefficients. Tickets determine which block is last, but never the
// order of a sum. So the bits depend only on a segment's tokens, and not on the grid.
#include "clipped_surrogate.cuh"
#include "surrogate_by_token.cuh"

namespace stppo {
namespace {

// Blocks per multiprocessor that the registers must suffice for. With 4 there are 32 warps, which hide the latency of
// memory. For sm_100 the compiler needs more registers and would spill 112 bytes in tokens_kernel. Not measured there.
#if __CUDA_ARCH__ >= 1000
constexpr int BLOCKS = 2;
#else
constexpr int BLOCKS = 4;
#endif

__device__ __forceinline__ void set_monitors(const Monitors &m, float (&sums)[SURROGATE_SUMS]) {
  sums[LIVE] = m.live, sums[K1] = m.k1, sums[K3] = m.k3;
}

__global__ void __launch_bounds__(THREADS, BLOCKS) segments_kernel(Surrogate a, unsigned tiles, unsigned checked) {
  __shared__ Shared shared;
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    Monitors m{};
    const int slot = threadIdx.x % SLOTS;
    if (threadIdx.x < SLOTS)
      for (int k = 0; k < SURROGATE_SUMS; ++k) shared.reported[k][slot] = 0;
    tile_of_segments(a, tile, shared, m, [&](int k, double value) { shared.reported[k][slot] += float(value); });
    float sums[SURROGATE_SUMS];
    for (int k = 0; k < SURROGATE_SUMS; ++k) sums[k] = threadIdx.x < SLOTS ? shared.reported[k][slot] : 0;
    if (is_unsorted(a, tile, checked)) sums[OBJECTIVE] = NAN;
    set_monitors(m, sums);
    write_row(sums, reinterpret_cast<OfThread &>(shared.buffer), tile_row(a, tile));
    add_tile(a, tile, tiles, shared.result, shared.last);
    __syncthreads();
  }
}

// Every token is a segment.
__global__ void __launch_bounds__(THREADS, BLOCKS) tokens_kernel(Surrogate a, unsigned tiles, unsigned) {
  __shared__ OfThread of_thread;
  __shared__ double result[SURROGATE_SUMS];
  __shared__ bool last;
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float sums[SURROGATE_SUMS] = {};
    Monitors m{};
    tile_of_tokens(a, int64_t(tile) << a.tile_log2(), sums, m);
    set_monitors(m, sums);
    write_row(sums, of_thread, tile_row(a, tile));
    add_tile(a, tile, tiles, result, last);
    __syncthreads();
  }
}

}  // namespace

Status clipped_surrogate_cuda(const Surrogate &a, void *stream) {
  const int64_t tiles = a.tiles();
  const unsigned grid = unsigned(tiles < a.max_blocks ? tiles : a.max_blocks);
  if (!a.offsets && (a.part || a.whole)) return LAUNCH_FAILED;  // a token is not split
  const unsigned checked = unsigned(a.segments / tiles + 1);  // offsets per tile: their order
  const auto kernel = a.offsets ? segments_kernel : tokens_kernel;
  kernel<<<grid, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a, tiles, checked);
  return cudaGetLastError() == cudaSuccess ? OK : LAUNCH_FAILED;
}

}  // namespace stppo
