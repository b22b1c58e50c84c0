// The data of the report, unpacked: columns as typed arrays, texts by their indices. The keys are
// described in bfc_tools/browser/data.py, packed columns in bfc_tools/browser/encoding.py.

const BYTES_OF = { u8: 1, u16: 2, u32: 4, i32: 4, u64: 8 };
const ARRAY_OF = { u8: Uint8Array, u16: Uint16Array, u32: Uint32Array, i32: Int32Array, u64: Float64Array };

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** A packed column. Its lowest bytes stand first, then all second ones: a u64 becomes a double, exact below 2**53. */
async function unpack({ type, count: length, data }) {
  const planes = await inflate(data);
  const found = new ARRAY_OF[type](length);
  for (let plane = BYTES_OF[type] - 1; plane >= 0; plane -= 1) {
    const from = plane * length;
    for (let i = 0; i < length; i += 1) found[i] = type === "u64" ? found[i] * 256 + planes[from + i] : (found[i] << 8) | planes[from + i];
  }
  return found;
}

async function unpackAll(columns) {
  const entries = Object.entries(columns).filter(([, value]) => value?.data !== undefined);
  return Object.fromEntries(await Promise.all(entries.map(async ([name, value]) => [name, await unpack(value)])));
}

async function load() {
  const raw = JSON.parse($("bfc-report").textContent);
  const [columns, frameColumns, stackColumns, maps] = await Promise.all([unpackAll(raw.blocks), unpackAll(raw.frames), unpackAll(raw.stacks), Promise.all(raw.runs.map((run) => (run.map ? unpackAll({ fill: run.map.fill, ...firstPaint(raw, run) }) : null)))]);
  const runs = raw.runs.map((run, index) => ({ ...run, ...timelineOf(run), segments: segmentsOf(run.segments), map: run.map && mapOf(run.map, maps[index]) }));
  const last = Math.max(1, ...runs.map((run) => run.events - 1));
  const first = Math.max(0, Math.min(raw.rebuilt - 1, last - 1));   // not those that rebuild what was live when a recording began
  const frames = Array.from(frameColumns.file, (file, i) => `${raw.texts[file]}:${frameColumns.line[i]} ${raw.texts[frameColumns.name[i]]}`);
  const found = {
    ...raw, runs, frames, whole: [first, last], hasTimeline: runs.some((run) => run.timeline), hasTime: Boolean(runs[0].seconds),
    stackParent: stackColumns.parent, stackFrame: stackColumns.frame, stackLine: stackColumns.line, blocks: blocksOf(raw, columns),
  };
  addLanes(found);
  found.blocks.line = found.blocks.stack.map((stack) => (stack < 0 ? -1 : found.stackLine[stack]));
  return found;
}

/** The columns of all blocks: those at the peak stand in `live_at_peak`, the others behind them in the packed columns. */
function blocksOf(raw, columns) {
  const owners = new Map(raw.owners.map((name, index) => [name, index]));
  const peak = raw.live_at_peak;
  const joined = (at, column, kind, read = (value) => value) => {
    const all = new kind(peak.length + column.length);
    for (let i = 0; i < peak.length; i += 1) all[i] = read(peak[i][at]);
    all.set(column, peak.length);
    return all;
  };
  return {
    ...raw.blocks, ...columns, count: columns.born.length,
    address: joined(0, columns.address, Float64Array), size: joined(1, columns.size, Float64Array),
    owner: joined(2, columns.owner, Int32Array, (name) => owners.get(name) ?? -1), stack: joined(3, columns.stack, Int32Array),
    died: Float64Array.from(columns.died, (event) => (event < 0 ? Infinity : event)),
  };
}

/** The rows of a timeline without repeated events: of an event's rows the largest figures. Times count from the first row. */
function timelineOf({ timeline }) {
  if (!timeline) return { event: [], live: [], reserved: [], seconds: null };
  const [event, live, reserved, seconds] = [[], [], [], []];
  timeline.event.forEach((at, i) => {
    const to = event.at(-1) === at ? event.length - 1 : event.length;
    event[to] = at;
    live[to] = Math.max(live[to] ?? 0, timeline.live[i]);
    reserved[to] = Math.max(reserved[to] ?? 0, timeline.reserved[i]);
    if (timeline.time_us) seconds[to] = (timeline.time_us[i] - timeline.time_us[0]) / 1e6;
  });
  return { event, live, reserved, seconds: timeline.time_us && seconds.length ? seconds : null };
}

function segmentsOf(columns) {
  const rows = columns.address.map((address, i) => ({
    address, size: columns.size[i], stream: columns.stream[i], kind: columns.kind[i], pool: columns.pool[i],
    live: columns.live[i], blocks: columns.blocks[i], largest: columns.largest[i],
  }));
  return { rows, leftOut: columns.left_out, leftOutBytes: columns.left_out_bytes, byPool: columns.by_pool };
}

