// Stacked bars and their legends.
"use strict";

// A bar of parts, each {name, ns, colour}; `whole` is the length of the full bar in ns.
function stackedBar(parts, whole, label) {
  const bar = element("div", {class: "bar", role: "img", "aria-label": label});
  for (const part of parts.filter(each => each.ns > 0)) {
    const piece = element("span", {title: `${part.name}: ${duration(part.ns)}`});
    piece.style.width = `${(100 * part.ns) / whole}%`;
    piece.style.background = part.colour;
    bar.append(piece);
  }
  return bar;
}
