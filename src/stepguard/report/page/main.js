// Puts the page together: header, lanes, panels, cards, facts; keyboard, theme, help.

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function prepare(run) {
  run.kept = keptRows(run);
  run.panels = panelsOf(run);
  run.incidents.forEach((incident, number) => (incident.number = number));
  return run;
}

class Page {
  constructor(documentData, runs) {
    this.document = documentData;
    this.all = runs.map(prepare);
    this.runs = this.groupOf(this.all[this.all.length - 1]);
    this.view = new View(this.runs);
    this.panels = [];
    this.buildHead();
    this.lanes = new Lanes(byId("lanes"), this.runs, this.view, (one) => this.select(one, true));
    this.view.listeners.push(() => this.lanes.render(), () => this.showRange());
    this.buildPanels();
    this.buildRest();
    this.bind();
    this.showRange();
    this.tellState();
    if (documentData.live) {
      this.lives = this.runs.map((_, lane) => new Live(this, documentData.live.events, lane));
      this.live = this.lives[0];
    }
  }

  // A run with several optimizers has a lane for each.
  groupOf(run) {
    return this.all.filter((one) => one.group === run.group);
  }

  // Whose something is, where the run has several optimizers.
  whose(run) {
    return this.runs.length > 1 ? `${run.name}: ` : "";
  }

  buildHead() {
    const run = this.runs[0];
    byId("run-name").textContent = run.title;
    byId("run-line").textContent = run.line;
    document.title = `${byId("run-name").textContent} · stepguard`;
    const verdict = byId("verdict");
    verdict.textContent = run.verdict.text;
    verdict.className = `chip ${run.verdict.weight}`;
    for (const live of this.lives || []) live.show(live.state);
    this.buildTiles(run);
    const unread = byId("unread");
    unread.hidden = !this.runs.some((one) => one.unread);
    unread.textContent = this.runs.map((one) => one.unread).filter(Boolean).join(" ");
    this.buildConcerns();
    this.buildChooser();
  }

  buildConcerns() {
    const list = byId("concerns");
    list.textContent = "";
    for (const run of this.runs) {
      const whose = this.whose(run);
      for (const [weight, text] of run.concerns) list.append(prose("li", weight, whose + text));
    }
  }

  buildTiles(run) {
    const tiles = byId("tiles");
    tiles.textContent = "";
    for (const [label, value, note] of run.tiles) {
      const tile = element("div", "tile");
      tile.append(element("dt", "", label), element("dd", "", value));
      if (note) tile.append(element("dd", "tile-note", note));
      tiles.append(tile);
    }
  }

  // A folder that was used for several runs shows the newest; the others can be chosen.
  buildChooser() {
    const box = byId("chooser");
    const firsts = this.all.filter((run) => !run.lane);
    box.hidden = firsts.length < 2;
    const select = byId("chosen-run");
    if (select.options.length === firsts.length) return;
    select.textContent = "";
    firsts.forEach((run, place) => {
      const option = element("option", "", run.label);
      option.value = String(place);
      select.append(option);
    });
    select.value = String(firsts.length - 1);
    select.addEventListener("change", () => this.show(this.groupOf(firsts[Number(select.value)])));
  }

  show(runs) {
    this.runs = runs;
    this.view.selected = null;
    this.view.min = undefined;
    this.view.setRuns(runs);
    this.buildHead();
    this.lanes.setRuns(runs);
    this.buildPanels();
    this.buildRest();
    this.view.apply();
  }

  buildPanels() {
    const host = byId("panels");
    host.textContent = "";
    const specs = new Map();
    for (const run of this.runs) for (const spec of run.panels) if (!specs.has(spec.id)) specs.set(spec.id, spec);
    this.panels = [...specs.values()].map((spec) => new Panel(host, spec, this.runs, this.view));
    this.view.panels = this.panels;
  }

  buildRest() {
    this.showCard();
    this.buildIncidentList();
    this.buildChain();
    showLooks(byId("looks"), this.runs);
    this.buildFacts();
  }

  incidents() {
    return this.runs.flatMap((run) => run.incidents);
  }

  select(incident, zooms) {
    this.view.select(incident, zooms);
    this.showCard();
    for (const row of document.querySelectorAll("#incident-rows tr")) {
      row.classList.toggle("selected", row.incidents.includes(incident));
    }
  }

  showCard() {
    const host = byId("card");
    const every = this.incidents();
    document.body.classList.toggle("no-incident", !every.length);
    host.textContent = "";
    if (!every.length) return;
    const shown = this.view.selected || every[0];
    const run = this.runs.find((one) => one.incidents.includes(shown));
    host.append(incidentCard(shown, run.incidents.length, (by) => this.step(by), this.whose(run)));
  }

  step(by) {
    const every = this.incidents();
    if (!every.length) return;
    const at = this.view.selected ? every.indexOf(this.view.selected) + by : by > 0 ? 0 : every.length - 1;
    this.select(every[(at + every.length) % every.length], true);
  }

  buildIncidentList() {
    const body = byId("incident-rows");
    body.textContent = "";
    for (const run of this.runs) {
      for (const group of alikeInARow(run.incidents)) body.append(this.incidentRow(run, group));
    }
    const count = this.incidents().length;
    byId("incident-count").textContent = countWords(count, "incident");
    byId("incident-list").hidden = !count;
  }

