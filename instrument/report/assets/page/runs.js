// The section Run compares windows and ranks: step times over the run, slow ranks, clocks.
"use strict";

// The most ranks in the legend.
const mostLegend = 32;
const rankParts = [
  ["compute_ns", "compute"],
  ["exposed_communication_ns", "exposed communication"],
  ["exposed_copy_ns", "copy"],
  ["idle_ns", "idle"],
];

sections.runs = {
  title: "Run",
  draw(root, data) {
    root.append(...[stepPlot(data), ...data.windows.map(windowOf)].flat().filter(Boolean));
  },
};

// The colour of a rank. The colours of the ranks differ as much as possible.
function colourOfRank(at, count) {
  return `oklch(0.68 0.14 ${Math.round((360 * at) / count)})`;
}

function nameOfRank(rank) {
  return rank === null ? "rank unknown" : `rank ${rank}`;
}

// A chart with a point for each step of each rank, the steps from left to right.
function stepPlot({windows, steps}) {
  const [width, height, left, bottom] = [1160, 220, 92, 26];
  const points = steps.flatMap(({window, rank, numbers, duration_ns: times}) => (
    numbers.map((number, at) => ({window, rank, number, ns: times[at]}))
  ));
  if (!points.length) return null;
  const columns = new Map();
  points
    .slice()
    .sort((one, other) => one.window - other.window || one.number - other.number)
    .forEach(({window, number}) => {
      const key = `${window}/${number}`;
      if (!columns.has(key)) columns.set(key, {at: columns.size, number, window});
    });
  const most = points.reduce((longest, {ns}) => Math.max(longest, ns), 1);
  const ranks = [...new Set(steps.map(({rank}) => rank))];
  const places = new Map(ranks.map((rank, at) => [rank, at]));
  const wide = (width - left) / columns.size;
  const middle = ({window, number}) => left + (columns.get(`${window}/${number}`).at + 0.5) * wide;
  // The points of a step's ranks lie side by side.
  const x = point => (
    middle(point) + ((places.get(point.rank) + 0.5) / ranks.length - 0.5) * wide * 0.7
  );
  const y = ns => 8 + (height - bottom - 8) * (1 - ns / most);
  const label = `Step times of ${windows.length} windows, ${points.length} steps on all ranks; `
    + `the longest takes ${duration(most)}. The tables below have the numbers.`;
  const plot = svg("svg", {
    class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label,
  });
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    plot.append(svg("line", {x1: left, x2: width, y1: y(part * most), y2: y(part * most)}));
    plot.append(textAt(left - 8, y(part * most) + 4, duration(Math.round(part * most)), "end"));
  }
  const every = Math.ceil(columns.size / 12);
  for (const {at, number, window} of columns.values()) {
    if (at % every) continue;
    plot.append(textAt(middle({window, number}), height - 6, `step ${number}`, "middle"));
  }
  for (const point of points) {
    const title = svg("title", {});
    title.textContent = `step ${point.number}, ${nameOfRank(point.rank)}: ${duration(point.ns)}`;
    const dot = svg("circle", {cx: x(point), cy: y(point.ns), r: 4}, title);
    dot.style.fill = colourOfRank(places.get(point.rank), ranks.length);
    plot.append(dot);
  }
  return [
    element("h3", {text: "Step times over the run"}),
    plot,
    element("p", {class: "legend"}, ranks.slice(0, mostLegend).map((rank, at) => (
      element("span", {}, mark(colourOfRank(at, ranks.length)), nameOfRank(rank))
    ))),
  ];
}

function textAt(x, y, text, anchor) {
  const made = svg("text", {x, y, "text-anchor": anchor});
  made.textContent = text;
  return made;
}

function windowOf(window) {
  const blocks = [
    ["stragglers", "Slow ranks that other ranks wait for"],
    ["collectives", "Collectives: transfer and waiting time"],
    ["clocks", "Clocks: how far the clock of each rank is ahead"],
  ];
  return [
    element("h3", {text: window.name}),
    ...window.notes.map(note => element("p", {class: "soft", text: note})),
    window.ranks && ranksTable(window),
    ...blocks.filter(([name]) => window[name]).flatMap(([name, title]) => [
      element("h4", {text: title}),
      tableOf(window[name], {caption: `${title}: ${window.name}`}),
    ]),
  ];
}

// The table of ranks. If the device work is known, a bar shows how the time of a step splits.
function ranksTable({ranks, name}) {
  const {cells} = ranks;
  const columns = columnsOf(ranks);
  const rows = rowsOf(ranks, columns);
  const known = rankParts.filter(([column]) => cells[column]);
  if (known.length && cells.step_ns) {
    const most = Math.max(...cells.step_ns, 1);
    const bar = at => {
      const parts = known.map(([column, kind]) => (
        {name: kind, ns: cells[column][at] || 0, colour: kindColours[kind]}
      ));
      const label = parts.map(part => `${part.name} ${duration(part.ns)}`).join(", ");
      return stackedBar(parts, most, label);
    };
    const key = at => cells.step_ns[at];
    columns.splice(1, 0, {title: "mean step, by kind of time", isBar: true, cell: bar, key});
    rows.forEach((row, at) => row.splice(1, 0, at));
  }
  return table(columns, rows, {caption: `Ranks: ${name}`});
}
