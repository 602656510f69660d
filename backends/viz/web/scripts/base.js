"use strict";
// Shared by all other scripts: the data of the page, creation of elements, the width of text.
const DATA = JSON.parse(document.getElementById("data").textContent);
const Z = DATA.sizes, START = -1, END = -2;
const opened = new Set(DATA.opened);
const keepers = []; // further parts of the URL's state: { write(state), read(state) } with state: URLSearchParams
const $ = (id) => document.getElementById(id);

// Returns an HTML element with the given properties (event handlers on…, class, attributes) and children.
function el(name, given = {}, ...children) {
  const made = document.createElement(name);
  for (const [k, v] of Object.entries(given)) {
    if (k.startsWith("on")) made[k] = v;
    else if (v !== null && v !== false) made.setAttribute(k, v);
  }
  made.append(...children.flat().filter((c) => c !== null && c !== undefined));
  return made;
}

// Returns an SVG element, with arguments as for `el`.
function shapeOf(name, given, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [k, v] of Object.entries(given)) made.setAttribute(k, v);
  made.append(...children);
  return made;
}

const widthOf = (text, px) => [...text].reduce((w, c) => w + (DATA.advances[c] ?? DATA.advances.W), 0) * px / 1000;
const counted = (n, one, many = one + "s") => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
const last = (name) => name.split(".").at(-1);

// Shows a message below the picture, which screen readers also announce.
function say(text) {
  const box = $("said");
  box.textContent = text;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { box.textContent = ""; }, 9000);
}
