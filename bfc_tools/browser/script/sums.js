// Sums over blocks, as the views show them: the report's own where it has them, which count every allocation of the
// run; otherwise over the blocks that it lists.

/** Whether the report has the sums of what is chosen, over all allocations. */
function isSummed() {
  const plain = isWhole() && !state.search.trim() && !state.only && report.views[state.which];
  return Boolean(plain) && (state.which !== "temporary" || state.within === report.temporary_within);
}

function sums() {
  if (!isSummed()) return summed(selectBlocks());
  return { ...report.views[state.which], exact: true };
}

function summed(blocks) {
  const { owner, size, stack, line, kind } = report.blocks;
  let total = 0;
  const [owners, lines, kinds, sizes, ages] = [new Map(), new Map(), new Map(), new Map(), new Map()];
  const age = ageOf();
  for (const i of blocks) {
    total += size[i];
    add(owners, owner[i], size[i]);
    add(lines, line[i], size[i]);
    add(kinds, kind[i], size[i]);
    add(sizes, power(size[i]), size[i]);
    add(ages, power(age(i)), size[i]);
  }
  return {
    exact: false, bytes: total, blocks: blocks.length, other_owners: [0, 0, 0], other_lines: [0, 0, 0], rows: blocks,
    by_owner: mostFirst(owners), by_line: mostFirst(lines), by_kind: mostFirst(kinds), by_size: rowsOf(sizes).sort((a, b) => a[0] - b[0]), by_age: rowsOf(ages).sort((a, b) => a[0] - b[0]),
    tree: treeOf(blocks, stack, size, total),
  };
}

function add(groups, key, amount) {
  const group = groups.get(key);
  if (group) { group[0] += amount; group[1] += 1; } else groups.set(key, [amount, 1]);
}

const rowsOf = (groups) => [...groups].map(([key, [amount, blocks]]) => [key, amount, blocks]);
const mostFirst = (groups) => rowsOf(groups).sort((a, b) => b[1] - a[1]);
const power = (value) => (value < 1 ? -1 : Math.floor(Math.log2(value)));

/** A block's age in events: until the moment, until its free, or until the end of the run. */
function ageOf() {
  const { born, died } = report.blocks;
  const at = moment();
  return state.which === "peak" ? (i) => at - born[i] : (i) => Math.min(died[i], report.events - 1) - born[i];
}

/** The places of the program, as `tree` of bfc_tools/browser/data.py has them: row 0 is the whole. */
function treeOf(blocks, stack, size, total) {
  const own = new Map();
  for (const i of blocks) add(own, stack[i], size[i]);
  const weights = new Map();
  for (const [id, [amount, number]] of own) {
    for (const at of id < 0 ? [] : pathOf(id)) {
      const weight = weights.get(at);
      if (weight) { weight[0] += amount; weight[1] += number; } else weights.set(at, [amount, number]);
    }
  }
  const ids = [...weights.keys()].sort((a, b) => a - b);
  const row = new Map(ids.map((id, index) => [id, index + 1]));
  return {
    parent: [-1, ...ids.map((id) => row.get(report.stackParent[id]) ?? 0)], frame: [-1, ...ids.map((id) => report.stackFrame[id])],
    bytes: [total, ...ids.map((id) => weights.get(id)[0])], blocks: [blocks.length, ...ids.map((id) => weights.get(id)[1])], left_out: 0,
  };
}
