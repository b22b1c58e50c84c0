// The timeline: live and reserved bytes of each run on one axis, drawn by uPlot.

const GUTTER = 108;   // left of the drawings, where their axes are named: the map stands under the timeline
const RIGHT = 14;
const NARROW = 3;     // pixels: bands below that would be one

/** All lines that there are to draw: two for each run. */
const lines = report.runs.flatMap((run, index) => [
  { run, index, what: "reserved", name: `${run.label} reserved`, colour: `run${index % 6}`, dash: null },
  { run, index, what: "live", name: `${run.label} live`, colour: `run${index % 6}`, dash: [5, 3] },
]);

/** The places on the axis at which any run has a figure, and each line's figure there: a run keeps its last one between two. */
function align() {
  const places = report.runs.map((run) => (state.axis === "time" ? run.seconds ?? [] : run.event));
  const x = Float64Array.from(new Set([toAxis(Math.max(0, report.peak_event)), ...places.flat()])).sort();
  const columns = lines.map(({ run, index, what }) => {
    const own = places[index];
    let at = -1;
    return Array.from(x, (here) => {
      while (at + 1 < own.length && own[at + 1] <= here) at += 1;
      return at < 0 || here > own[own.length - 1] ? null : run[what][at];
    });
  });
  return { x: Array.from(x), columns };
}

/** Where an event stands on the axis that was chosen, and back: events, or seconds from the first one. */
const toAxis = (event) => (state.axis === "time" ? timeOf(event) : event);
const fromAxis = (value) => (state.axis === "time" ? eventAt(value) : value);

let chart = null;
let aligned = null;

function drawTimeline() {
  const box = $("timeline");
  chart?.destroy();
  box.replaceChildren();
  aligned = align();
  chart = new uPlot(chartOptions(box.clientWidth, box.clientHeight), chartData(), box);
  showRange();
}

const chartData = () => [aligned.x, ...aligned.columns];

function chartOptions(width, height) {
  const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1, size: 4 }, font: "12px system-ui, sans-serif" };
  return {
    width, height, padding: [12, RIGHT, 0, 0], legend: { show: false },
    scales: { x: { time: false, range: () => state.range.map(toAxis) }, y: { range: (_, low, high) => [0, (high || 1) * 1.16] } },
    axes: [
      { ...axis, size: 30, space: 84, values: (_, ticks, __, ___, step) => (state.axis === "time" ? timeTicks(ticks, step) : ticks.map(count)) },
      { ...axis, size: GUTTER, splits: (_, __, low, high) => byteTicks(high), values: (_, ticks) => ticks.map(roundBytes) },
    ],
    cursor: { drag: { x: true, y: false, setScale: false }, y: false, points: { size: 7 }, bind: { dblclick: () => () => { setRange(...report.whole); return null; } } },
    series: [{}, ...lines.map(chartLine)],
    hooks: { setSelect: [choseRange], setCursor: [pointed], draw: [drawIterations, drawSleep, drawPeak] },
  };
}

function chartLine({ index, what, colour: name, dash }) {
  const drawn = colour(name);
  const filled = what === "live" && index === 0;
  return {
    stroke: drawn, width: what === "live" ? 1.25 : 2, dash, spanGaps: false, show: !state.hidden.has(`${index} ${what}`),
    fill: filled ? `${drawn}24` : undefined,
    paths: uPlot.paths.stepped({ align: 1 }), points: { show: false },
  };
}

/** Times in one unit, with as many digits as tell neighbours apart. */
function timeTicks(ticks, step) {
  const last = Math.abs(ticks.at(-1) ?? 1);
  const [unit, size] = last < 1e-3 ? ["µs", 1e-6] : last < 1 ? ["ms", 1e-3] : ["s", 1];
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step / size) + 1e-9)));
  return ticks.map((tick) => `${(tick / size).toFixed(digits)} ${unit}`);
}

/** About five round figures up to `high`: powers of two times 1, 2 or 4 and their halves. */
function byteTicks(high) {
  let step = 2 ** Math.floor(Math.log2(Math.max(1, high / 5)));
  if (high / step > 8) step *= 2;
  const ticks = [];
  for (let at = 0; at <= high; at += step) ticks.push(at);
  return ticks;
}

function choseRange(plot) {
  const { left, width } = plot.select;
  if (width < 3) return;
  const [low, high] = [left, left + width].map((x) => fromAxis(plot.posToVal(x, "x")));
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  setRange(low, high);
}

/** The figures under the pointer, in the tip and beside each line's name. */
function pointed(plot) {
  const at = plot.cursor.idx;
  const inside = plot.cursor.left >= 0 && at !== null && at !== undefined;
  if (!inside) { tip.hide(); showCrosshair(null); return; }
  const event = fromAxis(aligned.x[at]);
  const { left, top } = plot.over.getBoundingClientRect();
  const rows = lines.flatMap((line, i) => (plot.series[i + 1].show && aligned.columns[i][at] !== null ? [[line.name, bytes(aligned.columns[i][at])]] : []));
  if (plot.over.matches(":hover")) tip.show(left + plot.cursor.left, top + 20, whenText(event), rows);
  showCrosshair(event);
}

const whenText = (event) => `event ${count(event)}${report.hasTime ? `, after ${duration(timeOf(event))}` : ""}`;

