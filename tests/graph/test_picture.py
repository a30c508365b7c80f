"""The page of a graph: each node has a row, each input a line, each link its target, and nothing comes from outside."""

from __future__ import annotations

import re
from base64 import b64encode
from collections import Counter
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from made_nodes import nodes
from torch import nn

from instrument.analysis.table import Table
from instrument.fx import profile_graph
from instrument.fx.draw.html import page
from instrument.fx.draw.svg import heat, views
from instrument.fx.machine import Machine

HOSTILE = '<script>alert("1")</script>&'
WEIGHT = {"op": "get_attr", "median_ns": 0, "output_shape": "[3, 3]"}
GRAPH = nodes(
    {"name": "shared", **WEIGHT, "target": "shared", "module_path": "block.one"},
    {"name": "weight", **WEIGHT, "target": f"block.one.{HOSTILE}", "module_path": "block.one"},
    {"name": "x", "op": "placeholder", "target": "x", "module_path": None, "median_ns": 10},
    {
        "name": "linear",
        "inputs": "x, weight, weight, shared",
        "module_path": "block.one",
        "median_ns": 600,
    },
    {"name": "relu", "inputs": "linear", "module_path": "block.one", "median_ns": 100},
    {
        "name": "add",
        "inputs": "relu, x",
        "module_path": "block",
        "median_ns": 90,
        "target": HOSTILE,
    },
    {"name": "twice", "inputs": "add, add, shared", "module_path": HOSTILE, "median_ns": 200},
    {
        "name": "untimed",
        "inputs": "twice",
        "module_path": HOSTILE,
        "median_ns": None,
        "output_shape": None,
    },
    {"name": "output", "op": "output", "inputs": "untimed", "module_path": None, "median_ns": 0},
)
VOID = {"meta", "input"}


