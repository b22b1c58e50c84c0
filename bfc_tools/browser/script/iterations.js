// The table of iterations, one beside the other.

const ITERATIONS_AT_ONCE = 12;
const iterations = (report.iterations?.rows ?? []).map(([kind, begin, end, complete, agreement, made, peak, peakEvent, after], number) => (
  { number, kind, begin, end, complete, agreement, made, peak, peakEvent, after }));

/** How much more, or less, is live behind an iteration than behind the one before of its kind. */
function keptBy(one) {
  const before = iterations.findLast(({ number, kind }) => number < one.number && kind === one.kind);
  if (!before) return "–";
  return one.after === before.after ? "0" : grown(one.after - before.after);
}

function iterationRow(one, most) {
  const choose = () => setRange(one.begin, one.end - 1);
  const bar = make("div", { class: "track", "aria-hidden": "true" }, make("i", { style: { width: `${(100 * one.peak) / most}%` } }));
  return make("tr", { class: "choose", onclick: choose },
    make("td", { class: "number" }, make("button", { type: "button", class: "link", "aria-label": `Show iteration ${one.number}` }, String(one.number))),
    cell(one.complete ? one.kind : `${one.kind}, cut off`), cell(`${count(one.begin)} – ${count(one.end - 1)}`, "life"), cell(count(one.made), "number"),
    cell(bytes(one.peak), "number"), make("td", { class: "wide" }, bar), cell(bytes(one.after), "number"), cell(keptBy(one), "number"),
    cell(percent(one.agreement, 1), "number"));
}

function startIterations() {
  if (!iterations.length) return;
  const { source, sentence, left_out: left } = report.iterations;
  const most = iterations.reduce((top, { peak }) => Math.max(top, peak), 1);
  const heads = [["", "number"], ["kind"], ["events"], ["allocations", "number"], ["live at most", "number"], ["", "wide"], ["live after", "number"], ["kept since the one before", "number"], ["alike", "number"]];
  const from = source === "marks" ? "The recording marks them." : "Found from the order in which blocks come and go.";
  const rest = left ? ` ${many(left, "later iteration")} ${left === 1 ? "is" : "are"} left out.` : "";
  $("iterations").hidden = false;
  $("iterations-count").textContent = sentence;
  $("iterations-body").replaceChildren(...growing("One beside the other", heads, iterations.length, (at) => iterationRow(iterations[at], most), ITERATIONS_AT_ONCE),
    make("p", { class: "hint" }, `${from}${rest} “Alike” is the part that comes in another iteration, too. bfc diff RUN RUN --iterations 1 5 says what grew from one to another.`));
}
