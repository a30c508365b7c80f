// The parts of a section: texts, facts, bars, findings and charts. Their numbers are text already.
"use strict";

// The colour of a kind of time or of a phase. page.css defines a variable for each, such as
// --waiting-for-data.
const colourOfKind = name => `var(--${name.replaceAll(" ", "-")})`;

// For each kind of part, the function that draws it.
const drawings = {
  text: ({style, text, id, href}) => {
    const tag = ["h3", "h4"].includes(style) ? style : "p";
    const link = href ? [" ", element("a", {href, text: href})] : null;
    return element(tag, {id, class: tag === "p" && style !== "p" ? style : null}, text, link);
  },
  list: ({items}) => element("ul", {class: "soft"}, items.map(text => element("li", {text}))),
  facts: ({items}) => element("div", {class: "facts"}, items.map(fact)),
  bars: ({items}) => element("div", {class: "halves"}, items.map(({title, label, parts}) => element(
    "div",
    {},
    element("h4", {text: title}),
    stackedBar(parts.map(part => ({...part, colour: colourOfPart(part)})), label),
    element("ul", {class: "parts"}, parts.map(part => element(
      "li",
      {},
      mark(colourOfPart(part)),
      element("span", {class: "part-name"}, longName(part.title || part.name)),
      element("span", {class: "number", text: part.text}),
      element("span", {class: "number soft", text: part.share}),
    ))),
  ))),
  folded: ({title, note, id, is_open: isOpen, parts}) => element(
    "details",
    {class: "folded", id, open: isOpen},
    element(
      "summary",
      {},
      note ? element("b", {text: title}) : title,
      note ? element("span", {class: "soft", text: ` ${note}`}) : null,
    ),
    drawn(parts),
  ),
  finding,
  choice,
  table,
};

function drawn(parts) {
  return parts.map(part => drawings[part.kind](part));
}

// The colour of a range. Names such as "(others)" are not ranges and are grey.
function colourOfRange(path) {
  return path.startsWith("(") ? "var(--idle)" : colourOf(path.split("/").at(-1));
}

function colourOfPart({name, is_range: isRange}) {
  return isRange ? colourOfRange(name) : colourOfKind(name);
}

function mark(colour) {
  const made = element("i", {class: "mark"});
  made.style.background = colour;
  return made;
}

// A bar of parts {name, ns, text, colour}. Without `most`, the parts fill the whole bar.
function stackedBar(parts, label, most = parts.reduce((sum, {ns}) => sum + ns, 0)) {
  const bar = element("div", {class: "bar", role: "img", "aria-label": label});
  for (const part of parts) {
    const piece = element("span", {title: part.text ? `${part.name}: ${part.text}` : null});
    piece.style.width = `${(100 * Math.min(part.ns, most)) / most}%`;
    piece.style.background = part.colour;
    bar.append(piece);
  }
  return bar;
}

// A box with a label, a number or a chart of steps, and a note below.
function fact({label, value, note, tone, chart}) {
  return element(
    "div",
    {class: `fact ${tone || ""}`.trim()},
    label ? element("span", {class: "soft", text: label}) : null,
    chart ? stepChart(chart.ns, chart.numbers, {width: 200, height: 40})
      : element("b", {text: value}),
    note ? element("span", {class: "soft", text: note}) : null,
  );
}

function finding({code, title, share, saves, is_open: isOpen, terms, evidence}) {
  const gauge = element("span", {class: "gauge", "aria-hidden": "true"}, element("span"));
  gauge.firstChild.style.width = `${Math.min(Math.max(share, 0), 1) * 100}%`;
  return element(
    "details",
    {class: "finding", id: `finding-${code}`, open: isOpen},
    element(
      "summary",
      {},
      element("span", {class: "finding-title", text: title}),
      share === null ? element("span", {class: "soft saving", text: saves})
        : element("span", {class: "saving"}, gauge, element("span", {text: saves})),
    ),
    element("dl", {}, terms.map(({term, text, style}) => [
      element("dt", {text: term}),
      element("dd", {}, element(
        style === "code" ? "code" : "span", {class: style === "code" ? "block" : style || null, text},
      )),
    ])),
    evidence ? drawn([evidence]) : null,
  );
}

// Buttons that choose which parts are shown.
function choice({label, items, legend = []}) {
  const place = element("div");
  const buttons = items.map((item, at) => (
    element("button", {type: "button", text: item.title, onclick: () => show(at)})
  ));
  const show = at => {
    buttons.forEach((button, k) => button.setAttribute("aria-pressed", String(k === at)));
    place.replaceChildren(...drawn(items[at].parts).flat().filter(Boolean));
  };
  show(0);
  return [
    element("div", {class: "tools", role: "group", "aria-label": label}, buttons, element(
      "p", {class: "legend"}, legend.map(name => element("span", {}, mark(colourOfKind(name)), name)),
    )),
    place,
  ];
}

// A function that draws the bar of a change. All its bars have the same scale and zero line.
function scaleOf(values) {
  const low = Math.min(0, ...values);
  const high = Math.max(0, ...values);
  const percentOf = value => (100 * value) / (high - low || 1);
  return change => {
    const bar = element("span", {class: "change-bar", "aria-hidden": "true"});
    const filled = element("span", {class: directionOf(change)});
    const zero = element("i");
    zero.style.left = `${percentOf(-low)}%`;
    filled.style.left = `${percentOf(Math.min(change, 0) - low)}%`;
    filled.style.width = `${percentOf(Math.abs(change))}%`;
    bar.append(filled, zero);
    return bar;
  };
}

function directionOf(change) {
  return change > 0 ? "slower" : change < 0 ? "faster" : "same";
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function svgTitle(text) {
  return svg("title", {}, printable(text));
}

// A column for each step, with its duration as tooltip; null is no column.
function stepChart(values, numbers, {width, height, most = Math.max(...values, 1)}) {
  const sorted = values.filter(value => value !== null).sort((one, other) => one - other);
  const label = `${sorted.length} steps: from ${duration(sorted[0])} to `
    + `${duration(sorted.at(-1))}, median ${duration(sorted[Math.floor(sorted.length / 2)])}`;
  const chart = svg("svg", {
    class: "steps", viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": label,
  });
  const step = width / values.length;
  values.forEach((value, at) => {
    if (value === null) return;
    const tall = Math.max((value / most) * height, value ? 1 : 0);
    chart.append(svg("rect", {
      x: at * step,
      y: height - tall,
      width: Math.max(step - Math.min(step / 4, 2), 0.5),
      height: tall,
    }, svgTitle(`step ${numbers[at]}: ${duration(value)}`)));
  });
  return chart;
}
