// A table that can be sorted by a column and filtered by a text. Its rows may be a tree.
"use strict";

const unitTexts = {
  ns: duration,
  bytes,
  "bytes/s": rate,
  flops: count,
  "flops/s": count,
  share: percent,
};
// A longer name, in characters, is shortened until the reader clicks it.
const longestName = 60;
// A longer text, in characters, may break into several lines.
const longestLine = 32;
// At first, a tree is open down to the deepest level with at most this many rows in total.
const openedRows = 30;

function cellText(unit, value) {
  if (value === null || value === undefined) return "–";
  if (unit in unitTexts) return unitTexts[unit](value);
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

// A name. The middle of a long name is left out until the reader clicks it.
function longName(text) {
  const whole = printable(text);
  if (whole.length <= longestName) return whole;
  const short = `${whole.slice(0, longestName - 21)}…${whole.slice(-20)}`;
  const button = element("button", {
    type: "button", class: "name", "aria-expanded": "false", text: short,
  });
  button.addEventListener("click", () => {
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    button.textContent = isOpen ? short : whole;
  });
  return button;
}

// Make a table.
// - `columns` are {title, unit, doc, isText, isSentence, isBar, cell, key}. The function
//   `cell(value, row)` returns the content of a cell that is not plain text. `key(value)` returns
//   the value to sort by. A sentence is never shortened.
// - `rows` are arrays with a value for each column.
// - `sort` is the index of the column that sorts the rows at first; null keeps their order.
// - `depths` makes the rows a tree: it has the depth of each row. A row comes after its parent.
function table(columns, rows, options) {
  const {caption, sort = null, filter = rows.length > 10, shown = 25, depths = null} = options;
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
      sortBy(index, sorted.column === index ? !sorted.descending : !column.isText);
      fill();
    });
    const isLeft = column.isText || column.isBar;
    return element("th", {scope: "col", class: isLeft ? "text" : null}, button);
  });

  function sortBy(index, descending) {
    sorted = {column: index, descending};
    const sign = descending ? -1 : 1;
    const key = columns[index].key || (value => value);
    const compare = (one, other) => {
      const [a, b] = [one, other].map(node => key(node.row[index]));
      if (a === null || b === null) return (a === null) - (b === null); // unknown cells come last
      return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
    };
    for (const siblings of [roots, ...all.map(node => node.children)]) siblings.sort(compare);
    headers.forEach((header, at) => {
      if (at === index) header.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else header.removeAttribute("aria-sort");
    });
  }

  function search() {
    for (const node of all.slice().reverse()) {
      node.isFound = matches(columns, node.row, query) || node.children.some(each => each.isFound);
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
    const first = found.slice(0, limit);
    body.replaceChildren(...first.map(node => rowOf(columns, node, hasBranches, fill)));
    counted.textContent = found.length < rows.length
      ? `${found.length} of ${rows.length} rows`
      : `${rows.length} ${rows.length === 1 ? "row" : "rows"}`;
    more.hidden = found.length <= limit;
    more.textContent = `Show all ${found.length} rows`;
  }

  function openTree(isOpen) {
    for (const node of all) node.isOpen = isOpen;
    fill();
  }

  if (sort !== null) sortBy(sort, !columns[sort].isText);
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
  const all = rows.map((row, at) => (
    {row, depth: depths ? depths[at] : 0, children: [], isOpen: false, isFound: true}
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

function matches(columns, row, query) {
  return columns.some(({isText}, at) => isText && String(row[at]).toLowerCase().includes(query));
}

function rowOf(columns, node, hasBranches, redraw) {
  return element("tr", {}, columns.map((column, at) => {
    const value = node.row[at];
    let content = column.cell ? column.cell(value, node.row) : cellText(column.unit, value);
    const isName = column.isText && !column.isSentence;
    if (typeof content === "string" && isName) content = longName(content);
    const isLong = column.isText && String(value).length > longestLine;
    if (at > 0 || !hasBranches) {
      return element("td", {class: column.isText ? `text${isLong ? " long" : ""}` : null}, content);
    }
    const branch = element("td", {class: "text branch"}, toggle(node, redraw), content);
    branch.style.setProperty("--depth", node.depth);
    return branch;
  }));
}

function toggle(node, redraw) {
  if (!node.children.length) return element("span", {class: "leaf"});
  return element("button", {
    type: "button",
    class: "toggle",
    "aria-expanded": String(node.isOpen),
    "aria-label": `Ranges inside ${node.row[0]}`,
    text: node.isOpen ? "▾" : "▸",
    onclick: () => {
      node.isOpen = !node.isOpen;
      redraw();
    },
  });
}

// The columns of a table in the payload, {columns: [{name, title, unit, doc, is_text}], cells}.
function columnsOf(data, names = data.columns.map(({name}) => name)) {
  const byName = new Map(data.columns.map(column => [column.name, column]));
  return names.filter(name => byName.has(name)).map(name => {
    const {title, unit, doc, is_text: isText} = byName.get(name);
    return {name, title, unit, doc, isText};
  });
}

function rowsOf(data, columns) {
  const cells = columns.map(({name}) => data.cells[name]);
  return (cells[0] || []).map((_, at) => cells.map(column => column[at]));
}

// Make a table from a table in the payload, with all of its columns.
function tableOf(data, options) {
  const columns = columnsOf(data);
  return table(columns, rowsOf(data, columns), options);
}

// A table that can be folded, with its title and a note.
function tableDetails(id, title, note, isOpen, content) {
  return element(
    "details",
    {class: "folded", id, open: isOpen},
    element(
      "summary",
      {},
      element("b", {text: title}),
      element("span", {class: "soft", text: ` ${note}`}),
    ),
    content,
  );
}
