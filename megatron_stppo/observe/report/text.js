"use strict";
// Elements, numbers and text. Text of a model or a tool becomes text nodes, never markup.

// Control characters other than line feed and tab, Unicode line ends and direction codes, unpaired surrogates, and
// invisible characters (Unicode's Default_Ignorable_Code_Point, including tags, which can hide text from readers).
const ACTING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u2028-\u202e]|\p{Surrogate}|\p{DI}/u;

function el(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name === "class") made.className = value;
    else if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function svg(tag, given = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Four digits: 0.1235, 2101, 4.01e-7.
function digits(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value === 0 || (size >= 1e-3 && size < 1e5)) return String(Number(value.toPrecision(4)));
  return Number(value.toPrecision(3)).toExponential();
}

function signed(value) {
  return value > 0 ? `+${digits(value)}` : digits(value);
}

// A pattern that finds the text literally, ignoring case; null for an empty text.
function pattern(text) {
  return text ? new RegExp(text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu") : null;
}

// Appends the text to `into`: control codes are shown by name, matches of the search are marked.
function write(into, text, searched) {
  for (const part of text.split(new RegExp(`(${ACTING.source})`, "u"))) {
    if (part.length <= 2 && ACTING.test(part)) {
      const code = part.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
      into.append(el("span", { class: "code" }, `U+${code}`));
      continue;
    }
    let last = 0;
    for (const found of searched ? part.matchAll(searched) : []) {
      into.append(part.slice(last, found.index), el("mark", {}, found[0]));
      last = found.index + found[0].length;
    }
    into.append(part.slice(last));
  }
  return into;
}

// The value of a quoted string, as in a configuration.
function unquoted(text) {
  return /^".*"$/su.test(text) ? JSON.parse(text) : text;
}

// The text as one line for lists: without codes and line ends, and shortened.
function line(text, length) {
  const plain = text.replace(new RegExp(ACTING.source, "gu"), "").replace(/\s+/g, " ").trim();
  return plain.length > length ? `${plain.slice(0, length)}…` : plain;
}
