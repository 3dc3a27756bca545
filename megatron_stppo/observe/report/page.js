// Builds the page.

const { runs: RUNS } = JSON.parse(document.getElementById("data").textContent);

// A phase has one colour in all runs.
const PHASES = [...new Set(RUNS.flatMap((run) => run.phases.names))];

function runName(run) {
  return line(run.name, 60);
}

for (const part of document.querySelectorAll("[data-many]")) part.hidden = RUNS.length === 1;
const refused = RUNS.some((run) => Object.values(run.columns).some(([, y]) => y.includes(null)));
document.querySelector("[data-refused]").hidden = !refused;
const NAMES = RUNS.map(runName).join(", ");
document.title = NAMES;
document.getElementById("title").textContent = RUNS.length > 4 ? `${RUNS.length} runs` : NAMES;
if (RUNS.length > 1) {
  // when runs are compared, differences come first
  document.getElementById("overview").after(document.getElementById("config"));
  document.querySelector("[href='#overview']").after(document.querySelector("[href='#config']"));
}
showOverview();
showConfig();
const browser = new Browser();
showCurves((iteration) => browser.showIteration(iteration));
