// Generalised advantage estimation. One block processes a trajectory from its end, one tile of tokens at a time.
//
// A_t = delta_t + k A_{t+1} with k = gamma lam is a scan with the same factor at every step, so lanes exchange sums
// only. Arithmetic is in float64. A trajectory's bits do not depend on the other trajectories.
#include <cmath>

#include "ops.h"

namespace stppo {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32, ITEMS = 4, TILE = THREADS * ITEMS;
constexpr unsigned ALL = 0xffffffffu;

struct Range {
  int64_t first, last;
};

// Return slice i. If offsets are not sorted, it is empty, so nothing is read out of bounds.
__device__ Range slice(const int64_t *offsets, int64_t i, int64_t total) {
  const int64_t first = offsets[i], last = offsets[i + 1];
  return first >= 0 && first <= last && last <= total ? Range{first, last} : Range{0, 0};
}

// Return factor^exponent for exponent >= 0.
__device__ double power(double factor, int exponent) {
  double result = 1;
  for (; exponent; exponent >>= 1, factor *= factor)
    if (exponent & 1) result *= factor;
  return result;
}

// Inclusive scan over the block's threads: out_i = sum_{j <= i} step^(i-j) in_j, step being one thread's factor.
__device__ double block_scan(double value, double step, double *of_warp) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  double factor = step;
  for (int distance = 1; distance < 32; distance *= 2, factor *= factor) {
    const double before = __shfl_up_sync(ALL, value, distance);
    if (lane >= distance) value += factor * before;
  }
  __syncthreads();
  if (lane == 31) of_warp[warp] = value;
  __syncthreads();
  const double warp_step = factor;  // step^32
  double carried = 0;
  for (int w = 0; w < warp; ++w) carried = carried * warp_step + of_warp[w];
  return value + power(step, lane + 1) * carried;
}

__device__ void over_tokens(const Gae &a, Range t) {
  __shared__ double of_warp[WARPS], carry;
  const double k = a.gamma * a.lam, k_thread = power(k, ITEMS);
  if (threadIdx.x == 0) carry = 0;
  for (int64_t end = t.last; end > t.first; end -= TILE) {
    // thread 0 holds the last tokens; item j of a thread is one token earlier than item j - 1
    double delta[ITEMS], value[ITEMS], local = 0;
    const int64_t at = end - 1 - int64_t(threadIdx.x) * ITEMS;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      const int64_t i = at - j;
      const bool there = i >= t.first;
      value[j] = there ? double(a.value[i]) : 0;
      const double next = j ? value[j - 1] : there && i + 1 < t.last ? double(a.value[i + 1]) : 0;
      delta[j] = there ? double(a.reward[i]) + a.gamma * next - value[j] : 0;
      local = local * k + delta[j];
    }
    const double inclusive = block_scan(local, k_thread, of_warp);
    // the advantage after this thread's tokens, from the previous thread or the previous tile
    double advantage = __shfl_up_sync(ALL, inclusive, 1);
    __syncthreads();
    if (threadIdx.x % 32 == 31) of_warp[threadIdx.x / 32] = inclusive;
    __syncthreads();
    if (threadIdx.x % 32 == 0) advantage = threadIdx.x ? of_warp[threadIdx.x / 32 - 1] : 0;
    const double before = carry;
    advantage += power(k_thread, threadIdx.x) * before;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      const int64_t i = at - j;
      advantage = delta[j] + k * advantage;
      if (i < t.first) break;
      a.advantage[i] = float(advantage);
      a.returns[i] = float(advantage + value[j]);
    }
    __syncthreads();
    if (threadIdx.x == THREADS - 1) carry = inclusive + power(k_thread, THREADS) * before;
    __syncthreads();
  }
}

// The block's first warp processes the turns. It sums a turn's reward over its lanes. An empty turn is skipped.
__device__ void over_turns(const Gae &a, Range t) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  int64_t low = 0, high = a.turn_count;  // search for the turn that holds the last token
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (a.turns[middle + 1] < t.last) low = middle + 1;
    else high = middle;
  }
  double advantage = 0, next_value = 0;
  for (int64_t turn = low, end = t.last; end > t.first && turn >= 0; --turn) {
    const int64_t begin = max(a.turns[turn], t.first);
    if (begin >= end) continue;
    double reward = 0;
    for (int64_t i = begin + lane; i < end; i += 32) reward += a.reward[i];
    for (int distance = 16; distance > 0; distance /= 2) reward += __shfl_xor_sync(ALL, reward, distance);
    const double value = a.value[begin];
    advantage = reward + a.gamma * next_value - value + a.gamma * a.lam * advantage;
    next_value = value;
    for (int64_t i = begin + lane; i < end; i += 32) {
      a.advantage[i] = float(advantage);
      a.returns[i] = float(advantage + value);
    }
    end = begin;
  }
}

__global__ void __launch_bounds__(THREADS) gae_kernel(Gae a) {
  for (int64_t n = blockIdx.x; n < a.trajectory_count; n += gridDim.x) {
    const Range t = slice(a.trajectories, n, a.tokens);
    if (a.turns) over_turns(a, t);
    else over_tokens(a, t);
    __syncthreads();
  }
}

__device__ bool is_wrong(const int64_t *offsets, int64_t count, int64_t i, int64_t total) {
  return i == 0 ? offsets[0] != 0 || offsets[count] != total : i <= count && offsets[i] < offsets[i - 1];
}

// If offsets are not sorted, make every output NaN: nothing is read back to the host to raise an error.
__global__ void __launch_bounds__(THREADS) check_kernel(Gae a) {
  const int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  const bool wrong = is_wrong(a.trajectories, a.trajectory_count, i, a.tokens) ||
                     (a.turns && is_wrong(a.turns, a.turn_count, i, a.tokens));
  if (!__syncthreads_or(wrong)) return;
  for (int64_t t = threadIdx.x; t < a.tokens; t += THREADS) a.advantage[t] = a.returns[t] = NAN;
}

}  // namespace

Status gae_cuda(const Gae &a, void *stream) {
  if (a.tokens == 0) return OK;
  const int64_t most = 1 << 20, count = max(a.trajectory_count, a.turn_count);
  const unsigned grid = unsigned(min(max(a.trajectory_count, int64_t(1)), most)), checks = unsigned(count / THREADS + 1);
  gae_kernel<<<grid, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a);
  check_kernel<<<checks, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a);
  return cudaGetLastError() == cudaSuccess ? OK : LAUNCH_FAILED;
}

}  // namespace stppo
