// The table of lines: which line of the program holds how much, now chosen and at its own most.

const MOST_OF_LINES = new Map((report.lines?.line ?? []).map((frame, row) => [frame, row]));
const sorting = { column: "bytes", down: true };

/** A row for each line: of what is chosen, and, over the whole run, at its own most. */
function lineRows(found) {
  const held = report.lines;
  const rows = new Map();
  const row = (frame) => {
    if (!rows.has(frame)) {
      const at = MOST_OF_LINES.get(frame);
      rows.set(frame, { frame, name: shortName(lineText(frame)), bytes: 0, blocks: 0, most: at === undefined ? null : held.most[at], event: at === undefined ? null : held.most_event[at] });
    }
    return rows.get(frame);
  };
  for (const [frame, amount, blocks] of found.by_line) Object.assign(row(frame), { bytes: amount, blocks });
  // Lines that hold nothing at the peak may hold much at another time.
  if (found.exact && state.which === "peak") for (const frame of MOST_OF_LINES.keys()) row(frame);
  return [...rows.values()];
}

const LINE_COLUMNS = [
  ["name", "line", ""], ["bytes", "bytes", "number"], ["share", "share", "number"], ["blocks", "blocks", "number"],
  ["most", "at its most", "number"], ["event", "at event", "number"],
];

function sortedLines(rows) {
  const { column, down } = sorting;
  const key = column === "share" ? "bytes" : column;
  const compare = (a, b) => (key === "name" ? b.name.localeCompare(a.name) : (a[key] ?? -1) - (b[key] ?? -1));
  return rows.sort((a, b) => (down ? compare(b, a) : compare(a, b)));
}

/** A head that sorts: once by this column with the most first, twice the other way round. */
function lineHead([column, text, kind]) {
  const isSorted = sorting.column === column;
  const sort = () => {
    Object.assign(sorting, { column, down: isSorted ? !sorting.down : true });
    drawView();
    document.querySelector(`[data-sort="${column}"]`).focus();
  };
  return make("th", { scope: "col", class: kind || null, "aria-sort": isSorted ? (sorting.down ? "descending" : "ascending") : "none" },
    make("button", { type: "button", class: "sort", "data-sort": column, onclick: sort }, text, make("span", { "aria-hidden": "true" }, isSorted ? (sorting.down ? " ▾" : " ▴") : "")));
}

function lineRow(one, whole) {
  const { line } = report.blocks;
  const choose = () => chooseGroup(one.name, (i) => line[i] === one.frame);
  return make("tr", { class: "choose", onclick: choose },
    make("td", { class: "name", title: lineText(one.frame) }, state.paint === "line" ? make("span", { class: "swatch", style: { background: colour(groupColour("line", one.frame)) }, "aria-hidden": "true" }) : null, make("button", { type: "button", class: "link" }, one.name)),
    cell(bytes(one.bytes), "number"), cell(percent(one.bytes, whole), "number"), cell(count(one.blocks), "number"),
    cell(one.most === null ? "–" : bytes(one.most), "number"), cell(one.event === null ? "–" : count(one.event), "number"));
}

function byLine(found) {
  if (!report.lines) return make("p", { class: "hint" }, "No lines of the program were recorded for these blocks.");
  const isState = report.kind === "state";
  const rows = sortedLines(lineRows(found)).slice(0, MOST_LINES_SHOWN);
  const columns = isState ? LINE_COLUMNS.slice(0, 4) : LINE_COLUMNS;
  const drawn = make("table", { class: "lines" }, make("thead", {}, make("tr", {}, columns.map(lineHead))),
    make("tbody", {}, rows.map((one) => { const made = lineRow(one, found.bytes); while (made.children.length > columns.length) made.lastChild.remove(); return made; })));
  const [others, amount] = found.other_lines;
  const rest = others ? `${many(others, "more line")} ${others === 1 ? "has" : "have"} ${bytes(amount)}. ` : "";
  const what = "A block counts for the innermost line of your own code in its stack. ";
  const most = isState ? "" : "“At its most” counts all blocks of the run, wherever you zoomed.";
  return make("div", {}, region("Lines of the program", labelled(drawn)), make("p", { class: "hint" }, rest + what + most),
    make("button", { type: "button", class: "more", id: "lines-csv", onclick: () => download(fileName("-lines.csv"), "text/csv", linesCsv(found)) }, "save as CSV"));
}

// -- what memory is for ------------------------------------------------------------------------------------------------

const FIELD_WORDS = { weights: "PARAMETER", gradients: "GRADIENT", "optimizer state": "OPTIMIZER_STATE", activations: "ACTIVATION", inputs: "INPUT", temporary: "TEMPORARY" };

/** Says how sure the kinds are. */
function kindsNote() {
  const whole = report.views.peak.bytes;
  const said = report.kinds_said;
  const how = "a guess from the names of functions in each stack (such as forward, backward, an optimizer's step) and from how long a block lives; nothing in a recording says it";
  if (said >= whole) return "The owners' names say what the memory is for.";
  if (said > 0) return `The owners' names say it of ${bytes(said)}. The rest is ${how}.`;
  return `This is ${how}.`;
}

function byKind(found) {
  const { kind } = report.blocks;
  const rows = found.by_kind.map(([id, amount, blocks]) => ({
    name: report.kinds[id], bytes: amount, blocks, tint: colour(groupColour("kind", id)), choose: () => chooseGroup(report.kinds[id], (i) => kind[i] === id),
  }));
  return make("div", {}, bars("what for", rows, found.bytes), make("p", { class: "hint" }, kindsNote()));
}

/** The row of totals at the peak: shown where anything is known of it. */
function kindFigures() {
  if (!report.painted.kind) return null;
  const found = new Map(report.views.peak.by_kind.map(([id, amount]) => [id, amount]));
  const whole = report.views.peak.bytes;
  const items = report.kinds.map((name, id) => [name, id, found.get(id) ?? 0]).filter(([, , amount]) => amount > 0);
  if (!items.length) return null;
  return make("section", { class: "kinds card", id: "kinds", "aria-label": "What the memory is for at the peak" },
    make("div", { class: "share", "aria-hidden": "true" }, items.map(([, id, amount]) => make("i", { style: { width: `${(100 * amount) / whole}%`, background: colour(groupColour("kind", id)) } }))),
    make("dl", {}, items.map(([name, id, amount]) => make("div", { title: FIELD_WORDS[name] ? `${FIELD_WORDS[name]} in PyTorch's memory profiler` : null },
      make("dt", {}, make("span", { class: "swatch", style: { background: colour(groupColour("kind", id)) }, "aria-hidden": "true" }), ` ${name}`), make("dd", {}, `${bytes(amount)} `, make("small", {}, percent(amount, whole)))))),
    make("p", { class: "hint" }, report.kinds_said >= whole ? "At the peak. " : report.kinds_said ? "At the peak, in part guessed. " : "At the peak, guessed. ", kindsNote()));
}
