// Puts the page together.

const { runs: RUNS } = JSON.parse(document.getElementById("data").textContent);

// A phase has one colour in all runs.
const PHASES = [...new Set(RUNS.flatMap((run) => run.phases.names))];

function runName(run) {
  return line(run.name, 60);
}

for (const part of document.querySelectorAll("[data-many]")) part.hidden = RUNS.length === 1;
document.title = document.getElementById("title").textContent = RUNS.map(runName).join(", ");
showOverview();
showConfig();
const browser = new Browser();
showCurves((iteration) => browser.showIteration(iteration));