/** A band for each iteration at the head of the drawing, light and dark by turns, with its number where there is room. */
function drawIterations(plot) {
  const { ctx } = plot;
  const scale = devicePixelRatio || 1;
  const { top, left, width } = plot.bbox;
  const place = (event) => Math.min(left + width, Math.max(left, plot.valToPos(toAxis(event), "x", true)));
  ctx.save();
  ctx.font = `${10 * scale}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  (report.iterations?.rows ?? []).forEach(([, begin, end], number) => {
    const [x, last] = [place(begin), place(end)];
    if (last - x < NARROW * scale) return;
    ctx.fillStyle = `${colour("soft")}${number % 2 ? "18" : "30"}`;
    ctx.fillRect(x, top, last - x, 12 * scale);
    ctx.fillStyle = colour("soft");
    if (last - x > 24 * scale) ctx.fillText(String(number), (x + last) / 2, top + 9.5 * scale);
  });
  ctx.restore();
}

/** A band for each time that a tag slept, at the foot of the drawing, with its name where there is room. */
function drawSleep(plot) {
  const { ctx } = plot;
  const scale = devicePixelRatio || 1;
  const { top, height, left, width } = plot.bbox;
  const place = (event) => Math.min(left + width, Math.max(left, plot.valToPos(toAxis(event), "x", true)));
  ctx.save();
  ctx.font = `${11 * scale}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  const rows = [];
  for (const { tag, from, to } of sleeps()) {
    if (!rows.includes(tag)) rows.push(tag);
    const [x, end] = [place(from), place(to)];
    const y = top + height - (rows.indexOf(tag) % 4 + 1) * 14 * scale;
    ctx.fillStyle = `${colour("mark")}30`;
    ctx.fillRect(x, y, Math.max(end - x, 2 * scale), 13 * scale);
    ctx.fillStyle = colour("soft");
    if (end - x > ctx.measureText(tag).width + 6 * scale) ctx.fillText(tag, x + 3 * scale, y + 10 * scale);
  }
  ctx.restore();
}

/** The times that tags of the first run slept. */
function sleeps() {
  const found = [];
  const open = new Map();
  for (const [event, change, tag] of report.runs[0]?.asleep ?? []) {
    if (change > 0) { open.set(tag, { tag, from: event, to: report.events }); found.push(open.get(tag)); }
    else if (open.has(tag)) open.get(tag).to = event;
  }
  return found;
}

function drawPeak(plot) {
  const [event, text] = [report.peak_event, `peak ${bytes(report.peak_live)} live`];
  const [low, high] = state.range;
  if (event < low || event > high) return;
  const { ctx } = plot;
  const scale = devicePixelRatio || 1;
  const x = plot.valToPos(toAxis(event), "x", true);
  const { top, height, left, width } = plot.bbox;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colour("mark");
  ctx.setLineDash([4 * scale, 3 * scale]);
  ctx.lineWidth = 1.25 * scale;
  ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, top + height); ctx.stroke();
  ctx.font = `600 ${12 * scale}px system-ui, sans-serif`;
  const room = left + width - x > ctx.measureText(text).width + 10 * scale;
  ctx.textAlign = room ? "left" : "right";
  ctx.fillText(text, x + (room ? 5 : -5) * scale, top + (report.iterations ? 24 : 10) * scale);   // below their bands
  ctx.restore();
}

function drawLegend() {
  $("legend").replaceChildren(...lines.map(({ index, what, name, colour: paint, dash }) => {
    const key = `${index} ${what}`;
    return make("button", { type: "button", "aria-pressed": String(!state.hidden.has(key)), "data-line": key, onclick: () => toggleLine(key) },
      make("span", { class: `swatch thin${dash ? " dashed" : ""}`, style: { borderColor: colour(paint) }, "aria-hidden": "true" }), name);
  }));
}

function toggleLine(key) {
  const hidden = new Set(state.hidden);
  if (!hidden.delete(key)) hidden.add(key);
  update({ hidden });
}

function showRange() {
  const [low, high] = state.range;
  const times = report.hasTime ? `, ${duration(timeOf(high) - timeOf(low))}` : "";
  $("range").textContent = isWhole() ? `Shown: all ${count(report.events - report.rebuilt)} events${times}.` : `Shown: events ${count(low)} to ${count(high)}${times}. Its peak is at event ${count(moment())}.`;
  $("zoom-all").disabled = $("zoom-out").disabled = isWhole();
}

function timelineKeys(event) {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  const [low, high] = state.range;
  const from = chart.cursor.left >= 0 ? chart.cursor.left : chart.valToPos(toAxis(Math.min(high, Math.max(low, report.peak_event))), "x");
  const width = chart.over.clientWidth;
  const to = Math.min(width - 1, Math.max(0, from + (event.key === "ArrowRight" ? 1 : -1) * (event.shiftKey ? 40 : 4)));
  chart.setCursor({ left: to, top: 10 });
  const { left, top } = chart.over.getBoundingClientRect();
  const at = chart.cursor.idx;
  tip.show(left + to, top + 20, whenText(fromAxis(aligned.x[at])), lines.map((line, i) => [line.name, bytes(aligned.columns[i][at] ?? NaN)]));
  event.preventDefault();
  event.stopPropagation();
}

function wheelZoom(box, eventUnder) {
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, eventUnder(event.clientX));
  }, { passive: false });
}

function startTimeline() {
  const box = $("timeline");
  drawLegend();
  drawTimeline();
  box.addEventListener("keydown", timelineKeys);
  box.addEventListener("blur", tip.hide);
  wheelZoom(box, (x) => fromAxis(chart.posToVal(x - chart.over.getBoundingClientRect().left, "x")));
  watch(["axis", "dark", "hidden"], () => { drawLegend(); drawTimeline(); });
  watch(["range"], () => { chart.setData(chartData()); showRange(); });
  watch(["axis"], () => {
    $("axis-event").setAttribute("aria-pressed", String(state.axis === "event"));
    $("axis-time").setAttribute("aria-pressed", String(state.axis === "time"));
  });
  new ResizeObserver(() => chart.setSize({ width: box.clientWidth, height: box.clientHeight })).observe(box);
}
