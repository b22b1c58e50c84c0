// The flame graph: bytes by lines of the program, the outermost call at the top. A place is a row of a `tree`.

const FLAME_ROW = 22;
const MOST_PLACES = 1500;

function childrenOf(tree) {
  const children = tree.parent.map(() => []);
  tree.parent.forEach((parent, place) => { if (parent >= 0) children[parent].push(place); });
  for (const list of children) list.sort((a, b) => tree.bytes[b] - tree.bytes[a]);
  return children;
}

/** Where to begin: below the calls that all blocks have in common. */
function firstBranch(tree, children) {
  let place = 0;
  while (children[place].length === 1 && tree.bytes[children[place][0]] === tree.bytes[0] && children[children[place][0]].length) place = children[place][0];
  return place;
}

const placeName = (tree, place) => (place === 0 ? "all calls" : frameText(tree.frame[place]));

/** A warm colour for a place, the same wherever it stands. */
function placeColour(name) {
  let seed = 7;
  for (let i = 0; i < name.length; i += 1) seed = (seed * 31 + name.charCodeAt(i)) % 9973;
  return `hsl(${8 + (seed % 44)} ${72 + (seed % 5) * 4}% ${62 + (seed % 7) * 2}%)`;
}

function layOut(tree, children, root) {
  const placed = [];
  const put = (place, left, depth) => {
    const share = tree.bytes[place] / (tree.bytes[root] || 1);
    if (share < 0.0015 || placed.length >= MOST_PLACES) return;
    placed.push({ place, left, share, depth });
    let at = left;
    for (const child of children[place]) { put(child, at, depth + 1); at += tree.bytes[child] / (tree.bytes[root] || 1); }
  };
  put(root, 0, 0);
  return placed;
}

function flame(found) {
  const { tree } = found;
  if (tree.parent.length < 2) return make("p", { class: "hint" }, found.blocks ? "No lines of the program were recorded for these blocks." : "No blocks.");
  const children = childrenOf(tree);
  const root = state.root ?? firstBranch(tree, children);
  const placed = layOut(tree, children, root);
  const depth = placed.reduce((most, one) => Math.max(most, one.depth), 0);
  const needle = state.search.trim().toLowerCase();
  const graph = make("div", { class: "flame", role: "tree", "aria-label": "Bytes by lines of the program", style: { height: `${(depth + 1) * FLAME_ROW}px` }, onkeydown: walkFlame },
    placed.map((one, index) => placeButton(tree, one, root, needle, index === 0)));
  const rest = tree.bytes[0] - children[0].reduce((sum, place) => sum + tree.bytes[place], 0);
  return make("div", {}, crumbs(tree, root), make("div", { class: "scroll" }, graph),
    rest > 0 ? make("p", { class: "hint" }, `${bytes(rest)} have no stack, or one of the smallest.`) : "");
}

/** What stands in a box: the function and its bytes, and, where there is room, the line. */
function boxText(name, amount) {
  const found = name.match(PLACE);
  return found ? `${found[3]} · ${amount} · ${found[1]}:${found[2]}` : `${name} · ${amount}`;
}

function placeButton(tree, { place, left, share, depth }, root, needle, first) {
  const name = placeName(tree, place);
  const rows = [["bytes", bytes(tree.bytes[place])], ["of what is shown", percent(tree.bytes[place], tree.bytes[root])], ["blocks", count(tree.blocks[place])]];
  return make("button", {
    type: "button", role: "treeitem", "aria-level": depth + 1, tabindex: first ? 0 : -1, "data-depth": depth,
    "aria-label": `${boxText(name, rows[0][1])}, ${rows[1][1]}, ${many(tree.blocks[place], "block")}, ${name}`,
    class: needle && !name.toLowerCase().includes(needle) ? "dim" : null,
    style: { left: `${100 * left}%`, width: `${100 * share}%`, top: `${depth * FLAME_ROW}px`, background: placeColour(name) },
    onclick: () => (place === root ? listPlace(tree, place) : update({ root: place })),
    onmousemove: (event) => tip.show(event.clientX, event.clientY, name, rows),
    onmouseleave: tip.hide,
  }, share > 0.015 ? boxText(name, rows[0][1]) : "");
}

const listPlace = (tree, place) => { if (place > 0) chooseGroup(shortName(placeName(tree, place)), holdsPlace(tree, place)); };

/** Whether a block was made at a place, or by what it calls. */
function holdsPlace(tree, place) {
  const children = new Map();
  tree.parent.forEach((parent, at) => { if (at) children.set(`${parent} ${tree.frame[at]}`, at); });
  const inside = new Uint8Array(report.stackParent.length);
  const at = new Int32Array(report.stackParent.length);
  for (let i = 0; i < at.length; i += 1) {
    const parent = report.stackParent[i];
    const from = parent < 0 ? 0 : at[parent];
    at[i] = from < 0 ? -1 : children.get(`${from} ${report.stackFrame[i]}`) ?? -1;
    inside[i] = at[i] === place || (parent >= 0 && inside[parent]) ? 1 : 0;
  }
  return (block) => report.blocks.stack[block] >= 0 && inside[report.blocks.stack[block]] === 1;
}

function crumbs(tree, root) {
  const path = [];
  for (let at = root; at >= 0; at = tree.parent[at]) path.unshift(at);
  const shown = path.length > 5 ? [path[0], null, ...path.slice(-3)] : path;
  const parts = shown.flatMap((place, index) => [index ? " › " : "", place === null ? `… ${count(path.length - 4)} calls …`
    : make("button", { type: "button", class: "link", onclick: () => update({ root: place }) }, shortName(placeName(tree, place)))]);
  return make("nav", { class: "crumbs", "aria-label": "Calls above" }, parts,
    root ? make("button", { type: "button", class: "small", onclick: () => listPlace(tree, root) }, "list its blocks") : "");
}

/** Arrow keys: left and right along a row, up and down between rows. */
function walkFlame(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const level = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step && !level) return;
  const from = document.activeElement;
  const depth = Number(from.dataset.depth) + (level ?? 0);
  const left = (one) => parseFloat(one.style.left);
  const row = [...event.currentTarget.children].filter((one) => Number(one.dataset.depth) === depth).sort((a, b) => left(a) - left(b));
  const to = step ? row[row.indexOf(from) + step] : row.filter((one) => left(one) <= left(from) + 0.001).pop() ?? row[0];
  if (to) { from.tabIndex = -1; to.tabIndex = 0; to.focus(); }
  event.preventDefault();
  event.stopPropagation();
}
