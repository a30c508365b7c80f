"""A graph's picture and its table as one HTML page that needs nothing but itself."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256
from html import escape
from typing import Any

from instrument.analysis.table import Table, cell_text, heading
from instrument.fx.draw.svg import View, heat, views

_FIRST_SHOWN_BOXES = 150
# The columns that tell most, before the others in the table's own order.
_FIRST = ("name", "share", "median_ns")


def page(nodes: Table, title: str, notes: Iterable[str] = ()) -> str:
    """The page: on the left the graph, on the right a row for each node; a click on one leads to the other.

    `nodes` is a `NodeTable` or one with more columns. Nothing is loaded from anywhere, and the page's own policy lets
    no script run but this module's. The same table gives the same page.

    Cost: about 1 ms and 2 KB for each node, and 250 bytes for each value that it takes.
    """
    pictures = views(nodes)
    shown = max((v.number for v in pictures if v.boxes <= _FIRST_SHOWN_BOXES), default=0)
    choices = "".join(_choice(view, pictures, chosen=view.number == shown) for view in pictures)
    drawn = "\n".join(_section(view, hidden=view.number != shown) for view in pictures)
    digest = b64encode(sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style></head>\n'
        f"<body><header><h1>{escape(title)}</h1>{''.join(f'<p>{escape(note)}</p>' for note in notes)}</header>\n"
        f'<main><div id="graph"><nav><label>Show <select id="depth">{choices}</select></label>'
        '<button id="out" title="smaller">−</button><button id="in" title="larger">+</button>'
        '<button id="fit" title="as wide as the window">fit</button></nav>\n'
        f'{drawn}</div>\n<div id="table"><nav><input id="filter" type="search" placeholder="filter" '
        'aria-label="filter nodes"><span id="found"></span></nav>\n'
        f'<div class="scroll">{_table(nodes)}</div></div></main>\n'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _choice(view: View, pictures: list[View], *, chosen: bool) -> str:
    what = "every node" if view is pictures[-1] else f"modules {view.depth + 1} deep"
    selected = " selected" if chosen else ""
    return f'<option value="view-{view.number}"{selected}>{what} ({view.boxes} boxes)</option>'


def _section(view: View, *, hidden: bool) -> str:
    """One picture and what its colours say."""
    steps = [view.highest * part / 4 for part in range(5)]
    swatches = "".join(
        f'<span><i style="opacity:{heat(share, view.highest):.3f}"></i>{share:.1%}</span>' for share in steps
    )
    legend = f'<p class="legend">Share of the time: {swatches} Data flows downwards.</p>'
    hide = " hidden" if hidden else ""
    return f'<section class="view" id="view-{view.number}"{hide}>{legend}<div class="scroll">{view.svg}</div></section>'


def _table(nodes: Table) -> str:
    """A row for each node; a column of which nothing is known is left out."""
    known = [name for name in nodes.columns if any(cell is not None for cell in nodes.column(name))]
    columns = sorted(known, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    head = "".join(
        f'<th{_text_class(nodes, name)}><button data-column="{at}">{escape(heading(name))}</button></th>'
        for at, name in enumerate(columns)
    )
    highest = max((share for share in nodes.column("share") if share), default=1.0)
    body = "\n".join(
        f'<tr id="r-{at}">{"".join(_cell(name, getattr(row, name), at, highest) for name in columns)}</tr>'
        for at, row in enumerate(nodes)
    )
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def _text_class(nodes: Table, column: str) -> str:
    return ' class="text"' if any(isinstance(cell, str) for cell in nodes.column(column)) else ""


def _cell(column: str, value: Any, row: int, highest: float) -> str:
    """One cell; a number's exact value is in `data-value`, to be sorted by. A bar shows a share of the highest."""
    text = escape(cell_text(column, value, 10_000))
    if column == "name":
        return f'<td class="text"><a href="#n-{row}">{text}</a></td>'
    if value is None:
        return "<td>–</td>"
    if isinstance(value, str):
        return f'<td class="text" title="{text}">{text}</td>'
    bar = f' style="background-size:{value / highest:.1%} 100%"' if column == "share" else ""
    return f'<td data-value="{value!r}"{bar}>{text}</td>'


