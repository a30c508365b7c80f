// This is the handler of a click on `<thead>`. It sorts the rows of the table by the clicked
// column: numbers from high to low, and text from A to Z. A second click reverses the order, and a
// third click restores the original order. Cells without a value come last.
const heading = event.target.closest("th");
if (!heading) return;
const body = this.nextElementSibling;
const order = { "": "first", first: "second", second: "" }[heading.dataset.order ?? ""];
for (const each of heading.parentNode.cells) {
  each.dataset.order = each === heading ? order : "";
  each.lastElementChild.textContent = each.dataset.order && (order === "first" ? " ▾" : " ▴");
}
const rows = [...body.rows];
rows.forEach((row, at) => { row.dataset.at ??= at; });
const value = (row) => row.cells[heading.cellIndex].dataset.value;
const compare = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : b - a);
rows.sort((one, other) => {
  const [a, b] = [value(one), value(other)];
  if (order === "") return one.dataset.at - other.dataset.at;
  if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
  return order === "first" ? compare(a, b) : compare(b, a);
});
body.append(...rows);
