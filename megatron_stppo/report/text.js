"use strict";
// Elements, numbers and text. What a model or a tool wrote becomes text nodes, never markup.

// Controls that are no line's end or tab, ends of lines and directions, halves of pairs, and what is drawn as
// nothing (Unicode's Default_Ignorable_Code_Point, the tags in which text hides from people among them).
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

// A pattern that finds the text as it stands, in either case; null for none.
function pattern(text) {
  return text ? new RegExp(text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu") : null;
}

// The text into `into`: codes that act on a reader are named instead, what is searched for is marked.
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

// What a string is that stands in quotes, as those of a configuration do.
function unquoted(text) {
  return /^".*"$/su.test(text) ? JSON.parse(text) : text;
}

// A line of it, for lists: codes and line ends left out, cut.
function line(text, length) {
  const plain = text.replace(new RegExp(ACTING.source, "gu"), "").replace(/\s+/g, " ").trim();
  return plain.length > length ? `${plain.slice(0, length)}…` : plain;
}
