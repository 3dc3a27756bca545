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
// The work, tokens + segments, is divided into tiles with a partial sum each. The tile is the smallest of 1,024, 2,048
// and 4,096 that makes at most SURROGATE_MOST_TILES tiles, else 4,096: a smaller tile is faster as long as the GPU runs
// all tiles at once. On an H100, tiles of 1,024 / 2,048 / 4,096 take 11.2 / 13.3 / 17.9 us for 4,096 tokens in turns,
// 18.2 / 18.4 / 23.3 us for 524,288, and 89.5 / 66.0 / 59.4 us for 4,194,304. The tile depends on
// the size of the input alone, and not on the GPU, so that the bits of the sums do not depend on the GPU either.
constexpr int SMALLEST_TILE_LOG2 = 10, LARGEST_TILE_LOG2 = 12;
constexpr int64_t SMALLEST_TILE = int64_t(1) << SMALLEST_TILE_LOG2, LARGEST_TILE = int64_t(1) << LARGEST_TILE_LOG2;
constexpr int64_t SURROGATE_MOST_TILES = 528;  // 4 blocks on each of 132 multiprocessors
constexpr int SURROGATE_ROWS = 8;  // rows of SURROGATE_SUMS doubles in the workspace, per tile

// Return log2 of the tile: kernels divide by the tile with a shift.
constexpr int surrogate_tile_log2(int64_t work) {
  int log2 = SMALLEST_TILE_LOG2;
  while (log2 < LARGEST_TILE_LOG2 && (work >> log2) + 1 > SURROGATE_MOST_TILES) ++log2;
  return log2;
}
constexpr int64_t surrogate_tiles(int64_t work) { return (work >> surrogate_tile_log2(work)) + 1; }

struct Bound {
  float value, log2;
};

struct Surrogate {
  const float *logprob, *old_logprob, *advantage;  // [T]
  const float *weight;                             // [T], or null: `uniform_weight` for every token
  const float *sum_p_sq;                           // [T], or null: the LOGIT_* sums are not computed
  const int64_t *offsets;                          // [S+1], or null: every token is a segment
  int64_t tokens, segments;
  float uniform_weight;
  Bound low, high, dual;                           // of the ratio; dual = infinity: no dual clip
  double length_power;                             // of n tokens: bound^(n^-length_power)
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

  constexpr int64_t work() const { return tokens + (offsets ? segments : 0); }
  constexpr int tile_log2() const { return surrogate_tile_log2(work()); }
  constexpr int64_t tile() const { return int64_t(1) << tile_log2(); }
  constexpr int64_t tiles() const { return surrogate_tiles(work()); }  // `tiles` in the shape of the workspace
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
