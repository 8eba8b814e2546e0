// Figures of an incident card: exponents against the dtype's range, gradient heat map, sample.

const HEAT = ["#fff7ec", "#fdd49e", "#fc8d59", "#b30000", "#4a0010"];
const HEAT_DARK = ["#20262b", "#4a3a63", "#8a3f78", "#e0655f", "#fdd17a"];

// Where the elements of an operand lie in the range of their dtype: counts by binary exponent.
function exponentFigure(operand) {
  const range = operand.range;
  if (!operand.exponents.length || !range) return null;
  const width = 400;
  const height = 96;
  const low = Math.min(range.least, operand.exponents[0][0]) - 4;
  const high = range.most + 6;
  const most = Math.max(...operand.exponents.map((bin) => bin[1]));
  const x = (exponent) => ((exponent - low) / (high - low)) * (width - 8) + 4;
  const bar = (count) => Math.max(2, (Math.log1p(count) / Math.log1p(most)) * 54);
  const words = exponentWords(operand);
  const figure = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words, class: "exponents" });
  figure.append(svgElement("rect", { x: x(range.most), y: 8, width: x(high) - x(range.most), height: 62, class: "beyond" }));
  figure.append(svgElement("rect", { x: x(low), y: 8, width: x(range.normal) - x(low), height: 62, class: "below" }));
  const unit = Math.max(1.5, x(1) - x(0) - 0.4);
  for (const [exponent, count] of operand.exponents) {
    const shape = svgElement("rect", { x: x(exponent), y: 70 - bar(count), width: unit, height: bar(count), class: "bin" });
    figure.append(titled(shape, `${countWords(count, "element")} from 2^${exponent}`));
  }
  figure.append(svgElement("line", { x1: 4, x2: width - 4, y1: 70, y2: 70, class: "axis" }));
  for (const [exponent, label, anchor] of exponentTicks(range)) {
    figure.append(svgElement("line", { x1: x(exponent), x2: x(exponent), y1: 70, y2: 74, class: "axis" }));
    figure.append(svgElement("text", { x: x(exponent), y: 86, "text-anchor": anchor }, label));
  }
  const box = element("figure", "exponent-figure");
  box.append(element("figcaption", "", words), figure);
  return box;
}

function exponentTicks(range) {
  return [
    [range.normal, `${operandPower(range.normal)} least normal`, "start"],
    [0, range.normal > -40 ? "" : "1", "middle"],
    [range.most, `${operandPower(range.most)} most`, "end"],
  ];
}

function operandPower(exponent) {
  return `2^${exponent}`;
}

function exponentWords(operand) {
  const parts = [`${operand.name || "operand"}, ${operand.dtype}`];
  if (operand.zeros) parts.push(`${operand.zeros.toLocaleString("en-US")} zero`);
  for (const [name, field] of [["NaN", "nan"], ["+Inf", "posinf"], ["-Inf", "neginf"]]) {
    if (operand[field]) parts.push(`${operand[field].toLocaleString("en-US")} ${name}`);
  }
  return parts.join(", ");
}

// Modules down, steps across, colour is the logarithm of the gradient's norm.
function heatFigure(heat) {
  const box = element("figure", "heat-figure");
  const cell = Math.max(5, Math.min(14, Math.floor(300 / heat.steps.length)));
  const line = 13;
  const labels = 150;
  const width = labels + heat.steps.length * cell + 8;
  const height = heat.modules.length * line + 26;
  const logs = heat.values.flat().filter((v) => typeof v === "number" && v > 0).map(Math.log10);
  const low = Math.min(...logs);
  const high = Math.max(...logs);
  const words = heatWords(heat);
  const figure = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img", "aria-label": words, class: "heat" });
  heat.modules.forEach((module, m) => {
    const y = m * line + 2;
    const name = module.length > 24 ? `…${module.slice(-23)}` : module;
    const label = svgElement("text", { x: labels - 6, y: y + 10, "text-anchor": "end" }, name);
    figure.append(titled(label, module));
    heat.steps.forEach((step, s) => {
      const value = heat.values[m][s];
      const shape = svgElement("rect", { x: labels + s * cell, y, width: cell - 0.6, height: line - 1, class: heatClass(value) });
      if (typeof value === "number" && value > 0) shape.style.fill = heatColour((Math.log10(value) - low) / (high - low || 1));
      figure.append(titled(shape, `${module}, step ${step}: ${heatValue(value)}`));
      if (typeof value === "string") {
        const middle = labels + s * cell + cell / 2 - 0.3;
        figure.append(svgElement("path", { d: `M${middle - 2},${y + 4} l4,4 m0,-4 l-4,4`, class: "heat-cross" }));
      }
    });
  });
  if (heat.first) {
    const [m, s] = heat.first;
    figure.append(svgElement("rect", { x: labels + s * cell - 1.5, y: m * line + 0.5, width: cell + 2.4, height: line + 2, class: "first-bad" }));
  }
  const base = heat.modules.length * line + 16;
  figure.append(svgElement("text", { x: labels, y: base }, `step ${heat.steps[0]}`));
  figure.append(svgElement("text", { x: width - 8, y: base, "text-anchor": "end" }, String(heat.steps[heat.steps.length - 1])));
  box.append(element("figcaption", "", words), figure);
  return box;
}

function heatWords(heat) {
  const { steps, modules, first } = heat;
  const text = `norm of the gradient by module, steps ${steps[0]} to ${steps[steps.length - 1]}`;
  if (!first) return text;
  return `${text}; framed: the first that is not finite, ${modules[first[0]]} at step ${steps[first[1]]}`;
}

function heatValue(value) {
  if (value === null) return "not recorded";
  return typeof value === "string" ? value : shortNumber(value);
}

function heatClass(value) {
  if (value === null) return "heat-none";
  if (typeof value === "string") return "heat-bad";
  return value > 0 ? "heat-cell" : "heat-zero";
}

function heatColour(share) {
  const colours = isDark() ? HEAT_DARK : HEAT;
  const at = Math.max(0, Math.min(1, share)) * (colours.length - 1);
  const from = colours[Math.floor(at)];
  const to = colours[Math.ceil(at)];
  const mix = at - Math.floor(at);
  const part = (colour, i) => parseInt(colour.slice(1 + 2 * i, 3 + 2 * i), 16);
  return `rgb(${[0, 1, 2].map((i) => Math.round(part(from, i) * (1 - mix) + part(to, i) * mix)).join(",")})`;
}

// One tensor of a guilty sample: a picture, a row of numbers, or text.
function sampleFigure(shown) {
  const box = element("figure", "sample");
  box.append(element("figcaption", "", shown.caption));
  if (shown.kind === "image") box.append(samplePicture(shown));
  else box.append(element("pre", "", shown.text));
  return box;
}

function samplePicture(shown) {
  const canvas = element("canvas", "picture");
  canvas.width = shown.width;
  canvas.height = shown.height;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", shown.caption);
  const pixels = Uint8Array.from(atob(shown.pixels), (letter) => letter.charCodeAt(0));
  const channels = shown.channels;
  const image = new ImageData(shown.width, shown.height);
  for (let i = 0; i < shown.width * shown.height; i++) {
    for (let c = 0; c < 3; c++) image.data[i * 4 + c] = pixels[i * channels + (channels === 3 ? c : 0)];
    image.data[i * 4 + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  const scale = Math.max(1, Math.floor(160 / Math.max(shown.width, shown.height)));
  canvas.style.width = `${shown.width * scale}px`;
  return canvas;
}
