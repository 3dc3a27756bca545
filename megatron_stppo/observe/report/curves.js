// Panels of curves over iterations. The cursor selects the iteration at which all of them are read.

const WIDTH = 440, HEIGHT = 210, LEFT = 54, RIGHT = 10, TOP = 8, BOTTOM = 26, COLOURS = 8;
const MARKED = 60, MANY = 200; // points: up to MARKED are drawn as dots; more than MANY are smoothed at first

const ends = () => {
  const all = RUNS.flatMap((run) => [
    ...Object.values(run.columns).flatMap(([x]) => (x.length ? [x[0], x[x.length - 1]] : [])),
    ...run.phases.iterations,
  ]);
  return all.length ? extent(all) : [0, 1];
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
  let [low, high] = values.length ? extent(values) : [0.1, 1];
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

  // Draws the frame: axes, the line at the cursor, and the handlers of keys and pointer that move it.
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

  // Returns the panel; values(iteration) returns the texts of its legend, one per entry.
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
      const described = entries.map(([label], at) => `${label} ${texts[at]}`).join(", ");
      drawing.setAttribute("aria-valuenow", iteration);
      drawing.setAttribute("aria-valuetext", `iteration ${iteration}: ${described}`);
    };
    this.panels.push({ read });
    read(this.iteration);
    return el("figure", {}, el("figcaption", {}, title), drawing, legend);
  }

  // A panel of series {label, kind, members: [[iterations, values], ...]}, with a gap where a value is null. One
  // member is drawn as a curve; several are drawn as pale curves with their mean.
  lines(title, series, logarithmic, window) {
    const drawable = (value) => value !== null && (!logarithmic || value > 0);
    const [share, marks] = verticalScale(series.flatMap((one) => one.members.flatMap(([, y]) => y.filter(drawable))), logarithmic);
    const height = (value) => HEIGHT - BOTTOM - share(value) * (HEIGHT - TOP - BOTTOM);
    const [drawing, upright] = this.frame(title, marks, height);
    const draw = ([x, y], kind) => {
      const path = x.map((iteration, k) => {
        if (!drawable(y[k])) return "";
        const place = `${this.across(iteration).toFixed(1)},${height(y[k]).toFixed(1)}`;
        return k && drawable(y[k - 1]) ? `L${place}` : `M${place}h0`; // h0 makes a single point between two gaps visible
      });
      drawing.append(svg("path", { class: `curve ${kind}`, d: path.join("") }));
    };
    for (const { kind, members } of series) {
      const smoothed = members.map((member) => smooth(member, window));
      for (const member of members.length > 1 ? smoothed : window > 1 ? members : []) draw(member, `${kind} faint`);
      draw(members.length > 1 ? mean(smoothed) : smoothed[0], kind);
    }
    const sparse = window === 1 && series.length <= COLOURS;
    for (const { kind, members } of series) {
      for (const [x, y] of members) x.forEach((iteration, k) => {
        const cx = this.across(iteration).toFixed(1), low = HEIGHT - BOTTOM;
        if (y[k] === null) drawing.append(svg("path", { class: "refused", d: `M${cx},${low}m-3,-3l6,6m0,-6l-6,6` }));
        else if (sparse && members.length === 1 && x.length <= MARKED && drawable(y[k])) {
          drawing.append(svg("circle", { class: `dot ${kind}`, cx, cy: height(y[k]).toFixed(1), r: 2.5 }));
        }
      });
    }
    const values = (iteration) => series.map(({ members }) => reading(members, iteration));
    return this.card(title, drawing, upright, series.map((one) => [one.label, one.kind]), values);
  }

  // The share of each phase in the time of an iteration.
  phases(run) {
    const kind = (name) => areaKind(PHASES.indexOf(name));
    return this.stack("Time by phase, share", run, run.phases, kind, String, (seconds) => `, ${digits(seconds)} s`);
  }

  // The share of the action tokens that were generated 0, 1, ... versions before the one that is trained.
  staleness(run) {
    const label = (age) => `${age} version${age === "1" ? "" : "s"} old`;
    return this.stack("Action tokens by staleness, share", run, run.staleness, (age) => areaKind(Number(age)), label, () => "");
  }

  // Stacked shares of the parts of a whole, for one run; null without points. more(amount) is added to a share in
  // the legend.
  stack(what, run, { names, iterations, amounts }, kind, label, more) {
    if (!iterations.length) return null;
    const title = RUNS.length > 1 ? `${what}: ${runName(run)}` : what;
    const height = (value) => HEIGHT - BOTTOM - value * (HEIGHT - TOP - BOTTOM);
    const shares = amounts.map((row) => {
      const total = row.reduce((a, b) => a + b, 0) || 1;
      return row.map((value) => value / total);
    });
    const [drawing, upright] = this.frame(title, [0, 0.25, 0.5, 0.75, 1], height);
    const edge = (iteration) => Math.min(WIDTH - RIGHT, Math.max(LEFT, this.across(iteration))).toFixed(1);
    const kinds = names.map(kind);
    names.forEach((_, part) => {
      let steps = "", back = "";
      shares.forEach((row, k) => {
        const low = row.slice(0, part).reduce((a, b) => a + b, 0);
        const from = edge((k ? iterations[k - 1] : iterations[0] - 1) + 0.5), to = edge(iterations[k] + 0.5);
        steps += `L${from},${height(low + row[part]).toFixed(1)}H${to}`;
        back = `L${to},${height(low).toFixed(1)}H${from}${back}`;
      });
      drawing.insertBefore(svg("path", { class: kinds[part], d: `M${steps.slice(1)}${back}Z` }), upright);
    });
    const values = (iteration) => {
      const k = Math.max(0, at(iterations, iteration));
      return names.map((_, part) => `${(100 * shares[k][part]).toFixed(1)} %${more(amounts[k][part])}`);
    };
    return this.card(title, drawing, upright, names.map((name, part) => [label(name), kinds[part]]), values);
  }
}

