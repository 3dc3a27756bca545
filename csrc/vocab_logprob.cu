// Log-prob, entropy and sum of squared probabilities of vocabulary-parallel logits. The forward pass reads the logits
// once (a running maximum rescales the sums). The backward pass reads and writes them once, in place if requested.
//
// There is one block per row for any number of rows, so a row's bits do not depend on its neighbours.
#include "vocab_logprob.cuh"

namespace stppo {
namespace {

template <class T, int VALUES>
__global__ void __launch_bounds__(THREADS) statistics_kernel(VocabStatistics a) {
  for (int64_t row = blockIdx.x; row < a.logits.rows; row += gridDim.x) row_statistics<T, VALUES>(a, row);
}

template <class T, int VALUES>
__global__ void __launch_bounds__(THREADS) gradient_kernel(VocabGradient a) {
  for (int64_t row = blockIdx.x; row < a.logits.rows; row += gridDim.x) row_gradient<T, VALUES>(a, row);
}

constexpr int MERGE_THREADS = 32;  // few, so that some thousand rows occupy every multiprocessor

__global__ void __launch_bounds__(MERGE_THREADS) merge_kernel(VocabMerge a) {
  const int64_t row = int64_t(blockIdx.x) * MERGE_THREADS + threadIdx.x;
  if (row >= a.rows) return;
  merge_row(a, row);
  if (a.out.missing[row]) a.out.logprob[row] = NAN;  // NaN, because nothing is read back to the host to raise an error
}

constexpr int64_t MAX_GRID = 0x7fffffff;

bool aligned(const Logits &l, const void *other) {
  const int64_t size = l.dtype == FLOAT32 ? 4 : 2;
  return l.columns * size % 16 == 0 && reinterpret_cast<uintptr_t>(l.data) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(other) % 16 == 0;
}

Status last_launch() { return cudaGetLastError() == cudaSuccess ? OK : LAUNCH_FAILED; }

}  // namespace

Status vocab_statistics_cuda(const VocabStatistics &a, void *stream) {
  if (a.logits.rows == 0) return OK;
  const unsigned grid = unsigned(a.logits.rows < MAX_GRID ? a.logits.rows : MAX_GRID);
  const auto kernel = a.logits.dtype == FLOAT32
                          ? aligned(a.logits, nullptr) ? statistics_kernel<float, 4> : statistics_kernel<float, 1>
                      : aligned(a.logits, nullptr) ? statistics_kernel<__nv_bfloat16, 8>
                                                   : statistics_kernel<__nv_bfloat16, 1>;
  kernel<<<grid, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a);
  return last_launch();
}

Status vocab_gradient_cuda(const VocabGradient &a, void *stream) {
  if (a.logits.rows == 0) return OK;
  const unsigned grid = unsigned(a.logits.rows < MAX_GRID ? a.logits.rows : MAX_GRID);
  const auto kernel = a.logits.dtype == FLOAT32
                          ? aligned(a.logits, a.out) ? gradient_kernel<float, 4> : gradient_kernel<float, 1>
                      : aligned(a.logits, a.out) ? gradient_kernel<__nv_bfloat16, 8>
                                                 : gradient_kernel<__nv_bfloat16, 1>;
  kernel<<<grid, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a);
  return last_launch();
}

Status vocab_merge_cuda(const VocabMerge &a, void *stream) {
  if (a.rows == 0) return OK;
  const unsigned grid = unsigned((a.rows + MERGE_THREADS - 1) / MERGE_THREADS);
  merge_kernel<<<grid, MERGE_THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a);
  return last_launch();
}

}  // namespace stppo