class Page(HTMLParser):
    """The elements of a page with the text in them, read while checking that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[int] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self.texts.append("")
        if tag not in VOID:
            self.open.append(len(self.tags) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.tags[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for at in self.open:
            self.texts[at] += data

    def all(self, tag: str) -> list[tuple[dict[str, str], str]]:
        return [(attrs, text) for (name, attrs), text in zip(self.tags, self.texts) if name == tag]


def edges(svg: str) -> Counter[tuple[str, str]]:
    return Counter(re.findall(r'data-from="(\d+)" data-to="(\d+)"', svg))


def test_every_node_has_a_row_and_every_input_a_line() -> None:
    made = Page(page(GRAPH, "Graph"))
    names = [text for attrs, text in made.all("a") if attrs["href"].startswith("#n-")]
    assert names == GRAPH.column("name")
    assert [attrs["id"] for attrs, _ in made.all("tr") if "id" in attrs] == [
        f"r-{at}" for at in range(len(GRAPH))
    ]
    drawn = {
        attrs["id"]: text for attrs, text in made.all("a") if attrs.get("id", "").startswith("n-")
    }
    assert set(drawn) == {f"n-{at}" for at in range(len(GRAPH))}
    assert all(f"name: {row.name}\n" in drawn[f"n-{at}"] for at, row in enumerate(GRAPH))
    index = {name: str(at) for at, name in enumerate(GRAPH.column("name"))}
    wanted = {
        (index[source], str(at))
        for at, row in enumerate(GRAPH)
        for source in row.inputs.split(", ")
        if source
    }
    assert edges(views(GRAPH)[-1].svg) == dict.fromkeys(wanted, 1)
    assert [
        attrs["id"]
        for attrs, _ in made.all("a")
        if "badge" in attrs.get("class", "") and "id" in attrs
    ] == ["n-1"]


def test_every_link_has_its_target_and_no_name_is_given_twice() -> None:
    text = page(GRAPH, "Graph")
    names = re.findall(r' id="([^"]+)"', text)
    assert len(names) == len(set(names))
    links = [attrs["href"] for attrs, _ in Page(text).all("a")]
    assert links
    assert {link.removeprefix("#") for link in links} <= set(names)


def test_twice_the_takers_of_one_value_are_twice_the_page() -> None:
    def size(takers: int) -> int:
        chain = [
            {"name": f"n{at}", "inputs": f"n{at - 1}, x", "median_ns": 100}
            for at in range(1, takers)
        ]
        return len(page(nodes({"name": "x"}, {"name": "n0", "inputs": "x"}, *chain), "Graph"))

    once, twice, four = map(size, (200, 400, 800))
    assert four - twice < 2.2 * (twice - once)
    assert (four - twice) / 400 < 2_500, "bytes a node"


def test_what_lines_go_on_from_is_there() -> None:
    every = [attrs for attrs, _ in Page(views(GRAPH)[-1].svg).all("path")]
    shared = {attrs["data-at"]: attrs["data-from"] for attrs in every if "data-at" in attrs}
    after = [(attrs["data-after"], attrs["data-from"]) for attrs in every if "data-after" in attrs]
    assert after
    assert all(shared[number] == source for number, source in after)


def test_the_more_time_the_more_colour() -> None:
    links = views(GRAPH)[-1].svg.split("</a>")
    found = [
        re.findall(r'data-n="(\d+)"|fill-opacity="([\d.]+)"', link)
        for link in links
        if "fill-opacity" in link
    ]
    colours = {GRAPH[int(node)].share or 0: float(colour) for (node, _), (_, colour) in found}
    ordered = [colours[share] for share in sorted(colours)]
    assert len(ordered) == 6, "0 and unknown look the same"
    assert ordered == sorted(set(ordered))
    assert ordered[-1] == round(heat(0.6, 0.6), 3) > 0.5
    assert heat(0.0, 0.0) == heat(None, 1.0)


def test_modules_are_closed_first_and_their_times_summed() -> None:
    closed, opened, every = views(GRAPH)
    assert [view.boxes for view in (closed, opened, every)] == [4, 6, 8]
    assert "800 ns · 80.0%" not in closed.svg
    assert f"790 ns · {790 / 1000:.1%}" in unescape(closed.svg), "linear, relu and add"
    assert 'href="#m-1-0"' in closed.svg
    assert 'id="m-1-0"' in opened.svg
    assert edges(closed.svg) == {("2", "0"): 1, ("0", "6"): 1, ("6", "8"): 1}
    for view in (closed, opened, every):
        ElementTree.fromstring(view.svg)


def test_nothing_of_the_model_is_markup() -> None:
    text = page(GRAPH, HOSTILE, [HOSTILE])
    made = Page(text)
    (script,) = made.all("script")
    assert "alert" not in script[1]
    assert HOSTILE not in text.replace("&amp;", "&")
    assert made.all("h1")[0][1] == made.all("title")[0][1] == HOSTILE
    assert [attrs["title"] for attrs, _ in made.all("td") if HOSTILE in attrs.get("title", "")]


def test_what_does_not_print_stands_as_an_escape() -> None:
    evil = "\x1b[2J\u202e"
    text = page(
        nodes({"name": "x"}, {"name": "y", "inputs": "x", "target": evil, "module_path": evil}),
        evil,
        [evil],
    )
    assert "<h1>\\x1b[2J\\u202e</h1>" in text
    assert all(line.isprintable() for line in text.split("\n"))


def test_the_page_needs_nothing_and_lets_nothing_else_run() -> None:
    text = page(GRAPH, "Graph")
    made = Page(text)
    assert not {"link", "img", "iframe", "object", "form"} & {tag for tag, _ in made.tags}
    assert not re.search(r"https?:|url\(|@import|\son\w+=\"", text)
    digest = b64encode(sha256(made.all("script")[0][1].encode()).digest()).decode()
    policy = next(attrs["content"] for attrs, _ in made.all("meta") if "http-equiv" in attrs)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_cells_can_be_sorted_by_their_exact_value() -> None:
    made = Page(page(GRAPH, "Graph"))
    assert [text for _, text in made.all("th")][:3] == ["name", "share", "median"]
    assert "flops" not in [text for _, text in made.all("th")], "of which nothing is known"
    cells = [(attrs.get("data-value"), text) for attrs, text in made.all("td")]
    assert ("600", "600 ns") in cells
    assert (None, "–") in cells


def test_a_deep_graph_opens_in_few_steps() -> None:
    paths = [".".join("abcdefgh"[:depth]) for depth in range(9) for _ in range(2)]
    rows = [{"name": f"n{at}", "module_path": path} for at, path in enumerate(paths)]
    assert [view.depth for view in views(nodes(*rows))] == [0, 1, 2, 3, 8]


def test_the_same_table_gives_the_same_page() -> None:
    assert page(GRAPH, "Graph") == page(GRAPH, "Graph")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))

    def forward(self, x: Any) -> Any:
        return self.inner(x) + x


def test_a_profile_shows_itself(tmp_path: Path) -> None:
    with torch.no_grad():
        profile = profile_graph(Residual(), torch.randn(4, 8), runs=2)
    machine = Machine("this one", {"float32": 10**10}, 10**9)
    path = profile.save_html(tmp_path / "graph.html", machine)
    made = Page(path.read_text(encoding="utf-8"))
    assert [
        text for attrs, text in made.all("a") if attrs["href"].startswith("#n-")
    ] == profile.nodes.column("name")
    heads = [text for _, text in made.all("th")]
    assert {"alive memory", "freed memory", "bound by", "bound", "bound share"} <= set(heads)
    assert f"Captured by {profile.how}." in [text for _, text in made.all("p")]
    assert {str(profile.memory), f"The bounds are computed from the rates of {machine}."} <= {
        text for _, text in made.all("p")
    }
    assert str(machine) == "this one: 10.00 G float32 FLOPs, 953.67 MiB a second"
    frame = re.fullmatch(r'<iframe srcdoc="([^"]*)" style="[^"]*"></iframe>', profile._repr_html_())
    assert frame
    assert "bound" not in [text for _, text in Page(unescape(frame[1])).all("th")], (
        "a notebook measures nothing"
    )


@pytest.mark.parametrize(
    "table", [nodes({"name": "output", "op": "output"}), Table({n: [] for n in GRAPH.columns})]
)
def test_the_smallest_graphs(table: Table) -> None:
    assert len([1 for attrs, _ in Page(page(table, "Graph")).all("a") if "id" in attrs]) == len(
        table
    )
