// A table that can be sorted by a column and filtered by a text. Its rows may be a tree.
"use strict";

// The middle of a longer name, in characters, is left out; the tooltip shows all of it.
const longestName = 60;
// A longer text, in characters, may break into several lines.
const longestLine = 32;
// At first, a tree is open down to the deepest level with at most this many rows in total.
const openedRows = 30;

// A name, with the full name as tooltip if the text is a label, or too long.
function longName(text, full = text) {
  const whole = printable(text);
  if (full === text && whole.length <= longestName) return whole;
  const short = whole.length <= longestName
    ? whole : `${whole.slice(0, longestName - 21)}…${whole.slice(-20)}`;
  return element("span", {title: full, text: short});
}

// Make a table from a table in the payload; parts.py makes it.
// - The cells of a column are the values that sort the rows. `texts` are what they show.
// - `sort` is the name of the column that sorts the rows at first; without it they keep their order.
// - `depths` makes the rows a tree: it has the depth of each row. A row comes after its parent.
function table({caption, columns, cells, sort = null, shown = 25, depths = null, ...options}) {
  const size = columns.length ? cells[columns[0].name].length : 0;
  const rows = [...Array(size).keys()];
  const {has_filter: filter = size > 10} = options;
  const {roots, all} = treeOf(rows, depths);
  const hasBranches = all.some(node => node.children.length);
  let sorted = {column: null, descending: true};
  let query = "";
  let limit = shown;

  const body = element("tbody");
  const counted = element("span", {class: "soft", role: "status"});
  const more = element("button", {type: "button", onclick: () => { limit = Infinity; fill(); }});
  const headers = columns.map((column, index) => {
    const button = element("button", {type: "button", title: column.doc, text: column.title});
    button.addEventListener("click", () => {
      sortBy(index, sorted.column === index ? !sorted.descending : !column.is_text);
      fill();
    });
    const isLeft = column.is_text || column.kind === "bar";
    return element("th", {scope: "col", class: isLeft ? "text" : null}, button);
  });

  function sortBy(index, descending) {
    sorted = {column: index, descending};
    const sign = descending ? -1 : 1;
    const values = cells[columns[index].name];
    const compare = (one, other) => {
      const [a, b] = [values[one.row] ?? null, values[other.row] ?? null];
      if (a === null || b === null) return (a === null) - (b === null); // unknown cells come last
      return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
    };
    for (const siblings of [roots, ...all.map(node => node.children)]) siblings.sort(compare);
    headers.forEach((header, at) => {
      if (at === index) header.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else header.removeAttribute("aria-sort");
    });
  }

  const draw = columns.map(column => cellOf(column, cells[column.name]));
  const matches = row => columns.some(({name, is_text: isText}) => (
    isText && String(cells[name][row]).toLowerCase().includes(query)
  ));

  function search() {
    for (const node of all.slice().reverse()) {
      node.isFound = matches(node.row) || node.children.some(each => each.isFound);
    }
  }

  function visible() {
    const found = [];
    const pending = roots.slice().reverse();
    while (pending.length) {
      const node = pending.pop();
      if (query && !node.isFound) continue;
      found.push(node);
      if (node.isOpen || query) pending.push(...node.children.slice().reverse());
    }
    return found;
  }

  function fill() {
    const found = visible();
    body.replaceChildren(...found.slice(0, limit).map(node => rowOf(node)));
    counted.textContent = found.length < rows.length
      ? `${found.length} of ${rows.length} rows`
      : `${rows.length} ${rows.length === 1 ? "row" : "rows"}`;
    more.hidden = found.length <= limit;
    more.textContent = `Show all ${found.length} rows`;
  }

  function rowOf(node) {
    return element("tr", {}, columns.map((column, at) => {
      const content = draw[at](node.row);
      if (at === 0 && hasBranches) {
        const name = cells[column.name][node.row];
        const branch = element("td", {class: "text branch"}, toggle(node, name, fill), content);
        branch.style.setProperty("--depth", node.depth);
        return branch;
      }
      const isLong = String(cells[column.name][node.row]).length > longestLine;
      return element("td", {
        class: column.is_text ? `text${isLong ? " long" : ""}` : null,
        "data-column": column.title, // where a narrow page shows it
      }, content);
    }));
  }

  function openTree(isOpen) {
    for (const node of all) node.isOpen = isOpen;
    fill();
  }

  const first = columns.findIndex(({name}) => name === sort);
  if (first >= 0) sortBy(first, !columns[first].is_text);
  fill();
  const tools = filter || hasBranches ? element("div", {class: "tools"}) : null;
  if (filter) {
    tools.append(element("input", {
      type: "search",
      placeholder: "Filter by name",
      "aria-label": `Filter: ${caption}`,
      oninput: event => {
        query = event.target.value.toLowerCase();
        search();
        fill();
      },
    }));
  }
  if (hasBranches) {
    tools.append(
      element("button", {type: "button", text: "Unfold all", onclick: () => openTree(true)}),
      element("button", {type: "button", text: "Fold all", onclick: () => openTree(false)}),
    );
  }
  if (tools) tools.append(counted);
  return element(
    "div",
    {class: "table"},
    tools,
    element(
      "div",
      {class: "scroll", tabindex: "0", role: "region", "aria-label": caption},
      element(
        "table",
        {},
        element("caption", {class: "hidden", text: caption}),
        element("thead", {}, element("tr", {}, headers)),
        body,
      ),
    ),
    more,
  );
}

