// The section Comparison: what changed in a step since another run, and where.
"use strict";

// At first, at most this many changed rows of a table are shown.
const firstChanges = 12;
// The most warnings at the top. The others are folded.
const firstWarnings = 3;
// The columns of the tables that hold text, and how some of them are shown.
const textColumns = ["range", "name", "input_shapes", "kind", "status"];
const textCells = {range: pathCell, status: statusOf};

sections.comparison = {
  title: "Comparison",
  heading: ({name}) => `Compared with ${name}`,
  draw(root, data) {
    if (data.refused) {
      root.append(element("p", {class: "warning", text: `Not compared: ${data.sentence}`}));
      return;
    }
    const warnings = data.unlike.map(({sentence}) => (
      element("p", {class: "warning"}, element("b", {text: "Warning: "}), sentence)
    ));
    const parts = [
      element("p", {class: "lead", text: `${data.sentence}.`}),
      changeFacts(data),
      element("p", {class: "soft", text: data.spread}),
      ...warnings.slice(0, firstWarnings),
      folded(`More warnings (${warnings.length - firstWarnings})`, warnings.slice(firstWarnings)),
      ...whereItChanged(data),
      data.ranks && changedRanks(data),
      element("h3", {text: "Details"}),
      ...data.tables.map((each, at) => changedTable(each, at === 0)),
      changedCounters(data),
    ];
    root.append(...parts.filter(Boolean));
  },
};

// A change with its sign.
function signed(value, text = duration) {
  return `${value > 0 ? "+" : value < 0 ? "−" : ""}${text(Math.abs(value))}`;
}

// A quantity of a mean step. A number of calls has two decimals if it differs between steps.
function quantityText(unit, value) {
  if (unit || typeof value !== "number") return cellText(unit, value);
  const digits = Number.isInteger(value) ? 0 : 2;
  return value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
}

function directionOf(change) {
  return change > 0 ? "slower" : change < 0 ? "faster" : "same";
}

function changeFacts({step, what, parts}) {
  const change = step.change_ns;
  const share = step.before_ns ? `${percent(Math.abs(change) / step.before_ns)} ` : "";
  const [largest] = parts;
  const boxes = [
    fact(`The ${what} before`, duration(step.before_ns), stepsText(what, step.steps.before)),
    fact(`The ${what} in this run`, duration(step.after_ns), stepsText(what, step.steps.after)),
    fact("Change", signed(change), change ? `${share}${directionOf(change)}` : "no change"),
  ];
  boxes[2].classList.add(directionOf(change));
  if (largest && largest.change_ns) {
    const partName = `${largest.range} · ${largest.kind}`;
    const box = fact("Mostly", signed(largest.change_ns), partName);
    box.classList.add(directionOf(largest.change_ns));
    boxes.push(box);
  }
  return element("div", {class: "facts"}, boxes);
}

function stepsText(what, {count: steps, median_ns: median, deviation_ns: deviation}) {
  if (what !== "step") return null;
  const noun = steps === 1 ? "step" : "steps";
  const around = deviation === null ? "" : ` ± ${duration(deviation)}`;
  return `mean of ${steps} ${noun}; median ${duration(median)}${around}`;
}

function whereItChanged({step, what, parts, by_kind: kinds}) {
  const total = {...step, range: `the ${what}`, isTotal: true};
  return [
    element("h3", {text: "Where it changed"}),
    element(
      "p",
      {class: "legend"},
      element("span", {}, mark("var(--faster)"), "left of the line: faster"),
      element("span", {}, mark("var(--slower)"), "right of the line: slower"),
      element("span", {text: `The parts sum to the change of the ${what}.`}),
    ),
    element(
      "div",
      {class: "changes"},
      element("div", {}, element("h4", {text: "By range and kind"}), changeBars([...parts, total])),
      element("div", {}, element("h4", {text: "By kind"}), changeBars([...kinds, total])),
    ),
  ];
}

// A list of changes: the range, the kind, the times of both sides, a bar from a common zero line,
// the change.
function changeBars(rows) {
  const place = scaleOf(rows.map(row => row.change_ns));
  return element("ul", {class: "change-bars"}, rows.map(row => element(
    "li",
    {class: row.isTotal ? "total" : null},
    element(
      "span",
      {class: "part-name"},
      row.range ? longName(row.range) : row.kind,
      row.range && row.kind ? element("span", {class: "soft", text: ` · ${row.kind}`}) : null,
    ),
    element("span", {
      class: "number soft", text: `${duration(row.before_ns)} → ${duration(row.after_ns)}`,
    }),
    place(row.change_ns),
    element("span", {class: `number ${directionOf(row.change_ns)}`, text: signed(row.change_ns)}),
  )));
}

