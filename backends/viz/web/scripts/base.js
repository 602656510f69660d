"use strict";
// What every other script uses: the data of the page, elements, the width of text.
const DATA = JSON.parse(document.getElementById("data").textContent);
const Z = DATA.sizes, START = -1, END = -2;
const opened = new Set(DATA.opened);
const keepers = []; // what more the address keeps: { write(state), read(state) }, state being URLSearchParams
const $ = (id) => document.getElementById(id);

// An element of HTML with its properties (on…, class, or attributes) and children.
function el(name, given = {}, ...children) {
  const made = document.createElement(name);
  for (const [k, v] of Object.entries(given)) {
    if (k.startsWith("on")) made[k] = v;
    else if (v !== null && v !== false) made.setAttribute(k, v);
  }
  made.append(...children.flat().filter((c) => c !== null && c !== undefined));
  return made;
}

// The same of SVG.
function shapeOf(name, given, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [k, v] of Object.entries(given)) made.setAttribute(k, v);
  made.append(...children);
  return made;
}

const widthOf = (text, px) => [...text].reduce((w, c) => w + (DATA.advances[c] ?? DATA.advances.W), 0) * px / 1000;
const counted = (n, one, many = one + "s") => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
const last = (name) => name.split(".").at(-1);

// What was said lately, at the foot of the picture, and to readers of the screen.
function say(text) {
  const box = $("said");
  box.textContent = text;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { box.textContent = ""; }, 9000);
}
