// The map: addresses upward, time to the right, as the run that is shown placed them.

const map = { box: $("map"), under: make("canvas", { "aria-hidden": "true" }), over: make("canvas", { "aria-hidden": "true" }), picture: null, cursor: null, point: null };
const MAP_TOP = 4;
const MAP_BOTTOM = 4;
const MOST_RECTANGLES = 80000;
const FEW_BLOCKS = 10000;   // so many are drawn one by one from the start: sharper than cells, and quick enough
const MOST_COLOURS = 8;
const ROUND_ADDRESS = 2 ** 21;

const placedMap = () => report.runs[state.placed].map;
const isFirst = () => state.placed === 0;   // the blocks that are listed lie where the first run placed them

const mapWidth = () => Math.max(1, map.box.clientWidth - GUTTER - RIGHT);
const mapHeight = () => Math.max(1, map.box.clientHeight - MAP_TOP - MAP_BOTTOM);

function xOf(event) {
  const [low, high] = state.range.map(toAxis);
  return GUTTER + ((toAxis(event) - low) / (high - low || 1)) * mapWidth();
}

function eventAtX(x) {
  const [low, high] = state.range.map(toAxis);
  return fromAxis(low + ((x - GUTTER) / mapWidth()) * (high - low));
}

/** The share of the map's height below an address (0 at the bottom), or -1 if the map does not have it. */
function heightOf(address) {
  const { ranges, starts, bytes: whole } = placedMap();
  const range = ranges[atOrBefore(starts, address)];
  return range && address >= range.address && address <= range.address + range.size ? (range.below + address - range.address) / whole : -1;
}

function addressAt(share) {
  const at = Math.min(placedMap().bytes - 1, Math.max(0, share * placedMap().bytes));
  const range = placedMap().ranges.findLast((one) => one.below <= at) ?? placedMap().ranges[0];
  return Math.floor(range.address + at - range.below);
}

const shareAtY = (y) => 1 - (y - MAP_TOP) / mapHeight();

function rgb(name) {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d");
  canvas.fillStyle = colour(name);
  canvas.fillRect(0, 0, 1, 1);
  return canvas.getImageData(0, 0, 1, 1).data;
}

const laneColour = (lane) => `lane${lane % MOST_COLOURS}`;

/** What the colours may tell apart, and what each group is called. */
const PAINTS = { owner: "owners", line: "lines", kind: "what for", lane: "streams and pools" };
const paints = Object.keys(PAINTS).filter((paint) => paint === "lane" || report.painted[paint]);
const groupName = { owner: ownerName, line: (frame) => shortName(lineText(frame)), kind: (kind) => report.kinds[kind] };
const places = Object.fromEntries(Object.entries(report.painted).map(([paint, groups]) => [paint, new Map(groups.map((group, place) => [group, place]))]));

/** The colour of an owner, a line or a kind. */
function groupColour(paint, group) {
  const place = places[paint]?.get(group);
  return place === undefined ? "rest" : `lane${place}`;
}

/** Of a run of another trace nothing is known but streams and pools. */
const cellPaint = () => (state.paint === "lane" ? undefined : placedMap()?.paint[state.paint]);
const blockColour = (block) => (state.paint === "lane" ? laneColour(report.blocks.lane[block]) : groupColour(state.paint, report.blocks[state.paint][block]));

/** A pixel between two colours, as a little-endian number. */
function shade(from, to, share) {
  const part = (i) => Math.round(from[i] + (to[i] - from[i]) * share);
  return ((255 << 24) | (part(2) << 16) | (part(1) << 8) | part(0)) >>> 0;
}

/** The cells as a picture of one pixel each: the colour of what a cell holds most of, grey where it is free. */
function paintCells() {
  const { columns, rows, fill, lane } = placedMap();
  const cells = cellPaint();
  const lanes = Array.from({ length: MOST_COLOURS }, (_, i) => rgb(`lane${i}`));
  const rest = rgb("rest");
  const free = rgb("free");
  const shades = [...lanes, rest].map((paint) => Uint32Array.from({ length: 256 }, (_, value) => shade(free, paint, value / 255)));
  map.picture = new OffscreenCanvas(columns, rows);
  const drawn = map.picture.getContext("2d");
  const image = drawn.createImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let row = 0; row < rows; row += 1) {
    const to = (rows - 1 - row) * columns;
    const from = row * columns;
    const paint = shades[lane[row] % MOST_COLOURS];
    for (let column = 0; column < columns; column += 1) {
      const at = from + column;
      pixels[to + column] = (cells ? shades[Math.min(MOST_COLOURS, Math.max(1, cells[at]) - 1)] : paint)[fill[at]];
    }
  }
  drawn.putImageData(image, 0, 0);
}

