// The call tree: the same places as in the flame graph, as rows that open and close.

const unfolded = new Map();   // by the frames that lead to a place: whether the reader opened it
const MOST_TREE_ROWS = 2000;

/** What names a place whatever is chosen: the frames that lead to it. */
function keysOf(tree) {
  const keys = [""];
  for (let place = 1; place < tree.parent.length; place += 1) keys[place] = `${keys[tree.parent[place]]}/${tree.frame[place]}`;
  return keys;
}

/** Open at first: all that most of the bytes go through, down to where they part. */
function isOpen(tree, place, key) {
  return unfolded.get(key) ?? tree.bytes[place] >= tree.bytes[0] / 2;
}

function callTree(found) {
  const { tree } = found;
  if (tree.parent.length < 2) return make("p", { class: "hint" }, found.blocks ? "No lines of the program were recorded for these blocks." : "No blocks.");
  const [children, keys] = [childrenOf(tree), keysOf(tree)];
  const rows = [];
  const put = (place, level) => {
    if (rows.length >= MOST_TREE_ROWS) return;
    const open = children[place].length ? isOpen(tree, place, keys[place]) : null;
    rows.push({ place, level, open });
    if (open) for (const child of children[place]) put(child, level + 1);
  };
  for (const child of children[0]) put(child, 1);
  const box = make("div", { class: "tree", role: "tree", "aria-label": "Bytes by calls", onkeydown: (event) => walkTree(event, tree) },
    rows.map((row, index) => treeRow(tree, row, keys[row.place], index === 0)));
  const rest = tree.bytes[0] - children[0].reduce((sum, place) => sum + tree.bytes[place], 0);
  return make("div", {}, make("div", { class: "scroll" }, box),
    make("p", { class: "hint" }, `${rest > 0 ? `${bytes(rest)} have no stack, or one of the smallest. ` : ""}Arrow keys open and close, Enter lists the blocks of a call.`));
}

function treeRow(tree, { place, level, open }, key, isFirst_) {
  const name = placeName(tree, place);
  const toggle = () => fold(key, !open);
  return make("div", {
    role: "treeitem", tabindex: isFirst_ ? 0 : -1, "aria-level": level, "aria-expanded": open === null ? null : String(open), "data-key": key, "data-place": place, style: { paddingLeft: `${Math.min(level - 1, 24) * 12}px` }, title: name,
    class: hits_(name) ? "found" : null,
    onclick: () => (open === null ? listPlace(tree, place) : toggle()),
  }, make("span", { class: "fold", "aria-hidden": "true" }, open === null ? "·" : open ? "▾" : "▸"), make("span", { class: "call" }, shortName(name)),
    " ", make("b", {}, bytes(tree.bytes[place])), " ", make("span", { class: "blocks" }, `${percent(tree.bytes[place], tree.bytes[0])}, ${many(tree.blocks[place], "block")}`));
}

/** Whether what is searched for stands in a place's own name. */
const hits_ = (name) => state.search.trim() !== "" && name.toLowerCase().includes(state.search.trim().toLowerCase());

function fold(key, open) {
  unfolded.set(key, open);
  drawView();
  focusRow(document.querySelector(`.tree [data-key="${key}"]`));
}

function focusRow(row) {
  if (!row) return;
  for (const other of document.querySelectorAll('.tree [tabindex="0"]')) other.tabIndex = -1;
  row.tabIndex = 0;
  row.focus();
}

/** Up and down go from row to row; right opens, or goes in; left closes, or goes out. */
function walkTree(event, tree) {
  const from = document.activeElement;
  const rows = [...event.currentTarget.children];
  const at = rows.indexOf(from);
  const open = from.getAttribute("aria-expanded");
  const outer = () => focusRow(rows.slice(0, at).findLast((row) => Number(row.ariaLevel) < Number(from.ariaLevel)));
  const act = {
    ArrowDown: () => focusRow(rows[at + 1]), ArrowUp: () => focusRow(rows[at - 1]), Home: () => focusRow(rows[0]), End: () => focusRow(rows.at(-1)),
    ArrowRight: () => (open === "false" ? fold(from.dataset.key, true) : open === "true" && focusRow(rows[at + 1])),
    ArrowLeft: () => (open === "true" ? fold(from.dataset.key, false) : outer()),
    Enter: () => listPlace(tree, Number(from.dataset.place)), " ": () => open !== null && fold(from.dataset.key, open !== "true"),
  }[event.key];
  if (!act || at < 0) return;
  event.preventDefault();
  event.stopPropagation();
  act();
}
