// The section Ranges: a tree of ranges, each with its forward, backward and optimizer as one bar.
"use strict";

const phases = ["forward", "backward", "accumulate", "recompute", "optimizer"];

sections.ranges = {
  title: "Ranges",
  draw(root, data) {
    const place = element("div");
    const show = key => {
      for (const button of buttons) {
        button.setAttribute("aria-pressed", String(button.value === key));
      }
      place.replaceChildren(rangeTable(data, key));
    };
    const buttons = [["by_path", "By path"], ["by_name", "By name"]].map(([key, title]) => (
      element("button", {type: "button", value: key, text: title, onclick: () => show(key)})
    ));
    const shown = ["forward", "backward", "optimizer"];
    const legend = element("p", {class: "legend"}, shown.map(name => (
      element("span", {}, mark(kindColours[name]), name)
    )));
    const left = data.left_out ? [`${data.left_out} more ranges are left out.`] : [];
    root.append(
      element("p", {class: "soft", text:
        "The CPU time that each range caused, on all threads and in all steps: its forward, the "
        + "backward of its operators, and the optimizer steps inside it."}),
      element("div", {class: "tools", role: "group", "aria-label": "Grouping"}, buttons, legend),
      place,
      ...[...left, ...data.notes].map(note => element("p", {class: "soft", text: note})),
    );
    show("by_path");
  },
};

function rangeTable(data, key) {
  const {cells} = data[key];
  const most = Math.max(...cells.total_ns, 1);
  const others = columnsOf(data[key], [
    "self_total_ns", "share", "device_ns", "device_share", "calls", "median_ns", "p95_ns",
    "device_idle_ns", "allocated_bytes", "flops_per_second",
  ]);
  const columns = [
    {title: "range", isText: true, cell: (name, row) => rangeName(cells, row[1])},
    {
      title: "forward, backward, optimizer",
      isBar: true,
      key: at => cells.total_ns[at],
      cell: at => rangeBar(cells, at, most),
    },
    {title: "CPU time", unit: "ns", doc: "all CPU time that the range caused"},
    {
      title: "CPU time by step",
      doc: "the CPU time that the range caused in each step",
      key: values => values && Math.max(...values),
      cell: values => stepsOf(values, data.steps),
    },
    ...others,
  ];
  const rows = cells.name.map((name, at) => (
    [name, at, cells.total_ns[at], cells.steps[at], ...others.map(column => cells[column.name][at])]
  ));
  if (data.steps.length < 2) {
    for (const each of [columns, ...rows]) each.splice(3, 1);
  }
  return table(columns, rows, {
    caption: key === "by_path" ? "Ranges by path" : "Ranges by name",
    filter: true,
    shown: 40,
    depths: cells.depth || null,
    sort: key === "by_path" ? null : 2,
  });
}

function rangeName(cells, at) {
  const name = cells.name[at];
  const type = cells.module_type && cells.module_type[at];
  const isNew = type && !name.endsWith(type);
  return element(
    "span",
    {},
    mark(colourOfRange(name)),
    longName(name),
    isNew ? element("span", {class: "soft", text: ` ${type}`}) : null,
  );
}

function rangeBar(cells, at, most) {
  const parts = phases
    .map(name => ({name, ns: (cells[`${name}_ns`] || [])[at] || 0, colour: kindColours[name]}))
    .filter(part => part.ns > 0);
  if (!parts.length) {
    parts.push({name: cells.name[at], ns: cells.total_ns[at] || 0, colour: "var(--idle)"});
  }
  const label = parts.map(part => `${part.name} ${duration(part.ns)}`).join(", ");
  const bar = stackedBar(parts, most, label);
  bar.title = label;
  return bar;
}

function stepsOf(values, numbers) {
  if (!values || values.length < 2) return "";
  const labels = values.map((ns, at) => `step ${numbers[at]}: ${duration(ns)}`);
  const sorted = values.slice().sort((one, other) => one - other);
  const label = `Steps: from ${duration(sorted[0])} to ${duration(sorted.at(-1))}, `
    + `median ${duration(sorted[Math.floor(sorted.length / 2)])}`;
  return stepChart(values, labels, label, {width: Math.min(values.length * 8, 96), height: 16});
}
