// Decodes the document's columns and works out what is drawn: the line that was kept, the branches
// that rewinds and restarts left, and every value that is not finite.

const FINITE = 0;
const MISSING = 4;
const KIND_NAMES = ["", "NaN", "+Inf", "-Inf", ""];
const READERS = { f4: Float32Array, f8: Float64Array, u1: Uint8Array };
const SMOOTH_LEAST = 25;
const SMOOTH_POINTS = 1200;

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Bytes are stored by significance, which compresses better: put each number together again.
function unshuffled(bytes, width) {
  const count = bytes.length / width;
  const whole = new Uint8Array(bytes.length);
  for (let place = 0; place < width; place++) {
    for (let i = 0, from = place * count, to = place; i < count; i++, from++, to += width) {
      whole[to] = bytes[from];
    }
  }
  return whole;
}

async function decodeColumn(column) {
  const Reader = READERS[column.type];
  const bytes = unshuffled(await inflate(column.data), Reader.BYTES_PER_ELEMENT);
  const values = Array.from(new Reader(bytes.buffer));
  const kinds = column.kinds ? Array.from(await inflate(column.kinds)) : null;
  return { values, kinds };
}

async function decodeRun(run) {
  const names = Object.keys(run.columns);
  const decoded = await Promise.all(names.map((name) => decodeColumn(run.columns[name])));
  const columns = {};
  names.forEach((name, i) => (columns[name] = decoded[i]));
  return { ...run, columns, rowCount: columns.step.values.length };
}

function kindAt(column, row) {
  return column.kinds ? column.kinds[row] : FINITE;
}

// What a series has in one row: a number and whether it is finite, missing or which kind of not.
function valueAt(run, series, row) {
  const column = run.columns[series.column];
  if (!column || row >= column.values.length) return { kind: MISSING, value: 0 };
  return { kind: kindAt(column, row), value: column.values[row] };
}

// Rows of the line that was kept, in the order of their steps; a step that came twice without a
// rewind (a retry) counts once, with what came last.
function keptRows(run) {
  const rows = [];
  const steps = run.columns.step.values;
  for (const part of run.parts) {
    if (part.left) continue;
    const last = Math.min(part.last, run.rowCount);
    for (let row = part.first; row < last; row++) {
      while (rows.length && steps[rows[rows.length - 1]] >= steps[row]) rows.pop();
      rows.push(row);
    }
  }
  return rows;
}

// One series over some rows: `undefined` where nothing was recorded (the line goes on), null where
// the value is not finite (the line breaks, and a mark at the edge says so).
function along(run, series, rows) {
  const steps = run.columns.step.values;
  const column = run.columns[series.column];
  const values = new Array(rows.length);
  const marks = [];
  let recorded = 0;
  if (!column) return { values, marks, recorded };
  // Read in place, without an object for each row: there may be a million of them.
  for (let i = 0; i < rows.length; i++) {
    const kind = kindAt(column, rows[i]);
    if (kind === FINITE) {
      values[i] = column.values[rows[i]];
      recorded += 1;
    } else if (kind === MISSING) {
      values[i] = undefined;
    } else {
      values[i] = null;
      marks.push({ step: steps[rows[i]], kind, row: rows[i] });
    }
  }
  return { values, marks, recorded };
}

function rowsOf(part, rowCount) {
  const rows = [];
  for (let row = part.first; row < Math.min(part.last, rowCount); row++) rows.push(row);
  return rows;
}

// What a step was before something was left out of it: its row has the values of the rest.
function addIncidentMarks(run, series, marks, kept) {
  const known = new Set(marks.map((mark) => mark.row));
  for (const incident of run.incidents) {
    const kind = incident.bad[series.column];
    if (kind && incident.kept === kept && !known.has(incident.row)) {
      marks.push({ step: incident.step, kind, row: incident.row });
    }
  }
  marks.sort((a, b) => a.step - b.step);
}

// Everything one panel draws of one run.
function panelData(run, panel) {
  const rows = run.kept;
  const steps = run.columns.step.values;
  const lines = panel.series.map((series) => along(run, series, rows));
  panel.series.forEach((series, i) => addIncidentMarks(run, series, lines[i].marks, true));
  const branches = [];
  for (const part of run.parts) {
    if (!part.left) continue;
    const partRows = rowsOf(part, run.rowCount);
    const own = panel.series.map((series) => along(run, series, partRows));
    // The kept row before it, where the branch begins to differ.
    const joint = part.joint === null ? null : panel.series.map((s) => valueAt(run, s, part.joint));
    const start = part.joint === null ? 0 : steps[part.joint];
    branches.push({ part, steps: partRows.map((row) => steps[row]), lines: own, joint, start });
  }
  const left = panel.series.map((series) => {
    const marks = branches.flatMap((branch) => branch.lines[panel.series.indexOf(series)].marks);
    addIncidentMarks(run, series, marks, false);
    return marks;
  });
  return { steps: rows.map((row) => steps[row]), lines, branches, left };
}

function median(values) {
  const sorted = values.slice().sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// A running median, which a single spike cannot bend; nothing for short runs.
function smooth(steps, values) {
  const at = [];
  for (let i = 0; i < values.length; i++) if (values[i] != null) at.push(i);
  const window = Math.min(Math.max(SMOOTH_LEAST, Math.floor(at.length / 200)), at.length >> 3);
  if (window < 12) return null;
  const half = window >> 1;
  const every = Math.max(1, Math.floor(at.length / SMOOTH_POINTS));
  const points = { steps: [], values: [] };
  for (let i = half; i < at.length - half; i += every) {
    points.steps.push(steps[at[i]]);
    points.values.push(median(at.slice(i - half, i + half + 1).map((j) => values[j])));
  }
  return points;
}

// Log where every value is above 0 and they span decades; where some are not above 0, symlog.
function scaleFor(groups) {
  let least = Infinity;
  let most = -Infinity;
  const sizes = [];
  for (const values of groups) {
    const every = Math.max(1, Math.floor(values.length / 20000));
    for (let i = 0; i < values.length; i++) {
      const value = values[i];
      if (value == null) continue;
      if (value < least) least = value;
      if (value > most) most = value;
      if (i % every === 0 && value !== 0) sizes.push(Math.abs(value));
    }
  }
  if (least > 0 && most / least > 8) return { kind: "log" };
  if (least > 0 || !sizes.length) return { kind: "linear" };
  const typical = median(sizes);
  const spans = Math.max(Math.abs(least), Math.abs(most)) / typical > 100;
  return spans ? { kind: "symlog", threshold: typical } : { kind: "linear" };
}

function shortNumber(value) {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

function countWords(count, one, many) {
  return `${count.toLocaleString("en-US")} ${count === 1 ? one : many || one + "s"}`;
}
