// Runs CUDA kernels on a CPU, so that their logic is tested where there is no GPU. Force-included before a .cu.
//
// A block's threads are fibers that run until they meet: at a barrier, or in a warp operation. Between two
// meetings warps and lanes run in the order that `order` chooses, each as far as it can: a missing barrier shows
// as a result that depends on the order. A meeting that never completes is an error, not a hang. Blocks run one
// after another, in that order too. Shared memory is filled with NaN before each block.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __shared__ static __attribute__((section("emulated_shared")))

using std::max;
using std::min;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
using cudaStream_t = void *;
enum cudaError_t { cudaSuccess };
inline cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

namespace emulator {

extern dim3 thread, block, grid, threads;
extern int order;  // of warps, lanes and blocks: 0 rising, 1 falling, else shuffled with this seed

// Runs `kernel` once per thread of every block.
void launch(dim3 grid, dim3 threads, const std::function<void()> &kernel);
void barrier();
enum WarpOp { SHUFFLE, BALLOT, SYNC };
// Every lane of `mask` comes here with its bits; each gets those of lane `source` (BALLOT: whose are not 0).
uint64_t meet(WarpOp op, unsigned mask, uint64_t bits, int source);

template <class T>
T shuffle(unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = meet(SHUFFLE, mask, bits, source);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
inline int lane() { return int(thread.x % 32); }

}  // namespace emulator

#define threadIdx emulator::thread
#define blockIdx emulator::block
#define gridDim emulator::grid
#define blockDim emulator::threads

inline void __syncthreads() { emulator::barrier(); }
inline int __syncthreads_or(int value) {
  static int any;
  __syncthreads();
  any = 0;
  __syncthreads();
  any |= value != 0;
  __syncthreads();
  return any;
}
inline int __syncthreads_count(int value) {
  static int count;
  __syncthreads();
  count = 0;
  __syncthreads();
  count += value != 0;
  __syncthreads();
  return count;
}
inline void __syncwarp(unsigned mask = ~0u) { emulator::meet(emulator::SYNC, mask, 0, emulator::lane()); }
inline void __threadfence() {}
inline void __threadfence_block() {}

// A lane whose source lies outside its group of `width` keeps its own value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return emulator::shuffle(mask, value, emulator::lane() / width * width + (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int source = emulator::lane() ^ bits;
  return emulator::shuffle(mask, value, source / width > emulator::lane() / width ? emulator::lane() : source);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  const int lane = emulator::lane(), source = lane + int(distance);
  return emulator::shuffle(mask, value, source / width == lane / width ? source : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  const int lane = emulator::lane(), source = lane - int(distance);
  return emulator::shuffle(mask, value, source >= lane / width * width ? source : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return unsigned(emulator::meet(emulator::BALLOT, mask, predicate != 0, emulator::lane()));
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
template <class T>
T __reduce_add_sync(unsigned mask, T value) {
  for (int d = 16; d; d /= 2) value += __shfl_xor_sync(mask, value, d);
  return value;
}

template <class T, class V>
T atomicAdd(T *at, V value) {
  const T before = *at;
  *at = T(before + value);
  return before;
}
template <class T>
T atomicExch(T *at, T value) {
  return std::exchange(*at, value);
}
template <class T, class V>
T atomicOr(T *at, V value) {
  const T before = *at;
  *at = T(before | value);
  return before;
}

template <class T> T __ldg(const T *p) { return *p; }
template <class T> T __ldcs(const T *p) { return *p; }
template <class T> T __ldcg(const T *p) { return *p; }
template <class T> T __ldca(const T *p) { return *p; }
template <class T> T __ldcv(const T *p) { return *p; }
template <class T> void __stcs(T *p, std::type_identity_t<T> x) { *p = x; }
template <class T> void __stcg(T *p, std::type_identity_t<T> x) { *p = x; }

struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) double2 { double x, y; };
struct alignas(16) longlong2 { long long x, y; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline double2 make_double2(double x, double y) { return {x, y}; }

inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline double __fma_rn(double x, double y, double z) { return std::fma(x, y, z); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __double2hiint(double x) { return int(std::bit_cast<uint64_t>(x) >> 32); }
inline int __double2loint(double x) { return int(std::bit_cast<uint64_t>(x)); }
inline double __hiloint2double(int high, int low) {
  return std::bit_cast<double>(uint64_t(unsigned(high)) << 32 | unsigned(low));
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
inline unsigned __fns(unsigned mask, unsigned base, int offset) {  // of a positive offset
  for (unsigned bit = base; bit < 32; ++bit)
    if (mask >> bit & 1 && --offset == 0) return bit;
  return ~0u;
}
