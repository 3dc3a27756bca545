// The columns of metrics.jsonl that are drawn, and the runs that have them.

// Title, then {name as in docs/metrics.md: label}. N stands for every number that occurs.
const PANELS = [
  ["Reward", { "reward/mean": "training", "evaluate/reward": "held out" }],
  ["Exact match", { "rollout/exact_match": "training", "evaluate/exact_match": "held out" }],
  ["Action tokens clipped, share", { "actor/clip_fraction": "clipped" }],
  ["Clipped by turn, share", { "actor/clip_fraction_turn_N": "turn N", "actor/clip_fraction_turn_last": "last turn" }],
  ["Importance ratio", { "actor/ratio_p1": "1 %", "actor/ratio_p50": "median", "actor/ratio_p99": "99 %" }],
  ["Clipping bias ‖C‖", {
    "actor/clipping_bias": "as used", "actor/clipping_bias_coefficient": "coefficient",
    "actor/clipping_bias_logit": "logit", "actor/clipping_bias_gradient": "gradient",
  }],
  ["Correction, scale", { "actor/correction_scale": "scale" }],
  ["Gradient that clipping removed, and rate of the steps, shares", { "actor/removed_share": "removed gradient", "actor/effective_share": "effective rate" }],
  ["KL to the old policy, nats per token", { "actor/kl_to_old": "before the steps", "actor/kl_after": "after the update" }],
  ["KL to the reference, nats per token", { "kl/reference": "k1", "kl/reference_k3": "k3" }],
  ["Entropy, nats per token", { "actor/entropy": "entropy" }],
  ["Gradient norm, actor", { "actor/gradient_norm": "before scaling", "actor/scaled_gradient_norm": "after scaling" }],
  ["Gradient norm, critic", { "critic/gradient_norm": "critic" }],
  ["Critic, explained variance", { "critic/explained_variance": "explained variance" }],
  ["Advantage variance", { "advantage/variance": "as used", "advantage/variance_before_whitening": "before whitening" }],
  ["Train/serve mismatch, nats per token", { "mismatch/mean_abs": "mean |trainer − engine|" }],
  ["Staleness, policy versions", { "rollout/staleness": "mean of trajectories", "rollout/staleness_max": "largest" }],
  ["Waiting, share of time", { "serving/trainer_idle_share": "trainer", "serving/idle_share": "replicas" }],
  ["Episodes admitted and not trained on", {
    "serving/episodes_waiting": "not assigned", "serving/episodes_playing": "played", "serving/episodes_finished": "finished",
  }],
  ["Pause of a replica for new weights, ms", { "serving/pause_ms": "mean", "serving/longest_pause_ms": "longest so far" }],
  ["Tokens of the replicas", { "serving/generated_tokens": "generated", "serving/recomputed_tokens": "computed again" }],
  ["Length bias of order=completion, tokens", { "serving/length_bias": "mean of trained episodes" }],
  ["Per episode", { "rollout/turns": "turns", "rollout/tool_calls": "tool calls" }],
  ["Behaviour, share", {
    "rollout/called_tool": "episodes with a tool call", "rollout/valid_action_rate": "valid actions", "rollout/truncated": "episodes cut off",
  }],
  ["Response, tokens", {
    "rollout/response_tokens": "mean", "rollout/response_tokens_p95": "95 %", "rollout/response_tokens_max": "largest",
  }],
  ["Tokens computed in the update, share of the trajectories'", { "update/distinct_share": "share" }],
  ["Seconds per iteration", { seconds: "seconds" }],
];

const OWN = 24; // most panels of the environment's own metrics

// A panel for each metric of the environment, in training and on held-out tasks.
function environmentPanels(there) {
  const prefix = "environment/";
  const names = new Set(there.map((column) => column.replace(/^evaluate\//, "")).filter((column) => column.startsWith(prefix)));
  return [...names].slice(0, OWN).map((name) =>
    [`Environment: ${name.slice(prefix.length)}`, { [name]: "training", [`evaluate/${name}`]: "held out" }]);
}

// [[title, [[column, label], ...]], ...] of the columns of these runs. With several runs, each column has a panel.
function panels(runs, other) {
  const there = [...new Set(runs.flatMap((run) => Object.keys(run.columns)))].sort(byNumber);
  const found = (name, label) => {
    const [before, after] = name.split("_N");
    if (after === undefined) return there.includes(name) ? [[name, label]] : [];
    const numbers = there.map((column) => [column, column.slice(before.length + 1)]);
    return numbers.filter(([column, number]) => column === `${before}_${number}` && /^\d+$/.test(number))
      .map(([column, number]) => [column, label.replace("N", number)]);
  };
  const wanted = [...(other ? [[other, { [other]: other }]] : []), ...PANELS, ...environmentPanels(there)];
  return wanted.flatMap(([title, names]) => {
    const columns = Object.entries(names).flatMap(([name, label]) => found(name, label));
    if (!columns.length) return [];
    if (RUNS.length === 1 || Object.keys(names).length === 1) return [[title, columns]];
    return columns.map(([column, label]) => [`${title}: ${label}`, [[column, label]]]);
  });
}

// Fields by which runs can be grouped, the algorithm first. Runs with the same value share a colour.
function groupings() {
  const fields = [...new Set(RUNS.flatMap((run) => Object.keys(run.config)))];
  const groups = fields.filter((field) => {
    const values = new Set(RUNS.map((run) => run.config[field]));
    return values.size > 1 && values.size < RUNS.length;
  });
  return groups.sort((a, b) => (b === "algorithm.preset") - (a === "algorithm.preset"));
}

const byNumber = (a, b) => a.localeCompare(b, "en", { numeric: true });
