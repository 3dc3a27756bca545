// The browser of episodes: filters, the list, and one episode with the numbers that the update recorded.

const ALL = "", LISTED = 1000; // largest number of episodes in the list

class Browser {
  constructor() {
    this.all = RUNS.flatMap((run, r) => run.episodes.map((episode) => ({ ...episode, r })));
    this.form = document.getElementById("filters");
    this.list = document.getElementById("list");
    this.shown = [];
    this.chosen = null;
    this.tones = { ratio: ratioTone(), advantage: this.advantageTone() };
    const fill = (name, values, label) =>
      this.form.elements[name].append(
        el("option", { value: ALL }, "all"), ...values.map((value) => el("option", { value: String(value) }, label(value))),
      );
    const different = (of) => [...new Set(this.all.map(of))];
    this.tasks = new Map(different((one) => one.task).sort(byNumber).map((task, place) => [task, place]));
    fill("run", RUNS.map((_, r) => r), (r) => runName(RUNS[r]));
    fill("iteration", different((one) => one.iteration).sort((a, b) => a - b), String);
    fill("outcome", different((one) => one.outcome).sort(), (text) => line(text, 40) || "none");
    this.form.addEventListener("input", () => this.filter());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("reset", () => setTimeout(() => this.filter())); // runs after the browser has reset the fields
    document.getElementById("tones").addEventListener("input", () => this.filter());
    document.querySelector(".browser").addEventListener("keydown", (event) => this.onKey(event));
    const sentences = RUNS.map((run) => (RUNS.length > 1 ? `${run.name}: ` : "") + run.left_out);
    document.getElementById("left-out").append(...sentences.map((text) => write(el("span"), `${text} `)));
    this.filter();
  }

  get tone() {
    return this.tones[document.querySelector("input[name=tone]:checked").value];
  }

  // The full colour marks the advantage that 5 % of all turns exceed.
  advantageTone() {
    const sizes = this.all.flatMap((one) => one.turns.map((turn) => Math.abs(turn.advantage ?? 0))).sort((a, b) => a - b);
    const full = sizes[Math.floor(sizes.length * 0.95)] || 1;
    return {
      ends: [`-${digits(full)}`, "0", `+${digits(full)}`],
      of: (turn) => (turn.advantage === undefined ? null : Math.max(-1, Math.min(1, turn.advantage / full))),
    };
  }

  filter() {
    const given = Object.fromEntries(new FormData(this.form)), searched = pattern(given.text);
    const [least, most] = [given.least, given.most].map((text) => (text === "" ? null : Number(text)));
    const matches = (one) =>
      (given.run === ALL || one.r === Number(given.run)) &&
      (given.iteration === ALL || one.iteration === Number(given.iteration)) &&
      (given.outcome === ALL || one.outcome === given.outcome) &&
      (least === null || (one.reward !== null && one.reward >= least)) && (most === null || (one.reward !== null && one.reward <= most)) &&
      (!given.clipped || one.turns.some((turn) => turn.clipped > 0)) &&
      (!searched || texts(one).some((text) => text.search(searched) >= 0));
    const orders = {
      file: () => 0,
      task: (one) => this.tasks.get(one.task),
      reward: (one) => one.reward ?? Infinity,
      ratio: (one) => -Math.max(0, ...one.turns.map((turn) => Math.abs(Math.log(turn.ratio ?? 1)))),
      advantage: (one) => -Math.max(-Infinity, ...one.turns.map((turn) => Math.abs(turn.advantage ?? 0))),
    };
    const key = orders[given.order];
    const found = this.all.filter(matches).sort((a, b) => key(a) - key(b) || 0);
    this.shown = found.slice(0, LISTED);
    this.searched = searched;
    const what = this.all.some((one) => one.branch) ? "histories of episodes" : "episodes";
    const total = this.all.length === 1 ? "1 episode" : `${this.all.length} ${what}`;
    document.getElementById("found").textContent = `${found.length} of ${total} on this page` + (found.length > LISTED ? `; the first ${LISTED} are listed` : "");
    this.list.replaceChildren(...this.shown.map((one, place) => this.entry(one, place)));
    this.showScale();
    this.choose(Math.max(0, this.shown.indexOf(this.chosen)), false);
  }