_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #656d76; --line: #d8dee4; --paper: #fff; --heat: #e8590c;
  --edge: #8c959f; --frame: #0969da; --on: #8250df; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --paper: #0d1117;
  --edge: #6e7681; --frame: #58a6ff; --on: #d2a8ff; } }
* { box-sizing: border-box; }
body { font: 13px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0; height: 100vh;
  display: flex; flex-direction: column; }
header { padding: .6em 1em; border-bottom: 1px solid var(--line); }
h1 { font-size: 1.2em; margin: 0; }
header p { margin: .2em 0 0; color: var(--soft); }
main { flex: 1; min-height: 0; display: flex; }
#graph, #table, .view { display: flex; flex-direction: column; min-height: 0; min-width: 0; }
.view { flex: 1; }
.view[hidden] { display: none; }
#graph { width: 50%; overflow: hidden; resize: horizontal; border-right: 1px solid var(--line); }
#table { flex: 1; }
nav { display: flex; gap: .5em; align-items: center; padding: .4em 1em; border-bottom: 1px solid var(--line); }
nav button { min-width: 2em; }
#filter { flex: 1; }
#found { color: var(--soft); }
.scroll { overflow: auto; flex: 1; }
.legend { margin: 0; padding: .3em 1em; color: var(--soft); }
.legend span { margin-right: .8em; }
.legend i { display: inline-block; width: 1.4em; height: .9em; margin-right: .3em; vertical-align: -.1em;
  background: var(--heat); }
