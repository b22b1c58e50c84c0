// The table of the museum: rows open, the heads sort, and the form filters.
const table = document.querySelector("table.museum");
const form = document.querySelector("form.museum");

function cellOf(body, column) {
  return body.rows[0].cells[column].textContent;
}

function filter() {
  let count = 0;
  const wanted = Object.fromEntries(new FormData(form));
  for (const body of table.tBodies) {
    const { words, ...rest } = wanted;
    const matches = Object.entries(rest).every(([key, value]) => !value || body.dataset[key] === value);
    body.hidden = !matches || !words.toLowerCase().split(/\s+/).every((word) => body.dataset.words.includes(word));
    count += !body.hidden;
  }
  form.elements.count.value = `${count} cases`;
}

function sort(column) {
  const rising = table.dataset.sorted !== String(column);
  table.dataset.sorted = rising ? column : "";
  const order = (a, b) => cellOf(a, column).localeCompare(cellOf(b, column), "en", { numeric: true });
  const bodies = [...table.tBodies].sort((a, b) => (rising ? order(a, b) : order(b, a)));
  table.append(...bodies);
}

function toggle(body) {
  body.rows[1].hidden = !body.rows[1].hidden;
}

if (table) {
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  table.tHead.querySelectorAll("button").forEach((button, column) => button.addEventListener("click", () => sort(column)));
  for (const body of table.tBodies) {
    const row = body.rows[0];
    row.addEventListener("click", (event) => event.target.closest("a") || toggle(body));
    row.addEventListener("keydown", (event) => event.key === "Enter" && toggle(body));
    if (location.hash === `#${body.id}`) toggle(body);
  }
}
