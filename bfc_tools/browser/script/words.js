// Numbers as text, and elements. Text reaches the page through textContent alone: names come from recordings.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** 1536 -> "1.50 KiB". */
function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  let unit = 0;
  let left = Math.abs(value);
  while (left >= 1024 && unit < UNITS.length - 1) { left /= 1024; unit += 1; }
  const digits = unit === 0 ? 0 : left >= 100 ? 1 : 2;
  return `${value < 0 ? "−" : ""}${left.toFixed(digits)} ${UNITS[unit]}`;
}

/** 4294967296 -> "4 GiB". */
const roundBytes = (value) => bytes(value).replace(/\.0+ /, " ");

/** 2048 -> "+2.00 KiB". */
const grown = (value) => `${value < 0 ? "−" : "+"}${bytes(Math.abs(value))}`;

const count = (value) => Math.round(value).toLocaleString("en-US");
const many = (value, one, more = `${one}s`) => `${count(value)} ${value === 1 ? one : more}`;
const hex = (value) => `0x${value.toString(16)}`;
const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");

/** Seconds as text, with the unit that fits. */
function duration(seconds) {
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (size < 1) return `${(seconds * 1e3).toFixed(size < 0.1 ? 1 : 0)} ms`;
  return size < 600 ? `${seconds.toFixed(size < 10 ? 2 : 1)} s` : `${(seconds / 60).toFixed(1)} min`;
}

const $ = (id) => document.getElementById(id);

/** An element; `on...` are listeners, `style` an object, all else attributes (left out where null). */
function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(made.style, value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined).map(asNode));
  return made;
}

const asNode = (child) => (child instanceof Node ? child : document.createTextNode(String(child)));

const cell = (text, kind = "") => make("td", { class: kind || null }, text);

function table(heads, rows, attributes = {}) {
  const head = make("tr", {}, heads.map(([text, kind]) => make("th", { scope: "col", class: kind || null }, text || make("span", { class: "unseen" }, "as a bar"))));
  return make("table", attributes, make("thead", {}, head), make("tbody", {}, rows));
}

/** A table whose cells carry their column's name: on a narrow screen each row becomes a list of named figures. */
function labelled(made) {
  const names = Array.from(made.tHead.rows[0].cells, (head) => (head.classList.contains("wide") ? "" : head.textContent.replace(/ [▾▴]$/, "")));
  for (const row of made.tBodies[0].rows) Array.from(row.cells, (one, at) => { if (names[at]) one.dataset.head = names[at]; });
  made.classList.add("stacks");
  return made;
}

/** A table that scrolls by itself, under a name for screen readers. */
const region = (name, content) => make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, content);

/** A table of many rows, which shows `step` more at each click: the region, and the button for more. */
function growing(name, heads, length, rowAt, step, attributes = {}) {
  const drawn = table(heads, [], attributes);
  const body = drawn.tBodies[0];
  const more = make("button", { type: "button", class: "more", onclick: () => grow() });
  const grow = () => {
    const from = body.children.length;
    for (let at = from; at < Math.min(from + step, length); at += 1) body.append(rowAt(at));
    labelled(drawn);
    more.hidden = body.children.length >= length;
    more.textContent = `${count(length - body.children.length)} more`;
  };
  grow();
  return [region(name, drawn), more];
}

/** The value of a colour of page.css, as the theme has it now. */
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A canvas context whose units are CSS pixels, cleared. */
function context(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  const drawn = canvas.getContext("2d");
  drawn.setTransform(scale, 0, 0, scale, 0, 0);
  drawn.clearRect(0, 0, width, height);
  return drawn;
}

const tip = {
  show(x, y, title, lines) {
    const box = $("tip");
    box.replaceChildren(make("b", {}, title), ...lines.map((line) => make("p", {}, ...[line].flat().map((part) => make("span", {}, part)))));
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(4, x + 16 + width > innerWidth ? x - 14 - width : x + 16)}px`;
    box.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - height - 6))}px`;
  },
  hide() { $("tip").hidden = true; },
};
