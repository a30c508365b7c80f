// The sections of the page of a torch.fx graph: the summary; the modules by time beside the picture
// of the graph; and the table of nodes. A page address such as #graph?node=3, #graph?frame=2 or
// #graph?view=1 selects a node by its row, an open module by its frame, or a picture.
"use strict";

const leastLegible = 0.7; // a wide graph is first shown at this zoom

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
  draw(root, data) {
    const times = element("div", {}, element("h3", {text: "Time"}));
    root.append(
      element("div", {class: "sides"}, times, element("div", {}, graphPicture(data))),
      element("h3", {text: "Nodes"}),
      ...nodeTable(data.nodes),
    );
    if (!data.times.length) {
      times.append(element("p", {text: "No node has a time."}));
      return;
    }
    drawFlames(times, data.times, {
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

// The table of nodes. A switch shows the parameters, which are hidden at first.
function nodeTable(data) {
  const columns = columnsOf(data);
  const rows = rowsOf(data, columns);
  const at = name => columns.findIndex(column => column.name === name);
  const rowOfName = new Map(data.cells.name.map((name, row) => [name, row]));
  const most = (data.cells.share || []).reduce((one, other) => Math.max(one, other), 0);
  columns[at("name")].cell = name => element(
    "a", {href: `#graph?node=${rowOfName.get(name)}`, text: name},
  );
  if (most) {
    columns[at("share")].cell = share => (share === null ? cellText("share", share) : element(
      "span", {class: "share"},
      stackedBar([{name: "share", ns: share, colour: "var(--heat)"}], most, percent(share)),
      percent(share),
    ));
  }
  const shown = element("div");
  const fill = isEvery => shown.replaceChildren(table(
    columns,
    isEvery ? rows : rows.filter((_, row) => data.cells.op[row] !== "get_attr"),
    {caption: "Nodes", sort: at("share") < 0 ? null : at("share"), shown: 30},
  ));
  fill(false);
  return [data.cells.op.includes("get_attr") ? parameterSwitch(fill) : "", shown];
}

function parameterSwitch(changed) {
  return element("label", {class: "switch"}, element("input", {
    type: "checkbox", onchange: event => changed(event.target.checked),
  }), "Parameters (get_attr)");
}

// The known cells of a node as pairs of texts.
function factsOfNode(data, row) {
  return data.columns
    .filter(({name}) => ![null, ""].includes(data.cells[name][row]))
    .map(({name, title, unit}) => [title, cellText(unit, data.cells[name][row])]);
}

// The picture of the graph with its controls. It shows one of `data.views`.
function graphPicture(data) {
  let at = data.shown;
  let zoom = 1;
  let drawn = null;

  const depth = element("select", {
    "aria-label": "Depth of the graph",
    onchange: event => { location.hash = `graph?view=${event.target.value}`; },
  }, data.views.map((view, number) => element("option", {
    value: number,
    text: (view.every_node ? "every node" : `modules to level ${view.depth + 1}`)
      + ` (${view.boxes} boxes)`,
  })));
  const pane = element("div", {class: "graph", tabindex: "0", role: "region", "aria-label": "Graph"});
  const legend = element("p", {class: "legend"});
  const details = element("dl", {class: "picked"}, element("div", {}, element("dt", {
    text: "Click a node to see its values. Click a module (coloured border) to open it.",
  })));
  const frame = element("div", {class: "pane"}, pane);
  const showTip = tooltip(frame);

  const resize = factor => {
    const {width, height} = data.views[at];
    zoom = factor;
    drawn.picture.setAttribute("width", width * zoom);
    drawn.picture.setAttribute("height", height * zoom);
  };
  const fitting = () => Math.min(1, (pane.clientWidth - 2) / data.views[at].width);
  const show = number => {
    at = number;
    drawn = drawnView(data.views[at], at);
    depth.value = at;
    legend.replaceChildren("Share of the time: ", ...data.views[at].legend.map(([share, heat]) => {
      const colour = element("i");
      colour.style.opacity = heat;
      return element("span", {}, colour, percent(share));
    }), "Data flows downwards.");
    pane.replaceChildren(drawn.picture);
    resize(Math.max(fitting(), leastLegible));
  };

  // Show and highlight the node or module in the page's address.
  const follow = () => {
    const address = addressed("graph");
    if (!address) return;
    const [view, node, open] = ["view", "node", "frame"].map(key => (
      address.has(key) ? Number(address.get(key)) : null
    ));
    const has = index => (
      (node === null || isDrawn(data.views[index], node))
      && (open === null || data.views[index].frames.some(({number}) => number === open))
    );
    const wanted = data.views[view] ? view : at;
    const found = [wanted, ...data.views.keys()].find(has);
    if (found === undefined) return;
    if (found !== at) show(found);
    for (const each of pane.querySelectorAll(".on")) each.classList.remove("on");
    const boxes = node !== null ? drawn.boxes.get(node) : drawn.frames.get(open);
    if (!boxes) return;
    for (const each of [...boxes, ...(node === null ? [] : drawn.linesOf(node))]) {
      each.classList.add("on");
    }
    details.replaceChildren(...(node === null ? [] : factsOfNode(data.nodes, node)).map(
      ([title, text]) => element("div", {}, element("dt", {text: title}), element("dd", {}, longName(text))),
    ));
    scrollInto(pane, boxes[0], node === null);
  };

  pane.addEventListener("wheel", event => {
    if (!event.ctrlKey) return; // let the pane scroll
    event.preventDefault();
    resize(zoom * (event.deltaY < 0 ? 1.1 : 1 / 1.1));
  }, {passive: false});
  const pointed = event => {
    const link = event.target.closest("a");
    for (const each of pane.querySelectorAll(".near")) each.classList.remove("near");
    if (!link) return showTip(event, []);
    const [number, isModule] = [Number(link.dataset.number), link.dataset.frame !== undefined];
    for (const each of drawn.linesOf(number)) each.classList.add("near");
    return showTip(event, isModule
      ? [link.dataset.path, "Click to open the module"]
      : factsOfNode(data.nodes, number).map(([title, text]) => `${title}: ${text}`));
  };
  pane.addEventListener("pointermove", pointed);
  pane.addEventListener("pointerleave", pointed);
  addEventListener("hashchange", follow);

  const button = (text, title, onclick) => element("button", {type: "button", title, text, onclick});
  const hasParameters = data.nodes.cells.op.includes("get_attr");
  // The pane has no width until it is in the page.
  requestAnimationFrame(() => {
    show(at);
    follow();
  });
  return [
    element("h3", {text: "Graph"}),
    element("div", {class: "tools"},
      depth,
      button("−", "Smaller", () => resize(zoom / 1.25)),
      button("+", "Larger", () => resize(zoom * 1.25)),
      button("Fit", "Fit the width of the pane", () => resize(fitting())),
      hasParameters ? parameterSwitch(isOn => pane.classList.toggle("with-parameters", isOn)) : null),
    legend, frame, element("div", {class: "details", role: "status"}, details),
  ];
}

function scrollInto(pane, box, isTop) {
  const [outer, inner] = [pane.getBoundingClientRect(), box.getBoundingClientRect()];
  pane.scrollLeft += inner.left - outer.left - Math.max((outer.width - inner.width) / 2, 8);
  pane.scrollTop += inner.top - outer.top - (isTop ? 8 : (outer.height - inner.height) / 2);
}

function isDrawn(view, row) {
  return view.nodes.some(({number, frame, badges}) => (
    (frame === null && number === row) || badges.some(badge => badge.number === row)
  ));
}

// A view as SVG: the picture, the elements of each node and frame, and a function that returns the
// lines of a node.
function drawnView(view, at) {
  const boxes = new Map();
  const frames = new Map();
  const parameters = new Set(view.nodes.filter(({kind}) => kind === "get_attr").map(({number}) => number));
  const rectangle = ({x, y, width, height}, rx, more) => svg("rect", {x, y, width, height, rx, ...more});
  const picture = svg("svg", {
    viewBox: `0 0 ${view.width} ${view.height}`, role: "group", "aria-label": "The graph",
  });
  for (const {number, label, ...place} of view.frames) {
    const text = svg("text", {x: place.x + 8, y: place.y + 15}, printable(label));
    frames.set(number, [svg("g", {class: "frame"}, rectangle(place, 6), text)]);
    picture.append(...frames.get(number));
  }
  const lines = view.lines.map(({source, path}) => svg("path", {
    class: `edge${parameters.has(source) ? " parameter" : ""}`, d: path,
  }));
  picture.append(...lines);
  for (const node of view.nodes) {
    const {number, kind, frame, texts, badges} = node;
    const isModule = frame !== null;
    const address = isModule ? `view=${at + 1}&frame=${frame}` : `view=${at}&node=${number}`;
    const middle = node.x + node.width / 2;
    const link = svg(
      "a",
      {class: `node ${kind}${kind === "get_attr" ? " parameter" : ""}`, href: `#graph?${address}`},
      rectangle(node, 4, {class: "paper"}),
      rectangle(node, 4, {"fill-opacity": node.strength}),
      ...texts.map(([y, text]) => svg("text", {x: middle, y}, printable(text))),
    );
    link.dataset.number = number;
    if (isModule) Object.assign(link.dataset, {frame, path: texts.map(([, text]) => text).join(", ")});
    else boxes.set(number, [link]);
    picture.append(link);
    for (const badge of badges) {
      const made = svg(
        "a",
        {class: "node badge parameter", href: `#graph?view=${at}&node=${badge.number}`},
        rectangle(badge, 3, {class: "paper"}),
        svg("text", {x: badge.x + badge.width / 2, y: badge.y + 9}, printable(badge.text)),
      );
      made.dataset.number = badge.number;
      boxes.set(badge.number, [...(boxes.get(badge.number) || []), made]);
      picture.append(made, svg("path", {
        class: "edge parameter", d: `M${badge.x} ${badge.y + 6}H${node.x + node.width}`,
      }));
    }
  }

  const byNumber = new Map(view.lines.map((line, index) => [line.number, index]));
  // The lines that begin or end at a node. The lines of a value have a common beginning, so a line
  // that ends at the node is followed back to its source.
  const linesOf = number => {
    const found = [];
    view.lines.forEach((line, index) => {
      if (line.source === number) found.push(lines[index]);
      if (line.target !== number) return;
      for (let part = index; part !== undefined; part = byNumber.get(view.lines[part].after)) {
        found.push(lines[part]);
        if (view.lines[part].after === null) break;
      }
    });
    return found;
  };
  return {picture, boxes, frames, linesOf};
}
