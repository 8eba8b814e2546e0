// Lanes over the same steps as the panels: incidents, updates, the line of the run with its
// branches, checkpoints, ranks.

const INCIDENT_APART = 24;
const WIDEST_GROUP = 60;
const ACTION_GLYPHS = { rewind: "↺", stop: "■", note: "i", leave_out: "−", skip: "×", undo: "↶", retry: "↻" };
const STATES = { dropped: 1, calibration: 2, partial: 3 };

class Lanes {
  constructor(host, runs, view, onSelect) {
    this.host = host;
    this.view = view;
    this.onSelect = onSelect;
    this.drawn = { incidents: [], checkpoints: [], branches: [], updates: [], ranks: [] };
    this.setRuns(runs);
  }

  setRuns(runs) {
    this.runs = runs;
    this.render();
  }

  width() {
    return Math.max(100, this.host.clientWidth - AXIS_LEFT - PAD_RIGHT);
  }

  at(step) {
    return ((step - this.view.min) / (this.view.max - this.view.min)) * this.width();
  }

  inView(step) {
    return step >= this.view.min && step <= this.view.max;
  }

  render() {
    const focused = document.activeElement?.dataset?.incident;
    this.host.textContent = "";
    this.drawn = { incidents: [], checkpoints: [], branches: [], updates: [], ranks: [] };
    this.runs.forEach((run, place) => this.renderRun(run, place));
    if (focused) this.host.querySelector(`[data-incident="${focused}"]`)?.focus();
  }

  renderRun(run, place) {
    if (this.runs.length > 1) this.host.append(element("div", "lane-run", run.name));
    if (run.incidents.length) this.incidentLane(run, place);
    this.updateLane(run);
    if (run.parts.length > 1) this.lineLane(run);
    if (run.checkpoints.length) this.checkpointLane(run);
    for (const rank of run.ranks.length > 1 ? run.ranks : []) this.rankLane(run, rank);
  }

  lane(name, height, description) {
    const lane = element("div", "lane");
    lane.style.height = `${height}px`;
    const label = element("div", "lane-label", name);
    label.style.width = `${AXIS_LEFT - 6}px`;
    const track = element("div", "track");
    track.style.width = `${this.width()}px`;
    const drawing = svgElement("svg", { width: this.width(), height, role: "img", "aria-label": description });
    track.append(drawing);
    lane.append(label, track);
    this.host.append(lane);
    return { track, drawing };
  }

  incidentLane(run, place) {
    const words = `${countWords(run.incidents.length, "incident")} of ${run.name}`;
    const { track } = this.lane("incidents", 26, words);
    let group = [];
    const flush = () => {
      if (group.length) track.append(this.incidentButton(run, place, group));
      group = [];
    };
    const inView = run.incidents.filter((incident) => this.inView(incident.step));
    inView.sort((a, b) => a.step - b.step);
    for (const incident of inView) {
      const x = this.at(incident.step);
      const apart = group.length ? x - this.at(group[group.length - 1].step) : 0;
      if (apart > INCIDENT_APART || (group.length && x - this.at(group[0].step) > WIDEST_GROUP)) flush();
      group.push(incident);
    }
    flush();
  }

  incidentButton(run, place, group) {
    const chosen = group.includes(this.view.selected) ? this.view.selected : group[0];
    const button = element("button", `incident-dot ${chosen.weight}`);
    button.type = "button";
    button.textContent = group.length > 1 ? String(group.length) : ACTION_GLYPHS[chosen.action] || "!";
    const x = group.reduce((sum, incident) => sum + this.at(incident.step), 0) / group.length;
    button.style.left = `${x}px`;
    button.dataset.incident = `${place}:${chosen.number}`;
    if (group.includes(this.view.selected)) button.classList.add("selected");
    const more = group.length > 1 ? `, and ${group.length - 1} more beside it` : "";
    const words = `step ${chosen.step}: ${chosen.summary}, ${chosen.done}${more}`;
    button.setAttribute("aria-label", words);
    button.title = words;
    button.addEventListener("click", () => this.onSelect(chosen));
    this.drawn.incidents.push({ steps: group.map((incident) => incident.step), x });
    return button;
  }

