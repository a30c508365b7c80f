// Boxes with one number, stacked bars with legends, and small charts of step times.
"use strict";

// The colours of kinds of time and of phases; page.css defines the variables.
const kindColours = {
  compute: "var(--compute)",
  "exposed communication": "var(--communication)",
  copy: "var(--copy)",
  "waiting for data": "var(--loader)",
  launch: "var(--launch)",
  "CPU operators": "var(--cpu)",
  Python: "var(--python)",
  idle: "var(--idle)",
  forward: "var(--forward)",
  backward: "var(--backward)",
  accumulate: "var(--accumulate)",
  recompute: "var(--recompute)",
  optimizer: "var(--optimizer)",
};

// The colour of a range. Names such as "(others)" are not ranges and are grey.
function colourOfRange(path) {
  return path.startsWith("(") ? "var(--idle)" : colourOf(path.split("/").at(-1));
}

function mark(colour) {
  const made = element("i", {class: "mark"});
  made.style.background = colour;
  return made;
}

// A bar of parts {name, ns, colour}; `whole` is the length of the full bar in ns.
function stackedBar(parts, whole, label) {
  const bar = element("div", {class: "bar", role: "img", "aria-label": label});
  for (const part of parts) {
    const piece = element("span", {title: `${part.name}: ${duration(part.ns)}`});
    piece.style.width = `${(100 * part.ns) / whole}%`;
    piece.style.background = part.colour;
    bar.append(piece);
  }
  return bar;
}

// The parts of a bar as a list: colour, name, time, share of the whole.
function legendOf(parts, whole) {
  return element("ul", {class: "parts"}, parts.map(part => element(
    "li",
    {},
    mark(part.colour),
    element("span", {class: "part-name"}, longName(part.name)),
    element("span", {class: "number", text: duration(part.ns)}),
    element("span", {class: "number soft", text: percent(part.ns / whole)}),
  )));
}

// A box with a label, a number, and a note below the number.
function fact(label, value, note) {
  return element(
    "div",
    {class: "fact"},
    element("span", {class: "soft", text: label}),
    element("b", {text: value}),
    element("span", {class: "soft", text: note}),
  );
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A column for each step. `labels` are the columns' tooltips, `label` the name of the chart.
function stepChart(values, labels, label, {width, height, most = Math.max(...values, 1)}) {
  const chart = svg("svg", {
    class: "steps",
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    role: "img",
    "aria-label": label,
  });
  const step = width / values.length;
  values.forEach((value, at) => {
    const tall = Math.max((value / most) * height, value ? 1 : 0);
    const title = svg("title", {});
    title.textContent = printable(labels[at]);
    chart.append(svg("rect", {
      x: at * step,
      y: height - tall,
      width: Math.max(step - Math.min(step / 4, 2), 0.5),
      height: tall,
    }, title));
  });
  return chart;
}
