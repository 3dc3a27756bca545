// From the sums of tiles to the totals of clipped_surrogate.cu: the last block of a group of tiles adds up its rows,
// and the last of these blocks adds up the groups. So no block reads more than a few rows after all others have finished.
#pragma once
#include "segment_sums.cuh"

namespace stppo {
namespace {

constexpr int64_t GROUP = 32;  // tiles

// The workspace has three arrays: per tile, the sums of the tile (and then, in the first row of a group, of the group),
// and the sums of the giant that starts there; per PART tokens of a tile, the sums of parts of two giants.
__device__ __forceinline__ double *tile_row(const Surrogate &a, int64_t tile) { return a.workspace + tile * SURROGATE_SUMS; }
__device__ __forceinline__ double *giant_row(const Surrogate &a, int64_t tile) { return tile_row(a, a.tiles() + tile); }
// Part k of the giant that starts in tile `home`. Two giants may share a tile: the one that starts there has the second
// row.
__device__ __forceinline__ double *part_at(const Surrogate &a, int64_t home, int64_t k) {
  const int64_t parts = a.tile() / PART, row = 2 * (home * parts + k) + (k < parts);
  return a.workspace + 2 * a.tiles() * SURROGATE_SUMS + row * PART_SUMS;
}

// The tickets: of the groups, of giants, of the slices of the giant that starts in a tile, and of the tiles of a group.
__device__ __forceinline__ unsigned *ticket_of_groups(const Surrogate &a) { return a.tickets; }
__device__ __forceinline__ unsigned *giants(const Surrogate &a) { return a.tickets + 1; }
__device__ __forceinline__ unsigned *ticket_of_slices(const Surrogate &a, int64_t tile) { return a.tickets + 2 + tile; }
__device__ __forceinline__ unsigned *ticket_of_tiles(const Surrogate &a, int64_t group) {
  return a.tickets + 2 + a.tiles() + group;
}

// Return column k summed over `count` rows with this distance, in a fixed order, on every lane.
__device__ __forceinline__ double sum_rows(const Surrogate &a, int64_t first, int64_t distance, int64_t count, int k) {
  double sum = 0;
#pragma unroll 4
  for (int64_t row = threadIdx.x % 32; row < count; row += 32) sum += __ldcg(tile_row(a, first + row * distance) + k);
  return warp_sum(sum);
}

// Return column k summed over the giants. The ticket of a giant's slices is not 0 after it has finished.
__device__ double sum_giants(const Surrogate &a, int64_t tiles, int k) {
  double sum = 0;
  for (int64_t tile = threadIdx.x % 32; tile < tiles; tile += 32)
    if (__ldcg(ticket_of_slices(a, tile))) sum += __ldcg(giant_row(a, tile) + k);
  return warp_sum(sum);
}

// Write the totals if this is the last block. The row of `tile` has been written.
__device__ void add_tile(const Surrogate &a, int64_t tile, int64_t tiles, double *result, bool &last) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t groups = (tiles + GROUP - 1) / GROUP, group = tile / GROUP, first = group * GROUP;
  const int64_t members = min(tiles - first, GROUP);
  if (!arrives_last(ticket_of_tiles(a, group), members, last)) return;
  for (int k = warp; k < SURROGATE_SUMS; k += WARPS) {
    const double sum = sum_rows(a, first, 1, members, k);
    if (lane == 0) __stcg(tile_row(a, first) + k, sum);
  }
  if (!arrives_last(ticket_of_groups(a), groups, last)) return;
  const bool any = a.offsets && __ldcg(giants(a));
  for (int k = warp; k < SURROGATE_SUMS; k += WARPS) {
    double sum = sum_rows(a, 0, GROUP, groups, k);
    if (any) sum += sum_giants(a, tiles, k);
    if (lane == 0) result[k] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0 && !a.part) surrogate_totals(result, a.totals);
  if (!a.offsets) return;
  if (threadIdx.x == 0) *giants(a) = 0;
  for (int64_t i = threadIdx.x; i < tiles; i += THREADS) *ticket_of_slices(a, i) = 0;
}

}  // namespace
}  // namespace stppo
