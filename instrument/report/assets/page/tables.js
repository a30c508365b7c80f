// The tables of operators, kernels, collectives and copies.
"use strict";

sections.tables = {
  title: "Tables",
  draw(root, data) {
    root.append(...data.map(({name, title, left_out: left, ...each}, at) => {
      const size = each.cells[each.columns[0].name].length + left;
      return tableDetails(`tables-${name}`, title, size, at === 0, [
        tableOf(each, {caption: title, filter: size > 5}),
        left ? element("p", {class: "soft", text: `${left} more rows are left out.`}) : null,
      ]);
    }));
  },
};
