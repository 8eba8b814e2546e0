// The stretch of steps that every panel and lane shows, and the incident that is selected.

const LEAST_SPAN = 4;

class View {
  constructor(runs) {
    this.panels = [];
    this.listeners = [];
    this.selected = null;
    this.setRuns(runs);
    this.min = this.fullMin;
    this.max = this.fullMax;
  }

  setRuns(runs) {
    const wasFull = this.isFull();
    let low = Infinity;
    let high = -Infinity;
    for (const run of runs) {
      for (const step of run.columns.step.values) {
        if (step < low) low = step;
        if (step > high) high = step;
      }
      for (const incident of run.incidents) {
        if (incident.step < low) low = incident.step;
        if (incident.step > high) high = incident.step;
      }
    }
    if (low > high) [low, high] = [0, 1];
    this.lastStep = high;
    const room = Math.max(0.5, (high - low) * 0.01);
    this.fullMin = low - room;
    this.fullMax = high + room;
    if (wasFull) [this.min, this.max] = [this.fullMin, this.fullMax];
  }

  isFull() {
    return this.min === undefined || (this.min <= this.fullMin && this.max >= this.fullMax);
  }

  set(min, max) {
    const whole = this.fullMax - this.fullMin;
    const span = Math.min(whole, Math.max(LEAST_SPAN, max - min));
    const middle = (min + max) / 2;
    this.min = Math.max(this.fullMin, Math.min(middle - span / 2, this.fullMax - span));
    this.max = this.min + span;
    this.apply();
  }

  apply() {
    for (const panel of this.panels) panel.plot.setScale("x", { min: this.min, max: this.max });
    for (const listener of this.listeners) listener();
  }

  reset() {
    this.set(this.fullMin, this.fullMax);
  }

  pan(share) {
    const by = (this.max - this.min) * share;
    this.set(this.min + by, this.max + by);
  }

  zoom(factor) {
    const middle = this.selectedInView() ?? (this.min + this.max) / 2;
    this.set(middle - (middle - this.min) * factor, middle + (this.max - middle) * factor);
  }

  selectedInView() {
    const step = this.selected?.step;
    return step >= this.min && step <= this.max ? step : undefined;
  }

  // Zoom so that what led to the incident is seen, and something of what came after.
  select(incident, zooms) {
    this.selected = incident;
    if (incident && zooms) {
      const whole = this.fullMax - this.fullMin;
      const span = Math.min(whole, Math.max(24, Math.min(200, whole / 6)));
      this.set(incident.step - span * 0.6, incident.step + span * 0.4);
      return;
    }
    for (const panel of this.panels) panel.plot.redraw(false);
    for (const listener of this.listeners) listener();
  }

  drawSelection(u, ratio) {
    if (!this.selected) return;
    const x = u.valToPos(this.selected.step, "x", true);
    u.ctx.fillStyle = styleValue("--focus");
    u.ctx.globalAlpha = 0.16;
    u.ctx.fillRect(x - 4 * ratio, u.bbox.top, 8 * ratio, u.bbox.height);
    u.ctx.globalAlpha = 1;
  }

  pointed(step) {
    if (this.onPointed) this.onPointed(step);
  }
}
