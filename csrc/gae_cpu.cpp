// CPU kernel of gae.cu. Threads take trajectories and process each from its end.
#include <algorithm>

#include "ops.h"

namespace stppo {
namespace {

void over_tokens(const Gae &a, int64_t first, int64_t last) {
  double advantage = 0, next_value = 0;
  const double decay = a.gamma * a.lam;
  for (int64_t t = last - 1; t >= first; --t) {
    const double value = a.value[t];
    advantage = double(a.reward[t]) + a.gamma * next_value - value + decay * advantage;
    next_value = value;
    a.advantage[t] = float(advantage);
    a.returns[t] = float(advantage + value);
  }
}

// A turn's value is the one at its first token; its reward is the sum over its tokens. An empty turn is skipped.
void over_turns(const Gae &a, int64_t first, int64_t last) {
  double advantage = 0, next_value = 0;
  const double decay = a.gamma * a.lam;
  int64_t turn = std::upper_bound(a.turns, a.turns + a.turn_count + 1, last - 1) - a.turns;  // the end of the last turn
  for (int64_t end = last; end > first;) {
    while (turn > 0 && a.turns[turn] >= end) --turn;
    const int64_t begin = std::max(a.turns[turn], first);
    double reward = 0;
    for (int64_t t = begin; t < end; ++t) reward += a.reward[t];
    const double value = a.value[begin];
    advantage = reward + a.gamma * next_value - value + decay * advantage;
    next_value = value;
    std::fill(a.advantage + begin, a.advantage + end, float(advantage));
    std::fill(a.returns + begin, a.returns + end, float(advantage + value));
    end = begin;
  }
}

// Return whether the offsets start at 0, never decrease and end at `total`.
bool cuts(const int64_t *offsets, int64_t slices, int64_t total) {
  bool good = offsets[0] == 0 && offsets[slices] == total;
  for (int64_t i = 0; i < slices; ++i) good &= offsets[i] <= offsets[i + 1];
  return good;
}

// Return whether every trajectory starts where a turn starts.
bool turns_stay_inside(const Gae &a) {
  int64_t turn = 0;
  for (int64_t i = 0; i <= a.trajectory_count; ++i) {
    while (turn < a.turn_count && a.turns[turn] < a.trajectories[i]) ++turn;
    if (a.turns[turn] != a.trajectories[i]) return false;
  }
  return true;
}

}  // namespace

Status gae_cpu(const Gae &a, int threads) {
  if (!cuts(a.trajectories, a.trajectory_count, a.tokens)) return BAD_OFFSETS;
  if (a.turns && (!cuts(a.turns, a.turn_count, a.tokens) || !turns_stay_inside(a))) return BAD_OFFSETS;
#pragma omp parallel for schedule(dynamic, 8) num_threads(threads) if (a.tokens > 8192)
  for (int64_t n = 0; n < a.trajectory_count; ++n) {
    const int64_t first = a.trajectories[n], last = a.trajectories[n + 1];
    if (first < last) (a.turns ? over_turns : over_tokens)(a, first, last);
  }
  return OK;
}

}  // namespace stppo
