"use strict";
// Cards of models: filters, order, pictures drawn when cards scroll into view, and a model's page in a frame.
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

function el(name, given = {}, ...children) {
  const made = document.createElement(name);
  for (const [k, v] of Object.entries(given)) {
    if (k.startsWith("on")) made[k] = v;
    else made.setAttribute(k, v);
  }
  made.append(...children);
  return made;
}

// -- cards
const near = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) {
    if (!isIntersecting) continue;
    near.unobserve(target);
    target.innerHTML = DATA.cards[target.dataset.card].picture;
  }
}, { rootMargin: "600px" });

const cards = DATA.cards.map((card, i) => {
  const [w, h] = card.size, drawing = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [k, v] of Object.entries({ class: "picture", viewBox: `-1 -1 ${w} ${h}`, style: `max-width:${w}px;aspect-ratio:${w}/${h}`, role: "img", "aria-label": card.words })) drawing.setAttribute(k, v);
  drawing.dataset.card = i;
  const facts = el("dl", {}, ...card.rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  const to = `#${encodeURIComponent(card.name)}`, title = `Open ${card.title}`;
  const shown = el("article", { "data-card": card.name }, el("h2", {}, el("a", { href: to, title }, card.title)), el("p", {}, card.about),
    el("figure", {}, el("a", { href: to, title, tabindex: -1 }, drawing)), facts);
  near.observe(drawing);
  const text = [card.title, card.about, ...card.rows.flat(), ...Object.values(card.groups).flat()].join(" ").toLowerCase();
  return { card, shown, text, i };
});

// -- filters and order
const wanted = new Map(); // criterion -> names of the chosen groups
const orders = { "as listed": (a, b) => a.i - b.i, name: (a, b) => a.card.title.localeCompare(b.card.title, "en", { numeric: true }) };
for (const name of new Set(DATA.cards.flatMap((card) => Object.keys(card.numbers)))) {
  orders[name] = (a, b) => (a.card.numbers[name] ?? Infinity) - (b.card.numbers[name] ?? Infinity) || a.i - b.i;
}
$("order").append(...Object.keys(orders).map((name) => el("option", {}, name)));

function fits({ card, text }) {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  return words.every((word) => text.includes(word))
    && [...wanted].every(([sort, names]) => names.size === 0 || card.groups[sort]?.some((name) => names.has(name)));
}

function arrange() {
  const shown = cards.filter(fits).sort(orders[$("order").value]);
  $("cards").replaceChildren(...shown.map((c) => c.shown));
  $("count").textContent = shown.length === cards.length ? `${cards.length} models` : `${shown.length} of ${cards.length} models`;
  $("nothing").hidden = shown.length > 0;
}

for (const sort of new Set(DATA.cards.flatMap((card) => Object.keys(card.groups)))) {
  const names = new Set(DATA.cards.flatMap((card) => card.groups[sort] ?? []));
  wanted.set(sort, new Set());
  if (names.size < 2) continue;
  $("groups").append(el("fieldset", {}, el("legend", {}, sort), ...[...names].map((name) =>
    el("button", { "aria-pressed": "false", onclick: ({ currentTarget: button }) => {
      const on = !wanted.get(sort).delete(name);
      if (on) wanted.get(sort).add(name);
      button.setAttribute("aria-pressed", on);
      arrange();
    } }, name))));
}

function showAll() {
  $("search").value = "";
  wanted.forEach((names) => names.clear());
  for (const button of $("groups").querySelectorAll("button")) button.setAttribute("aria-pressed", "false");
  arrange();
}
$("search").oninput = arrange;
$("order").onchange = arrange;
$("all").onclick = showAll;

// -- theme
const night = matchMedia("(prefers-color-scheme: dark)");
let asked = "";
try { asked = localStorage.getItem("weft-theme") ?? ""; } catch { /* pages from a disk may not store */ }
const dark = () => (asked ? asked === "dark" : night.matches);
function paint() {
  document.documentElement.classList.toggle("dark", dark());
  $("theme").textContent = dark() ? "Light" : "Dark";
}
$("theme").onclick = () => {
  asked = dark() ? "light" : "dark";
  try { localStorage.setItem("weft-theme", asked); } catch { /* as above */ }
  paint();
};
night.addEventListener("change", paint);
$("large").onclick = () => {
  const on = document.documentElement.classList.toggle("large");
  $("large").setAttribute("aria-pressed", on);
};

// -- the page of a model: the common page template with the model's data; the URL has its name
const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
function pageOf(card) {
  const data = JSON.stringify({ ...DATA.common, ...card.page, theme: dark() ? "dark" : "light" }).replaceAll("<", "\\u003c");
  const { title, faces, data: place } = DATA.places;
  return DATA.shell.replace(place, () => data).replace(faces, () => $("faces").textContent).replaceAll(title, () => escaped(card.title));
}
function open() {
  const name = decodeURIComponent(location.hash.slice(1)), found = DATA.cards.find((card) => card.name === name);
  $("frame").replaceChildren();
  if (!found) {
    $("viewer").close();
    return;
  }
  $("viewed").textContent = found.about;
  $("frame").append(el("iframe", { srcdoc: pageOf(found), title: found.title }));
  if (!$("viewer").open) $("viewer").showModal();
}
$("close").onclick = () => $("viewer").close();
$("viewer").onclose = () => {
  $("frame").replaceChildren();
  if (location.hash) history.replaceState(null, "", location.pathname + location.search);
};
addEventListener("hashchange", open);

// -- keys
function step(by) {
  const links = [...$("cards").querySelectorAll("h2 a")], at = links.indexOf(document.activeElement);
  links[at < 0 ? 0 : Math.max(0, Math.min(links.length - 1, at + by))]?.focus();
}
const across = () => getComputedStyle($("cards")).gridTemplateColumns.split(" ").length;
const keys = {
  "/": () => $("search").focus(), d: () => $("theme").click(), l: () => $("large").click(), Escape: showAll,
  ArrowRight: () => step(1), ArrowLeft: () => step(-1), ArrowDown: () => step(across()), ArrowUp: () => step(-across()),
};
addEventListener("keydown", (e) => {
  const typing = e.target.matches("input, select") && e.key !== "Escape";
  if (typing || e.ctrlKey || e.metaKey || e.altKey || $("viewer").open || !keys[e.key]) return;
  e.preventDefault();
  keys[e.key]();
});

paint();
arrange();
open();
