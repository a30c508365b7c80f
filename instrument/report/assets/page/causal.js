// What if: what each range, operator and kernel spends, and what a step would win.
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
        title: "spends, and wins at most",
        isBar: true,
        doc: "CPU and device time of a step; the dark part is what a step wins without it",
        cell: (_, row) => causalBar(row[2], row[3], most),
      },
      {title: "wins at most", unit: "ns", doc: "how much shorter a step is if this takes no time"},
      ...data.faster.map(share => ({
        title: share === 1 ? "gone" : `${Math.round(share * 100)} % faster`,
        unit: "ns",
        doc: `the step if this takes ${Math.round(share * 100)} % less time`,
      })),
    ];
    const rows = data.rows.map(row => (
      [row.name, row.kind, spent(row), data.step_ns - row.step_ns.at(-1), ...row.step_ns]
    ));
    root.append(
      element("p", {class: "soft", text:
        `A simulated step takes ${duration(data.step_ns)}. Each row is made faster in the `
        + "simulation, and the columns on the right show the step that follows. Time that is spent "
        + "cannot always be won: what runs beside slower work is free."}),
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
    class: "causal", title: `spends ${duration(spent)}, wins at most ${duration(won)}`,
  });
  for (const [ns, name] of [[spent, "spent"], [won, "won"]]) {
    const piece = element("span", {class: name});
    piece.style.width = `${(100 * Math.min(Math.max(ns, 0), most)) / most}%`;
    bar.append(piece);
  }
  return bar;
}
