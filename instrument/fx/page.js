// The section of the page of a torch.fx graph with the time of modules and the nodes.
"use strict";

sections.graph = {
  title: "Modules and nodes",
  draw(root, {times, nodes}) {
    const flames = element("div");
    root.append(flames, element("h3", {text: "Nodes"}), table(nodes));
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
      list: {sort: "share", shown: 15},
    });
  },
};

// Modules of the same class have the same colour. Nodes are paler.
function colourOfType(node) {
  const base = colourOf(node.name.split(": ").at(-1));
  return node.isRange ? base : `color-mix(in oklab, ${base} 55%, white)`;
}
