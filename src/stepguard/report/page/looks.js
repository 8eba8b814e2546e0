// Deep looks: what was told about healthy steps, and tables of the newest look with their history.

function showLooks(host, runs) {
  host.textContent = "";
  const looked = runs.filter((run) => run.looks);
  host.hidden = !looked.length;
  for (const run of looked) {
    host.append(element("h2", "", runs.length > 1 ? `Looks: ${run.name}` : "Looks"), element("p", "soft", run.looks.line));
    if (run.looks.findings.length) host.append(lookFindings(run.looks.findings));
    run.looks.tables.forEach((table, place) => host.append(lookTable(table, place === 0)));
    if (run.looks.remarks.length) {
      const list = element("ul", "remarks");
      for (const sentence of run.looks.remarks) list.append(element("li", "", sentence));
      host.append(list);
    }
  }
}

function lookFindings(findings) {
  const list = element("ul", "silent");
  for (const [step, code, words] of findings) {
    const item = element("li", "note");
    item.dataset.code = code;
    item.append(element("span", "when", `step ${step} `), element("span", "", words));
    list.append(item);
  }
  return list;
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
    if (row.history.length > 1) cell.append(lookHistory(row.history, `${name}, ${history}`));
    line.append(cell);
  }
  return line;
}

// One small curve; a row that never moved is a line in the middle.
function lookHistory(points, label) {
  const [width, height, edge] = [110, 22, 3];
  const [first, last] = [points[0], points[points.length - 1]];
  const values = points.map((point) => point[1]);
  const low = Math.min(...values);
  const span = Math.max(...values) - low;
  const x = (step) => edge + ((step - first[0]) / (last[0] - first[0] || 1)) * (width - 2 * edge);
  const y = (value) => (span ? height - edge - ((value - low) / span) * (height - 2 * edge) : height / 2);
  const words = `${label}: ${first[1].toPrecision(3)} at step ${first[0]}, ${last[1].toPrecision(3)} at step ${last[0]}`;
  const figure = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": words });
  const path = points.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join(" ");
  figure.append(titled(svgElement("polyline", { points: path, class: "history" }), words));
  figure.append(svgElement("circle", { cx: x(last[0]), cy: y(last[1]), r: 2, class: "newest" }));
  return figure;
}
