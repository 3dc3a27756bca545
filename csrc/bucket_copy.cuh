// Shared by the CUDA kernels over slices: casts between the types, and access to four neighbouring elements at once.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

namespace stppo {
namespace {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_float(float x, float &out) { out = x; }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16 &out) { out = __float2bfloat16_rn(x); }
__device__ __forceinline__ void convert(float x, float &out) { out = x; }
__device__ __forceinline__ void convert(__nv_bfloat16 x, __nv_bfloat16 &out) { out = x; }  // NaN keeps its bits
template <class S, class T>
__device__ __forceinline__ void convert(S x, T &out) {
  from_float(to_float(x), out);
}

template <class T>
__device__ bool aligned(const T *pointer, int64_t stride) {
  return reinterpret_cast<uintptr_t>(pointer) % (4 * sizeof(T)) == 0 && stride % 4 == 0;
}

template <class T>
struct alignas(4 * sizeof(T)) Four {
  T value[4];
};

}  // namespace
}  // namespace stppo
