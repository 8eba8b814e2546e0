// Health probes: tables of the newest one with history.

function showLooks(host, runs) {
  host.textContent = "";
  const looked = runs.filter((run) => run.looks);
  host.hidden = !looked.length;
  for (const run of looked) {
    host.append(element("h2", "", runs.length > 1 ? `Health probes: ${run.name}` : "Health probes"), element("p", "soft", run.looks.line));
    run.looks.tables.forEach((table, place) => host.append(lookTable(table, place === 0)));
    if (run.looks.remarks.length) {
      const list = element("ul", "remarks");
      for (const sentence of run.looks.remarks) list.append(element("li", "", sentence));
      host.append(list);
    }
  }
}

function lookTable(table, open) {
  const box = element("details", "fact-group");
  box.open = open;
  const scroll = element("div", "scroll");
  focusable(scroll, table.title);
  const drawn = element("table", "looks");
  const head = element("tr");
  for (const heading of [...table.headings, ...(table.history ? [table.history] : [])]) {
    const cell = element("th", "", heading);
    cell.scope = "col";
    head.append(cell);
  }
  const body = element("tbody");
  for (const row of table.rows) body.append(lookRow(row, table.history));
  const top = element("thead");
  top.append(head);
  drawn.append(top, body);
  scroll.append(drawn);
  box.append(element("summary", "", table.title), scroll);
  return box;
}

function lookRow(row, history) {
  const line = element("tr");
  const [name, ...figures] = row.cells;
  const head = element("th", "", name);
  head.scope = "row";
  line.append(head);
  figures.forEach((text, place) => line.append(element("td", row.warns.includes(place + 1) ? "bad" : "", text)));
  if (history) {
    const cell = element("td", "trend");
    if (row.history.length > 1) cell.append(sparkline(row.history, `${name}, ${history}`));
    line.append(cell);
  }
  return line;
}