function drawMap() {
  const [width, height] = [map.box.clientWidth, map.box.clientHeight];
  const drawn = context(map.under, width, height);
  drawn.fillStyle = colour("none");
  drawn.fillRect(GUTTER, MAP_TOP, mapWidth(), mapHeight());
  drawn.save();
  drawn.beginPath();
  drawn.rect(GUTTER, MAP_TOP, mapWidth(), mapHeight());
  drawn.clip();
  const isWholeList = report.blocks.total <= report.blocks.count;
  const isExact = isFirst() && (isDeep() || (cellPaint() !== undefined && isWholeList && report.blocks.count <= FEW_BLOCKS));
  if (isExact && isWholeList) {
    drawn.fillStyle = colour("free");
    drawn.fillRect(GUTTER, MAP_TOP, mapWidth(), mapHeight());
  } else drawCells(drawn);
  if (isExact) drawRectangles(drawn);
  drawn.restore();
  drawAddresses(drawn);
  drawOver();
}

/** Whether so little of the run is shown that single blocks are drawn over the cells. */
const isDeep = () => (report.whole[1] - report.whole[0]) / (state.range[1] - state.range[0] || 1) >= 4;

function drawCells(drawn) {
  const { columns, rows, edges } = placedMap();
  drawn.imageSmoothingEnabled = mapHeight() < rows;
  const [low, high] = state.range;
  for (let column = 0; column < columns; column += 1) {
    if (edges[column + 1] < low || edges[column] > high) continue;
    const [from, to] = [xOf(edges[column]), xOf(edges[column + 1])];
    drawn.drawImage(map.picture, column, 0, 1, rows, from, MAP_TOP, to - from + 0.5, mapHeight());
  }
}

function drawRectangles(drawn) {
  const { born, died, count: length } = report.blocks;
  const [low, high] = state.range;
  const paints = new Map();
  const paintOf = (name) => paints.get(name) ?? paints.set(name, colour(name)).get(name);
  const frame = frameOf();
  drawn.strokeStyle = colour("card");
  drawn.lineWidth = 0.5;
  let left = MOST_RECTANGLES;
  for (let block = 0; block < length && left > 0; block += 1) {
    const box = born[block] <= high && died[block] > low ? rectangle(block, frame) : null;
    if (!box) continue;
    left -= 1;
    drawn.fillStyle = paintOf(blockColour(block));
    drawn.fillRect(...box);
    if (box[2] > 3 && box[3] > 3) drawn.strokeRect(...box);
  }
}

/** x, y, width and height of a block on the map; null if it is not on it. */
function rectangle(block, frame = frameOf()) {
  if (!isFirst()) return null;
  const { address, size, born, died } = report.blocks;
  const share = heightOf(address[block]);
  if (share < 0) return null;
  const x = (event) => GUTTER + ((toAxis(event) - frame.low) / frame.span) * frame.width;
  const [left, right] = [x(Math.max(state.range[0], born[block])), x(Math.min(state.range[1], died[block]))];
  const height = (size[block] / frame.bytes) * frame.height;
  return [left, MAP_TOP + (1 - share) * frame.height - height, Math.max(0.5, right - left), Math.max(0.5, height)];
}

/** What the places of all blocks depend on. */
function frameOf() {
  const [low, high] = state.range.map(toAxis);
  return { low, span: high - low || 1, width: mapWidth(), height: mapHeight(), bytes: placedMap().bytes };
}

/** The axis: where each range of addresses begins, and addresses in between where there is room. */
function drawAddresses(drawn) {
  drawn.fillStyle = colour("soft");
  drawn.strokeStyle = colour("line");
  drawn.font = "11px ui-monospace, 'DejaVu Sans Mono', monospace";
  drawn.textAlign = "right";
  drawn.textBaseline = "middle";
  const { ranges, bytes: whole } = placedMap();
  const yAt = (below) => MAP_TOP + (1 - below / whole) * mapHeight();
  const taken = [];
  const label = (below, address, room) => {
    const y = Math.min(yAt(below), MAP_TOP + mapHeight() - 6);
    if (y < MAP_TOP + 6 || taken.some((other) => Math.abs(other - y) < room)) return;
    drawn.fillText(hex(address), GUTTER - 7, y);
    taken.push(y);
  };
  drawn.globalAlpha = 0.6;
  for (const { below } of ranges) line(drawn, GUTTER - 4, yAt(below), GUTTER + mapWidth(), yAt(below));
  drawn.globalAlpha = 1;
  for (const { address, below } of ranges) label(below, address, 14);
  for (let share = 0.2; share < 1; share += 0.2) {
    const over = addressAt(share) % ROUND_ADDRESS;
    label(share * whole - over, addressAt(share) - over, 30);
  }
}

