// The page as a whole: figures, themes, keys, what was left out, and the start.

const KEYS = [
  ["/", "search", () => $("search").focus()],
  ["n", "the next hit; Enter does it, too", () => goToHit(1)],
  ["N", "the hit before", () => goToHit(-1)],
  ["t", "light or dark", () => update({ dark: !state.dark })],
  ["c", "other colours: of owners, lines, what for, streams", () => update({ paint: paints[(paints.indexOf(state.paint) + 1) % paints.length] })],
  ["e", "events or time on the axis", () => { if (report.hasTime) update({ axis: state.axis === "time" ? "event" : "time" }); }],
  ["+", "zoom in", () => zoom(0.5)],
  ["-", "zoom out", () => zoom(2)],
  ["0", "the whole run", () => setRange(...report.whole)],
  ["p", "the events around the peak", () => { const at = report.peak_event; setRange(at - report.events / 40, at + report.events / 40); }],
  ["ArrowLeft", "earlier", () => pan(-0.25)],
  ["ArrowRight", "later", () => pan(0.25)],
  ["1", "blocks at the peak", () => update({ which: "peak" })],
  ["2", "blocks that are never freed", () => pick("never_freed")],
  ["3", "temporary blocks", () => pick("temporary")],
  ["4", "all blocks", () => pick("all")],
  ["o", "by owner", () => update({ how: "owner" })],
  ["w", "what for: weights, gradients and so on", () => { if (report.painted.kind) update({ how: "kind" }); }],
  ["i", "lines of the program", () => update({ how: "line" })],
  ["r", "the call tree", () => update({ how: "tree" })],
  ["l", "the flame graph", () => update({ how: "flame" })],
  ["s", "by size", () => update({ how: "size" })],
  ["a", "by age", () => { if (report.kind !== "state") update({ how: "age" }); }],
  ["b", "list of blocks", () => update({ how: "list" })],
  ["j", "the next block below the chosen one", () => step(-1)],
  ["k", "the next block above it", () => step(1)],
  ["?", "this help", () => openHelp()],
  ["Escape", "close, or forget what was chosen", () => { tip.hide(); update({ chosen: -1, only: null }); }],
];

const WORDS = [
  ["live", "bytes that the program has asked for and not freed"],
  ["reserved", "bytes that the allocator has taken from the device"],
  ["idle", "bytes of a segment that are not live: cached, or lost to rounding and gaps"],
  ["segment", "a piece of memory as it was taken from the device; it goes back only when nothing in it is live"],
  ["temporary", "freed before N more allocations were made; you choose N"],
];

const pick = (which) => { if (report.kind !== "state") update({ which }); };

function openHelp() {
  const names = { ArrowLeft: "←", ArrowRight: "→", Escape: "Esc" };
  const rows = KEYS.map(([key, text]) => make("tr", {}, make("td", {}, make("kbd", {}, names[key] ?? key)), cell(text)));
  const half = Math.ceil(rows.length / 2);
  const words = make("dl", {}, WORDS.flatMap(([word, text]) => [make("dt", {}, word), make("dd", {}, text)]));
  const more = "Tab goes through everything. On the timeline and on the map the arrow keys move the pointer, with Shift faster; Enter on the map chooses the block. Ctrl and the wheel zoom. In the flame graph the arrow keys go from place to place, and Enter zooms.";
  $("help-body").replaceChildren(make("div", { class: "keys" }, make("table", {}, make("tbody", {}, rows.slice(0, half))), make("table", {}, make("tbody", {}, rows.slice(half)))), make("p", { class: "hint" }, more), words);
  if (!$("help").open) $("help").showModal();
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (event.target.matches?.("input, select, textarea")) { if (event.key === "Escape") event.target.blur(); return; }
  const found = KEYS.find(([key]) => key === event.key);
  if (!found || (report.kind === "state" && ["+", "-", "0", "p", "e", "ArrowLeft", "ArrowRight"].includes(event.key))) return;
  event.preventDefault();
  found[2]();
}

// -- figures -----------------------------------------------------------------------------------------------------------

function figure(name, value, note = "") {
  return make("dl", { class: "figure" }, make("dt", {}, name), make("dd", {}, value, note ? make("small", {}, ` ${note}`) : ""));
}

/** How the runs ran out of memory, each in one sentence. */
function drawRanOut() {
  const named = new Set(report.runs.map((run) => run.trace)).size > 1;
  $("ran-out").replaceChildren(...report.ran_out.map(({ trace, sentence }) => make("p", { class: "notice" }, named ? `${trace}: ${sentence}` : sentence)));
}

function drawFigures() {
  const [run] = report.runs;
  const state_ = report.kind === "state";
  const shown = [
    figure(state_ ? "live now" : "live at the peak", bytes(report.peak_live), state_ ? "" : `event ${count(report.peak_event)}`),
    figure(state_ ? "reserved" : "reserved at most", bytes(report.peak_reserved)),
    figure("reserved and not live", bytes(report.peak_reserved - report.peak_live), percent(report.peak_reserved - report.peak_live, report.peak_reserved)),
  ];
  if (!state_) shown.push(figure("events", count(report.events - report.rebuilt), report.rebuilt ? `from event ${count(report.rebuilt)} on` : ""), figure("calls to the driver", count(run.driver_calls)), figure("refused", count(run.refusals), run.refusals ? `first at ${count(run.first_refusal)}` : ""));
  const remarks = remarksOf(report.runs);
  const parts = [make("div", { class: "tiles" }, shown), kindFigures()].filter(Boolean);
  if (report.runs.length > 1) parts.push(runsTable());
  if (remarks.length) parts.push(make("p", { class: "remark" }, make("b", {}, "Note: "), `${remarks.join("; ")}.`));
  $("figures").replaceChildren(...parts);
}

