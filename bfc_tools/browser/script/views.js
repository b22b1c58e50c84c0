// The blocks: which ones (tabs), and how they are shown (buttons).

const WHICH = { peak: "At the peak", never_freed: "Never freed", temporary: "Temporary", all: "All" };
const HOW = { owner: "owners", kind: "what for", line: "lines", tree: "call tree", flame: "flame graph", size: "sizes", age: "ages", list: "list" };
const MOST_LINES_SHOWN = 500;
const ROWS_AT_ONCE = 200;

/** Shows only the blocks of a group, as a list. */
function chooseGroup(label, holds) { tip.hide(); update({ only: { label, holds }, how: "list" }); }

function drawTabs() {
  $("which").replaceChildren(...Object.entries(WHICH).map(([which, text]) => make("button", {
    type: "button", role: "tab", id: `which-${which}`, "aria-controls": "view", "aria-selected": String(state.which === which), tabindex: state.which === which ? 0 : -1,
    disabled: report.kind === "state" && which !== "peak", onclick: () => update({ which }), onkeydown: walkTabs,
  }, report.kind === "state" ? { ...WHICH, peak: "Live now" }[which] : text)));
  $("how").replaceChildren(...Object.entries(HOW).filter(([how]) => (how !== "age" || report.kind !== "state") && (how !== "kind" || report.painted.kind)).map(([how, text]) => make("button", {
    type: "button", id: `how-${how}`, "aria-pressed": String(state.how === how), onclick: () => update({ how }),
  }, text)));
  $("within-label").hidden = state.which !== "temporary";
}

function walkTabs(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const names = Object.keys(WHICH);
  update({ which: names[(names.indexOf(state.which) + step + names.length) % names.length] });
  $(`which-${state.which}`).focus();
  event.preventDefault();
  event.stopPropagation();
}

function drawView() {
  const found = sums();
  drawCount(found);
  const drawn = { owner: byOwner, kind: byKind, line: byLine, tree: callTree, flame, size: bySize, age: byAge, list: blockList }[state.how](found);
  $("view").replaceChildren(drawn);
}

/** How many blocks are shown, and whether these are all that there are. */
function drawCount(found) {
  const parts = [make("b", {}, bytes(found.bytes)), ` in ${many(found.blocks, "block")}`];
  if (state.which === "peak" && !isWhole()) parts.push(` after event ${count(moment())}`);
  if (!found.exact && isPartial()) parts.push(`, of those that the report lists`);
  if (state.only) parts.push(" ", make("button", { type: "button", class: "chip", title: "Show all again", "aria-label": `Only ${state.only.label}: show all again`, onclick: () => update({ only: null }) }, `${state.only.label} ✕`));
  $("selected").replaceChildren(...parts.map(asNode));
}

/** Whether blocks of the choice may be missing from the list: not of those at the run's peak, unless some of these are. */
const isPartial = () => (state.which === "peak" && isWhole() ? report.left_out > 0 : report.blocks.total > report.blocks.count);

// -- by owner, by size, by age -----------------------------------------------------------------------------------------

function bars(head, rows, whole) {
  const most = Math.max(1, ...rows.map((row) => row.bytes));
  const body = rows.map(({ name, bytes: amount, blocks, choose, tint }) => make("tr", { class: choose ? "choose" : null, onclick: choose },
    make("td", { class: "name", title: name }, choose ? make("button", { type: "button", class: "link" }, name) : name),
    make("td", { class: "wide" }, make("div", { class: "track", "aria-hidden": "true" }, make("i", { style: { width: `${(100 * amount) / most}%`, background: tint ?? "" } }))),
    cell(bytes(amount), "number"), cell(percent(amount, whole), "number"), cell(count(blocks), "number")));
  return region(`By ${head}`, table([[head], ["", "wide"], ["bytes", "number"], ["share", "number"], ["blocks", "number"]], body));
}

function byOwner(found) {
  const { owner } = report.blocks;
  const rows = found.by_owner.map(([id, amount, blocks]) => ({ name: ownerName(id), bytes: amount, blocks, tint: state.paint === "owner" ? colour(groupColour("owner", id)) : null, choose: () => chooseGroup(ownerName(id), (i) => owner[i] === id) }));
  const [others, amount, blocks] = found.other_owners;
  if (others) rows.push({ name: `${many(others, "more owner")}`, bytes: amount, blocks });
  const nobody = rows.length === 1 && found.by_owner[0]?.[0] <= 0 && ownerName(found.by_owner[0][0]) === "(no owner)";
  return make("div", {}, bars("owner", rows, found.bytes), nobody ? make("p", { class: "hint" }, "No owner was named in this run: `with bfc.owner(\"kv cache\"):` names one.") : "");
}

/** "512 B to 1 KiB" for the power 9; `text` writes one end. */
const span = (exponent, text, nothing) => (exponent < 0 ? nothing : `${text(2 ** exponent)} to ${text(2 ** (exponent + 1))}`);

function bySize(found) {
  const { size } = report.blocks;
  const rows = found.by_size.map(([exponent, amount, blocks]) => {
    const name = span(exponent, roundBytes, "0 B");
    return { name, bytes: amount, blocks, tint: "var(--lane2)", choose: () => chooseGroup(name, (i) => power(size[i]) === exponent) };
  });
  return bars("size, below the second", rows, found.bytes);
}

function byAge(found) {
  const age = ageOf();
  const rows = found.by_age.map(([exponent, amount, blocks]) => {
    const name = span(exponent, count, "0");
    return { name: `${name} events`, bytes: amount, blocks, tint: "var(--lane3)", choose: () => chooseGroup(`age ${name} events`, (i) => power(age(i)) === exponent) };
  });
  const what = { peak: "age at the peak", never_freed: "age at the end", temporary: "age at its free", all: "age at its free, or at the end" }[state.which];
  return bars(what, rows, found.bytes);
}

// -- the list ----------------------------------------------------------------------------------------------------------

function blockList() {
  const { size } = report.blocks;
  const rows = selectBlocks().sort((a, b) => size[b] - size[a]);
  if (!rows.length) return make("p", { class: "hint" }, "No block.");
  const heads = [["size", "number"], ["owner"], ["line"], ["address"], ["events"]];
  return make("div", {}, growing("List of blocks", heads, rows.length, (at) => blockRow(rows[at]), ROWS_AT_ONCE, { class: "blocks" }));
}

function blockRow(block) {
  const { size, owner, stack, address } = report.blocks;
  const line = innermost(stack[block]);
  return make("tr", { class: "choose", "data-block": block, "aria-current": String(state.chosen === block), onclick: () => chooseBlock(block) },
    make("td", { class: "number" }, make("button", { type: "button", class: "link" }, bytes(size[block]))),
    make("td", { class: "name" }, ownerName(owner[block])), make("td", { class: "name", title: line }, shortName(line) || "–"),
    cell(address[block] ? hex(address[block]) : "refused", "address"), cell(lifeText(block), "life"));
}

function startViews() {
  $("within").value = state.within;
  $("within").addEventListener("input", (event) => { if (event.target.checkValidity() && event.target.valueAsNumber) update({ within: event.target.valueAsNumber }); });
  drawTabs();
  drawView();
  watch(["which", "how"], drawTabs);
  watch(["dark", "paint"], drawView);
  watch(["which", "how", "range", "within", "search", "only", "root"], () => { tip.hide(); drawView(); });
}
