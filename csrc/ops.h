// Every op of the extension: one argument record, one entry per device.
//
// Pointers lead to contiguous arrays of the stated length on the op's device, sizes count elements. An entry
// allocates nothing, reads nothing back to the host (CUDA), and returns OK or what is wrong; outputs and
// workspaces belong to the caller. CUDA entries only enqueue on `stream`; they can be captured into a graph.
#pragma once
#include <cstdint>

namespace stppo {

enum Status : int { OK = 0, BAD_OFFSETS = 1, LAUNCH_FAILED = 2, NOT_BUILT = 3 };
enum Dtype : int { FLOAT32 = 0, BFLOAT16 = 1 };

// algorithm/surrogate.py
enum SurrogateSum : int { OBJECTIVE, CLIPPED, LIVE, BIAS_SQ, GRAD_SQ, K1, K3, LOGIT_BIAS_SQ, LOGIT_GRAD_SQ, SURROGATE_SUMS };
constexpr int SURROGATE_TOTALS = 10, SEGMENT_SUMS = 4;
constexpr int64_t SURROGATE_TILE = 4096;  // tokens + segments that one partial sum covers
constexpr int SURROGATE_ROWS = 4;  // of SURROGATE_SUMS doubles that the workspace has per tile

struct Surrogate {
  const float *logprob, *old_logprob, *advantage;  // [T]
  const float *weight;                             // [T], or null: `uniform_weight` for every token
  const float *sum_p_sq;                           // [T], or null: no LOGIT_* sums
  const int64_t *offsets;                          // [S+1], or null: every token a segment of its own
  int64_t tokens, segments;
  float uniform_weight, low, high, dual;           // bounds of the ratio; dual = infinity: none
  bool by_sum;                                     // ratio = exp(sum), not exp(mean)
  float *ratio;                                    // [S]
  float *gradient, *bias;                          // [T] g_u, b_u; bias may be null
  float *totals;                                   // [SURROGATE_TOTALS], see surrogate_totals
  double *workspace;                               // [SURROGATE_ROWS, tiles, SURROGATE_SUMS]
  unsigned *tickets;                               // CUDA: [1 + tiles], zero before and after
  int64_t max_blocks;                              // CUDA: no result depends on it
  // Turns that are split over ranks: first `part` is written and nothing else; then, summed over the ranks, it
  // is `whole`. Both [S, SEGMENT_SUMS]: tokens, sum of log ratios, S+, S-. Null where segments are whole.
  double *part;
  const double *whole;

  // `tiles` of the workspace.
  constexpr int64_t tiles() const { return (tokens + (offsets ? segments : 0)) / SURROGATE_TILE + 1; }
};
Status clipped_surrogate_cpu(Surrogate, int threads);
Status clipped_surrogate_cuda(const Surrogate &, void *stream);


// algorithm/vocabulary.py. Rows of `columns` logits, of which the first `valid` are true vocabulary.
struct Logits {
  const void *data;
  Dtype dtype;
  int64_t rows, columns, valid, vocab_start;
  const int64_t *target;     // [T] global ids
  const float *temperature;  // [T], or null: `uniform_temperature` for every row
  float uniform_temperature;
  int64_t ignore_index;
};

// Per row of one shard: max, sum, moment, squares, the target's logit (NaN where it is not here).
struct VocabStatistics {
  Logits logits;
  float *out;  // [5, T]
};
Status vocab_statistics_cpu(const VocabStatistics &, int threads);
Status vocab_statistics_cuda(const VocabStatistics &, void *stream);

// The numbers of all shards together, in the shards' order.
struct VocabMerged {
  float *logprob, *entropy, *sum_p_sq, *max, *log_sum;  // [T] each; logprob etc. are 0 on ignored rows
  uint8_t *missing;                                     // [T] 1: no shard holds the target, and it is not ignored
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

// d logits for cotangents g, h, c of logprob, entropy, sum p^2 (null: 0); `out` may be the logits themselves.
struct VocabGradient {
  Logits logits;
  VocabMerged merged;
  const float *g, *h, *c;  // [T] or null
  void *out;               // [T, columns], the logits' dtype
};
Status vocab_gradient_cpu(const VocabGradient &, int threads);
Status vocab_gradient_cuda(const VocabGradient &, void *stream);

// algorithm/gae.py. `turns` null: every token is a step.
struct Gae {
  const float *reward, *value;           // [T]
  const int64_t *trajectories, *turns;   // [N+1]; [S+1] or null
  int64_t tokens, trajectory_count, turn_count;
  double gamma, lam;
  float *advantage, *returns;            // [T]
};
Status gae_cpu(const Gae &, int threads);
Status gae_cuda(const Gae &, void *stream);

// reshard: many two-dimensional slices, cast on the way.
struct Slice {
  const void *source;
  void *target;
  int64_t rows, width, source_stride, target_stride;  // in elements
};
struct BucketCopy {
  const Slice *slices;  // on the op's device
  int64_t count;
  Dtype source, target;
};
Status bucket_copy_cpu(const BucketCopy &, int threads);
Status bucket_copy_cuda(const BucketCopy &, void *stream);

// ops/bucket_checksum.py: a sum of every slice's bits as cast to `target`, which depends on their order.
struct SummedSlice {
  const void *source;
  int64_t rows, width, stride;  // in elements
  int64_t place;                // of its sum
};
struct BucketChecksum {
  const SummedSlice *slices;  // on the op's device
  int64_t count;
  Dtype source, target;
  uint32_t *sums;  // [places, 2]: low and high half of each sum; zero before
};
Status bucket_checksum_cpu(const BucketChecksum &, int threads);
Status bucket_checksum_cuda(const BucketChecksum &, void *stream);

}  // namespace stppo
