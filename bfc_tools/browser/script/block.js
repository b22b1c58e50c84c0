// One block: what it is, its stack, and what lies beside it.

const blockTitle = (block) => `${bytes(report.blocks.size[block])}, ${ownerName(report.blocks.owner[block])}`;

/** "event 12 to 40", "event 12, never freed". */
function lifeText(block) {
  const { born, died } = report.blocks;
  if (report.kind === "state") return "live";
  return died[block] === Infinity ? `${count(born[block])}, never freed` : `${count(born[block])} to ${count(died[block])}`;
}

const lineOf = (block) => (report.blocks.stack[block] < 0 ? [] : [["line", shortName(innermost(report.blocks.stack[block]))]]);

function chooseBlock(block) {
  update({ chosen: block });
  markChosen();
  $("block-title").focus({ preventScroll: true });
}

function markChosen() {
  for (const row of document.querySelectorAll("tr[data-block]")) row.setAttribute("aria-current", String(Number(row.dataset.block) === state.chosen));
}

/** The moment at which neighbours are looked for: the peak of the range if the block is there then, else its first event. */
function momentOf(block) {
  const at = moment();
  const { born, died } = report.blocks;
  return report.kind === "state" || (born[block] <= at && at < died[block]) ? at : born[block];
}

/** The listed blocks that are live after an event and lie in a segment, or near a block, in the order of addresses. */
function around(block, at) {
  const { address, born, died, size } = report.blocks;
  const segment = at === report.segments_event ? segmentAt(report.runs[0].segments.rows, address[block]) : null;
  const there = [];
  for (let i = 0; i < address.length; i += 1) {
    const live = report.kind === "state" || (born[i] <= at && at < died[i]);
    if (live && address[i] && size[i] && (!segment || (address[i] >= segment.address && address[i] < segment.address + segment.size))) there.push(i);
  }
  return { segment, there: there.sort((a, b) => address[a] - address[b]) };
}

/** Rows of what lies beside a block, from high addresses to low: blocks, and the free bytes between them. */
function neighbours(block, { segment, there }) {
  const { address, size } = report.blocks;
  const at = there.indexOf(block);
  const near = there.slice(Math.max(0, at - 3), at + 4);
  const rows = [];
  let end = near[0] === there[0] ? segment?.address ?? null : null;
  for (const one of near) {
    if (end !== null && address[one] > end) rows.push({ gap: address[one] - end });
    rows.push({ one });
    end = address[one] + size[one];
  }
  if (segment && near.at(-1) === there.at(-1) && segment.address + segment.size > end) rows.push({ gap: segment.address + segment.size - end });
  return rows.reverse();
}

function neighbourRow(block, { gap, one }) {
  if (one === undefined) return make("tr", { class: "gap" }, cell(bytes(gap), "number"), make("td", { colspan: 2 }, report.left_out ? "free, or not listed" : "free"));
  const { size, owner, address } = report.blocks;
  const name = one === block ? bytes(size[one]) : make("button", { type: "button", class: "link", onclick: () => chooseBlock(one) }, bytes(size[one]));
  return make("tr", { class: one === block ? "self" : "other" }, make("td", { class: "number" }, name), cell(ownerName(owner[one]), "text"), cell(hex(address[one]), "address"));
}

function stackOf(block) {
  const stack = report.blocks.stack[block];
  if (stack < 0) return make("p", { class: "hint" }, "No stack was recorded for it.");
  const frames = pathOf(stack).reverse().map((at) => frameText(report.stackFrame[at]));
  return make("ol", { class: "stack" }, frames.map((text) => make("li", { title: text }, shortName(text))));
}

/** What a block is for, where anything is known of it. */
const kindFact = (block) => (report.painted.kind ? [["what for", report.kinds[report.blocks.kind[block]]]] : []);

function facts(block, segment) {
  const { address, size, born, died, between: others, stream } = report.blocks;
  const rows = [["size", `${bytes(size[block])} (${count(size[block])} bytes)`], ["owner", ownerName(report.blocks.owner[block])], ...kindFact(block), ["address", address[block] ? hex(address[block]) : "none: the request was refused"]];
  if (report.kind !== "state") {
    rows.push(["made", whenText(born[block])], ["freed", died[block] === Infinity ? "never" : whenText(died[block])]);
    if (died[block] !== Infinity) rows.push(["lives for", others[block] === 255 ? "255 allocations or more" : many(others[block], "allocation")]);
  }
  rows.push(["stream", segment?.pool ? `${stream[block]}, private pool ${segment.pool}` : stream[block]]);
  if (segment) rows.push(["segment", `${bytes(segment.size)} at ${hex(segment.address)}, ${segment.size > segment.live ? `${bytes(segment.size - segment.live)} of it` : "none of it"} idle`]);
  return make("dl", {}, rows.flatMap(([term, text]) => [make("dt", {}, term), make("dd", {}, text)]));
}

function drawBlock() {
  const block = state.chosen;
  if (block < 0) { $("block-body").replaceChildren(make("p", { class: "hint" }, "Choose a block on the map or in a list to see its stack and its neighbours.")); return; }
  const at = momentOf(block);
  const near = around(block, at);
  const strip = near.segment ? segmentStrip(near.segment, near.there, block) : "";
  const when = report.kind === "state" ? "" : at === report.peak_event ? " at the peak" : ` after event ${count(at)}`;
  const beside = report.blocks.address[block] ? [make("h3", {}, `Neighbours${when}, high addresses first`), strip, table([["size", "number"], ["owner"], ["address"]], neighbours(block, near).map((row) => neighbourRow(block, row)), { class: "neighbours" })] : [];
  $("block-body").replaceChildren(facts(block, near.segment), make("h3", {}, "Stack, the innermost call first"), stackOf(block), ...beside.map(asNode));
}

/** The blocks of a segment by address, the chosen one marked. A click chooses the block under it. */
function segmentStrip(segment, blocks, chosen) {
  const { address, size } = report.blocks;
  const canvas = make("canvas", { class: "strip", role: "img", "aria-label": `${many(blocks.length, "block")} in a segment of ${bytes(segment.size)}` });
  const share = (at) => (at - segment.address) / segment.size;
  const draw = () => {
    const [width, height] = [canvas.clientWidth || 300, canvas.clientHeight || 22];
    const drawn = context(canvas, width, height);
    for (const block of blocks) {
      drawn.fillStyle = colour(block === chosen ? "mark" : blockColour(block));
      const wide = (size[block] / segment.size) * width;
      drawn.fillRect(share(address[block]) * width, 0, Math.max(0.75, wide - (wide > 3 ? 0.75 : 0)), height);
    }
  };
  canvas.addEventListener("click", (event) => {
    const { left, width } = canvas.getBoundingClientRect();
    const at = segment.address + ((event.clientX - left) / width) * segment.size;
    const found = blocks.find((block) => address[block] <= at && at < address[block] + size[block]);
    if (found !== undefined) { event.stopPropagation(); chooseBlock(found); }
  });
  requestAnimationFrame(draw);
  return canvas;
}

/** The next block up or down from the chosen one. */
function step(by) {
  if (state.chosen < 0) return;
  const { there } = around(state.chosen, momentOf(state.chosen));
  const to = there[there.indexOf(state.chosen) + by];
  if (to !== undefined) chooseBlock(to);
}

function startBlock() {
  watch(["chosen", "range", "dark", "paint"], drawBlock);
}
