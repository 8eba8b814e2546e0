// The panels: uPlot draws axes and the kept line (with every pixel column's extremes, so no spike is
// lost); marks at the edge, left branches and the running median are drawn over it here.

const AXIS_LEFT = 76;
const PAD_RIGHT = 14;
const EDGE = 7;
const MARKS_APART = 24;
const MOST_SINGLE = 6;
const COLOURS = 6;

const LOG_AXIS = { splits: (u, axis, low, high) => logSplits(low, high), filter: (u, splits) => splits };

function styleValue(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function seriesColour(place) {
  return styleValue(`--series-${place % COLOURS}`);
}

// What is drawn over the steps of a run, from the most telling down: id, title, columns with their
// labels, and how it looks. The first column is the main one; the others have no median.
function panelsOf(run) {
  const named = (kind) => Object.keys(run.columns).filter((name) => name.startsWith(kind)).sort();
  const labelled = (kind) => Object.fromEntries(named(kind).map((name) => [name, name.slice(kind.length)]));
  const groups = Object.fromEntries(named("lr/").map((name) => [name, `group ${name.slice(3)}`]));
  const rates = { lr: named("lr/").length ? "group 0" : "learning rate", ...groups };
  const norms = { grad_norm: "before clipping", grad_norm_clipped: "after clipping" };
  const drawn = [
    { id: "loss", title: "loss", columns: { loss: "loss", ...labelled("loss/") }, height: 230, smooth: true },
    { id: "grad-norm", title: "gradient norm", columns: norms, height: 160, smooth: true, colour: 2 },
    { id: "lr", title: "learning rate", columns: rates, height: 120, colour: 4, linear: true },
    { id: "scale", title: "loss scale", columns: { scale: "loss scale" }, height: 110, colour: 3 },
    ...Object.entries(labelled("followed/")).map(([name, title], place) => (
      { id: `followed-${place}`, title, columns: { [name]: title }, height: 120, smooth: true, colour: place })),
    { id: "labels", title: "targets in the step", columns: { labels: "targets" }, height: 90 },
    { id: "seconds", title: "step time", columns: { seconds: "seconds" }, height: 110, smooth: true, colour: 5 },
  ];
  for (const panel of drawn) {
    const series = Object.entries(panel.columns).map(([column, label], i) => ({ label, column, minor: i > 0 }));
    panel.series = series.filter((one) => run.columns[one.column]);
  }
  return drawn.filter((panel) => panel.series.length);
}

function markHeight(u, kind, ratio) {
  if (kind === "-Inf") return u.bbox.top + u.bbox.height - 5 * ratio;
  return u.bbox.top - (EDGE - 2) * ratio;
}

class Panel {
  constructor(host, spec, runs, view) {
    this.spec = spec;
    this.view = view;
    this.hidden = new Set(spec.series.map((s, i) => (s.off ? i : -1)).filter((i) => i >= 0));
    this.drawn = { marks: [], branches: [], spans: [] };
    this.linear = Boolean(spec.linear);
    this.buildFrame(host);
    this.setRuns(runs);
  }

  buildFrame(host) {
    this.root = element("section", "panel");
    this.root.id = `panel-${this.spec.id}`;
    const head = element("div", "panel-head");
    head.append(element("h3", "", this.spec.title));
    this.legend = element("div", "legend");
    head.append(this.legend);
    this.plotHost = element("div", "plot");
    this.plotHost.setAttribute("role", "img");
    this.root.append(head, this.plotHost);
    host.append(this.root);
  }

  // Several runs share a panel when they are compared; each has lines of its own.
  setRuns(runs) {
    this.runs = runs;
    this.sources = runs.map((run) => panelData(run, this.spec));
    const lines = [];
    this.sources.forEach((source, r) =>
      source.lines.forEach((line, s) => lines.push({ line, run: r, series: s })));
    this.lines = lines;
    this.scale = scaleFor(this.sources.flatMap((s) => s.lines.map((line) => line.values)));
    this.smoothed = this.spec.smooth ? this.smoothedLines() : [];
    this.isolated = lines.map(({ line, run }) => isolated(this.sources[run].steps, line.values));
    this.rebuild();
  }

  smoothedLines() {
    return this.lines.map(({ line, run }) => smooth(this.sources[run].steps, line.values));
  }

  data() {
    if (this.sources.length === 1) {
      return [this.sources[0].steps, ...this.sources[0].lines.map((line) => line.values)];
    }
    const tables = this.sources.map((s) => [s.steps, ...s.lines.map((line) => line.values)]);
    const modes = tables.map((table) => table.map(() => 1)); // null stays a gap
    return uPlot.join(tables, modes);
  }

  rebuild() {
    if (this.plot) this.plot.destroy();
    this.plotHost.textContent = "";
    const distribution = { log: 3, symlog: 4, linear: 1 }[this.linear ? "linear" : this.scale.kind];
    this.plot = new uPlot(this.options(distribution), this.data(), this.plotHost);
    this.plot.setScale("x", { min: this.view.min, max: this.view.max });
    this.buildLegend();
    this.describe();
  }

  options(distribution) {
    const grid = () => styleValue("--grid");
    const ink = () => styleValue("--ink-soft");
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const lines = this.lines.map(({ run, series }, i) => ({
      label: this.spec.series[series].label,
      show: !this.hidden.has(series),
      stroke: () => this.lineColour(i),
      width: this.smoothed[i] || this.spec.series[series].minor ? 1 : 1.4,
      alpha: this.lineAlpha(i, series),
      dash: run ? [6, 4] : undefined,
      points: { size: 5 },
    }));
    return {
      width: Math.max(240, this.plotHost.clientWidth || 600),
      height: this.spec.height || 150,
      padding: [EDGE + 5, PAD_RIGHT, 0, 0],
      legend: { show: false },
      cursor: {
        sync: { key: "steps", setSeries: false },
        drag: { x: true, y: false, dist: 4, setScale: false },
        bind: { dblclick: () => () => this.view.reset() },
        points: { size: 6 },
        y: false,
      },
      scales: {
        x: { time: false },
        y: { distr: distribution, asinh: this.scale.threshold || 1, range: (u, low, high) => this.yRange(u, low, high, distribution) },
      },
      axes: [
        { ...axis, size: 26, space: 70, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7, 1e8], values: (u, ticks) => ticks.map((t) => t.toLocaleString("en-US")) },
        { ...axis, ...(distribution === 3 ? LOG_AXIS : {}), size: AXIS_LEFT, gap: 6, space: 26, values: (u, ticks) => ticks.map((t) => (t === null ? "" : shortNumber(t))) },
      ],
      series: [{ label: "step" }, ...lines],
      hooks: {
        setSelect: [(u) => this.zoomToSelect(u)],
        setCursor: [(u) => this.showValues(u)],
        draw: [(u) => this.drawExtras(u)],
      },
    };
  }

  zoomToSelect(u) {
    const { left, width } = u.select;
    if (width < 4) return;
    const min = u.posToVal(left, "x");
    const max = u.posToVal(left + width, "x");
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.view.set(min, max);
  }

  lineAlpha(i, series) {
    const minor = this.spec.series[series].minor;
    if (this.smoothed[i]) return minor ? 0.22 : 0.45;
    return minor ? 0.75 : 1;
  }

  lineColour(i) {
    const { run, series } = this.lines[i];
    return seriesColour(this.runs.length > 1 ? run * 3 + series : series + (this.spec.colour || 0));
  }

  // Branches are not in uPlot's data: without them the axis would cut them off.
  yRange(u, low, high, distribution) {
    const { min, max } = u.scales.x;
    for (const source of this.sources) {
      for (const branch of source.branches) {
        branch.lines.forEach((line, series) => {
          if (this.hidden.has(series)) return;
          for (let i = 0; i < line.values.length; i++) {
            const value = line.values[i];
            if (value == null || branch.steps[i] < min || branch.steps[i] > max) continue;
            if (low === null || value < low) low = value;
            if (high === null || value > high) high = value;
          }
        });
      }
    }
    if (low === null || low === undefined) return distribution === 3 ? [0.1, 1] : [0, 1];
    if (distribution === 3) return logRange(low, high);
    if (distribution === 4) return uPlot.rangeAsinh(low, high, 10, true);
    if (low === high) return [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
    return [low - (high - low) * 0.05, high + (high - low) * 0.05];
  }

  drawExtras(u) {
    const ctx = u.ctx;
    const ratio = uPlot.pxRatio;
    const box = u.bbox;
    this.drawn = { marks: [], branches: [], spans: [] };
    ctx.save();
    ctx.beginPath();
    ctx.rect(box.left, box.top - (EDGE + 4) * ratio, box.width, box.height + (EDGE + 4) * ratio);
    ctx.clip();
    this.sources.forEach((source) => source.branches.forEach((b) => this.drawBranch(u, b, ratio)));
    // The first series on top: where nothing was clipped the others lie exactly on it.
    for (let i = this.smoothed.length - 1; i >= 0; i--) {
      if (this.smoothed[i]) this.drawSmooth(u, this.smoothed[i], i, ratio);
    }
    this.isolated.forEach((points, i) => this.drawDots(u, points, i, ratio));
    this.lines.forEach(({ line, run, series }) => this.drawMarks(u, line.marks, series, false, ratio, run));
    this.sources.forEach((source, run) =>
      source.left.forEach((marks, series) => this.drawMarks(u, marks, series, true, ratio, run)));
    this.view.drawSelection(u, ratio);
    ctx.restore();
  }

  visible(i) {
    return !this.hidden.has(this.lines[i].series);
  }

  drawBranch(u, branch, ratio) {
    const ctx = u.ctx;
    branch.lines.forEach((line, series) => {
      if (this.hidden.has(series) || !branch.steps.length) return;
      ctx.strokeStyle = styleValue("--left");
      ctx.beginPath();
      const joint = branch.joint?.[series];
      const joined = joint && joint.kind === FINITE;
      const points = polyline(
        u,
        joined ? [branch.start, ...branch.steps] : branch.steps,
        joined ? [joint.value, ...line.values] : line.values,
      );
      // A pale band: steps that were run again as they were lie exactly on the kept line.
      ctx.globalAlpha = 0.25;
      ctx.lineWidth = 7 * ratio;
      ctx.lineJoin = "round";
      ctx.stroke();
      ctx.globalAlpha = 0.85;
      ctx.lineWidth = 1.4 * ratio;
      ctx.setLineDash([3 * ratio, 3 * ratio]);
      ctx.stroke();
      ctx.setLineDash([]);
      if (series === 0) {
        const first = branch.steps[0];
        const last = branch.steps[branch.steps.length - 1];
        this.drawn.branches.push({ first, last, points, left: u.valToPos(first, "x"), right: u.valToPos(last, "x"), kind: branch.part.left.kind });
        this.drawBranchEnd(u, branch, line, ratio);
      }
    });
    ctx.globalAlpha = 1;
  }

  // A small cross where the branch ended: from there the run went back.
  drawBranchEnd(u, branch, line, ratio) {
    let at = branch.steps.length - 1;
    while (at >= 0 && line.values[at] == null) at -= 1;
    if (at < 0) return;
    const x = u.valToPos(branch.steps[at], "x", true);
    const y = u.valToPos(line.values[at], "y", true);
    cross(u.ctx, x, y, 3 * ratio, styleValue("--left"), 1.5 * ratio);
  }

  drawSmooth(u, points, i, ratio) {
    if (!this.visible(i)) return;
    const ctx = u.ctx;
    ctx.strokeStyle = this.lineColour(i);
    ctx.lineWidth = 2 * ratio;
    ctx.lineJoin = "round";
    ctx.setLineDash(this.lines[i].run ? [6 * ratio, 4 * ratio] : []);
    ctx.beginPath();
    polyline(u, points.steps, points.values);
    ctx.stroke();
    ctx.setLineDash([]);
  }

  drawDots(u, points, i, ratio) {
    if (!this.visible(i)) return;
    u.ctx.fillStyle = this.lineColour(i);
    for (const [step, value] of points) {
      u.ctx.beginPath();
      u.ctx.arc(u.valToPos(step, "x", true), u.valToPos(value, "y", true), 2 * ratio, 0, 7);
      u.ctx.fill();
    }
  }

  // Values that are not finite have no height: they stand at the edge. Many that are close to each
  // other are one shaded span.
  drawMarks(u, marks, series, onBranch, ratio, run) {
    if (this.hidden.has(series)) return;
    const { min, max } = u.scales.x;
    const colour = styleValue(onBranch ? "--left" : "--bad");
    const groups = {};
    for (const mark of marks) {
      if (mark.step < min || mark.step > max) continue;
      const kind = KIND_NAMES[mark.kind];
      const x = u.valToPos(mark.step, "x", true);
      const y = markHeight(u, kind, ratio);
      this.drawn.marks.push({ step: mark.step, kind, x: x / ratio, y: y / ratio, branch: onBranch, series, run });
      const own = (groups[kind] ||= []);
      const near = own.length && x - own.at(-1).at(-1).x < MARKS_APART * ratio;
      if (near) own.at(-1).push({ x, step: mark.step });
      else own.push([{ x, step: mark.step }]);
    }
    for (const [kind, found] of Object.entries(groups)) {
      for (const group of found) this.drawGroup(u, kind, group, colour, ratio);
    }
  }

  drawGroup(u, kind, group, colour, ratio) {
    if (group.length <= MOST_SINGLE) {
      for (const { x } of group) this.drawSpan(u, kind, x, x, 0.25, colour, ratio);
      return;
    }
    const [first, last] = [group[0], group.at(-1)];
    const share = group.length / (last.step - first.step + 1);
    this.drawSpan(u, kind, first.x, last.x, 0.07 + 0.1 * Math.min(1, share), colour, ratio);
    this.drawn.spans.push({ kind, first: first.step, last: last.step, count: group.length });
  }

  drawSpan(u, kind, left, right, strength, colour, ratio) {
    const ctx = u.ctx;
    const y = markHeight(u, kind, ratio);
    const middle = (left + right) / 2;
    if (kind === "NaN") cross(ctx, middle, y, 3.5 * ratio, colour, 2 * ratio);
    else triangle(ctx, middle, y, 4.5 * ratio, colour, kind === "-Inf");
    ctx.fillStyle = colour;
    if (right > left) ctx.fillRect(left - ratio, y - ratio, right - left + 2 * ratio, 2 * ratio);
    ctx.globalAlpha = strength;
    ctx.fillRect(left - ratio / 2, u.bbox.top, right - left + ratio, u.bbox.height);
    ctx.globalAlpha = 1;
  }

  buildLegend() {
    this.legend.textContent = "";
    this.values = this.lines.map(({ run, series }, i) => {
      const item = element("button", "legend-item");
      item.type = "button";
      const swatch = element("span", run ? "swatch dashed" : "swatch");
      swatch.style.color = this.lineColour(i);
      const name = this.spec.series[series].label;
      const label = this.runs.length > 1 ? `${name} · ${this.runs[run].name}` : name;
      const value = element("span", "value", "");
      item.append(swatch, element("span", "", label), value);
      item.setAttribute("aria-pressed", String(!this.hidden.has(series)));
      item.addEventListener("click", () => this.toggle(series));
      this.legend.append(item);
      return value;
    });
  }

  toggle(series) {
    if (this.hidden.has(series)) this.hidden.delete(series);
    else this.hidden.add(series);
    this.rebuild();
  }

  showValues(u) {
    const at = u.cursor.idx;
    this.values?.forEach((host, i) => {
      const value = at == null ? undefined : u.data[i + 1][at];
      let text = value == null ? "" : shortNumber(value);
      if (value === null) text = "not finite";
      host.textContent = text;
    });
    if (at != null) this.view.pointed(u.data[0][at]);
  }

  // What a screen reader says instead of the picture.
  describe() {
    const words = this.lines.map(({ line, series, run }) => {
      const name = this.spec.series[series].label;
      const whose = this.runs.length > 1 ? ` of ${this.runs[run].name}` : "";
      const bad = line.marks.length ? `, ${countWords(line.marks.length, "value")} not finite` : "";
      return `${name}${whose}: ${countWords(line.recorded, "finite value")}${bad}`;
    });
    const left = this.sources.reduce((sum, source) => sum + source.branches.length, 0);
    const branches = left ? `; ${countWords(left, "branch", "branches")} left` : "";
    this.plotHost.setAttribute("aria-label", `${this.spec.title} over steps. ${words.join("; ")}${branches}`);
  }

  resize() {
    const width = Math.max(240, this.plotHost.clientWidth);
    if (width !== this.plot.width) this.plot.setSize({ width, height: this.spec.height || 150 });
  }
}