// A function that draws the bar of a change. All its bars have the same scale and zero line.
function scaleOf(changes) {
  const low = Math.min(0, ...changes);
  const high = Math.max(0, ...changes);
  const percentOf = value => (100 * value) / (high - low || 1);
  return change => {
    const bar = element("span", {class: "change-bar", "aria-hidden": "true"});
    const filled = element("span", {class: directionOf(change)});
    const zero = element("i");
    zero.style.left = `${percentOf(-low)}%`;
    filled.style.left = `${percentOf(Math.min(change, 0) - low)}%`;
    filled.style.width = `${percentOf(Math.abs(change))}%`;
    bar.append(filled, zero);
    return bar;
  };
}

function changedRanks({ranks, what}) {
  const columns = columnsOf(ranks).map(column => (
    column.name === "change_ns" ? {...column, cell: ns => signed(ns)} : column
  ));
  return element(
    "div",
    {},
    element("h3", {text: `The ${what} of each rank`}),
    table(columns, rowsOf(ranks, columns), {caption: "Change of each rank"}),
  );
}

// A table of changes. The time that changed most has the columns before, after and change. Each
// other quantity has one column with both sides.
function changedTable(data, isOpen) {
  const {name, title, time, statuses, left_out: left} = data;
  const given = columnsOf(data);
  const described = new Map(given.map(column => [column.name, column]));
  const records = rowsOf(data, given).map(row => (
    Object.fromEntries(row.map((cell, at) => [given[at].name, cell]))
  ));
  const texts = given.filter(column => textColumns.includes(column.name)).map(column => (
    {...column, cell: textCells[column.name]}
  ));
  const bar = scaleOf(records.map(record => record[`change_${time}`] || 0));
  const quantities = [
    ...["before", "after", "change"].map(side => sideColumn(described, side, time, bar)),
    ...given
      .filter(column => column.name.startsWith("change_") && column.name !== `change_${time}`)
      .map(column => column.name.slice("change_".length))
      .filter(key => key === "calls" || records.some(record => record[`change_${key}`]))
      .map(key => bothColumn(described, key)),
  ];
  const rows = records.map(record => [
    ...texts.map(column => record[column.name]),
    ...quantities.map(() => record),
  ]);
  const changed = records.filter(record => record.status !== "same" || record[`change_${time}`]);
  const state = statuses.length ? statuses.join(", ") : "the same calls on both sides";
  return tableDetails(`comparison-${name}`, title, `${rows.length + left}; ${state}`, isOpen, [
    table([...texts, ...quantities], rows, {
      caption: `Changes: ${title}`,
      filter: rows.length > 5,
      shown: Math.min(changed.length || Infinity, firstChanges),
    }),
    left ? element("p", {class: "soft", text: `${left} smaller changes are left out.`}) : null,
  ]);
}

// A column with one side, or with the change, of the time that sorts the table.
function sideColumn(described, side, time, bar) {
  const name = `${side}_${time}`;
  const isChange = side === "change";
  return {
    title: side,
    doc: described.has(name) ? described.get(name).doc : null,
    key: record => record[name] ?? null,
    cell: record => (isChange ? changeCell(record[name], bar) : cellText("ns", record[name])),
  };
}

// A column with both sides of a quantity. It is sorted by the change.
function bothColumn(described, key) {
  const {title, unit, doc} = described.get(`change_${key}`);
  return {
    title: title.replace("change ", ""),
    doc: `before → after; sorted by the change, ${doc}`,
    key: record => record[`change_${key}`],
    cell: record => {
      const [before, after] = [`before_${key}`, `after_${key}`].map(each => (
        quantityText(unit, record[each])
      ));
      return before === after ? after : `${before} → ${after}`;
    },
  };
}

function statusOf(status) {
  return element("span", {class: `status ${status}`, text: status});
}

// The path of a range, with the path that it had before.
function pathCell(path, row) {
  const old = row.at(-1).before_range;
  return old
    ? element("span", {}, longName(path), element("span", {class: "soft was"}, "was ", longName(old)))
    : path;
}

function changeCell(change, bar) {
  if (change === null || change === undefined) return "–";
  return element(
    "span",
    {class: "change-cell"},
    bar(change),
    element("span", {class: `number ${directionOf(change)}`, text: signed(change)}),
  );
}

function changedCounters({counters, what}) {
  const columns = columnsOf(counters, ["counter", "range", "before", "after", "change"]);
  const text = (value, row) => quantityText(row.at(-1), value);
  columns[1].cell = range => range ?? `(whole ${what})`;
  columns[2].cell = text;
  columns[3].cell = text;
  columns[4].cell = (value, row) => (
    value === null ? "–" : signed(value, number => text(number, row))
  );
  const rows = rowsOf(counters, [...columns, {name: "unit"}]);
  const differs = row => row[2] !== row[3];
  const changed = rows.filter(differs);
  const order = [...changed, ...rows.filter(row => !differs(row))];
  const note = `${rows.length}; ${changed.length} differ`;
  return tableDetails("comparison-counters", "Counters", note, false, [
    table(columns, order, {
      caption: "Changes: counters", filter: rows.length > 5,
      shown: changed.length || Infinity,
    }),
    counters.left_out
      ? element("p", {class: "soft", text: `${counters.left_out} rows are left out.`})
      : null,
  ]);
}
