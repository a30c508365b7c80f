// The tables of operators, kernels, collectives and copies.
"use strict";

// Kernels are long names: the table shows these columns first.
sections.tables = {
  title: "Tables",
  draw(root, data) {
    for (const [at, each] of data.entries()) {
      const size = each.cells[each.columns[0].name].length + each.left_out;
      const block = element(
        "details",
        {class: "folded", open: at === 0},
        element("summary", {}, element("b", {text: each.title}), element("span", {class: "soft", text: ` ${size}`})),
      );
      const fill = () => {
        if (!block.open || block.children.length > 1) return;
        block.append(tableOf(each, {caption: each.title, filter: size > 5}));
        if (each.left_out) {
          block.append(element("p", {class: "soft", text: `${each.left_out} more rows are left out.`}));
        }
      };
      block.addEventListener("toggle", fill);
      fill();
      root.append(block);
    }
  },
};
