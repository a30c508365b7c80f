// The flame graphs: each frame lies below its caller, and its width is its time.
"use strict";

const frameHeight = 18;
const mostDepth = 400; // the most rows of a graph

// The frames of a graph as nodes, callers first. The first node, "all", contains all frames.
function frameNodes(graph) {
  const root = {name: "all", label: "all", parent: null, depth: 0, self: 0, total: 0, calls: []};
  const nodes = [root];
  const stack = [root];
  graph.depth.forEach((depth, at) => {
    const code = graph.name_of[at];
    const name = graph.names[code];
    const isRange = graph.is_range[code];
    const parent = stack[depth];
    const node = {
      name, label: labelOf(name), parent, depth: depth + 1, self: Math.max(graph.self[at], 0),
      total: 0, calls: [], range: isRange ? name : parent.range, isRange,
    };
    parent.calls.push(node);
    nodes.push(node);
    stack.splice(depth + 1, stack.length, node);
  });
  for (const node of nodes.slice().reverse()) {
    node.total += node.self;
    if (node.parent) node.parent.total += node.total;
  }
  root.left = 0;
  for (const node of nodes) {
    node.calls.sort((one, other) => other.total - one.total);
    let {left} = node;
    for (const called of node.calls) {
      called.left = left;
      left += called.total;
    }
  }
  return nodes;
}

// Whether a frame is inside another one for which a test holds. The time of such a frame is part of
// the other's time.
function isInside(node, test) {
  let above = node.parent;
  while (above && !(above.parent && test(above))) above = above.parent;
  return above !== null;
}

// A row for each name: its total time, which includes the frames it calls, and its own time.
function timesByName([, ...nodes]) {
  const rows = new Map();
  for (const node of nodes) {
    if (!rows.has(node.name)) rows.set(node.name, [node.name, 0, 0]);
    const row = rows.get(node.name);
    row[2] += node.self;
    if (!isInside(node, ({name}) => name === node.name)) row[1] += node.total;
  }
  return [...rows.values()];
}

