// Panels of curves over iterations, all read at one iteration, the cursor.

// Title, then the columns of metrics.jsonl that it draws and their labels.
const PANELS = [
  ["Reward", { "reward/mean": "reward" }],
  ["Exact match", { "rollout/exact_match": "training", "evaluate/exact_match": "held out" }],
  ["Action tokens clipped, share", { "actor/clip_fraction": "clipped" }],
  ["Clipping bias ‖C‖", { "actor/clipping_bias": "‖C‖" }],
  ["Correction, scale", { "actor/correction_scale": "scale" }],
  ["KL, nats per token", { "actor/kl_to_old": "to the old policy", "kl/reference": "to the reference" }],
  ["Entropy, nats per token", { "actor/entropy": "entropy" }],
  ["Gradient norm", { "actor/gradient_norm": "actor", "critic/gradient_norm": "critic" }],
  ["Train/serve mismatch, nats per token", { "mismatch/mean_abs": "mean |trainer − engine|" }],
  ["Critic, explained variance", { "critic/explained_variance": "explained variance" }],
  ["Behaviour", { "rollout/searched": "episodes that search", "rollout/valid_action_rate": "valid actions" }],
  ["Turns per episode", { "rollout/turns": "turns" }],
];
const WIDTH = 440, HEIGHT = 210, LEFT = 54, RIGHT = 10, TOP = 8, BOTTOM = 26, COLOURS = 8;

const ends = () => {
  const all = RUNS.flatMap((run) => [
    ...Object.values(run.columns).flatMap(([x]) => (x.length ? [x[0], x[x.length - 1]] : [])),
    ...run.phases.iterations,
  ]);
  return all.length ? [Math.min(...all), Math.max(...all)] : [0, 1];
};

// Steps of 1, 2 or 5 times a power of ten, about `count` of them.
function ticks(low, high, count, whole) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  let step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}

// [position of a value between 0 and 1, the values to label]
function verticalScale(values, logarithmic) {
  let low = Math.min(...values), high = Math.max(...values);
  if (logarithmic) {
    const [a, b] = [Math.log10(low), Math.log10(high)], room = Math.max(0.05, (b - a) * 0.05);
    const from = a - room, to = b + room;
    let decades = ticks(from, to, 4, true).map((power) => 10 ** power);
    if (decades.length < 2) decades = ticks(10 ** from, 10 ** to, 4).filter((value) => value > 0);
    return [(value) => (Math.log10(value) - from) / (to - from), decades];
  }
  if (low >= 0) low = 0;
  if (high === low) high = low + (Math.abs(low) || 1);
  const room = (high - low) * 0.05, bottom = low < 0 ? low - room : low, top = high + room;
  return [(value) => (value - bottom) / (top - bottom), ticks(bottom, top, 4)];
}

