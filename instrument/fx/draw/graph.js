// The script of the page of a graph. Node 3 is row `r-3` of the table, and the link with
// `data-n="3"` in each picture that shows the node. A link changes the fragment of the address, and
// the script shows the element with this id: #r-3, #n-3, or #m-1-0 for module 0 in picture 1.
'use strict';

const UNKNOWN = '–';

const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const byId = (name) => document.getElementById(name);
const currentView = () => document.querySelector('.view:not([hidden])');
let zoom = 0;

// Resize the picture. Without a factor, fit the picture into its pane, but do not enlarge it.
function resize(factor) {
  const svg = currentView().querySelector('svg');
  const { width, height } = svg.viewBox.baseVal;
  zoom = factor || Math.min(1, (svg.parentNode.clientWidth - 4) / width);
  svg.style.width = `${width * zoom}px`;
  svg.style.height = `${height * zoom}px`;
}

function show(view) {
  for (const each of all('.view')) each.hidden = each !== view;
  byId('depth').value = view.id;
  resize(Math.max(zoom, 0.35));  // smaller text is not legible
}

// Give a class to these elements and to no others.
function mark(elements, name) {
  for (const each of all(`.${name}`)) each.classList.remove(name);
  for (const each of elements) each.classList.add(name);
}

// The lines that begin at a node, and the lines that end there. The lines of a value share their
// beginning, so a line that ends at the node is followed back by `data-after` to its source.
function linesOf(number) {
  const found = all(`[data-from="${number}"]`);
  for (const last of all(`[data-to="${number}"]`)) {
    for (let line = last; line; line = lineBefore(line)) found.push(line);
  }
  return found;
}

function lineBefore(line) {
  const { after } = line.dataset;
  return after === undefined ? null : line.closest('svg').querySelector(`[data-at="${after}"]`);
}

const linksTo = (number, within = document) => all(`a[data-n="${number}"]:not(.module)`, within);

// Show and mark the element of the address: a node, a row or a module.
function follow() {
  let target = byId(location.hash.slice(1));
  if (!target) return;
  const number = /^[nr]-(\d+)$/.exec(target.id)?.[1];
  // Only the last picture has the ids of nodes, but the current picture may show this node too.
  if (target.id.startsWith('n-')) target = linksTo(number, currentView())[0] ?? target;
  const view = target.closest('.view');
  if (view) show(view);
  if (target.hidden) clearFilter();
  const same = number === undefined ? [target] : [byId(`r-${number}`), ...linksTo(number)];
  mark(number === undefined ? same : [...same, ...linesOf(number)], 'on');
  for (const each of same) each.scrollIntoView({ block: 'nearest', inline: 'nearest' });
  target.scrollIntoView({
    block: target.matches('.frame') ? 'start' : 'center',
    inline: target.matches('tr') ? 'nearest' : 'center',
  });
}

function clearFilter() {
  byId('filter').value = '';
  filter();
}

// Hide the rows without the text of the filter, and fade their nodes.
function filter() {
  const wanted = byId('filter').value.toLowerCase();
  const matches = (element) => element.textContent.toLowerCase().includes(wanted);
  const rows = all('tbody tr');
  for (const row of rows) row.hidden = !matches(row);
  const found = new Set(rows.filter((row) => !row.hidden).map((row) => row.id.slice(2)));
  for (const node of all('.node')) {
    const hit = node.matches('.module') ? matches(node) : found.has(node.dataset.n);
    node.classList.toggle('off', !hit);
  }
  byId('found').textContent = wanted ? `${found.size} of ${rows.length}` : '';
}

// Sort by a column: numbers descending, text ascending, and the reverse at the next click. Unknown
// cells come last.
function sort(button) {
  const header = button.parentNode;
  const value = (cell) => (cell.dataset.value ? Number(cell.dataset.value) : cell.textContent);
  const rows = all('tbody tr').map((row) => [value(row.cells[header.cellIndex]), row]);
  const known = rows.filter(([key]) => key !== UNKNOWN);
  const unknown = rows.filter(([key]) => key === UNKNOWN);
  const numeric = known.some(([key]) => typeof key === 'number');
  const down = header.ariaSort ? header.ariaSort === 'ascending' : numeric;
  known.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1));
  for (const each of all('th')) each.removeAttribute('aria-sort');
  header.ariaSort = down ? 'descending' : 'ascending';
  document.querySelector('tbody').append(...[...known, ...unknown].map(([, row]) => row));
}

function zoomByWheel(event) {
  if (!event.ctrlKey) return;  // the pane scrolls
  event.preventDefault();
  resize(zoom * (event.deltaY < 0 ? 1.1 : 1 / 1.1));
}

byId('depth').addEventListener('change', (event) => show(byId(event.target.value)));
byId('in').addEventListener('click', () => resize(zoom * 1.25));
byId('out').addEventListener('click', () => resize(zoom / 1.25));
byId('fit').addEventListener('click', () => resize());
byId('filter').addEventListener('input', filter);
for (const button of all('th button')) button.addEventListener('click', () => sort(button));
for (const pane of all('.view .scroll')) {
  pane.addEventListener('wheel', zoomByWheel, { passive: false });
}
document.addEventListener('mouseover', (event) => {
  const node = event.target.closest('.node');
  mark(node ? linesOf(node.dataset.n) : [], 'near');
});
document.addEventListener('click', (event) => {
  // A second click on a link does not change the address.
  if (event.target.closest('a')) setTimeout(follow);
});
window.addEventListener('hashchange', follow);
// The browser first scrolls to the element of the address; `follow` must run after that.
window.addEventListener('load', () => setTimeout(follow));

resize();
if (zoom < 0.5) resize(0.7);  // a wide graph: legible, but not all of it visible
