// Tables: main numbers and summaries of runs, and the differences of their configurations.

// A row per name that any run has, a column per run; `trees` map a name to a text.
function table(corner, trees, keep) {
  const head = el("tr", {}, el("th", { scope: "col" }, corner));
  for (const run of RUNS) head.append(el("th", { scope: "col" }, runName(run)));
  const body = el("tbody");
  for (const name of new Set(trees.flatMap((tree) => Object.keys(tree)))) {
    const values = trees.map((tree) => (Object.hasOwn(tree, name) ? tree[name] : null));
    const differs = values.some((value) => value !== values[0]);
    if (!keep(name, values, differs)) continue;
    const row = el("tr", differs && keep.mark ? { class: "differs" } : {}, el("th", { scope: "row" }));
    write(row.firstChild, name);
    for (const value of values) row.append(value === null ? el("td", { class: "none" }, "–") : write(el("td"), value));
    body.append(row);
  }
  return body.childElementCount ? el("table", {}, el("thead", {}, head), body) : el("p", {}, "Nothing to show.");
}

function showOverview() {
  const headlines = RUNS.map(headlinesOf);
  const summaries = RUNS.map((run) =>
    Object.fromEntries(Object.entries(run.summary).map(([name, value]) => [name, rounded(value)])),
  );
  const shown = RUNS.length > 1 ? byRun(headlines) : table("", headlines, (_, values) => values.some((value) => value !== "–"));
  document.getElementById("overview-table").append(shown);
  if (summaries.some((tree) => Object.keys(tree).length)) {
    const summary = el("div", { class: "scroll" }, table("", summaries, () => true));
    document.getElementById("notes").append(el("details", {}, el("summary", {}, "summary.json"), summary));
  }
  const notes = RUNS.flatMap((run) => run.notes.map((note) => `${RUNS.length > 1 ? `${run.name}: ` : ""}${note}`));
  if (!notes.length) return;
  const items = notes.map((note) => write(el("li"), note));
  document.getElementById("notes").append(el("h3", {}, "What is damaged, missing or left out"), el("ul", {}, ...items));
}

// A row per run, a column per name, so that numbers are compared down a column.
function byRun(trees) {
  const names = Object.keys(trees[0]).filter((name) => trees.some((tree) => tree[name] !== "–"));
  const head = el("tr", {}, el("th", { scope: "col" }, "run"), ...names.map((name) => el("th", { scope: "col" }, name)));
  const rows = trees.map((tree, r) =>
    el("tr", {}, el("th", { scope: "row" }, runName(RUNS[r])), ...names.map((name) => write(el("td"), tree[name]))));
  return el("table", { class: "headlines" }, el("thead", {}, head), el("tbody", {}, ...rows));
}

function headlinesOf(run) {
  const found = Object.fromEntries(Object.entries(run.overview).map(([name, value]) => [name, headline(value)]));
  const planned = run.config["run.iterations"];
  if (planned !== undefined && found.iterations !== "–" && found.iterations !== planned) found.iterations += ` of ${planned}`;
  return { algorithm: unquoted(run.config["algorithm.preset"] ?? "–"), ...found };
}

function headline(value) {
  if (!Array.isArray(value)) return digits(value);
  const [first, last, best] = value.map((one) => digits(one === null ? null : Number(one.toPrecision(3))));
  return `${first} → ${last}, best ${best}`;
}

function rounded(value) {
  return /^-?\d+\.\d{5,}(e-?\d+)?$/.test(value) ? digits(Number(value)) : value;
}

function showConfig() {
  const text = document.getElementById("config-text");
  const only = document.getElementById("config-differs");
  const shown = document.getElementById("config-table");
  const draw = () => {
    const searched = text.value.toLowerCase();
    const keep = (name, values, differs) =>
      (RUNS.length === 1 || !only.checked || differs) &&
      [name, ...values].some((value) => value !== null && value.toLowerCase().includes(searched));
    keep.mark = RUNS.length > 1;
    shown.replaceChildren(table("field", RUNS.map((run) => run.config), keep));
  };
  for (const input of [text, only]) input.addEventListener("input", draw);
  draw();
}