function areaKind(colour) {
  return `area c${colour % COLOURS}${colour >= COLOURS ? " pale" : ""}`;
}

// The series to draw: for one run a series per column, for several runs a series per value of `field`.
function seriesOf(runs, columns, field) {
  const having = (name) => runs.filter((run) => Object.hasOwn(run.columns, name));
  const kind = (k) => `c${k % COLOURS} dash${Math.floor(k / COLOURS) % 3}`;
  const members = (name, which) => having(name).filter(which).map((run) => run.columns[name]);
  if (RUNS.length === 1) return columns.map(([name, label], k) => ({ label, kind: kind(k), members: members(name, () => true) }));
  const value = (run) => (field ? run.config[field] ?? "none" : runName(run));
  const groups = field ? [...new Set(RUNS.map(value))] : RUNS.map(runName);
  const [[name]] = columns;
  return groups.map((group, k) => {
    const shown = field ? unquoted(group) : group;
    const label = ["", "algorithm.preset"].includes(field) ? shown : `${field.split(".").pop()} ${shown}`;
    return { label: line(label, 60), kind: kind(k), members: members(name, (run) => (field ? value(run) === group : run === RUNS[k])) };
  }).filter((one) => one.members.length);
}

function showCurves(onIteration) {
  const cursor = new Cursor();
  const [log, other, grouping, smoothing] = ["log", "other", "grouping", "smoothing"].map((id) => document.getElementById(id));
  const named = [...new Set(RUNS.flatMap((run) => Object.keys(run.columns)))].sort(byNumber);
  const options = (values) => values.map((value) => el("option", { value }, value));
  other.append(el("option", { value: "" }, "none"), ...options(named));
  const fields = groupings();
  grouping.append(el("option", { value: "" }, "run"), ...options(fields));
  if (fields[0] === "algorithm.preset") grouping.value = fields[0];
  if (RUNS.some((run) => Object.values(run.columns).some(([x]) => x.length > MANY))) smoothing.value = "20";
  const boxes = RUNS.map((run) => {
    const box = el("input", { type: "checkbox", checked: true });
    document.getElementById("runs").append(el("label", {}, box, runName(run)));
    return box;
  });
  const draw = () => {
    const runs = RUNS.filter((_, r) => boxes[r].checked);
    cursor.panels = [];
    const curves = panels(runs, other.value).map(([title, columns]) =>
      cursor.lines(title, seriesOf(runs, columns, grouping.value), log.checked, Number(smoothing.value)));
    const stacks = [...runs.map((run) => cursor.staleness(run)), ...runs.map((run) => cursor.phases(run))];
    const drawn = [...curves, ...stacks.filter((panel) => panel !== null)];
    document.getElementById("panels").replaceChildren(...(drawn.length ? drawn : [el("p", {}, "No numbers yet.")]));
    cursor.move(cursor.iteration);
  };
  for (const input of [log, other, grouping, smoothing, ...boxes]) input.addEventListener("input", draw);
  document.getElementById("to-episodes").addEventListener("click", () => onIteration(cursor.iteration));
  draw();
}