  updateLane(run) {
    const states = run.columns.state.values;
    const steps = run.columns.step.values;
    const words = `updates of ${run.name}: ${run.updateWords}`;
    const { drawing } = this.lane("updates", 14, words);
    const taken = new Set();
    for (let row = 0; row < states.length; row++) {
      const state = states[row];
      if (!state || !this.inView(steps[row])) continue;
      const x = Math.round(this.at(steps[row]));
      const key = `${x}:${state}`;
      if (taken.has(key)) continue;
      taken.add(key);
      const shape = svgElement("rect", { x: x - 1, y: state === STATES.calibration ? 6 : 2, width: 2, height: state === STATES.calibration ? 6 : 10, class: `update state-${state}` });
      drawing.append(titled(shape, `step ${steps[row]}: ${["", "update dropped", "loss-scale calibration", "part of the batch dropped"][state]}`));
      this.drawn.updates.push({ step: steps[row], state, x });
    }
  }

  // The run as one line through time: where it was taken back, the branch that was left.
  lineLane(run) {
    const left = run.parts.filter((part) => part.left);
    const words = `${countWords(left.length, "branch", "branches")} left: ${left.map((part) => part.left.text).join("; ")}`;
    const { drawing } = this.lane("branches", 22, words);
    for (const part of run.parts) {
      const [from, to] = this.partSteps(run, part);
      if (from === undefined || to < this.view.min || from > this.view.max) continue;
      const y = part.left ? 15 : 6;
      const x1 = Math.max(-4, this.at(from));
      const x2 = Math.min(this.width() + 4, Math.max(this.at(to), this.at(from) + 2));
      const shape = svgElement("line", { x1, x2, y1: y, y2: y, class: part.left ? "part left" : "part" });
      drawing.append(titled(shape, part.text));
      if (!part.left) continue;
      const back = svgElement("path", { d: `M${x2},${y} L${x2},10 M${x1},${y} L${x1},8`, class: "part-ends" });
      drawing.append(back);
      this.drawn.branches.push({ first: from, last: to, left: x1, right: x2, kind: part.left.kind });
    }
  }

  partSteps(run, part) {
    const steps = run.columns.step.values;
    const last = Math.min(part.last, run.rowCount);
    if (part.first >= last) return [undefined, undefined];
    return [steps[part.first], steps[last - 1]];
  }

  checkpointLane(run) {
    const words = run.checkpoints.map((c) => `step ${c.step} ${c.state}`).slice(0, 40).join(", ");
    const { drawing } = this.lane("checkpoints", 18, `${countWords(run.checkpoints.length, "checkpoint")}: ${words}`);
    for (const checkpoint of run.checkpoints) {
      if (!this.inView(checkpoint.step)) continue;
      const x = this.at(checkpoint.step);
      drawing.append(titled(checkpointShape(checkpoint.state, x), `step ${checkpoint.step}: ${checkpoint.text}`));
      this.drawn.checkpoints.push({ step: checkpoint.step, state: checkpoint.state, x });
    }
  }

  rankLane(run, rank) {
    const words = `rank ${rank.rank}: ${rank.text}`;
    const { drawing } = this.lane(`rank ${rank.rank}`, 14, words);
    const x1 = Math.max(0, this.at(rank.first));
    const x2 = Math.min(this.width(), this.at(rank.last));
    if (x2 > x1) drawing.append(titled(svgElement("line", { x1, x2, y1: 7, y2: 7, class: "rank-line" }), words));
    for (const mark of rank.marks) {
      if (!this.inView(mark.step)) continue;
      const x = this.at(mark.step);
      const shape = svgElement("circle", { cx: x, cy: 7, r: 4, class: mark.blamed ? "rank-mark blamed" : "rank-mark" });
      drawing.append(titled(shape, `step ${mark.step}: ${mark.text}`));
      this.drawn.ranks.push({ rank: rank.rank, step: mark.step, x, blamed: mark.blamed });
    }
  }
}

function checkpointShape(state, x) {
  if (state === "refused") {
    return svgElement("path", { d: `M${x - 4},5 l8,8 m0,-8 l-8,8`, class: "checkpoint refused" });
  }
  if (state === "rewound to" || state === "restored") {
    return svgElement("path", { d: `M${x},3 l6,6 l-6,6 l-6,-6 z`, class: "checkpoint rewound" });
  }
  return svgElement("circle", { cx: x, cy: 9, r: 4.5, class: state === "good" ? "checkpoint good" : "checkpoint" });
}