// The text in a box. The path of a Python file keeps only its last folder.
function labelOf(name) {
  return name.replace(/^[^;<>]*[/\\](?=[^/\\]+[/\\][^/\\]+\.py\()/, "");
}

// The colour of a frame: the colour of its range, or else of its file or name.
function colourOfCall(node) {
  if (node.isRange) return colourOfRange(node.name);
  const file = node.name.includes(".py(") ? node.name.split("(")[0] : node.name;
  const base = colourOf(node.range || file);
  return `color-mix(in oklab, ${base} ${node.name.includes(".py(") ? 30 : 55}%, white)`;
}

// Draw the graphs with their controls. A graph has the keys of `section` in show/page/flame.py.
function drawFlames(root, graphs) {
  const resolve = colourResolver();
  let graph = graphs[0];
  let nodes = frameNodes(graph);
  let [tree] = nodes;
  let focus = tree;
  let selected = tree;
  let query = "";

  const canvas = element("canvas", {
    tabindex: "0",
    role: "application",
    "aria-label": `Flame graph. Arrow keys select frames, Enter zooms, Escape shows all. The frames `
      + "are also listed in a table below.",
  });
  const picture = element("div", {class: "picture"}, canvas);
  const frame = element("div", {class: "flame"}, picture);
  const details = element("p", {role: "status"});
  const found = element("span", {class: "soft", role: "status"});
  const notes = element("p", {class: "soft"});
  const listed = element("div");

  const matches = node => node.name.toLowerCase().includes(query);
  const share = time => percent(tree.total ? time / tree.total : 0);
  const isAround = node => node.depth < focus.depth && node.left <= focus.left
    && node.left + node.total >= focus.left + focus.total;

  // The frames that are wide enough to see, as boxes in pixels.
  const boxes = width => {
    const scale = focus.total ? width / focus.total : 0;
    const made = [];
    const waiting = [tree];
    while (waiting.length) {
      const node = waiting.pop();
      const left = Math.max((node.left - focus.left) * scale, 0);
      const right = Math.min((node.left + node.total - focus.left) * scale, width);
      const isSeen = right - left >= 0.5 || node === tree;
      if (!isSeen || node.depth > mostDepth) continue;
      made.push({node, left, width: right - left, top: node.depth * frameHeight});
      waiting.push(...node.calls);
    }
    return made;
  };

  let shown = [];
  const paint = () => {
    const width = picture.clientWidth;
    if (width <= 0) return;
    shown = boxes(width);
    const rows = 1 + shown.reduce((most, {node}) => Math.max(most, node.depth), 0);
    const context = fitted(canvas, width, rows * frameHeight);
    const [ink, line] = [themeColour("--ink"), themeColour("--line")];
    for (const {node, left, width: wide, top} of shown) {
      const isDim = query ? !matches(node) : isAround(node);
      context.fillStyle = isDim || node === tree ? line : resolve(colourOfCall(node));
      context.fillRect(left, top, Math.max(wide - (wide > 3 ? 0.6 : 0), 0.5), frameHeight - 1);
      context.fillStyle = isDim || node === tree ? ink : "#16191d";
      if (wide > 22) fillLabel(context, printable(node.label), left, top + frameHeight / 2, wide);
      if (node === selected && node !== tree) {
        context.strokeStyle = ink;
        context.lineWidth = 2;
        context.strokeRect(left + 1, top + 1, Math.max(wide - 2, 1), frameHeight - 3);
      }
    }
    canvas.dataset.rectangles = shown.length;
  };
  const repaint = painter(paint, picture);

  const textOf = node => `${duration(node.total)}, ${share(node.total)} of the ${graph.value}; `
    + `self ${duration(node.self)}`;
  const select = node => {
    selected = node;
    details.replaceChildren(node === tree
      ? `All ${graph.value}: ${duration(tree.total)}, merged over steps and threads. Click a frame to `
        + "zoom, and the first one or Escape to show all."
      : printable(`${node.name}: ${textOf(node)}`));
    repaint();
  };
  const zoom = node => {
    focus = node;
    select(node);
  };
  const search = () => {
    found.textContent = query
      ? `${share(nodes.slice(1).filter(node => matches(node) && !isInside(node, matches))
        .reduce((sum, {total}) => sum + total, 0))} of the time is in frames with this text`
      : "";
    repaint();
  };
  const load = () => {
    nodes = frameNodes(graph);
    [tree] = nodes;
    notes.textContent = graph.left_out
      ? `${graph.left_out.toLocaleString("en")} frames with the least time are left out. The `
        + "own time of their callers includes their time." : "";
    const rows = timesByName(nodes);
    const whole = tree.total || 1;
    listed.replaceChildren(table({
      caption: "Frames by name",
      columns: [
        {name: "frame", title: "frame", is_text: true},
        {name: "time", title: "time", doc: "with the frames that it calls", text: duration},
        {name: "self", title: "self", text: duration},
        {name: "share", title: "share", doc: "time as a share of the whole time", text: percent},
      ],
      cells: {
        frame: rows.map(row => row[0]),
        time: rows.map(row => row[1]),
        self: rows.map(row => row[2]),
        share: rows.map(row => row[1] / whole),
      },
      sort: "self", shown: 20,
    }));
    zoom(tree);
    search();
  };

  const nodeAt = event => {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const hit = shown.find(({left, width, top}) => (
      x >= left && x < left + width && y >= top && y < top + frameHeight
    ));
    return hit ? hit.node : null;
  };
  canvas.addEventListener("click", event => {
    const node = nodeAt(event);
    if (node) zoom(node);
  });
  tooltip(frame, canvas, event => {
    const node = nodeAt(event);
    return node ? [node.name, textOf(node)] : [];
  });
  canvas.addEventListener("keydown", event => {
    const beside = step => {
      const siblings = selected.parent ? selected.parent.calls : [selected];
      return siblings[siblings.indexOf(selected) + step] || selected;
    };
    const act = {
      ArrowUp: () => select(selected.parent || selected),
      ArrowDown: () => select(selected.calls[0] || selected),
      ArrowLeft: () => select(beside(-1)),
      ArrowRight: () => select(beside(1)),
      Enter: () => zoom(selected),
      Escape: () => zoom(tree),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });

  root.append(
    element("div", {class: "tools"},
      element("select", {
        "aria-label": "Graph",
        onchange: event => { graph = graphs[event.target.value]; load(); },
      }, graphs.map(({name, value}, at) => (
        element("option", {value: at, text: `${name}, ${value}`})
      ))),
      element("input", {
        type: "search", placeholder: "Search frames", "aria-label": "Search frames by name",
        oninput: event => { query = event.target.value.toLowerCase(); search(); },
      }),
      found),
    frame, details, notes,
    element("details", {}, element("summary", {text: "Frames as a table"}), listed),
  );
  load();
}

sections.flame = {
  title: "Flame graph",
  draw(root, data) {
    drawFlames(root, data.graphs);
  },
};