function drawOver() {
  const drawn = context(map.over, map.box.clientWidth, map.box.clientHeight);
  drawn.beginPath();
  drawn.rect(GUTTER, MAP_TOP, mapWidth(), mapHeight());
  drawn.clip();
  drawn.strokeStyle = colour("mark");
  if (state.search) { drawn.globalAlpha = 0.85; drawn.lineWidth = 1; for (const block of selectBlocks().slice(0, 4000)) strokeBlock(drawn, block, 0); drawn.globalAlpha = 1; }
  if (state.chosen >= 0) { drawn.strokeStyle = colour("ink"); drawn.lineWidth = 2; strokeBlock(drawn, state.chosen, 1); }
  drawn.strokeStyle = colour("soft");
  drawn.lineWidth = 1;
  drawn.setLineDash([3, 3]);
  if (map.cursor !== null) line(drawn, xOf(map.cursor), MAP_TOP, xOf(map.cursor), MAP_TOP + mapHeight());
  if (map.point) line(drawn, GUTTER, map.point.y, GUTTER + mapWidth(), map.point.y);
}

function strokeBlock(drawn, block, more) {
  const box = rectangle(block);
  if (box) drawn.strokeRect(box[0] - more, box[1] - more, box[2] + 2 * more, box[3] + 2 * more);
}

function line(drawn, x0, y0, x1, y1) { drawn.beginPath(); drawn.moveTo(x0, y0); drawn.lineTo(x1, y1); drawn.stroke(); }

function showCrosshair(event) { map.cursor = event; drawOver(); }

/** The block that holds an address after an event, among those that the report lists; -1 if there is none. */
function blockAt(event, address) {
  const { address: start, size, born, died } = report.blocks;
  if (!isFirst()) return -1;
  for (let block = 0; block < start.length; block += 1) {
    if (born[block] <= event && event < died[block] && start[block] <= address && address < start[block] + size[block]) return block;
  }
  return -1;
}

function pointAt(x, y, clientX, clientY) {
  if (x < GUTTER || x > GUTTER + mapWidth() || y < MAP_TOP || y > MAP_TOP + mapHeight()) { leaveMap(); return; }
  map.point = { x, y };
  const event = Math.round(eventAtX(x));
  const address = addressAt(shareAtY(y));
  map.found = nearestBlock(event, x, y);
  const title = map.found >= 0 ? blockTitle(map.found) : cellTitle(event, address);
  const lines = [["address", hex(map.found >= 0 ? report.blocks.address[map.found] : address)], ["at", whenText(event)]];
  if (map.found >= 0) lines.push(["lives", lifeText(map.found)], ...lineOf(map.found));
  tip.show(clientX, clientY, title, lines);
  showCrosshair(event);
}

/** The block under a point, or one within two pixels of it: small ones are hard to hit. */
function nearestBlock(event, x, y) {
  for (const [right, up] of [[0, 0], [0, 1], [0, -1], [2, 0], [-2, 0], [0, 2], [0, -2]]) {
    const found = blockAt(right ? Math.round(eventAtX(x + right)) : event, addressAt(shareAtY(y - up)));
    if (found >= 0) return found;
  }
  return -1;
}

function cellTitle(event, address) {
  const { columns, rows, fill, edges } = placedMap();
  const column = Math.min(columns - 1, Math.max(0, atOrBefore(edges, event)));
  const row = Math.min(rows - 1, Math.max(0, Math.floor(heightOf(address) * rows)));
  const value = fill[row * columns + column];
  const group = report.painted[state.paint]?.[(cellPaint()?.[row * columns + column] ?? 0) - 1];
  const most = group === undefined ? "" : `, most of it ${groupName[state.paint](group)}`;
  return value === 0 ? "free" : `${percent(value, 255)} in use${isFirst() ? ", by blocks that are not listed" : ""}${most}`;
}

