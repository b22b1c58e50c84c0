// Searching: how many blocks are found, and going from one to the next.

const hits = { rows: [], at: -1 };

function findHits() {
  hits.at = -1;
  hits.rows = state.search.trim() ? selectBlocks().sort((a, b) => report.blocks.size[b] - report.blocks.size[a]) : [];
  drawHits();
}

function drawHits() {
  const isSearching = state.search.trim() !== "";
  $("hits").hidden = !isSearching;
  $("hits-count").textContent = hits.at < 0 ? many(hits.rows.length, "hit") : `${count(hits.at + 1)} of ${count(hits.rows.length)}`;
  for (const name of ["hits-next", "hits-before"]) $(name).disabled = !hits.rows.length;
}

/** Chooses the next block that was found, or the one before; after the last comes the first. The focus stays. */
function goToHit(by) {
  const { length } = hits.rows;
  if (!length) return;
  hits.at = hits.at < 0 ? (by > 0 ? 0 : length - 1) : (hits.at + by + length) % length;
  update({ chosen: hits.rows[hits.at] });
  markChosen();
  document.querySelector(`tr[data-block="${state.chosen}"]`)?.scrollIntoView({ block: "nearest" });
  drawHits();
}

function startSearch() {
  let waiting = 0;
  const take = () => { clearTimeout(waiting); update({ search: $("search").value }); };
  $("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(take, 120); });
  $("search").addEventListener("keydown", (event) => { if (event.key === "Enter") { take(); goToHit(event.shiftKey ? -1 : 1); event.preventDefault(); } });
  $("hits-next").addEventListener("click", () => goToHit(1));
  $("hits-before").addEventListener("click", () => goToHit(-1));
  watch(["search", "which", "only", "range", "within"], findHits);
  drawHits();
}
