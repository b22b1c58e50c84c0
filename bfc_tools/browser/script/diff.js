// What grew between two runs, in a report that compares them ("diff" in its data).

const DIFF_MOMENTS = { peak: "at the peaks", end: "at the ends" };
const DIFF_KINDS = { owner: "by owner", line: "by line", size: "by size" };
const diffShown = { moment: "peak", kind: "owner" };

function diffName(kind, name) {
  if (kind === "size") return bytes(Number(name));
  return name || (kind === "owner" ? "(no owner)" : "(no stack)");
}

function diffGroup(names, chosen, choose) {
  return Object.entries(names).map(([name, text]) => make("button", {
    type: "button", id: `diff-${name}`, "aria-pressed": String(chosen === name), onclick: () => { choose(name); drawDiff(); $(`diff-${name}`).focus(); },
  }, text));
}

function diffTile(title, moment) {
  const note = `${bytes(moment.a)} → ${bytes(moment.b)}${moment.a && moment.growth ? `, ${moment.growth < 0 ? "−" : "+"}${percent(Math.abs(moment.growth), moment.a)}` : ""}`;
  return figure(title, grown(moment.growth), note);
}

function diffRow(kind, row, most) {
  const name = diffName(kind, row.name);
  const short = kind === "line" ? name.replace(/^.*[\\/](?=[^\\/]*\.py:)/, "") : name;
  const width = most ? (100 * Math.abs(row.growth)) / most : 0;
  const bar = make("div", { class: "track", "aria-hidden": "true" }, make("i", { style: { width: `${width}%`, background: row.growth < 0 ? "var(--lane2)" : "var(--mark)" } }));
  return make("tr", {}, make("td", { class: "name", title: name }, short), cell(bytes(row.a), "number"), cell(bytes(row.b), "number"),
    cell(grown(row.growth), "number"), make("td", { class: "wide" }, bar), cell(`${count(row.count_a)} → ${count(row.count_b)}`, "number"));
}

function drawDiff() {
  const { diff } = report;
  const { moment, kind } = diffShown;
  const found = diff[moment];
  const all = found[`by_${kind}`];
  const rows = all.filter((row) => row.growth || row.count_a !== row.count_b);
  const most = rows.reduce((top, row) => Math.max(top, Math.abs(row.growth)), 0);
  const tiles = [diffTile("growth of the peak", diff.peak), diffTile("growth of what is live at the end", diff.end)];
  if (diff.reserved_a !== null && diff.reserved_b !== null) tiles.push(diffTile("growth of what was reserved at most", { a: diff.reserved_a, b: diff.reserved_b, growth: diff.reserved_b - diff.reserved_a }));
  const heads = [[kind], ["first", "number"], ["second", "number"], ["growth", "number"], ["", "wide"], ["blocks", "number"]];
  const drawn = rows.length ? region("What grew, row by row", labelled(table(heads, rows.map((row) => diffRow(kind, row, most))))) : make("p", { class: "hint" }, "Nothing changed.");
  const same = all.length - rows.length;
  const rest = [same && `${many(same, "row")} did not change`, found.left_out[kind] && `${many(found.left_out[kind], "row")} that changed least ${found.left_out[kind] === 1 ? "is" : "are"} left out`].filter(Boolean).join("; ");
  const remarks = diff.remarks.join("; ");
  $("diff-when").replaceChildren(...diffGroup(DIFF_MOMENTS, moment, (name) => { diffShown.moment = name; }));
  $("diff-how").replaceChildren(...diffGroup(DIFF_KINDS, kind, (name) => { diffShown.kind = name; }));
  $("diff-body").replaceChildren(make("div", { class: "tiles" }, tiles), drawn, make("p", { class: "hint" }, [rest, remarks].filter(Boolean).map((text) => `${text}. `)));
}

function startDiff() {
  if (!report.diff) return;
  $("diff-title").textContent = `What grew from ${report.diff.a} to ${report.diff.b}`;
  $("diff").hidden = false;
  drawDiff();
}
