// Shared by the CUDA kernels over slices: casts between the types, access to four neighbouring elements at once, and
// the way from an element's number in a slice to its row and column.
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

struct Place {
  int64_t row, column;
};

// The places of a few thousand steps from `start` on, in rows of `width` steps. A step is one element or four. There
// is one 64-bit division per block, because such divisions are slow; later rows are found by one of 32 bits.
class Places {
 public:
  __device__ Places(int64_t start, int64_t rows, int64_t width)
      : row_(rows == 1 ? 0 : start / width), column_(start - row_ * width), left_(short_of(width - column_)),
        width_(unsigned(short_of(width))) {}

  __device__ __forceinline__ Place operator[](int step) const {
    if (step < left_) return {row_, column_ + step};
    const unsigned after = unsigned(step - left_), row = after / width_;
    return {row_ + 1 + row, after - row * width_};
  }

 private:
  static __device__ int short_of(int64_t x) { return x < 0x7fffffff ? int(x) : 0x7fffffff; }

  int64_t row_, column_;
  int left_;  // steps in the first row; if it has more than 2^31, no step of this block is in another row
  unsigned width_;
};

}  // namespace
}  // namespace stppo