svg { display: block; margin: 0 auto; }
svg text { font: 11px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: var(--ink); }
.node text { text-anchor: middle; }
.node text + text { font-size: 10px; fill-opacity: .75; }
.node rect { fill: var(--heat); stroke: var(--soft); }
.node rect.paper { fill: var(--paper); }
.node.module rect { stroke: var(--frame); stroke-width: 2; }
.node.placeholder rect, .node.output rect, .node.get_attr rect { stroke-dasharray: 4 2; }
.node.chip text { font-size: 9px; fill: var(--soft); }
.node:hover rect { stroke: var(--ink); }
.node.off { opacity: .2; }
.frame rect { fill: var(--frame); fill-opacity: .04; stroke: var(--frame); stroke-opacity: .45; }
.frame text { fill: var(--frame); paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
.edge { fill: none; stroke: var(--edge); stroke-width: 1.2; }
.edge.on, .edge.near { stroke: var(--on); stroke-width: 2.2; }
.node.on rect, .frame.on rect { stroke: var(--on); stroke-width: 3; stroke-opacity: 1; }
table { border-collapse: collapse; min-width: 100%; }
th, td { text-align: right; padding: .15em .6em; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { position: sticky; top: 0; background: var(--paper); z-index: 1; }
th button { all: unset; cursor: pointer; color: var(--soft); font-weight: 600; }
th button:focus-visible { outline: 2px solid var(--on); }
th[aria-sort=ascending] button::after { content: " ↑"; }
th[aria-sort=descending] button::after { content: " ↓"; }
th.text { text-align: left; }
td.text { text-align: left; max-width: 22em; overflow: hidden; text-overflow: ellipsis; }
td:first-child { position: sticky; left: 0; background: var(--paper); }
th:first-child { left: 0; z-index: 2; }
td[style] { background: linear-gradient(color-mix(in srgb, var(--heat) 35%, transparent) 0 100%) no-repeat 0 0; }
tr.on td { background-color: color-mix(in srgb, var(--on) 20%, var(--paper)); }
tr { scroll-margin-top: 3em; }
tr[hidden] { display: none; }
a { color: inherit; text-decoration: none; }
td a { color: var(--frame); }
@media (max-width: 900px) { main { flex-direction: column; } #graph { width: 100%; height: 60%; } }
"""

_SCRIPT = """
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const byId = (name) => document.getElementById(name);
const current = () => all('.view:not([hidden])')[0];
let zoom = 0;

function size(factor) {
  const svg = all('svg', current())[0];
  zoom = factor || Math.min(1, (svg.parentNode.clientWidth - 4) / svg.viewBox.baseVal.width);
  svg.style.width = svg.viewBox.baseVal.width * zoom + 'px';
  svg.style.height = svg.viewBox.baseVal.height * zoom + 'px';
}

function show(view) {
  for (const each of all('.view')) each.hidden = each !== view;
  byId('depth').value = view.id;
  size(Math.max(zoom, .35));
}

function mark(elements, kind) {
  for (const each of all('.' + kind)) each.classList.remove(kind);
  for (const each of elements) each.classList.add(kind);
}

function lines(number) {  // all that leave a node, and those to it, each with what it goes on from
  const found = all(`[data-from="${number}"]`);
  for (let each of all(`[data-to="${number}"]`))
    for (; each; each = each.dataset.after && all(`[data-at="${each.dataset.after}"]`, each.closest('svg'))[0])
      found.push(each);
  return found;
}

function follow() {  // what the address names: a node, a row, a module
  let target = byId(location.hash.slice(1));
  if (!target) return;
  const number = /^[nr]-(\\d+)$/.exec(target.id)?.[1];
  if (target.id[0] === 'n') target = all(`a[data-n="${number}"]:not(.module)`, current())[0] || target;
  if (target.closest('.view')) show(target.closest('.view'));
  if (target.hidden) { byId('filter').value = ''; filter(); }
  const same = number ? all(`#r-${number}, a[data-n="${number}"]:not(.module)`) : [target];
  mark(number ? [...same, ...lines(number)] : same, 'on');
  for (const other of all('.on:not(.edge)')) other.scrollIntoView({ block: 'nearest', inline: 'nearest' });
  const row = target.matches('tr');
  target.scrollIntoView({ block: target.matches('.frame') ? 'start' : 'center', inline: row ? 'nearest' : 'center' });
}

function filter() {
  const wanted = byId('filter').value.toLowerCase();
  const rows = all('tbody tr');
  for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  const found = new Set(rows.filter((row) => !row.hidden).map((row) => row.id.slice(2)));
  for (const node of all('.node')) {
    const hit = node.matches('.module') ? node.textContent.toLowerCase().includes(wanted) : found.has(node.dataset.n);
    node.classList.toggle('off', !hit);
  }
  byId('found').textContent = wanted ? `${found.size} of ${rows.length}` : '';
}

function sort(button) {
  const at = +button.dataset.column, header = button.parentNode;
  const value = (cell) => cell.dataset.value ? +cell.dataset.value : cell.textContent;
  const rows = all('tbody tr').map((row) => [value(row.cells[at]), row]);
  const down = header.ariaSort ? header.ariaSort === 'ascending' : rows.some(([v]) => typeof v === 'number');
  const known = rows.filter(([v]) => v !== '–'), unknown = rows.filter(([v]) => v === '–');
  known.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1));
  for (const each of all('th')) each.removeAttribute('aria-sort');
  header.ariaSort = down ? 'descending' : 'ascending';
  all('tbody')[0].append(...[...known, ...unknown].map(([, row]) => row));
}

byId('depth').onchange = (event) => show(byId(event.target.value));
byId('in').onclick = () => size(zoom * 1.25);
byId('out').onclick = () => size(zoom / 1.25);
byId('fit').onclick = () => size(0);
byId('filter').oninput = filter;
for (const button of all('th button')) button.onclick = () => sort(button);
for (const pane of all('.view .scroll')) {
  pane.onwheel = (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    size(zoom * (event.deltaY < 0 ? 1.1 : 1 / 1.1));
  };
}
document.onmouseover = (event) => {
  const node = event.target.closest('.node');
  mark(node ? lines(node.dataset.n) : [], 'near');
};
document.onclick = (event) => {  // also where the address stays what it is
  if (event.target.closest('a')) setTimeout(follow);
};
window.onhashchange = follow;
size(0);
if (zoom < .5) size(.7);
window.onload = () => setTimeout(follow);  // after the browser has gone to the address itself
"""
