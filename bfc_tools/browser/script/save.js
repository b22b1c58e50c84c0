// Saving what is shown: the timeline and the map as a picture, and figures as CSV.

const SAVED_LINE = 22;
const SAVED_MARGIN = 14;

/** Hands a file to the reader. */
function download(name, type, content) {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

const fileName = (ending) => `${report.title.replace(/[^\w.-]+/g, "_").slice(0, 80) || "report"}${ending}`;

/** A value for CSV. A name that a table program would take for a formula gets an apostrophe. */
function csvValue(value) {
  if (value === null || value === undefined) return "";
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const csv = (rows) => rows.map((row) => `${row.map(csvValue).join(",")}\r\n`).join("");

function timelineCsv() {
  const names = [...new Set(report.runs.flatMap((run) => Object.keys(run.timeline ?? {})))];
  const rows = report.runs.flatMap((run) => (run.timeline?.event ?? []).map((_, i) => [run.label, ...names.map((name) => run.timeline[name]?.[i])]));
  return csv([["run", ...names], ...rows]);
}

function linesCsv(found) {
  const rows = sortedLines(lineRows(found)).map((one) => [lineText(one.frame), one.bytes, one.blocks, one.most, one.event]);
  return csv([["line", "bytes", "blocks", "most_bytes", "most_event"], ...rows]);
}

/** Where the parts of the picture stand: texts, keys with their colours, and the two drawings. */
function arrange() {
  const measure = document.createElement("canvas").getContext("2d");
  measure.font = "12px system-ui, sans-serif";
  const width = $("timeline").clientWidth + 2 * SAVED_MARGIN;
  const found = { width, texts: [], keys: [], height: SAVED_MARGIN };
  const heading = (text) => { found.texts.push({ text, x: SAVED_MARGIN, y: found.height + 14, bold: true }); found.height += SAVED_LINE; };
  const legend = (entries) => {
    let x = SAVED_MARGIN;
    for (const entry of entries) {
      const wide = measure.measureText(entry.text).width + 34;
      if (x + wide > width && x > SAVED_MARGIN) { x = SAVED_MARGIN; found.height += SAVED_LINE; }
      found.keys.push({ ...entry, x, y: found.height });
      x += wide;
    }
    found.height += SAVED_LINE;
  };
  const drawing = (box) => { const top = found.height; found.height += box.clientHeight + 8; return { top, width: box.clientWidth, height: box.clientHeight }; };
  heading(`${report.title}: memory over time`);
  legend(lines.filter(({ index, what }) => !state.hidden.has(`${index} ${what}`)).map((one) => ({ text: one.name, colour: colour(one.colour), dash: one.dash })));
  found.timeline = drawing($("timeline"));
  if (map.picture) {
    heading("Addresses over time");
    legend(shownKeys().map(([paint, text]) => ({ text, colour: colour(paint), filled: true })));
    found.map = drawing(map.box);
  }
  found.height += SAVED_MARGIN;
  return found;
}

function savePng() {
  const found = arrange();
  const canvas = document.createElement("canvas");
  const drawn = context(canvas, found.width, found.height);
  drawn.fillStyle = colour("card");
  drawn.fillRect(0, 0, found.width, found.height);
  for (const { text, colour: paint, dash, filled, x, y } of found.keys) {
    drawn.fillStyle = drawn.strokeStyle = paint;
    drawn.lineWidth = 2;
    drawn.setLineDash(dash ?? []);
    if (filled) drawn.fillRect(x, y + 4, 12, 12); else line(drawn, x, y + 10, x + 18, y + 10);
    drawn.fillStyle = colour("ink");
    drawn.font = "12px system-ui, sans-serif";
    drawn.fillText(text, x + 23, y + 14);
  }
  drawn.fillStyle = colour("ink");
  drawn.font = "600 13px system-ui, sans-serif";
  for (const { text, x, y } of found.texts) drawn.fillText(text, x, y);
  const put = (canvas_, place) => drawn.drawImage(canvas_, SAVED_MARGIN, place.top, place.width, place.height);
  put(chart.ctx.canvas, found.timeline);
  if (found.map) put(map.under, found.map);
  canvas.toBlob((blob) => download(fileName(".png"), "image/png", blob));
}

// -- SVG: the timeline as lines and text, the map as a picture in it ---------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";
/** A document that nobody sees: the browser loads nothing for it, which this page's policy would forbid. */
const paper = document.implementation.createDocument(SVG, "svg");

function svg(name, attributes, ...children) {
  const made = paper.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined) made.setAttribute(key, String(value));
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const svgText = (text, x, y, more = {}) => svg("text", { x, y, fill: colour("ink"), "font-size": 12, ...more }, paper.createTextNode(text));

/** The steps of one line, as the chart draws them: a gap where a run has no figure. */
function stepPath(column, place) {
  const [low, high] = state.range.map(toAxis);
  let [path, last] = ["", null];
  aligned.x.forEach((x, i) => {
    if (column[i] === null || x < low || x > high) { if (column[i] === null) last = null; return; }
    const [px, py] = [place.x(x).toFixed(1), place.y(column[i]).toFixed(1)];
    path += last === null ? `M${px} ${py}` : `H${px}${py === last ? "" : `V${py}`}`;
    last = py;
  });
  return path;
}

function timelineSvg(top) {
  const scale = devicePixelRatio || 1;
  const box = Object.fromEntries(Object.entries(chart.bbox).map(([key, value]) => [key, value / scale]));
  const place = { x: (x) => SAVED_MARGIN + box.left + chart.valToPos(x, "x"), y: (y) => top + box.top + chart.valToPos(y, "y") };
  const [left, bottom, right] = [SAVED_MARGIN + box.left, top + box.top + box.height, SAVED_MARGIN + box.left + box.width];
  const [xs, ys] = chart.axes;
  const grid = (x1, y1, x2, y2) => svg("line", { x1, y1, x2, y2, stroke: colour("line") });
  const soft = { fill: colour("soft") };
  const parts = [
    ...xs._splits.flatMap((at, i) => [grid(place.x(at), top + box.top, place.x(at), bottom), svgText(xs._values[i] ?? "", place.x(at), bottom + 18, { ...soft, "text-anchor": "middle" })]),
    ...ys._splits.flatMap((at, i) => [grid(left, place.y(at), right, place.y(at)), svgText(ys._values[i] ?? "", left - 8, place.y(at) + 4, { ...soft, "text-anchor": "end" })]),
    ...lines.flatMap((one, i) => (state.hidden.has(`${one.index} ${one.what}`) ? [] : [svg("path", { d: stepPath(aligned.columns[i], place), fill: "none", stroke: colour(one.colour), "stroke-width": 1.5, "stroke-dasharray": one.dash?.join(" ") })])),
  ];
  const [low, high] = state.range;
  if (report.peak_event >= low && report.peak_event <= high) {
    const x = place.x(toAxis(report.peak_event));
    const isLeft = x < (left + right) / 2;
    parts.push(svg("line", { x1: x, y1: top + box.top, x2: x, y2: bottom, stroke: colour("mark"), "stroke-dasharray": "4 3" }),
      svgText(`peak ${bytes(report.peak_live)} live`, x + (isLeft ? 5 : -5), top + box.top + 11, { fill: colour("mark"), "text-anchor": isLeft ? "start" : "end", "font-weight": 600 }));
  }
  return parts;
}

function saveSvg() {
  const found = arrange();
  const root = svg("svg", { width: found.width, height: found.height, viewBox: `0 0 ${found.width} ${found.height}`, "font-family": "system-ui, sans-serif" },
    svg("title", {}, paper.createTextNode(report.title)), svg("rect", { width: found.width, height: found.height, fill: colour("card") }),
    ...found.texts.map(({ text, x, y }) => svgText(text, x, y, { "font-weight": 600, "font-size": 13 })),
    ...found.keys.flatMap(({ text, colour: paint, dash, filled, x, y }) => [
      filled ? svg("rect", { x, y: y + 4, width: 12, height: 12, fill: paint }) : svg("line", { x1: x, y1: y + 10, x2: x + 18, y2: y + 10, stroke: paint, "stroke-width": 2, "stroke-dasharray": dash?.join(" ") }),
      svgText(text, x + 23, y + 14)]),
    ...timelineSvg(found.timeline.top),
    found.map ? svg("image", { x: SAVED_MARGIN, y: found.map.top, width: found.map.width, height: found.map.height, href: map.under.toDataURL() }) : null);
  download(fileName(".svg"), "image/svg+xml", new XMLSerializer().serializeToString(root));
}

function startSave() {
  $("save-png").addEventListener("click", savePng);
  $("save-svg").addEventListener("click", saveSvg);
  $("save-csv").addEventListener("click", () => download(fileName(".csv"), "text/csv", timelineCsv()));
}
