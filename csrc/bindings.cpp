// Python bindings of the extension. Every function takes pointers and sizes and returns a status. The GIL is
// released while an op runs. The callers are megatron_stppo/ops/*.py; they check device, dtype, shape and
// contiguity first.
#include <pybind11/pybind11.h>

#include "ops.h"

namespace py = pybind11;
using namespace stppo;
using Pointer = uintptr_t;

namespace {

template <class T>
T *to(Pointer address) {
  return reinterpret_cast<T *>(address);
}

// Run the CPU or the CUDA kernel. `where` is the number of threads on the CPU, and the stream's handle on a GPU.
template <class Arguments, auto cpu, auto cuda>
int call(const Arguments &arguments, bool on_gpu, Pointer where) {
  py::gil_scoped_release release;
#ifdef STPPO_CUDA
  if (on_gpu) return cuda(arguments, to<void>(where));
#else
  if (on_gpu) return NOT_BUILT;
#endif
  return cpu(arguments, int(where));
}
#ifdef STPPO_CUDA
#define STPPO_CALL(Arguments, name) call<Arguments, name##_cpu, name##_cuda>
#else
#define STPPO_CALL(Arguments, name) call<Arguments, name##_cpu, nullptr>
#endif

Logits logits(Pointer data, int dtype, int64_t rows, int64_t columns, int64_t valid, int64_t vocab_start, Pointer target,
              Pointer temperature, float uniform_temperature, int64_t ignore_index) {
  return {to<void>(data), Dtype(dtype), rows, columns, valid, vocab_start, to<int64_t>(target), to<float>(temperature),
          uniform_temperature, ignore_index};
}

// [6, T] float32 in the order of VocabMerged; the last row holds `missing` as bytes.
VocabMerged merged(Pointer at, int64_t rows) {
  float *m = to<float>(at);
  return {m, m + rows, m + 2 * rows, m + 3 * rows, m + 4 * rows, reinterpret_cast<uint8_t *>(m + 5 * rows)};
}

Bound bound(float value) { return {value, std::log2(value)}; }

int clipped_surrogate(Pointer logprob, Pointer old_logprob, Pointer advantage, Pointer weight, Pointer sum_p_sq,
                      Pointer offsets, int64_t tokens, int64_t segments, float uniform_weight, float low, float high,
                      float dual, double length_power, bool by_sum, Pointer ratio, Pointer gradient, Pointer bias,
                      Pointer totals, Pointer workspace, Pointer tickets, int64_t max_blocks, Pointer part,
                      Pointer whole, bool on_gpu, Pointer where) {
  const Surrogate a{to<float>(logprob), to<float>(old_logprob), to<float>(advantage), to<float>(weight),
                    to<float>(sum_p_sq), to<int64_t>(offsets),  tokens,               segments,
                    uniform_weight,      bound(low),            bound(high),          bound(dual),
                    length_power,        by_sum,
                    to<float>(ratio),    to<float>(gradient),   to<float>(bias),
                    to<float>(totals),   to<double>(workspace),
                    to<unsigned>(tickets), max_blocks,            to<double>(part),     to<double>(whole)};
  return STPPO_CALL(Surrogate, clipped_surrogate)(a, on_gpu, where);
}

int vocab_statistics(const Logits &l, Pointer out, bool on_gpu, Pointer where) {
  return STPPO_CALL(VocabStatistics, vocab_statistics)({l, to<float>(out)}, on_gpu, where);
}

int vocab_merge(Pointer statistics, int64_t shards, int64_t rows, Pointer target, int64_t ignore_index, Pointer out,
                bool on_gpu, Pointer where) {
  const VocabMerge a{to<float>(statistics), shards, rows, to<int64_t>(target), ignore_index, merged(out, rows)};
  return STPPO_CALL(VocabMerge, vocab_merge)(a, on_gpu, where);
}

int vocab_gradient(const Logits &l, Pointer statistics, Pointer g, Pointer h, Pointer c, Pointer out, bool on_gpu,
                   Pointer where) {
  const VocabGradient a{l, merged(statistics, l.rows), to<float>(g), to<float>(h), to<float>(c), to<void>(out)};
  return STPPO_CALL(VocabGradient, vocab_gradient)(a, on_gpu, where);
}

int bucket_copy(Pointer slices, int64_t count, Pointer owners, int64_t pieces, int source, int target, bool on_gpu,
                Pointer where) {
  const BucketCopy a{to<Slice>(slices), count, to<int>(owners), pieces, Dtype(source), Dtype(target)};
  return STPPO_CALL(BucketCopy, bucket_copy)(a, on_gpu, where);
}

int bucket_checksum(Pointer slices, int64_t count, Pointer owners, int64_t pieces, int source, int target, Pointer sums,
                    Pointer counters, bool on_gpu, Pointer where) {
  const BucketChecksum a{to<SummedSlice>(slices), count, to<int>(owners), pieces, Dtype(source), Dtype(target),
                         to<uint32_t>(sums),     to<uint32_t>(counters)};
  return STPPO_CALL(BucketChecksum, bucket_checksum)(a, on_gpu, where);
}

}  // namespace

PYBIND11_MODULE(_csrc, m) {
  m.doc() = "Kernels of megatron_stppo; call them through megatron_stppo.ops.";
#ifdef STPPO_CUDA
  m.attr("cuda_archs") = STPPO_CUDA;  // such as "90a"
#else
  m.attr("cuda_archs") = "";
#endif
  m.attr("surrogate_row") = int(SURROGATE_ROWS * SURROGATE_SUMS);
  m.attr("surrogate_totals") = SURROGATE_TOTALS;
  m.attr("segment_sums") = SEGMENT_SUMS;
  m.attr("copy_piece") = COPY_PIECE;
  m.attr("checksum_block") = CHECKSUM_BLOCK;
  py::class_<Logits>(m, "Logits").def(py::init(&logits));
  m.def("clipped_surrogate", &clipped_surrogate);  // objective, ratios and coefficients in one pass
  m.def("surrogate_tiles", &surrogate_tiles);      // tokens + segments -> tiles of its workspace
  m.def("vocab_statistics", &vocab_statistics);    // five numbers per row of one shard of logits
  m.def("vocab_merge", &vocab_merge);              // numbers of all shards -> log-prob, entropy, sum p^2
  m.def("vocab_gradient", &vocab_gradient);        // gradients of these three -> gradient of the logits
  m.def("bucket_copy", &bucket_copy);              // copy many strided slices and cast them
  m.def("bucket_checksum", &bucket_checksum);      // checksum of every slice after the cast
}
