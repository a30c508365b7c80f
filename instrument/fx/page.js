// The sections of the page of a torch.fx graph: the summary, the time of modules, and the nodes.
"use strict";

sections.summary = {
  title: "Summary",
  draw(root, {facts, notes}) {
    root.append(
      element("div", {class: "facts"}, facts.map(([number, text]) => (
        element("div", {class: "fact"}, element("b", {text: number}), element("span", {class: "soft", text}))
      ))),
      element("details", {class: "folded"},
        element("summary", {text: "How this was measured"}),
        notes.map(text => element("p", {text}))),
    );
  },
};

sections.graph = {
  title: "Modules and nodes",
  draw(root, {times, nodes}) {
    const share = nodes.columns.findIndex(({name}) => name === "share");
    const flames = element("div");
    root.append(
      flames,
      element("h3", {text: "Nodes"}),
      tableOf(nodes, {caption: "Nodes", sort: share < 0 ? null : share, shown: 30}),
    );
    if (!times.length) {
      flames.append(element("p", {text: "No node has a time."}));
      return;
    }
    drawFlames(flames, times, {
      title: "Time of modules",
      about: "the sum of the medians of the nodes",
      colour: colourOfType,
      canInvert: false,
      isListed: true,
      list: {sort: 3, shown: 15},
    });
  },
};

// Modules of the same class have the same colour. Nodes are paler.
function colourOfType(node) {
  const base = colourOf(node.name.split(": ").at(-1));
  return node.isRange ? base : `color-mix(in oklab, ${base} 55%, white)`;
}
