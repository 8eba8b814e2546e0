// Small things to draw with: elements, SVG, glyphs, lines with every pixel column's extremes.

const SVG = "http://www.w3.org/2000/svg";

// Text always goes in as text: nothing of a journal is ever read as HTML.
function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Text in which `backticks` mark code.
function prose(tag, className, text) {
  const made = element(tag, className);
  text.split(/`([^`]+)`/).forEach((part, place) => {
    if (part) made.append(place % 2 ? element("code", "", part) : part);
  });
  return made;
}

function svgElement(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function titled(shape, words) {
  shape.append(svgElement("title", {}, words));
  return shape;
}

function cross(ctx, x, y, size, colour, width) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = width;
  ctx.beginPath();
  ctx.moveTo(x - size, y - size);
  ctx.lineTo(x + size, y + size);
  ctx.moveTo(x + size, y - size);
  ctx.lineTo(x - size, y + size);
  ctx.stroke();
}

function triangle(ctx, x, y, size, colour, down) {
  const tip = down ? size : -size;
  ctx.fillStyle = colour;
  ctx.beginPath();
  ctx.moveTo(x, y + tip);
  ctx.lineTo(x - size, y - tip);
  ctx.lineTo(x + size, y - tip);
  ctx.fill();
}

// Adds a line to the present path. Of the points in one pixel column the first, lowest, highest and
// last are drawn: what is seen is the same as if all were.
function polyline(u, steps, values) {
  const ctx = u.ctx;
  let column = null;
  let points = 0;
  let open = false;
  const flush = () => {
    if (!column) return;
    for (const y of [column.first, column.low, column.high, column.last]) {
      if (open) ctx.lineTo(column.x, y);
      else ctx.moveTo(column.x, y);
      open = true;
    }
    column = null;
  };
  for (let i = 0; i < values.length; i++) {
    if (values[i] === undefined) continue;
    if (values[i] === null) {
      flush();
      open = false;
      continue;
    }
    points += 1;
    const x = Math.round(u.valToPos(steps[i], "x", true));
    const y = u.valToPos(values[i], "y", true);
    if (column && column.x === x) {
      column.low = Math.min(column.low, y);
      column.high = Math.max(column.high, y);
      column.last = y;
    } else {
      flush();
      column = { x, first: y, low: y, high: y, last: y };
    }
  }
  flush();
  return points;
}

// Points between two gaps, which a line cannot show.
function isolated(steps, values) {
  const found = [];
  let before = null;
  for (let i = 0; i < values.length; i++) {
    if (values[i] === undefined) continue;
    if (values[i] !== null && before === null) {
      let next = i + 1;
      while (next < values.length && values[next] === undefined) next += 1;
      if (next >= values.length || values[next] === null) found.push([steps[i], values[i]]);
    }
    before = values[i];
  }
  return found;
}

// Where a log axis has lines: 1, 2 and 5 of each decade, or only powers of ten where there are many.
function logSplits(low, high) {
  const first = Math.floor(Math.log10(low) + 1e-9);
  const last = Math.ceil(Math.log10(high) - 1e-9);
  const every = Math.max(1, Math.ceil((last - first) / 6));
  const mantissas = last - first > 2 ? [1] : [1, 2, 5];
  const splits = [];
  for (let decade = first; decade <= last; decade += every) {
    for (const mantissa of mantissas) splits.push(mantissa * 10 ** decade);
  }
  return splits.filter((value) => value >= low * 0.999 && value <= high * 1.001);
}

// The next 1, 2 or 5 of a decade below the least value and above the greatest.
function logRange(low, high) {
  const nice = (value, mantissas, round) => {
    const decade = 10 ** Math.floor(Math.log10(value));
    const share = value / decade;
    return decade * round(mantissas, share);
  };
  const down = (mantissas, share) => mantissas.filter((m) => m <= share * 1.0001).pop() ?? 1;
  const up = (mantissas, share) => mantissas.find((m) => m >= share * 0.9999) ?? 10;
  const bottom = nice(low, [1, 2, 5], down);
  const top = nice(high, [1, 2, 5, 10], up);
  return bottom < top ? [bottom, top] : [bottom / 2, top * 2];
}

// One small curve; a row that never moved is a line in the middle.
function sparkline(points, label) {
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