/** The colours that the map opens with; the others are unpacked when the page stands (`unpackPaints`). */
const firstPaint = (raw, run) => (run.map.paint[raw.opens] ? { [raw.opens]: run.map.paint[raw.opens] } : {});

function mapOf(given, { fill, ...paint }) {
  let below = 0;
  const ranges = given.ranges.map(([address, size]) => { const range = { address, size, below }; below += size; return range; });
  const edges = Float64Array.of(0, ...given.ends);
  return { ...given, fill, paint, packedPaint: given.paint, ranges, starts: Float64Array.from(ranges, (range) => range.address), edges, bytes: given.rows * given.row_bytes };
}

/** What is told apart by colour: a stream, and in it a private pool. A block belongs to its segment's at the peak. */
function addLanes(found) {
  const lanes = new Map();
  const laneOf = (stream, pool) => {
    const key = `${stream} ${pool}`;
    if (!lanes.has(key)) lanes.set(key, { index: lanes.size, name: pool ? `private pool ${pool}, stream ${stream}` : `stream ${stream}` });
    return lanes.get(key).index;
  };
  for (const stream of found.streams) laneOf(stream, "");
  for (const run of found.runs) {
    for (const row of run.segments.rows) row.lane = laneOf(row.stream, row.pool);
    if (run.map) run.map.lane = Array.from({ length: run.map.rows }, (_, row) => rowLane(run, row, laneOf));
  }
  const { address, stream, count: length } = found.blocks;
  found.blocks.lane = Uint16Array.from({ length }, (_, i) => {
    const segment = segmentAt(found.runs[0].segments.rows, address[i]);
    return segment && segment.pool ? segment.lane : laneOf(stream[i], "");
  });
  found.lanes = [...lanes.values()];
}

function rowLane(run, row, laneOf) {
  const at = row * run.map.row_bytes;
  const range = run.map.ranges.findLast((one) => one.below <= at) ?? { address: 0, below: 0 };
  const segment = segmentAt(run.segments.rows, range.address + at - range.below);
  if (segment?.pool) return segment.lane;
  return run.map.row_stream[row] < 0 ? segment?.lane ?? 0 : laneOf(run.map.row_stream[row], "");
}

/** The segment that holds an address; the rows rise by address. */
function segmentAt(rows, address) {
  let [low, high] = [0, rows.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle].address <= address) low = middle + 1; else high = middle;
  }
  const row = rows[low - 1];
  return row && address < row.address + row.size ? row : null;
}

/** The index of the last value at or below `value` in a rising array; 0 if there is none. */
function atOrBefore(rising, value) {
  let [low, high] = [0, rising.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rising[middle] <= value) low = middle + 1; else high = middle;
  }
  return Math.max(0, low - 1);
}

/** The value at `x` of the line through (xs, ys), which rise; it goes on past their ends as it does at them. */
function between(xs, ys, x) {
  if (xs.length < 2) return ys[0] ?? 0;
  const at = Math.min(xs.length - 2, atOrBefore(xs, x));
  const width = xs[at + 1] - xs[at];
  return width > 0 ? ys[at] + ((ys[at + 1] - ys[at]) * (x - xs[at])) / width : ys[at];
}

const report = await load();

/** Seconds since the first event, and the event at that time, by the first run's rows. */
const timeOf = (event) => (report.hasTime ? between(report.runs[0].event, report.runs[0].seconds, event) : event);
const eventAt = (seconds) => (report.hasTime ? between(report.runs[0].seconds, report.runs[0].event, seconds) : seconds);

const ownerNamed = (owner) => owner >= 0 && report.owners[owner] !== "";
const ownerName = (owner) => (ownerNamed(owner) ? report.owners[owner] : "(no owner)");

/** The stacks above a stack and itself, the outermost first. */
function pathOf(stack) {
  const path = [];
  for (let at = stack; at >= 0; at = report.stackParent[at]) path.push(at);
  return path.reverse();
}

/** The line of the program that counts for a block; -1: it has no stack. */
const lineText = (frame) => (frame < 0 ? "(no stack)" : frameText(frame));
const frameText = (frame) => report.frames[frame] ?? "?";
/** "/long/way/model.py:12 forward" -> "forward model.py:12": the part that tells most stands first. */
const PLACE = /^(?:.*\/)?([^/]*?):(\d+) (.*)$/s;
const shortName = (text) => text.replace(PLACE, "$3 $1:$2");
const innermost = (stack) => (stack < 0 ? "" : frameText(report.stackFrame[stack]));