// The rows as nodes {row, depth, children, isOpen, isFound}, and the nodes without a parent.
function treeOf(rows, depths) {
  const all = rows.map(row => (
    {row, depth: depths ? depths[row] : 0, children: [], isOpen: false, isFound: true}
  ));
  const roots = [];
  const above = [];
  for (const node of all) {
    above[node.depth] = node;
    (node.depth ? above[node.depth - 1].children : roots).push(node);
  }
  const sizes = [];
  for (const node of all) sizes[node.depth] = (sizes[node.depth] || 0) + 1;
  let total = 0;
  for (const [depth, size] of sizes.entries()) {
    total += size;
    if (total > openedRows) break;
    for (const node of all) if (node.depth === depth - 1) node.isOpen = true;
  }
  return {roots, all};
}

// A function that draws the cell of a row. The script of a chart may give a column a function
// `text` that writes a value, or a function `draw` that draws a cell.
function cellOf(column, values) {
  const {texts, text = value => value ?? "–", notes = [], links = []} = column;
  const textOf = row => (texts ? texts[row] : text(values[row]));
  const noteOf = row => (notes[row] ? element("span", {class: "soft note", text: notes[row]}) : null);
  const most = Math.max(...values.filter(value => typeof value === "number"), 1);
  const place = column.kind === "change" ? scaleOf(values.map(value => value || 0)) : null;
  const kinds = {
    range: row => {
      const isRange = column.is_range ? column.is_range[row] : true;
      const colour = isRange ? colourOfRange(values[row]) : "transparent";
      const className = column.is_range ? "named" : null;
      return element("span", {class: className}, mark(colour), longName(textOf(row)), noteOf(row));
    },
    bar: row => {
      const parts = Object.entries(column.parts)
        .map(([name, ns]) => ({name, ns: ns[row] || 0, colour: colourOfKind(name)}))
        .filter(part => part.ns > 0);
      const bar = stackedBar(parts, textOf(row), most);
      bar.title = printable(textOf(row));
      return bar;
    },
    steps: row => {
      const ns = column.charts[row];
      const width = Math.min(ns?.length * 8, column.width || 96);
      return ns && stepChart(ns, column.numbers, {width, height: 16, most: column.most});
    },
    change: row => (values[row] === null ? "–" : element(
      "span",
      {class: "change-cell"},
      place(values[row]),
      element("span", {class: `number ${directionOf(values[row])}`, text: textOf(row)}),
    )),
    status: row => element("span", {class: `status ${values[row]}`, text: textOf(row)}),
    link: row => (links[row] ? element("a", {href: links[row], text: textOf(row)})
      : longName(textOf(row))),
    name: row => {
      const name = longName(textOf(row), values[row] ?? textOf(row));
      return notes[row] ? element("span", {}, name, noteOf(row)) : name;
    },
  };
  return column.draw || kinds[column.kind || (column.is_text ? "name" : null)] || textOf;
}

function toggle(node, name, redraw) {
  if (!node.children.length) return element("span", {class: "leaf"});
  return element("button", {
    type: "button",
    class: "toggle",
    "aria-expanded": String(node.isOpen),
    "aria-label": `Ranges inside ${name}`,
    text: node.isOpen ? "▾" : "▸",
    onclick: () => {
      node.isOpen = !node.isOpen;
      redraw();
    },
  });
}
