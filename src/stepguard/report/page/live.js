// Follows a run that is still training: the server sends the rows that came since, in order.

class Live {
  // `lane`: which optimizer of the run it follows.
  constructor(page, address, lane) {
    this.page = page;
    this.address = address;
    this.lane = lane;
    this.events = 0;
    this.rows = 0;
    this.lost = 0;
    this.state = "connecting";
    this.connect();
    // A browser keeps only a few streams open at a time: tabs in the background give theirs back,
    // and ask for what they missed when they are looked at again.
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.source.close();
      else if (this.source.readyState === EventSource.CLOSED) this.connect();
    });
    addEventListener("pagehide", () => this.source.close());
  }

  connect() {
    const run = this.page.runs[this.lane];
    const from = `from=${run.rowCount}&number=${run.number}&version=${run.version}&lane=${this.lane}`;
    const joiner = this.address.includes("?") ? "&" : "?";
    this.source = new EventSource(`${this.address}${joiner}${from}`);
    this.source.addEventListener("rows", (event) => this.take(JSON.parse(event.data)));
    this.source.addEventListener("other-run", () => location.reload());
    this.source.addEventListener("open", () => this.show("live"));
    this.source.addEventListener("error", () => this.show("waiting for the server"));
  }

  take(message) {
    const run = this.page.runs[this.lane];
    this.events += 1;
    if (message.from > run.rowCount) {
      // Never draw a line over rows that are missing: ask for them again.
      this.lost += message.from - run.rowCount;
      this.source.close();
      this.connect();
      return;
    }
    const fresh = message.count - (run.rowCount - message.from);
    const skip = message.count - Math.max(0, fresh);
    for (const [name, column] of Object.entries(message.columns)) {
      this.append(run, name, column, skip, message.count);
    }
    if (fresh > 0) run.rowCount += fresh;
    this.rows += Math.max(0, fresh);
    this.padColumns(run);
    if (message.parts) run.parts = message.parts;
    else if (run.parts.length) run.parts[run.parts.length - 1].last = run.rowCount;
    Object.assign(run, message.always, message.facts || {});
    const { tiles, verdict } = message.always;
    // Of the whole run, whichever optimizer it came with.
    for (const one of this.page.runs) Object.assign(one, { tiles, verdict });
    this.page.refresh(Boolean(message.facts));
    this.show("live");
  }

  append(run, name, column, skip, count) {
    const own = (run.columns[name] ||= { values: [], kinds: null });
    while (own.values.length < run.rowCount) this.pad(own);
    for (let i = skip; i < count; i++) {
      const kind = column.kinds ? column.kinds[i] : FINITE;
      if (kind && !own.kinds) own.kinds = own.values.map(() => FINITE);
      own.values.push(column.values[i] ?? 0);
      if (own.kinds) own.kinds.push(kind);
    }
  }

  pad(column) {
    if (!column.kinds) column.kinds = column.values.map(() => FINITE);
    column.values.push(0);
    column.kinds.push(MISSING);
  }

  padColumns(run) {
    for (const column of Object.values(run.columns)) {
      while (column.values.length < run.rowCount) this.pad(column);
    }
  }

  show(state) {
    this.state = state;
    const host = document.getElementById("live-state");
    // A run that has ended is still followed, for it may be started again, but it is not live.
    host.hidden = state === "live" && this.page.runs[0].verdict.over;
    host.className = `chip ${state === "live" ? "good" : "note"}`;
    host.textContent = state;
  }
}
