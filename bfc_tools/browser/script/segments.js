// What is taken from the device at the peak, and which blocks keep each segment from going back.

const SEGMENTS_AT_ONCE = 25;

/** The listed blocks that are live at the peak, by segment (its index), for the first run. */
function blocksBySegment(rows) {
  const { address, born, died, count: length } = report.blocks;
  const index = new Map(rows.map((row, at) => [row, at]));
  const found = rows.map(() => []);
  if (state.placed !== 0) return found;
  for (let i = 0; i < length; i += 1) {
    const live = report.kind === "state" || (born[i] <= report.segments_event && report.segments_event < died[i]);
    const row = live && address[i] ? segmentAt(rows, address[i]) : null;
    if (row) found[index.get(row)].push(i);
  }
  return found;
}

/** Who keeps a segment: its owners by bytes, of its largest blocks. */
function pinnedBy(row) {
  if (!row.blocks) return "nothing: it could go back";
  const names = [...new Set(row.largest.map(([, size, owner]) => `${bytes(size)}${ownerNamed(owner) ? ` ${ownerName(owner)}` : ""}`))];
  const rest = row.blocks - row.largest.length;
  return names.join("; ") + (rest > 0 ? `; and ${many(rest, "more block")}` : "");
}

function segmentRow(row, blocks) {
  const choose = blocks.length ? () => chooseBlock(blocks.reduce((a, b) => (report.blocks.size[a] >= report.blocks.size[b] ? a : b))) : null;
  return make("tr", { class: choose ? "choose" : null, onclick: choose },
    make("td", { class: "address" }, choose ? make("button", { type: "button", class: "link address" }, hex(row.address)) : hex(row.address)),
    cell(bytes(row.size), "number"), cell(bytes(row.size - row.live), "number"),
    make("td", { class: "wide" }, blocks.length ? segmentStrip(row, blocks, -1) : share(row)),
    cell(count(row.blocks), "number"), make("td", { class: "text" }, make("div", { class: "two", title: pinnedBy(row) }, pinnedBy(row))),
    make("td", { class: "short" }, make("span", { class: "key" }, make("span", { class: "swatch", style: { background: colour(laneColour(row.lane)) }, "aria-hidden": "true" }), ` ${row.pool ? `pool ${row.pool}, ` : ""}stream ${row.stream}${row.kind ? `, ${row.kind}` : ""}`)));
}

/** What each pool has taken; nothing where all is in the default one. */
function poolTable(pools) {
  if (!pools.length) return [];
  const rows = pools.map(([pool, segments, size, live, blocks]) => make("tr", {}, cell(pool ? `private pool ${pool}` : "default pool", "text"), cell(count(segments), "number"), cell(bytes(size), "number"), cell(bytes(live), "number"), cell(count(blocks), "number")));
  const drawn = table([["pool"], ["segments", "number"], ["taken", "number"], ["live", "number"], ["blocks", "number"]], rows, { id: "pools" });
  return [region("Pools", labelled(drawn))];
}

const share = (row) => make("div", { class: "track whole", "aria-hidden": "true" }, make("i", { style: { width: `${(100 * row.live) / row.size}%`, background: colour(laneColour(row.lane)) } }));

function drawSegments() {
  const { rows, leftOut, leftOutBytes, byPool } = report.runs[state.placed].segments;
  const blocks = blocksBySegment(rows);
  const isKept = (index) => Number(rows[index].blocks > 0);
  const order = rows.map((_, index) => index).sort((a, b) => isKept(b) - isKept(a) || rows[b].size - rows[b].live - (rows[a].size - rows[a].live));
  const empty = rows.filter((row) => !row.blocks);
  const [size, idle] = [rows.reduce((sum, row) => sum + row.size, 0), rows.reduce((sum, row) => sum + row.size - row.live, 0)];
  $("segments-count").textContent = rows.length ? `${many(rows.length + leftOut, "segment")} of ${bytes(size + leftOutBytes)}${report.kind === "state" ? "" : " at the peak"}, ${bytes(idle)} idle, ${bytes(empty.reduce((sum, row) => sum + row.size, 0))} of it in ${many(empty.length, "segment")} that nothing keeps. The most idle of the others first.` : "Nothing is taken from the device.";
  const heads = [["address"], ["size", "number"], ["idle", "number"], ["blocks by address", "wide"], ["blocks", "number"], ["kept by"], ["for"]];
  const rowAt = (at) => segmentRow(rows[order[at]], blocks[order[at]]);
  $("segments").replaceChildren(...(rows.length ? [...poolTable(byPool), ...growing("Segments", heads, rows.length, rowAt, SEGMENTS_AT_ONCE)] : []));
}

function startSegments() {
  drawSegments();
  watch(["placed", "dark", "paint"], drawSegments);
}