  entry(one, place) {
    const squares = el("span", { class: "squares", "aria-hidden": true });
    for (const turn of one.turns.slice(0, 12)) squares.append(this.coloured(el("i"), turn));
    const clipped = one.turns.some((turn) => turn.clipped > 0) ? ", clipped" : "";
    const run = RUNS.length > 1 ? `${runName(RUNS[one.r])} ` : "";
    const made = el("li", { role: "option", tabindex: "-1", "aria-selected": "false" },
      el("span", { class: "where" }, `${run}${one.iteration}·${one.line}${one.branch ? " ↳" : ""}`),
      el("span", { class: `outcome ${one.outcome === "ok" ? "ok" : ""}` }, line(one.outcome, 12) || "none"),
      el("span", { class: "reward" }, digits(one.reward)),
      squares,
      el("span", { class: "asked" }, line(question(one.prompt), 90)),
      el("span", { class: "hidden" }, (one.branch ? `, history ${one.branch + 1} of an episode` : "") + clipped));
    made.addEventListener("click", () => this.choose(place, true));
    return made;
  }

  onKey(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const place = this.shown.indexOf(this.chosen), page = 10, inList = this.list.contains(event.target);
    const choose = (to) => this.choose(Math.max(0, Math.min(this.shown.length - 1, to)), inList);
    const keys = {
      ArrowLeft: () => choose(place - 1), ArrowRight: () => choose(place + 1),
      "/": () => this.form.elements.text.focus(), c: () => this.otherTone(),
    };
    const listKeys = {
      ArrowDown: () => choose(place + 1), ArrowUp: () => choose(place - 1), PageDown: () => choose(place + page),
      PageUp: () => choose(place - page), Home: () => choose(0), End: () => choose(this.shown.length - 1),
      Enter: () => document.getElementById("episode").focus(),
    };
    const act = { ...keys, ...(inList ? listKeys : { Escape: () => this.choose(place, true) }) }[event.key];
    if (act === undefined) return;
    event.preventDefault();
    act();
  }

  otherTone() {
    document.querySelector("input[name=tone]:not(:checked)").checked = true;
    const place = this.shown.indexOf(this.chosen), inList = this.list.contains(document.activeElement);
    this.filter();
    if (inList) this.choose(place, true);
  }

  choose(place, focus) {
    for (const entry of this.list.querySelectorAll("[aria-selected=true]")) {
      entry.setAttribute("aria-selected", "false");
      entry.tabIndex = -1;
    }
    this.chosen = this.shown[place] ?? null;
    const into = document.getElementById("episode"), entry = this.list.children[place];
    if (this.chosen === null) return into.replaceChildren(el("p", {}, "No episode matches."));
    entry.setAttribute("aria-selected", "true");
    entry.tabIndex = 0;
    if (focus) {
      entry.focus({ preventScroll: true });
      entry.scrollIntoView({ block: "nearest" });
    }
    const reading = into.contains(document.activeElement);
    into.replaceChildren(...this.episode(this.chosen));
    if (reading) into.focus({ preventScroll: true });
    for (const text of into.querySelectorAll(".text:has(mark)")) {
      text.scrollTop = text.querySelector("mark").offsetTop - 40;
    }
  }

  episode(one) {
    const facts = {
      run: RUNS.length > 1 ? runName(RUNS[one.r]) : null, outcome: one.outcome, reward: digits(one.reward), task: one.task, group: one.group,
      history: one.branch ? `${one.branch + 1} of the episode that begins on line ${one.line - one.branch}` : null, "tool calls": one.branch ? null : one.tool_calls,
      "valid actions": one.valid, targets: one.targets.join(" | "), detail: one.detail,
      metrics: Object.entries(one.metrics).map(([name, value]) => `${name} ${digits(value)}`).join(", "),
    };
    const list = el("dl", { class: "facts" });
    for (const [name, value] of Object.entries(facts)) {
      if (value !== null && value !== "") list.append(el("div", {}, el("dt", {}, name), write(el("dd"), String(value), this.searched)));
    }
    return [
      el("h3", {}, `Iteration ${one.iteration}, episode ${one.line}`), list,
      this.passage("prompt", one.prompt),
      ...one.turns.flatMap((turn, k) => [this.turn(turn, k + 1), turn.observation ? this.passage("observation", turn.observation) : null]),
      one.more_turns ? el("p", {}, `${one.more_turns} more turns are in the file.`) : null,
    ].filter((part) => part !== null);
  }

