// The ops of the extension. Each op has one argument struct, and one function per device.
//
// Pointers lead to contiguous arrays of the stated length on the op's device. Sizes count elements. A function
// allocates nothing, reads nothing back to the host (CUDA), and returns OK or an error status. The caller owns outputs
// and workspaces. CUDA functions only enqueue work on `stream`, so they can be captured into a CUDA graph.
#pragma once
#include <cstdint>

namespace stppo {

enum Status : int { OK = 0, BAD_OFFSETS = 1, LAUNCH_FAILED = 2, NOT_BUILT = 3 };
enum Dtype : int { FLOAT32 = 0, BFLOAT16 = 1 };

// Reference implementation: algorithm/surrogate.py.
enum SurrogateSum : int { OBJECTIVE, CLIPPED, LIVE, BIAS_SQ, GRAD_SQ, K1, K3, LOGIT_BIAS_SQ, LOGIT_GRAD_SQ, SURROGATE_SUMS };
constexpr int SURROGATE_TOTALS = 10, SEGMENT_SUMS = 4;
// Tokens + segments that one partial sum covers. On an H100, tiles of 4,096 are 5 to 15 % faster than tiles of 2,048 from
// 4M tokens on, and up to 39 % slower with at most 0.5M tokens (docs/performance.md). Training calls the surrogate with
// about update.logit_rows tokens (4,096), for which no size has been measured on a GPU.
constexpr int64_t SURROGATE_TILE = 4096;
constexpr int SURROGATE_ROWS = 4;  // rows of SURROGATE_SUMS doubles in the workspace, per tile

struct Surrogate {
  const float *logprob, *old_logprob, *advantage;  // [T]
  const float *weight;                             // [T], or null: `uniform_weight` for every token
  const float *sum_p_sq;                           // [T], or null: the LOGIT_* sums are not computed
  const int64_t *offsets;                          // [S+1], or null: every token is a segment
  int64_t tokens, segments;
  float uniform_weight, low, high, dual;           // bounds of the ratio; dual = infinity: no dual clip
  bool by_sum;                                     // ratio = exp(sum of log ratios) instead of exp(mean)
  float *ratio;                                    // [S]
  float *gradient, *bias;                          // [T] g_u, b_u; bias may be null
  float *totals;                                   // [SURROGATE_TOTALS], see surrogate_totals
  double *workspace;                               // [SURROGATE_ROWS, tiles, SURROGATE_SUMS]
  unsigned *tickets;                               // CUDA: [2 + 2 tiles], zero before and after the call
  int64_t max_blocks;                              // CUDA: does not change any result
  // For turns that are split over ranks, the op is called twice. The first call writes `part` and nothing else. The
  // caller sums it over the ranks and passes the result as `whole` to the second call. Both are [S, SEGMENT_SUMS]:
  // tokens, sum of log ratios, S+, S-. Null if no segment is split.
  double *part;
  const double *whole;

  // The number `tiles` in the shape of the workspace.
  constexpr int64_t tiles() const { return (tokens + (offsets ? segments : 0)) / SURROGATE_TILE + 1; }
};
Status clipped_surrogate_cpu(Surrogate, int threads);
Status clipped_surrogate_cuda(const Surrogate &, void *stream);


// Reference implementation: algorithm/vocabulary.py. Rows of `columns` logits; the first `valid` columns belong to the
// vocabulary, the others are padding.
struct Logits {
  const void *data;
  Dtype dtype;
  int64_t rows, columns, valid, vocab_start;
  const int64_t *target;     // [T] global token ids
  const float *temperature;  // [T], or null: `uniform_temperature` for every row
  float uniform_temperature;
  int64_t ignore_index;
};

// Numbers per row of one shard: max, sum, moment, squares, and the target's logit (NaN if another shard holds it).
struct VocabStatistics {
  Logits logits;
  float *out;  // [5, T]
};
Status vocab_statistics_cpu(const VocabStatistics &, int threads);
Status vocab_statistics_cuda(const VocabStatistics &, void *stream);

// The result for all shards. The shards are merged in their order.
struct VocabMerged {
  float *logprob, *entropy, *sum_p_sq, *max, *log_sum;  // [T] each; logprob etc. are 0 on ignored rows
  uint8_t *missing;                                     // [T] 1: no shard holds the target; not an ignored row
};
struct VocabMerge {
  const float *statistics;  // [W, 5, T]
  int64_t shards, rows;
  const int64_t *target;
  int64_t ignore_index;
  VocabMerged out;
};
Status vocab_merge_cpu(const VocabMerge &, int threads);
Status vocab_merge_cuda(const VocabMerge &, void *stream);

// The gradient of the logits, from the gradients g, h, c of logprob, entropy and sum p^2 (null: 0). `out` may be the
// logits themselves.
struct VocabGradient {
  Logits logits;
  VocabMerged merged;
  const float *g, *h, *c;  // [T] or null
  void *out;               // [T, columns], the logits' dtype
};
Status vocab_gradient_cpu(const VocabGradient &, int threads);
Status vocab_gradient_cuda(const VocabGradient &, void *stream);

// Reference implementation: algorithm/gae.py. If `turns` is null, every token is a step.
struct Gae {
  const float *reward, *value;           // [T]
  const int64_t *trajectories, *turns;   // [N+1]; [S+1] or null
  int64_t tokens, trajectory_count, turn_count;
  double gamma, lam;
  float *advantage, *returns;            // [T]
};
Status gae_cpu(const Gae &, int threads);
Status gae_cuda(const Gae &, void *stream);

// For the reshard: copy many two-dimensional slices, with a cast. CUDA: a slice is cut into pieces of a fixed number of
// elements, numbered through all slices. Every block works on one piece.
constexpr int64_t COPY_PIECE = 4096;  // elements
constexpr int64_t CHECKSUM_BLOCK = 16384;  // 16-bit numbers after the cast; a float32 is two of them
struct Slice {
  const void *source;
  void *target;
  int64_t rows, width, source_stride, target_stride;  // in elements
  int64_t first_piece;                                // number of the slice's first piece
};
struct BucketCopy {
  const Slice *slices;  // on the op's device
  int64_t count;
  const int *owners;    // CUDA: [pieces] index of the slice of every piece
  int64_t pieces;
  Dtype source, target;
};
Status bucket_copy_cpu(const BucketCopy &, int threads);
Status bucket_copy_cuda(const BucketCopy &, void *stream);

// ops/bucket_checksum.py: a checksum of every slice's bits after the cast to `target`. It depends on their order.
struct SummedSlice {
  const void *source;
  int64_t rows, width, stride;  // in elements
  int64_t place;                // index of its sum
  int64_t first_piece;
};
struct BucketChecksum {
  const SummedSlice *slices;  // on the op's device
  int64_t count;
  const int *owners;          // as in BucketCopy
  int64_t pieces;
  Dtype source, target;
  uint32_t *sums;      // [places, 2]: low and high half of each sum; CPU: zero before the call
  uint32_t *counters;  // CUDA: [count, 3], zero before and after the call
};
Status bucket_checksum_cpu(const BucketChecksum &, int threads);
Status bucket_checksum_cuda(const BucketChecksum &, void *stream);

}  // namespace stppo
