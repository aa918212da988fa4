// Rows are found by words, sorted by a column, and a link opens what it leads to. Without this script all is still there.
const shown = document.querySelector("#shown");

function filter(words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const row of document.querySelectorAll("[data-find]")) {
    const text = row.dataset.find.toLowerCase();
    row.hidden = !wanted.every(word => text.includes(word));
    count += !row.hidden;
  }
  shown.textContent = wanted.length ? `${count} found` : "";
  if (wanted.length) document.querySelectorAll("details.cases").forEach(part => { part.open = true; });
}

function sort(heading) {
  const rows = heading.closest("table").tBodies[0];
  const column = heading.cellIndex, down = heading.ariaSort === "ascending";
  for (const other of heading.parentElement.cells) other.ariaSort = null;
  heading.ariaSort = down ? "descending" : "ascending";
  const text = row => row.cells[column].textContent.trim();
  const number = row => Number.parseFloat(text(row).replaceAll(",", ""));
  const order = (a, b) => number(a) - number(b) || text(a).localeCompare(text(b));
  rows.append(...[...rows.rows].sort((a, b) => (down ? -1 : 1) * order(a, b)));
}

function reveal() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let part = target; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
  target.hidden = false;
  target.scrollIntoView();
}

document.querySelector("#find")?.addEventListener("input", event => filter(event.target.value));
for (const heading of document.querySelectorAll("table.sorted th")) {
  const press = document.createElement("button");
  press.append(...heading.childNodes);
  press.addEventListener("click", () => sort(heading));
  heading.append(press);
}
document.querySelector("#tools")?.removeAttribute("hidden");
addEventListener("hashchange", reveal);
reveal();
