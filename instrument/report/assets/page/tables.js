// The tables of operators, kernels, collectives and copies.
"use strict";

sections.tables = {
  title: "Tables",
  draw(root, data) {
    for (const [at, each] of data.entries()) {
      const size = each.cells[each.columns[0].name].length + each.left_out;
      const title = element(
        "summary",
        {},
        element("b", {text: each.title}),
        element("span", {class: "soft", text: ` ${size}`}),
      );
      const left = element("p", {class: "soft", text: `${each.left_out} more rows are left out.`});
      root.append(element(
        "details",
        {class: "folded", open: at === 0},
        title,
        tableOf(each, {caption: each.title, filter: size > 5}),
        each.left_out ? left : null,
      ));
    }
  },
};
