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
        cell: (_, row) => causalBar(row[2], row.at(-1), most),
      },
      ...data.faster.map(share => ({
        title: share === 1 ? "saves if it takes no time"
          : `saves if it takes ${Math.round(share * 100)} % less time`,
        unit: "ns",
        doc: `how much shorter a step is if this takes ${Math.round(share * 100)} % less time`,
      })),
    ];
    const rows = data.rows.map(row => (
      [row.name, row.kind, spent(row), ...row.step_ns.map(ns => data.step_ns - ns)]
    ));
    root.append(
      element("p", {class: "soft", text:
        "For each row, a simulation makes one range, operator or kernel faster. The columns on the "
        + "right show how much shorter a step then is. A faster kernel does not always make the "
        + "step shorter, because slower work may run at the same time."}),
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
