// The section What if: the time of each range, operator and kernel, and the step if it were faster.
"use strict";

sections.whatif = {
  title: "What if",
  draw(root, data) {
    const spent = row => (row.cpu_ns || 0) + (row.device_ns || 0);
    const most = Math.max(...data.rows.map(spent), 1);
    const columns = [
      {title: "range, operator or kernel", isText: true, cell: (name, row) => named(name, row[1])},
      {title: "kind", isText: true},
      {
        title: "time, and largest saving",
        isBar: true,
        doc: "CPU and device time in one step; the dark part is the largest saving",
        cell: (_, row) => causalBar(row[2], row[3], most),
      },
      {
        title: "largest saving",
        unit: "ns",
        doc: "how much shorter a step is if this takes no time",
      },
      ...data.faster.map(share => ({
        title: share === 1 ? "no time" : `${Math.round(share * 100)} % faster`,
        unit: "ns",
        doc: `the duration of a step if this takes ${Math.round(share * 100)} % less time`,
      })),
    ];
    const rows = data.rows.map(row => (
      [row.name, row.kind, spent(row), data.step_ns - row.step_ns.at(-1), ...row.step_ns]
    ));
    root.append(
      element("p", {class: "soft", text:
        `A simulated step takes ${duration(data.step_ns)}. For each row, the simulation makes one `
        + "range, operator or kernel faster. The columns on the right show how long the step then "
        + "takes. A faster kernel does not always make the step shorter, because slower work may "
        + "run at the same time."}),
      table(columns, rows, {caption: "Causal profile", shown: 15}),
      element("ul", {class: "soft"}, data.notes.map(note => element("li", {text: note}))),
    );
  },
};

function named(name, kind) {
  const colour = kind === "range" ? colourOfRange(name) : "transparent";
  return element("span", {class: "named"}, mark(colour), longName(name));
}

function causalBar(spent, won, most) {
  const bar = element("span", {
    class: "causal", title: `time ${duration(spent)}, largest saving ${duration(won)}`,
  });
  for (const [ns, name] of [[spent, "spent"], [won, "won"]]) {
    const piece = element("span", {class: name});
    piece.style.width = `${(100 * Math.min(Math.max(ns, 0), most)) / most}%`;
    bar.append(piece);
  }
  return bar;
}
