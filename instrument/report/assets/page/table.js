// A table whose rows can be sorted by its headers and filtered by a text.
"use strict";

const unitTexts = {
  ns: duration,
  bytes,
  "bytes/s": rate,
  flops: count,
  "flops/s": count,
  share: percent,
};

function cellText(unit, value) {
  if (value === null || value === undefined) return "–";
  if (unit in unitTexts) return unitTexts[unit](value);
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(3)));
}

// Make a table. `columns` are {title, unit, doc, isText, cell}; `cell(value, row)` makes the content
// of a cell if text is not enough. `rows` are arrays with a value for each column. `sort` is the
// index of the column that sorts the rows at first; null keeps their order.
function table(columns, rows, {caption, sort = null, filter = rows.length > 10, shown = 25}) {
  let order = rows.slice();
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
    return element("th", {scope: "col", class: column.isText ? "text" : null}, button);
  });

  function sortBy(index, descending) {
    sorted = {column: index, descending};
    const sign = descending ? -1 : 1;
    order = rows.slice().sort((one, other) => {
      const [a, b] = [one[index], other[index]];
      if (a === null || b === null) return (a === null) - (b === null); // unknown cells come last
      return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
    });
    headers.forEach((header, at) => {
      if (at === index) header.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else header.removeAttribute("aria-sort");
    });
  }

  function fill() {
    const found = query ? order.filter(row => matches(columns, row, query)) : order;
    body.replaceChildren(...found.slice(0, limit).map(row => rowOf(columns, row)));
    counted.textContent = found.length < rows.length
      ? `${found.length} of ${rows.length} rows`
      : `${rows.length} ${rows.length === 1 ? "row" : "rows"}`;
    more.hidden = found.length <= limit;
    more.textContent = `Show all ${found.length} rows`;
  }

  if (sort !== null) sortBy(sort, !columns[sort].isText);
  fill();
  const search = element("input", {
    type: "search",
    placeholder: "Filter",
    "aria-label": `Filter: ${caption}`,
    oninput: event => {
      query = event.target.value.toLowerCase();
      fill();
    },
  });
  return element(
    "div",
    {class: "table"},
    filter ? element("div", {class: "tools"}, search, counted) : null,
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

function matches(columns, row, query) {
  return columns.some((column, at) => column.isText && String(row[at]).toLowerCase().includes(query));
}

function rowOf(columns, row) {
  return element("tr", {}, columns.map((column, at) => {
    const value = row[at];
    const text = cellText(column.unit, value);
    return element(
      "td",
      {class: column.isText ? "text" : null},
      column.cell ? column.cell(value, row) : text,
    );
  }));
}

// A table of the payload, {columns: [{name, title, unit, doc, is_text}], cells: {name: [...]}}.
function tableOf(data, options) {
  const columns = data.columns.map(({title, unit, doc, is_text}) => (
    {title, unit, doc, isText: is_text}
  ));
  const cells = data.columns.map(({name}) => data.cells[name]);
  const rows = (cells[0] || []).map((_, at) => cells.map(column => column[at]));
  return table(columns, rows, options);
}
