// What the reader chose. Every part of the page that shows it watches the names that it depends on.

const state = {
  range: report.whole,    // events, both ends included
  axis: "event",         // or "time"
  paint: report.opens,   // of the map: by "lane" (streams and pools), "owner", "line" or "kind"
  hidden: new Set(),     // lines of the timeline that are switched off
  placed: 0,             // the run whose map and segments are shown
  which: "peak",         // peak | never_freed | temporary | all
  how: report.opens === "lane" ? "size" : report.opens,   // owner | kind | line | tree | flame | size | age | list
  within: report.temporary_within,   // allocations: what "temporary" means
  search: "",
  only: null,            // { label, holds(block) }: a group that was chosen
  root: null,            // where the flame graph starts; null: where it first branches
  chosen: -1,            // a block
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
};

const watchers = [];

function watch(names, act) { watchers.push({ names, act }); }

/** Changes the state, then calls each watcher of a changed name once, in the order of watching. */
function update(change) {
  const changed = Object.keys(change).filter((name) => state[name] !== change[name]);
  Object.assign(state, change);
  if (changed.some((name) => ["range", "which", "within", "search", "only"].includes(name))) state.root = null;
  for (const { names, act } of watchers) if (names.some((name) => changed.includes(name))) act();
}

const isWhole = () => state.range[0] <= report.whole[0] && state.range[1] >= report.whole[1];

/** The events from `low` to `high`, moved into the run and kept at least two events wide. */
function setRange(low, high) {
  const [first, last] = report.whole;
  const width = Math.min(last - first, Math.max(Math.min(2, last - first), high - low));
  const start = Math.max(first, Math.min(low, last - width));
  update({ range: [Math.round(start), Math.round(start + width)] });
}

function zoom(factor, at = (state.range[0] + state.range[1]) / 2) {
  const [low, high] = state.range;
  setRange(at - (at - low) * factor, at + (high - at) * factor);
}

function pan(share) {
  const [low, high] = state.range;
  const [first, last] = report.whole;
  const moved = Math.max(first - low, Math.min(last - high, (high - low) * share));
  setRange(low + moved, high + moved);
}

/** The event of the range after which most was live: what "at the peak" speaks of. */
function moment() {
  if (state.range[0] <= report.peak_event && report.peak_event <= state.range[1]) return report.peak_event;
  const { event, live } = report.runs[0];
  const start = atOrBefore(event, state.range[0]);
  let [best, most] = [state.range[0], live[start] ?? 0];
  for (let i = start; i < event.length && event[i] <= state.range[1]; i += 1) {
    if (event[i] >= state.range[0] && live[i] > most) { most = live[i]; best = event[i]; }
  }
  return best;
}

// -- which blocks ------------------------------------------------------------------------------------------------------

/** Whether a block is among those that the tab means. Of a chosen range: live at its peak, or made within it. */
function choice() {
  const { born, died, between: others } = report.blocks;
  const [low, high] = state.range;
  const at = moment();
  const made = isWhole() ? () => true : (i) => born[i] >= low && born[i] <= high;
  if (report.kind === "state") return () => true;
  return {
    peak: (i) => born[i] <= at && died[i] > at,
    never_freed: (i) => died[i] === Infinity && made(i),
    temporary: (i) => died[i] !== Infinity && others[i] < state.within && made(i),
    all: (i) => born[i] <= high && died[i] > low,
  }[state.which];
}

/** What the search means: part of an owner or of a line, or an address. */
function searched() {
  const needle = state.search.trim().toLowerCase();
  if (!needle) return () => true;
  const { owner, stack, address, size } = report.blocks;
  const owners = report.owners.map((name) => name.toLowerCase().includes(needle));
  const frames = report.frames.map((text) => text.toLowerCase().includes(needle));
  const stacks = new Uint8Array(report.stackParent.length);
  for (let i = 0; i < stacks.length; i += 1) stacks[i] = frames[report.stackFrame[i]] || (report.stackParent[i] >= 0 && stacks[report.stackParent[i]]) ? 1 : 0;
  const wanted = /^0x[0-9a-f]+$/.test(needle) ? Number(needle) : NaN;
  return (i) => owners[owner[i]] || (stack[i] >= 0 && stacks[stack[i]] === 1) || (wanted >= address[i] && wanted < address[i] + size[i]);
}

/** The listed blocks that the tab, the search and the chosen group mean. */
function selectBlocks() {
  const [holds, finds] = [choice(), searched()];
  const found = [];
  for (let i = 0; i < report.blocks.count; i += 1) if (holds(i) && finds(i) && (!state.only || state.only.holds(i))) found.push(i);
  return found;
}
