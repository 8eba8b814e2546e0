// The card of one incident: what, cause, fix, what was done, where, operands, sample, replay.

// `whose`: the optimizer or the run it is of, where the page shows several.
function incidentCard(incident, total, move, whose = "") {
  const card = element("article", "card");
  card.setAttribute("aria-label", `incident at step ${incident.step}`);
  card.append(cardHead(incident, total, move, whose));
  card.append(prose("p", "summary", incident.summary));
  const [likely, ...others] = incident.findings;
  const lists = [
    section("Cause", likely ? [findingPart(likely)] : []),
    section("Fix", (likely ? likely.remedies : incident.fixes).map(remedyPart)),
    section("What was done", donePart(incident)),
    section("Where", wherePart(incident)),
    section("Operands", operandPart(incident)),
    section("Less likely causes", others.map((one) => findingPart(one, one.remedies))),
    section("Gradients by module", incident.heat ? [heatFigure(incident.heat)] : []),
    section("Sample", samplePart(incident)),
    section("Numbers of the step", [factTable(incident.facts)]),
    section("What next", commandPart(incident)),
  ];
  card.append(...lists.filter(Boolean));
  return card;
}

function cardHead(incident, total, move, whose) {
  const head = element("header", "card-head");
  const title = element("h2", "", `${whose ? `${whose}step` : "Step"} ${incident.step.toLocaleString("en-US")}`);
  const kind = element("span", `chip ${incident.weight}`, incident.title);
  head.append(title, kind);
  if (total > 1 && move) {
    const pager = element("span", "pager");
    pager.append(pagerButton("‹", "previous incident", () => move(-1)));
    pager.append(element("span", "", `${incident.number + 1} of ${total}`));
    pager.append(pagerButton("›", "next incident", () => move(1)));
    head.append(pager);
  }
  return head;
}

function pagerButton(text, name, act) {
  const button = element("button", "plain", text);
  button.type = "button";
  button.setAttribute("aria-label", name);
  button.addEventListener("click", act);
  return button;
}

function section(title, parts) {
  if (!parts || !parts.length) return null;
  const box = element("section", "card-part");
  box.append(element("h3", "", title), ...parts);
  return box;
}

function donePart(incident) {
  const parts = [prose("p", "done", incident.done)];
  for (const line of incident.done_more) parts.push(prose("p", "note", line));
  return parts;
}

function wherePart(incident) {
  const where = incident.where;
  if (!where) return [element("p", "note", incident.unplaced)];
  const parts = [element("p", "", where.text)];
  if (where.context.length) {
    const code = element("pre", "code");
    for (const line of where.context) {
      const marked = line.startsWith(">");
      code.append(element("span", marked ? "hit" : "", `${line}\n`));
    }
    parts.push(code);
  }
  for (const remark of where.remarks) parts.push(prose("p", "note", remark));
  return parts;
}

// A box that may scroll must be reachable by keyboard.
function focusable(box, name) {
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", name);
}

function operandPart(incident) {
  if (!incident.operands.length) return [];
  const table = element("table", "operands");
  const head = element("tr");
  for (const name of ["", "type", "finite values", "not finite", "at the fault"]) {
    const cell = element("th", "", name);
    cell.scope = "col";
    head.append(cell);
  }
  table.append(head);
  for (const operand of incident.operands) {
    const row = element("tr");
    const name = element("th", "", operand.name || "operand");
    name.scope = "row";
    row.append(name);
    for (const text of [operand.type, operand.span, operand.bad, operand.at]) row.append(element("td", "", text));
    table.append(row);
  }
  const box = element("div", "scroll");
  focusable(box, "operands");
  box.append(table);
  const figures = incident.operands.map(exponentFigure).filter(Boolean);
  return [box, ...figures];
}

function findingPart(finding, remedies = []) {
  const box = element("div", "finding");
  const line = element("p", "finding-head");
  line.append(prose("strong", "", `${finding.code} ${finding.title}`));
  line.append(element("span", "certainty", finding.certainty));
  box.append(line);
  const list = element("ul");
  for (const fact of finding.evidence) list.append(prose("li", "", fact));
  if (finding.evidence.length) box.append(list);
  box.append(...remedies.map(remedyPart));
  return box;
}

function remedyPart(remedy) {
  const box = element("div", "remedy");
  box.append(prose("p", "", remedy.title));
  if (remedy.snippet) box.append(element("pre", "code", remedy.snippet));
  return box;
}

function samplePart(incident) {
  if (!incident.culprits && !incident.samples.length) return [];
  const parts = [];
  if (incident.culprits) parts.push(element("p", "", incident.culprits));
  const row = element("div", "samples");
  row.append(...incident.samples.map(sampleFigure));
  if (incident.samples.length) parts.push(row);
  return parts;
}

function commandPart(incident) {
  return incident.commands.map((command) => {
    const line = element("div", "command");
    const code = element("code", "", command);
    const copy = element("button", "plain", "copy");
    copy.type = "button";
    copy.setAttribute("aria-label", `copy ${command}`);
    copy.addEventListener("click", () => copyText(command, copy));
    line.append(code, copy);
    return line;
  });
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    getSelection().selectAllChildren(button.previousSibling);
    button.textContent = "selected";
  }
}

function factTable(facts) {
  const table = element("table", "facts");
  for (const [name, value] of facts) {
    const row = element("tr");
    const head = element("th", "", name);
    head.scope = "row";
    row.append(head, element("td", "", value));
    table.append(row);
  }
  return table;
}
