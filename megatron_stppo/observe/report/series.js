// Sequences of points [iterations, values]; a value is null where it was not a finite number.

// The index of the last point at or before an iteration; -1 if there is none.
function at(iterations, iteration) {
  let low = 0, high = iterations.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (iterations[middle] <= iteration) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

// The mean of the last `window` values, up to each value. A null stays null and is left out of means.
// Example: window 2 makes 1 3 null 5 into 1 2 null 5.
function smooth([x, y], window) {
  return [x, y.map((value, k) => (value === null ? null : average(y.slice(Math.max(0, k + 1 - window), k + 1))))];
}

// The mean of several sequences, over those that have begun and not ended, with their last values. Example:
// iterations 1 3 with values 0 4, and 1 2 3 with 2 4 6, give 1 2 3 with 1 2 5.
function mean(members) {
  const x = [...new Set(members.flatMap(([iterations]) => iterations))].sort((a, b) => a - b);
  return [x, x.map((iteration) => average(going(members, iteration)))];
}

// The values at an iteration, of the sequences that have begun and not ended.
function going(members, iteration) {
  const there = members.filter(([x]) => x[0] <= iteration && iteration <= x[x.length - 1]);
  return there.map(([x, y]) => y[at(x, iteration)]);
}

function average(values) {
  const numbers = values.filter((value) => value !== null);
  return numbers.length ? numbers.reduce((a, b) => a + b, 0) / numbers.length : null;
}

// The text of a legend for a series at an iteration: the value, or mean, range and count of several.
function reading(members, iteration) {
  const shown = (value) => (value === null ? "not a number" : digits(value));
  if (members.length === 1) {
    const [x, y] = members[0], k = at(x, iteration);
    return k < 0 ? "–" : x[k] === iteration ? shown(y[k]) : `${shown(y[k])} at ${x[k]}`;
  }
  const numbers = going(members, iteration).filter((value) => value !== null);
  const count = `${numbers.length} of ${members.length} runs`;
  if (!numbers.length) return count;
  const [low, high] = extent(numbers);
  return `${digits(average(numbers))} (${digits(low)} to ${digits(high)}, ${count})`;
}

const extent = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
