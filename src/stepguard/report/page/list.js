// The list of runs, asked for again every few seconds. Rows are changed where they stand: nothing
// moves or is replaced under the mouse.

const EVERY_MS = 3000;
const UNITS = [["d", 86400], ["h", 3600], ["min", 60]];
const WORST_FIRST = ["bad", "note", "plain", "good"];

// Columns by the id in the head of the table; `descends`: what a first click does.
const COLUMNS = {
  name: { key: (run) => run.name, text: (run) => run.name },
  state: { key: (run) => WORST_FIRST.indexOf(run.weight), text: (run) => run.state },
  curve: { text: (run) => JSON.stringify(run.curve) },
  loss: { key: (run) => numberIn(run.loss), text: (run) => run.loss },
  steps: { key: (run) => numberIn(run.steps), text: (run) => run.steps, descends: true },
  incidents: { key: (run) => numberIn(run.incidents), text: (run) => run.incidents, descends: true },
  last: { key: (run) => numberIn(run.last), text: (run) => run.last, descends: true },
  started: { key: (run) => run.began, text: (run) => moment(run.began), descends: true },
  age: { key: (run) => (run.began === null ? null : -run.began), text: (run) => age(run.began) },
};

const rows = new Map();
let runs = [];
let sorted = { column: "started", descends: true };

function numberIn(text) {
  const found = Number(text.replaceAll(",", ""));
  return Number.isNaN(found) ? null : found;
}

function moment(began) {
  if (began === null) return "-";
  const at = new Date(began * 1000);
  const two = (number) => String(number).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}`;
}

function age(began) {
  if (began === null) return "-";
  const seconds = Math.max(0, Date.now() / 1000 - began);
  for (const [unit, size] of UNITS) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  return `${Math.floor(seconds)} s`;
}

// Whatever has no value stands last, however the list is sorted; runs alike are in the order of names.
function compared(a, b) {
  const key = COLUMNS[sorted.column].key;
  const [one, other] = [key(a), key(b)];
  if (one === null || other === null) return (one === null) - (other === null) || byName(a, b);
  const order = typeof one === "string" ? byName(a, b) : one - other;
  return (sorted.descends ? -order : order) || byName(a, b);
}

function byName(a, b) {
  return a.name.localeCompare(b.name, "en", { numeric: true });
}

function newRow(run) {
  const row = element("tr");
  row.parts = {};
  for (const name of Object.keys(COLUMNS)) {
    const cell = element("td", `of-${name}`);
    cell.dataset.label = document.getElementById(`by-${name}`).textContent;
    row.parts[name] = cell;
    row.append(cell);
  }
  const link = element("a", "", run.name);
  link.href = run.address;
  row.parts.name.append(link);
  return row;
}

function fill(cell, name, run, text) {
  if (name === "name") return;
  cell.textContent = "";
  if (name === "state") cell.append(element("span", `chip ${run.weight}`, text));
  else if (name === "curve") cell.append(...(run.curve.length > 1 ? [sparkline(run.curve, `loss of ${run.name}`)] : []));
  else cell.textContent = text;
}

function show(found) {
  runs = found;
  document.getElementById("none").hidden = runs.length > 0;
  for (const run of runs) {
    if (!rows.has(run.name)) rows.set(run.name, newRow(run));
    const row = rows.get(run.name);
    for (const [name, column] of Object.entries(COLUMNS)) {
      const text = column.text(run);
      const cell = row.parts[name];
      if (cell.shown !== text) fill(cell, name, run, text);
      cell.shown = text;
    }
  }
  const names = new Set(runs.map((run) => run.name));
  for (const [name, row] of rows) {
    if (names.has(name)) continue;
    row.remove();
    rows.delete(name);
  }
  arrange(false);
}

function arrange(always) {
  const body = document.getElementById("runs");
  const ordered = runs.slice().sort(compared).map((run) => rows.get(run.name));
  const busy = !always && (body.matches(":hover") || body.contains(document.activeElement));
  const moved = busy ? ordered.filter((row) => !row.parentNode) : ordered;
  if (busy || ordered.some((row, place) => body.children[place] !== row)) body.append(...moved);
}

function sortBy(name) {
  const again = sorted.column === name;
  sorted = { column: name, descends: again ? !sorted.descends : Boolean(COLUMNS[name].descends) };
  showOrder();
  arrange(true);
}

function showOrder() {
  for (const head of document.querySelectorAll("th[id]")) head.removeAttribute("aria-sort");
  const head = document.getElementById(`by-${sorted.column}`);
  head.setAttribute("aria-sort", sorted.descends ? "descending" : "ascending");
}

async function again() {
  try {
    const answer = await fetch("/runs.json");
    if (answer.ok) show((await answer.json()).runs);
  } finally {
    setTimeout(again, EVERY_MS);
  }
}

for (const name of Object.keys(COLUMNS)) {
  document.querySelector(`#by-${name} button`)?.addEventListener("click", () => sortBy(name));
}
document.getElementById("runs").addEventListener("mouseleave", () => arrange(false));
showOrder();
show(JSON.parse(document.getElementById("stepguard-runs").textContent).runs);
setTimeout(again, EVERY_MS);