  incidentRow(run, group) {
    const [incident] = group;
    const last = group[group.length - 1];
    const row = element("tr");
    row.incidents = group;
    const steps = [incident, last].map((one) => one.step.toLocaleString("en-US"));
    const words = group.length > 1 ? `steps ${steps[0]}-${steps[1]} (${group.length})` : `step ${steps[0]}`;
    const button = element("button", "link", words);
    button.type = "button";
    button.addEventListener("click", () => {
      this.select(incident, true);
      byId("lanes").scrollIntoView({ block: "nearest" });
    });
    const first = element("td");
    first.append(button);
    row.append(first);
    const whose = this.whose(run);
    for (const text of [whose + incident.summary, incident.where?.text || "", incident.cause, incident.done]) {
      row.append(prose("td", "", text));
    }
    return row;
  }

  buildChain() {
    const list = byId("chain-list");
    list.textContent = "";
    byId("chain").hidden = !this.runs.some((run) => run.chain.length);
    for (const run of this.runs) {
      for (const event of run.chain) {
        const item = element("li", event.weight);
        const button = element("button", "link when", event.steps);
        button.type = "button";
        button.addEventListener("click", () => this.view.set(event.first - 20, event.last + 20));
        const whose = this.whose(run);
        item.append(button, prose("span", "", whose + event.text));
        list.append(item);
      }
    }
  }

  buildFacts() {
    const host = byId("facts");
    host.textContent = "";
    for (const run of this.runs) {
      for (const group of run.groups) {
        const box = element("details", "fact-group");
        box.open = group.open;
        const title = element("summary", "", this.whose(run) + group.title);
        box.append(title, factRows(group.rows));
        host.append(box);
      }
    }
  }

  // Live: rows or incidents have come.
  refresh(structural) {
    const followed = this.view.isFull();
    this.runs.forEach(prepare);
    this.view.setRuns(this.runs);
    this.buildTiles(this.runs[0]);
    if (structural) this.keepSelection();
    const known = new Set(this.panels.map((panel) => panel.spec.id));
    const panels = this.runs.flatMap((run) => run.panels);
    if (panels.some((spec) => !known.has(spec.id))) this.buildPanels();
    else this.panels.forEach((panel) => panel.setRuns(this.runs));
    if (structural) {
      this.buildHead();
      this.buildRest();
    }
    if (followed) this.view.reset();
    else this.view.apply();
    this.tellState();
  }

  // For whoever looks from outside: which run is shown, and how much of it.
  tellState() {
    document.body.dataset.rows = String(this.runs[0].rowCount);
    document.body.dataset.run = String(this.runs[0].number);
  }

  keepSelection() {
    const before = this.view.selected;
    if (before) this.view.selected = this.incidents().find((one) => one.id === before.id) || null;
  }

  showRange() {
    const from = Math.max(0, Math.ceil(this.view.min)).toLocaleString("en-US");
    const to = Math.min(this.view.lastStep, Math.floor(this.view.max)).toLocaleString("en-US");
    byId("range").textContent = this.view.isFull() ? `all steps, ${from} to ${to}` : `steps ${from} to ${to}`;
    byId("whole").disabled = this.view.isFull();
  }

  redraw() {
    for (const panel of this.panels) panel.rebuild();
    this.lanes.render();
    this.showCard();
  }

  toggleTheme() {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    this.redraw();
  }

  toggleScales() {
    for (const panel of this.panels) {
      panel.linear = !panel.linear;
      panel.rebuild();
    }
  }

  bind() {
    const help = byId("help");
    this.keys = {
      ArrowLeft: () => this.view.pan(-0.2),
      ArrowRight: () => this.view.pan(0.2),
      "+": () => this.view.zoom(0.5),
      "=": () => this.view.zoom(0.5),
      "-": () => this.view.zoom(2),
      0: () => this.view.reset(),
      n: () => this.step(1),
      p: () => this.step(-1),
      l: () => this.toggleScales(),
      t: () => this.toggleTheme(),
      "?": () => (help.open ? help.close() : help.showModal()),
      Escape: () => this.select(null, false),
    };
    document.addEventListener("keydown", (event) => this.onKey(event));
    byId("whole").addEventListener("click", () => this.view.reset());
    byId("theme").addEventListener("click", () => this.toggleTheme());
    byId("help-button").addEventListener("click", () => help.showModal());
    byId("help-close").addEventListener("click", () => help.close());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    this.view.onPointed = (step) => (byId("pointed").textContent = `step ${step.toLocaleString("en-US")}`);
    new ResizeObserver(() => {
      this.panels.forEach((panel) => panel.resize());
      this.lanes.render();
    }).observe(byId("panels"));
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (["SELECT", "INPUT", "TEXTAREA"].includes(event.target.tagName)) return;
    if (byId("help").open && event.key !== "?") return;
    const act = this.keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }
}

function factRows(rows) {
  const box = element("div", "scroll");
  focusable(box, "table");
  const table = element("table", "facts");
  for (const [name, ...values] of rows) {
    const row = element("tr");
    const head = element("th", "", name);
    head.scope = "row";
    row.append(head, ...values.map((value) => element("td", "", value)));
    table.append(row);
  }
  box.append(table);
  return box;
}

// Incidents that follow each other and were the same trouble, answered alike, are one row.
function alikeInARow(incidents) {
  const groups = [];
  let before = "";
  for (const one of incidents) {
    const words = [one.summary, one.where?.text, one.cause, one.done].join("\n");
    if (words === before) groups[groups.length - 1].push(one);
    else groups.push([one]);
    before = words;
  }
  return groups;
}

function byId(name) {
  return document.getElementById(name);
}

async function begin() {
  const text = byId("stepguard-data").textContent;
  const documentData = JSON.parse(text);
  const runs = await Promise.all(documentData.runs.map(decodeRun));
  globalThis.stepguardPage = new Page(documentData, runs);
  document.body.dataset.ready = "yes";
}

begin();