/** What a reader must know of the runs; what holds for all of them is said once. */
function remarksOf(runs) {
  const texts = new Set(runs.flatMap((run) => run.remarks));
  return [...texts].map((text) => {
    const labels = runs.filter((run) => run.remarks.includes(text)).map((run) => run.label);
    return labels.length === runs.length ? text : `${labels.join(", ")}: ${text}`;
  });
}

function runsTable() {
  const rows = report.runs.map((run, index) => make("tr", {},
    make("td", {}, make("span", { class: "key" }, make("span", { class: "swatch", style: { background: colour(`run${index % 6}`) }, "aria-hidden": "true" }), ` ${run.label}`)),
    cell([run.origin, run.device && `on ${run.device}`].filter(Boolean).join(" ")), cell(run.completed ? "yes" : `no: refuses event ${count(run.first_refusal)}`),
    cell(bytes(run.peak_live), "number"), cell(bytes(run.peak_reserved), "number"), cell(run.peak_live ? `${(run.peak_reserved / run.peak_live).toFixed(3)} ×` : "–", "number"), cell(count(run.driver_calls), "number")));
  return make("div", { class: "runs" }, labelled(table([["run"], ["origin"], ["completes"], ["live at most", "number"], ["reserved at most", "number"], ["reserved / live", "number"], ["driver calls", "number"]], rows)));
}

/** Everything that the run has and the page has not, in words. */
function drawLeftOut() {
  const { blocks, left_out: left, stacks_left_out: stacks, views } = report;
  const [run] = report.runs;
  const said = [];
  if (left) said.push(`${many(left, "block")} of ${bytes(report.left_out_bytes)} at the peak: the ${count(blocks.at_peak)} largest are listed. The sums at the peak count all.`);
  if (blocks.total > blocks.count) said.push(`${count(blocks.total - blocks.count)} of ${many(blocks.total, "allocation")}: beside those at the peak, the ${count(blocks.count - blocks.at_peak)} largest are listed. Sums over the whole run count all; a chosen range, a search, and another N for “temporary” count those that are listed.`);
  if (run.timeline && run.timeline.event.length < run.events) said.push(`The timeline has ${many(run.timeline.event.length, "row")} for ${count(run.events)} events. It keeps the largest and the smallest figures of each interval, so no peak is lost.`);
  if (run.map && run.map.edges.at(-1) > run.map.columns) said.push(`The map has ${count(run.map.columns)} columns and ${count(run.map.rows)} rows. A cell is ${bytes(run.map.row_bytes)} high, and shows the average of some ${count(run.events / run.map.columns)} events.`);
  if (run.map?.ranges_left_out) said.push(`${many(run.map.ranges_left_out, "range")} of addresses on the map.`);
  if (stacks) said.push(`The stacks of ${many(stacks, "block")}.`);
  const places = Object.values(views).reduce((most, view) => Math.max(most, view.tree.left_out), 0);
  if (places) said.push(`Up to ${many(places, "place")} of the flame graphs, the smallest. Their bytes are in the places that call them.`);
  for (const one of report.runs) if (one.segments.leftOut) said.push(`${many(one.segments.leftOut, "segment")} of ${bytes(one.segments.leftOutBytes)} (${one.label}).`);
  $("left").replaceChildren(...(said.length ? said : ["Nothing: every block of the run is in this file."]).map((text) => make("li", {}, text)));
}

// -- the start ---------------------------------------------------------------------------------------------------------

function applyTheme() { document.documentElement.dataset.theme = state.dark ? "dark" : "light"; }

function startTheme() {
  applyTheme();
  watch(["dark"], applyTheme);
  watch(["dark"], drawFigures);
  $("theme").addEventListener("click", () => update({ dark: !state.dark }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => update({ dark: event.matches }));
}

function startControls() {
  $("axis-event").addEventListener("click", () => update({ axis: "event" }));
  $("axis-time").addEventListener("click", () => update({ axis: "time" }));
  $("axis-time").disabled = !report.hasTime;
  if (!report.hasTime) $("axis-time").title = "This run recorded no times";
  $("zoom-in").addEventListener("click", () => zoom(0.5));
  $("zoom-out").addEventListener("click", () => zoom(2));
  $("zoom-all").addEventListener("click", () => setRange(...report.whole));
  $("help-open").addEventListener("click", openHelp);
  document.addEventListener("keydown", pressed);
}

function start() {
  document.title = `bfc report: ${report.title}`;
  $("title").textContent = report.title;
  $("title").title = report.title;
  $("about").textContent = `Written by bfc ${report.version}. This file asks nothing of the network. The timeline is drawn by uPlot 1.6.32 (MIT licence, © 2022 Leon Sorokin).`;
  startTheme();
  startControls();
  startSearch();
  startDiff();
  drawRanOut();
  drawFigures();
  if (report.hasTimeline) startTimeline(); else $("time").hidden = true;
  if (report.hasTimeline && report.runs[0].map) startMap(); else $("map").parentElement.classList.add("without-map");
  startViews();
  startIterations();
  startBlock();
  startSegments();
  startSave();
  drawLeftOut();
}

start();
// Two frames later all of it has been painted, and every control answers.
requestAnimationFrame(() => requestAnimationFrame(() => {
  performance.mark("bfc-interactive");
  document.documentElement.dataset.ready = "yes";
  if (map.picture) unpackPaints();
}));