// The last point at or before an iteration; -1 before the first.
function at(iterations, iteration) {
  let low = 0, high = iterations.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (iterations[middle] <= iteration) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

class Cursor {
  constructor() {
    [this.first, this.last] = ends();
    this.iteration = this.last;
    this.panels = [];
  }

  across(iteration) {
    return LEFT + ((iteration - this.first) / (this.last - this.first || 1)) * (WIDTH - LEFT - RIGHT);
  }

  move(iteration) {
    this.iteration = Math.min(this.last, Math.max(this.first, Math.round(iteration)));
    document.getElementById("cursor").textContent = String(this.iteration);
    for (const panel of this.panels) panel.read(this.iteration);
  }

  // The drawing's frame: axes, the line at the cursor, and the keys and pointers that move it.
  frame(title, marks, height) {
    const drawing = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "slider", tabindex: "0", "aria-label": title,
      "aria-valuemin": this.first, "aria-valuemax": this.last,
    });
    for (const mark of marks) {
      const y = height(mark);
      drawing.append(svg("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }));
      drawing.append(svg("text", { class: "tick", x: LEFT - 6, y: y + 4, "text-anchor": "end" }, digits(mark)));
    }
    for (const mark of ticks(this.first, this.last, 6, true)) {
      const given = { class: "tick", x: this.across(mark), y: HEIGHT - 8, "text-anchor": "middle" };
      drawing.append(svg("text", given, String(mark)));
    }
    const upright = svg("line", { class: "upright", y1: TOP, y2: HEIGHT - BOTTOM });
    drawing.append(upright);
    const point = (event) => {
      const box = drawing.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * WIDTH;
      this.move(this.first + ((x - LEFT) / (WIDTH - LEFT - RIGHT)) * (this.last - this.first));
    };
    drawing.addEventListener("pointermove", point);
    drawing.addEventListener("pointerdown", point);
    drawing.addEventListener("keydown", (event) => {
      const leap = Math.max(1, Math.round((this.last - this.first) / 10));
      const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -leap, PageUp: leap };
      const to = { Home: this.first, End: this.last }[event.key] ?? this.iteration + (by[event.key] ?? NaN);
      if (Number.isNaN(to)) return;
      event.preventDefault();
      this.move(to);
    });
    return [drawing, upright];
  }

  // The panel's card; values(iteration) are the texts of its legend, one per entry.
  card(title, drawing, upright, entries, values) {
    const legend = el("ul", { class: "legend" });
    for (const [label, kind] of entries) {
      legend.append(el("li", { class: kind }, el("span", { class: "swatch" }), el("span", {}, label), el("b")));
    }
    const read = (iteration) => {
      const x = this.across(iteration), texts = values(iteration);
      upright.setAttribute("x1", x);
      upright.setAttribute("x2", x);
      [...legend.children].forEach((entry, at) => (entry.lastChild.textContent = texts[at]));
      const told = entries.map(([label], at) => `${label} ${texts[at]}`).join(", ");
      drawing.setAttribute("aria-valuenow", iteration);
      drawing.setAttribute("aria-valuetext", `iteration ${iteration}: ${told}`);
    };
    this.panels.push({ read });
    read(this.iteration);
    return el("figure", {}, el("figcaption", {}, title), drawing, legend);
  }

  lines(title, names, logarithmic) {
    const wanted = Object.entries(names).filter(([name]) => RUNS.some((run) => name in run.columns));
    const drawn = RUNS.flatMap((run, r) =>
      wanted.filter(([name]) => name in run.columns).map(([name, label]) => {
        const style = wanted.findIndex(([other]) => other === name);
        const several = RUNS.length > 1;
        const whole = run.columns[name], positive = (_, k) => !logarithmic || whole[1][k] > 0;
        const [x, y] = whole.map((values) => values.filter(positive));
        const text = !several ? label : wanted.length > 1 ? `${runName(run)}, ${label}` : runName(run);
        const kind = several ? `c${r % COLOURS} dash${style % 3}` : `c${style % COLOURS} dash0`;
        return { x, y, whole, text, kind, marked: x.length < 10 || name.startsWith("evaluate/") };
      }),
    );
    if (!drawn.some((one) => one.x.length)) return null;
    const [share, marks] = verticalScale(drawn.flatMap((one) => one.y), logarithmic);
    const height = (value) => HEIGHT - BOTTOM - share(value) * (HEIGHT - TOP - BOTTOM);
    const [drawing, upright] = this.frame(title, marks, height);
    for (const { x, y, kind, marked } of drawn) {
      const points = x.map((iteration, k) => `${this.across(iteration).toFixed(1)},${height(y[k]).toFixed(1)}`);
      drawing.append(svg("polyline", { class: `curve ${kind}`, points: points.join(" ") }));
      if (!marked) continue;
      for (const point of points) {
        const [cx, cy] = point.split(",");
        drawing.append(svg("circle", { class: `dot ${kind}`, cx, cy, r: 3 }));
      }
    }
    const values = (iteration) => drawn.map(({ whole: [x, y] }) => {
      const k = at(x, iteration);
      return k < 0 || x[k] === iteration ? digits(y[k]) : `${digits(y[k])} at ${x[k]}`;
    });
    return this.card(title, drawing, upright, drawn.map((one) => [one.text, one.kind]), values);
  }

  // What each phase took of an iteration, one on the other, of one run.
  phases(run) {
    const { names, iterations, seconds } = run.phases;
    if (!iterations.length) return null;
    const title = RUNS.length > 1 ? `Time by phase, share: ${runName(run)}` : "Time by phase, share";
    const height = (value) => HEIGHT - BOTTOM - value * (HEIGHT - TOP - BOTTOM);
    const shares = seconds.map((row) => {
      const total = row.reduce((a, b) => a + b, 0) || 1;
      return row.map((value) => value / total);
    });
    const [drawing, upright] = this.frame(title, [0, 0.25, 0.5, 0.75, 1], height);
    const edge = (iteration) => Math.min(WIDTH - RIGHT, Math.max(LEFT, this.across(iteration))).toFixed(1);
    const kinds = names.map((name) => {
      const colour = PHASES.indexOf(name);
      return `area c${colour % COLOURS}${colour >= COLOURS ? " pale" : ""}`;
    });
    names.forEach((_, phase) => {
      let steps = "", back = "";
      shares.forEach((row, k) => {
        const low = row.slice(0, phase).reduce((a, b) => a + b, 0);
        const from = edge((k ? iterations[k - 1] : iterations[0] - 1) + 0.5), to = edge(iterations[k] + 0.5);
        steps += `L${from},${height(low + row[phase]).toFixed(1)}H${to}`;
        back = `L${to},${height(low).toFixed(1)}H${from}${back}`;
      });
      drawing.insertBefore(svg("path", { class: kinds[phase], d: `M${steps.slice(1)}${back}Z` }), upright);
    });
    const values = (iteration) => {
      const k = Math.max(0, at(iterations, iteration));
      return names.map((_, phase) => `${(100 * shares[k][phase]).toFixed(1)} %, ${digits(seconds[k][phase])} s`);
    };
    return this.card(title, drawing, upright, names.map((name, phase) => [name, kinds[phase]]), values);
  }
}

function showCurves(onIteration) {
  const cursor = new Cursor(), log = document.getElementById("log"), other = document.getElementById("other");
  const named = new Set(RUNS.flatMap((run) => Object.keys(run.columns)));
  other.append(el("option", { value: "" }, "none"), ...[...named].sort().map((name) => el("option", { value: name }, name)));
  const draw = () => {
    cursor.panels = [];
    const chosen = other.value ? [[other.value, { [other.value]: other.value }]] : [];
    const panels = [...chosen, ...PANELS].map(([title, names]) => cursor.lines(title, names, log.checked));
    const drawn = [...panels, ...RUNS.map((run) => cursor.phases(run))].filter((panel) => panel !== null);
    document.getElementById("panels").replaceChildren(...(drawn.length ? drawn : [el("p", {}, "No numbers yet.")]));
    cursor.move(cursor.iteration);
  };
  for (const input of [log, other]) input.addEventListener("input", draw);
  document.getElementById("to-episodes").addEventListener("click", () => onIteration(cursor.iteration));
  draw();
}