function leaveMap() { map.point = null; tip.hide(); showCrosshair(null); }

function mapKeys(event) {
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (event.key === "Enter" && map.point && map.found >= 0) chooseBlock(map.found);
  else if (steps) {
    const pace = event.shiftKey ? 40 : 6;
    const from = map.point ?? { x: xOf(Math.min(state.range[1], Math.max(state.range[0], report.peak_event))), y: MAP_TOP + mapHeight() - 8 };
    const x = Math.min(GUTTER + mapWidth(), Math.max(GUTTER, from.x + steps[0] * pace));
    const y = Math.min(MAP_TOP + mapHeight(), Math.max(MAP_TOP, from.y + steps[1] * pace));
    const { left, top } = map.box.getBoundingClientRect();
    pointAt(x, y, left + x, top + y);
  } else return;
  event.preventDefault();
  event.stopPropagation();
}

/** Drags choose a range; a click, which moves less than four pixels, chooses a block. */
function dragMap() {
  let from = null;
  const place = (event) => { const { left, top } = map.box.getBoundingClientRect(); return [event.clientX - left, event.clientY - top]; };
  map.box.addEventListener("pointerdown", (event) => { [from] = place(event); });
  map.box.addEventListener("pointermove", (event) => pointAt(...place(event), event.clientX, event.clientY));
  map.box.addEventListener("pointerleave", leaveMap);
  window.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const [x] = place(event);
    const start = from;
    from = null;
    if (Math.abs(x - start) > 4) setRange(eventAtX(Math.min(x, start)), eventAtX(Math.max(x, start)));
    else if (map.point && map.found >= 0) chooseBlock(map.found);
  });
}

/** The colours and the names of what the map tells apart. */
function mapLegend() {
  if (!cellPaint()) return report.lanes.map((lane, index) => [laneColour(index), lane.name]);
  return report.painted[state.paint].map((group) => [groupColour(state.paint, group), groupName[state.paint](group)]);
}

const shownKeys = () => [...mapLegend().slice(0, MOST_COLOURS), ...(cellPaint() ? [["rest", "others"]] : []), ["free", "free"]];

function drawLanes() {
  const keys = mapLegend();
  $("lanes").replaceChildren(...shownKeys().map(([paint, name]) => make("span", { class: "key" },
    make("span", { class: "swatch", style: { background: colour(paint) }, "aria-hidden": "true" }), name)));
  if (keys.length > MOST_COLOURS) $("lanes").append(make("span", { class: "hint" }, `and ${keys.length - MOST_COLOURS} more, in the same colours again`));
}

/** Which run's addresses are shown, where there are several. */
function runChooser() {
  if (report.runs.filter((run) => run.map).length < 2) return;
  const choose = make("select", { "aria-label": "Run whose addresses are shown", onchange: (event) => update({ placed: Number(event.target.value) }) },
    report.runs.map((run, index) => (run.map ? make("option", { value: index }, run.label) : "")));
  $("map-title").after(choose);
}

function drawPaint() {
  $("paint").hidden = paints.length < 2;
  $("paint").replaceChildren(...paints.map((paint) => make("button", {
    type: "button", id: `paint-${paint}`, "aria-pressed": String(state.paint === paint), onclick: () => update({ paint }),
  }, PAINTS[paint])));
}

/** Unpacks the colours that the map did not open with, and draws them where the reader was faster. */
async function unpackPaints() {
  for (const run of report.runs) if (run.map) Object.assign(run.map.paint, await unpackAll(run.map.packedPaint));
  if (state.paint !== report.opens) { drawLanes(); paintCells(); drawMap(); }
}

function startMap() {
  runChooser();
  drawPaint();
  map.box.append(map.under, map.over);
  drawLanes();
  paintCells();
  drawMap();
  dragMap();
  map.box.addEventListener("keydown", mapKeys);
  map.box.addEventListener("blur", leaveMap);
  map.box.addEventListener("dblclick", () => setRange(...report.whole));
  wheelZoom(map.box, (x) => eventAtX(x - map.box.getBoundingClientRect().left));
  watch(["dark", "placed", "paint"], () => { drawPaint(); drawLanes(); paintCells(); });
  watch(["range", "axis", "dark", "placed", "paint"], drawMap);
  watch(["chosen", "search", "which", "only", "within"], drawOver);
  new ResizeObserver(drawMap).observe(map.box);
}
