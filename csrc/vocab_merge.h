// Merge the statistics of all shards of one row into the results of the op. Shared by the CPU and the CUDA kernels.
// Specification: megatron_stppo/algorithm/vocabulary.py, merge.
#pragma once
#include <cmath>

#include "ops.h"
#include "portable.h"

namespace stppo {

// Sums run in the order of the shards, in float64, so every rank gets the same bits. A row whose target is ignored
// gives 0. A row with a logit that is not finite gives NaN.
STPPO_BOTH void merge_row(const VocabMerge &a, int64_t r) {
  const auto at = [&](int64_t shard, int statistic) { return a.statistics[(shard * 5 + statistic) * a.rows + r]; };
  float top = at(0, 0);
  for (int64_t w = 1; w < a.shards; ++w) {
    const float x = at(w, 0);
    top = x > top || x != x ? x : top;
  }
  double total = 0, moment = 0, squares = 0, target = 0;
  bool missing = true;
  for (int64_t w = 0; w < a.shards; ++w) {
    const double max = at(w, 0), sum = at(w, 1);
    const double shift = max == -INFINITY ? 0 : max - double(top);  // all logits of the shard are -inf: its sums are 0
    const double scale = exp(shift);
    total += sum * scale;
    moment += (double(at(w, 2)) + shift * sum) * scale;
    squares += double(at(w, 3)) * (scale * scale);
    const float logit = at(w, 4);
    if (logit == logit) target += logit, missing = false;
  }
  const double log_sum = log(total);
  const bool ignored = a.target[r] == a.ignore_index;
  a.out.logprob[r] = ignored ? 0 : float(target - double(top) - log_sum);
  a.out.entropy[r] = ignored ? 0 : float(log_sum - moment / total);
  a.out.sum_p_sq[r] = ignored ? 0 : float(squares / (total * total));
  a.out.max[r] = top;
  a.out.log_sum[r] = float(log_sum);
  a.out.missing[r] = missing && !ignored && total == total;  // a NaN logit does not count as a missing target
}

}  // namespace stppo