  turn(turn, number) {
    const numbers_of = {
      ratio: turn.ratio, advantage: turn.advantage, value: turn.value, "policy ÷ engine": turn.mismatch,
      tokens: turn.tokens,
    };
    const numbers = el("dl", { class: "numbers" });
    for (const [name, value] of Object.entries(numbers_of)) {
      if (value === undefined || value === null) continue;
      numbers.append(el("div", {}, el("dt", {}, name), el("dd", {}, name === "advantage" ? signed(value) : digits(value))));
    }
    if (turn.version) numbers.append(el("div", {}, el("dt", {}, "policy version"), el("dd", {}, turn.version)));
    const head = el("h4", {}, `Turn ${number}`);
    if (turn.clipped > 0) head.append(el("span", { class: "badge" }, `clipped: ${turn.clipped} of ${turn.tokens} tokens`));
    if (turn.tokens === undefined) head.append(el("span", { class: "hint" }, "the update recorded nothing for this turn"));
    else if (turn.ratio === undefined) head.append(el("span", { class: "hint" }, "no ratio: the turn has no loss, or the ratio is not a number"));
    const text = write(el("div", { class: "text" }), turn.action, this.searched);
    return this.coloured(el("section", { class: "turn" }, head, el("div", { class: "beside" }, text, numbers)), turn);
  }

  passage(name, text) {
    return el("section", { class: "passage" }, el("h4", {}, name), write(el("div", { class: "text" }), text, this.searched));
  }

  // Sets the colour from the chosen number, and marks clipped turns.
  coloured(element, turn) {
    const share = this.tone.of(turn);
    element.classList.add(share === null ? "unknown" : share < 0 ? "down" : "up");
    if (turn.clipped > 0) element.classList.add("clipped");
    element.style.setProperty("--strength", `${Math.round(Math.abs(share ?? 0) * 100)}%`);
    return element;
  }

  showScale() {
    const steps = el("span", { class: "steps", "aria-hidden": true });
    for (let share = -1; share <= 1.01; share += 0.25) {
      const step = el("i", { class: share < 0 ? "down" : "up" });
      step.style.setProperty("--strength", `${Math.round(Math.abs(share) * 100)}%`);
      steps.append(step);
    }
    const [low, middle, high] = this.tone.ends;
    const scale = el("span", {}, low, steps, high, ` (pale: ${middle})`);
    const clipped = el("span", {}, el("i", { class: "up clipped sample", "aria-hidden": true }), " clipped");
    document.getElementById("scale").replaceChildren(scale, clipped);
  }

  showIteration(iteration) {
    const select = this.form.elements.iteration, there = this.all.map((one) => one.iteration);
    const nearest = there.reduce((best, one) => (Math.abs(one - iteration) < Math.abs(best - iteration) ? one : best), there[0]);
    select.value = there.length ? String(nearest) : ALL;
    this.filter();
    document.getElementById("episodes").scrollIntoView();
    select.focus({ preventScroll: true });
  }
}

// The full colour marks the clip bounds, taken from the first run that has them. Those of turns may follow their tokens n.
function ratioTone() {
  const bound = (name) => RUNS.map((run) => Number(run.config[`algorithm.${name}`])).find((value) => value > 0 && (name === "clip_high" || value < 1)) ?? 0.2;
  const [below, above] = [bound("clip_low"), bound("clip_high")];
  const by = RUNS.find((run) => run.config["algorithm.clip_low"] !== undefined)?.config ?? {};
  const power = by["algorithm.segments"] === '"turn"' ? Number(by["algorithm.clip_length_power"]) || 0 : 0;
  const over = power === 0 ? "" : power === 1 ? "^(1/n)" : `^(n^−${digits(power)})`;
  return {
    ends: over ? [`${digits(1 - below)}${over}`, "1", `${digits(1 + above)}${over}, n tokens`] : [digits(1 - below), "1", digits(1 + above)],
    of: ({ ratio, tokens }) => {
      if (!(ratio >= 0)) return null;
      const narrow = Math.max(1, tokens || 1) ** -power, far = Math.log(ratio) / narrow;
      return ratio < 1 ? -Math.min(1, far / Math.log(1 - below)) : Math.min(1, far / Math.log(1 + above));
    },
  };
}

const texts = (one) => [one.prompt, one.detail, one.task, ...one.targets, ...one.turns.flatMap((turn) => [turn.action, turn.observation])];

// The last informative part of a prompt: chat markup and role names are the same in all prompts.
function question(prompt) {
  const parts = prompt.split(/<\|[^|]{0,40}\|>|\n/).map((part) => part.trim());
  return parts.filter((part) => part && !/^(system|user|assistant)$/.test(part)).pop() ?? prompt;
}
