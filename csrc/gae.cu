// Generalised advantage estimation. One block processes a trajectory from its end, one tile of tokens at a time.
//
// A_t = delta_t + k A_{t+1} with k = gamma lam is a scan with the same factor at every step, so lanes exchange sums
// only. Each thread computes the advantages of ITEMS neighbouring tokens. Loads and stores pass through shared memory,
// so that neighbouring threads read and write neighbouring tokens. Arithmetic is in float64. A trajectory's bits do
// not depend on the other trajectories.
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
#pragma unroll 1
  for (; exponent; exponent >>= 1, factor *= factor)
    if (exponent & 1) result *= factor;
  return result;
}

// Scan over the block's threads: return sum_{j < i} step^(i-1-j) in_j + step^i carry for thread i, `step` being one
// thread's factor and of_lane = step^(threadIdx.x % 32). Only thread 0's `carry` is used.
__device__ double block_scan(double in, double step, double of_lane, double carry, double *of_warp) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  double value = threadIdx.x ? in : in + step * carry, factor = step;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2, factor *= factor) {
    const double before = __shfl_up_sync(ALL, value, distance);
    if (lane >= distance) value += factor * before;
  }
  if (lane == 31) of_warp[warp] = value;
  const double before = __shfl_up_sync(ALL, value, 1);
  __syncthreads();
  if (warp == 0) return lane ? before : carry;
  double carried = 0;
  for (int w = 0; w < warp; ++w) carried = carried * factor + of_warp[w];  // factor = step^32
  return lane ? before + of_lane * carried : carried;
}

// Tokens of a tile in shared memory, the last token first. The gaps spread a thread's tokens over the banks.
struct Tile {
  float item[TILE + TILE / 32];
  static __device__ int at(int i) { return i + i / 32; }
  __device__ float &operator[](int i) { return item[at(i)]; }
};

__device__ void over_tokens(const Gae &a, Range t) {
  __shared__ Tile first, second;  // rewards and values, then advantages and returns
  __shared__ double of_warp[WARPS], carry, value_after;
  const double k = a.gamma * a.lam, step = power(k, ITEMS), of_lane = power(step, threadIdx.x % 32);
  if (threadIdx.x == 0) carry = 0, value_after = 0;
  for (int64_t end = t.last; end > t.first; end -= TILE) {
    const int count = int(min(int64_t(TILE), end - t.first));  // token `end - 1 - i` is item i
    float reward[ITEMS], value[ITEMS];
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      const int i = j * THREADS + threadIdx.x;
      reward[j] = i < count ? a.reward[end - 1 - i] : 0;
      value[j] = i < count ? a.value[end - 1 - i] : 0;
    }
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      first[j * THREADS + threadIdx.x] = reward[j];
      second[j * THREADS + threadIdx.x] = value[j];
    }
    __syncthreads();
    const int own = threadIdx.x * ITEMS;
    double delta[ITEMS], local = 0, next = own ? second[own - 1] : value_after;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      value[j] = second[own + j];
      delta[j] = own + j < count ? double(first[own + j]) + a.gamma * next - value[j] : 0;
      next = value[j];
      local = local * k + delta[j];
    }
    // the advantage after this thread's tokens
    double advantage = block_scan(local, step, of_lane, threadIdx.x ? 0 : carry, of_warp);
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      advantage = delta[j] + k * advantage;
      first[own + j] = float(advantage);
      second[own + j] = float(advantage + value[j]);
    }
    __syncthreads();
    if (threadIdx.x == THREADS - 1) carry = advantage, value_after = value[ITEMS - 1];
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      const int i = j * THREADS + threadIdx.x;
      if (i >= count) break;
      a.advantage[end - 1 - i] = first[i];
      a.returns[end - 1 - i] = second[i];
    }
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

__device__ bool is_wrong(const int64_t *offsets, int64_t count, int64_t i, int64_t total) {
  return i == 0 ? offsets[0] != 0 || offsets[count] != total : i <= count && offsets[i] < offsets[i - 1];
}

__device__ bool is_wrong(const Gae &a, int64_t i) {
  return is_wrong(a.trajectories, a.trajectory_count, i, a.tokens) ||
         (a.turns && is_wrong(a.turns, a.turn_count, i, a.tokens));
}

// If offsets are not sorted, make every output NaN: nothing is read back to the host to raise an error. With few
// offsets every block looks at all of them first, which saves the launch of check_kernel.
constexpr int64_t FEW_OFFSETS = 4 * THREADS;

template <bool by_turn>
__global__ void __launch_bounds__(THREADS, 4) gae_kernel(Gae a, bool few) {
  if (few) {
    bool wrong = false;
#pragma unroll 1
    for (int64_t i = threadIdx.x; i <= max(a.trajectory_count, a.turn_count); i += THREADS) wrong |= is_wrong(a, i);
    if (__syncthreads_or(wrong)) {
#pragma unroll 1
      for (int64_t t = int64_t(blockIdx.x) * THREADS + threadIdx.x; t < a.tokens; t += int64_t(gridDim.x) * THREADS)
        a.advantage[t] = a.returns[t] = NAN;
      return;
    }
  }
  for (int64_t n = blockIdx.x; n < a.trajectory_count; n += gridDim.x) {
    const Range t = slice(a.trajectories, n, a.tokens);
    if constexpr (by_turn) over_turns(a, t);
    else over_tokens(a, t);
    __syncthreads();
  }
}

__global__ void __launch_bounds__(THREADS) check_kernel(Gae a) {
  if (!__syncthreads_or(is_wrong(a, int64_t(blockIdx.x) * THREADS + threadIdx.x))) return;
  for (int64_t t = threadIdx.x; t < a.tokens; t += THREADS) a.advantage[t] = a.returns[t] = NAN;
}

}  // namespace

Status gae_cuda(const Gae &a, void *stream) {
  if (a.tokens == 0) return OK;
  const int64_t most = 1 << 20, count = max(a.trajectory_count, a.turn_count);
  const unsigned grid = unsigned(min(max(a.trajectory_count, int64_t(1)), most)), checks = unsigned(count / THREADS + 1);
  const bool few = count < FEW_OFFSETS;
  const auto kernel = a.turns ? gae_kernel<true> : gae_kernel<false>;
  kernel<<<grid, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a, few);
  if (!few) check_kernel<<<checks, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a);
  return cudaGetLastError() == cudaSuccess ? OK : LAUNCH_FAILED;
}

}  // namespace stppo
