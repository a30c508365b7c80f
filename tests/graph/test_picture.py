"""The page of a graph: each node has a row and a box, each input a line, and each link its target."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from browsing import problems
from made_nodes import nodes, shown
from torch import nn

from instrument.analysis.table import Table
from instrument.fx import profile_graph
from instrument.fx.draw.html import page, payload
from instrument.fx.draw.icicle import graphs
from instrument.fx.draw.pictures import View, heat, views
from instrument.fx.machine import Machine

if TYPE_CHECKING:
    from playwright.sync_api import Page

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
TYPES = {"block": "Block", "block.one": "One", HOSTILE: HOSTILE}


def edges(view: View) -> Counter[tuple[int, int]]:
    return Counter((line.source, line.target) for line in view.lines if line.target is not None)


def labels(view: View) -> list[str]:
    return [node.texts[0][1] for node in view.nodes]


def test_every_node_has_a_row_and_a_box_and_every_input_a_line() -> None:
    cells = shown(page(GRAPH, "Graph", TYPES))["sections"]["graph"]["nodes"]["cells"]
    assert cells["name"] == GRAPH.column("name")
    every = views(GRAPH, TYPES)[-1]
    assert every.every_node
    beside = {node.number: [badge.number for badge in node.badges] for node in every.nodes}
    assert sorted(beside) == [2, 3, 4, 5, 6, 7, 8]
    assert {at: badges for at, badges in beside.items() if badges} == {3: [1, 0], 6: [0]}
    index = {name: at for at, name in enumerate(GRAPH.column("name"))}
    wanted = {
        (index[source], at)
        for at, row in enumerate(GRAPH)
        for source in row.inputs.split(", ")
        if source and GRAPH[index[source]].op != "get_attr"
    }
    assert edges(every) == dict.fromkeys(wanted, 1)


def test_twice_the_takers_of_one_value_are_twice_the_page() -> None:
    def size(takers: int) -> int:
        chain = [
            {"name": f"n{at}", "inputs": f"n{at - 1}, x", "median_ns": 100}
            for at in range(1, takers)
        ]
        table = nodes({"name": "x"}, {"name": "n0", "inputs": "x"}, *chain)
        return len(json.dumps(payload(table, "Graph", {}, [])))

    once, twice, four = map(size, (200, 400, 800))
    assert four - twice < 2.2 * (twice - once)


def test_what_lines_go_on_from_is_there() -> None:
    lines = views(GRAPH, TYPES)[-1].lines
    begun = {line.number: line.source for line in lines if line.number is not None}
    after = [(line.after, line.source) for line in lines if line.after is not None]
    assert after
    assert all(begun[number] == source for number, source in after)


def test_the_more_time_the_more_colour() -> None:
    found = views(GRAPH, TYPES)[-1].nodes
    colours = {GRAPH[node.number].share or 0: node.strength for node in found}
    ordered = [colours[share] for share in sorted(colours)]
    assert len(ordered) == 6, "0 and unknown look the same"
    assert ordered == sorted(set(ordered))
    assert ordered[-1] == heat(0.6, 0.6) > 0.5
    assert heat(0.0, 0.0) == heat(None, 1.0)


def test_modules_are_closed_first_and_their_times_summed() -> None:
    closed, opened, every = views(GRAPH, TYPES)
    assert [view.boxes for view in (closed, opened, every)] == [4, 6, 7]
    assert labels(closed)[:2] == ["x", "block: Block"]
    block = closed.nodes[1]
    assert [text for _, text in block.texts] == [
        "block: Block",
        f"790 ns · {790 / 1000:.1%}",
        "3 nodes",
    ]
    assert [frame.number for frame in opened.frames if frame.path == "block"] == [block.frame]
    assert [frame.label for frame in every.frames][:2] == ["block: Block", "one: One"]
    assert edges(closed) == {(2, 3): 1, (3, 6): 1, (6, 8): 1}


def test_a_node_alone_in_its_module_is_named_as_the_module() -> None:
    table = nodes(
        {"name": "x", "op": "placeholder", "module_path": None},
        {"name": "linear", "inputs": "x", "module_path": "layers.0"},
        {"name": "relu", "inputs": "linear", "module_path": "layers.1"},
        {"name": "add", "inputs": "relu, x"},
    )
    view = views(table, {"layers.0": "Linear", "layers.1": "ReLU"})[-1]
    assert labels(view) == ["x", "0: Linear", "1: ReLU", "add"]
    assert [frame.label for frame in view.frames] == ["layers"]


def paths(graph: dict[str, Any]) -> dict[tuple[str, ...], int]:
    """The own time of each frame, by the names of the frames around it."""
    around: list[str] = []
    found = {}
    for depth, name, own_ns in zip(graph["depth"], graph["name_of"], graph["self"], strict=True):
        around[depth:] = [graph["names"][name]]
        found[tuple(around)] = own_ns
    return found


def test_the_time_of_modules_and_types() -> None:
    table = nodes(
        {"name": "scale", "op": "get_attr", "median_ns": 2},
        {"name": "x", "op": "placeholder", "module_path": None, "median_ns": 3},
        {"name": "weight", "op": "get_attr", "module_path": "block.one", "median_ns": 5},
        {"name": "linear", "module_path": "block.one", "median_ns": 100},
        {"name": "add", "module_path": "block", "median_ns": 10, "target": "operator.add"},
        {"name": "two", "op": "call_module", "module_path": "two", "median_ns": 20},
        {"name": "two_1", "op": "call_module", "module_path": "two", "median_ns": 30},
        {"name": "free", "median_ns": None},
    )
    types = {"block": "Block", "block.one": "Linear", "two": "ReLU"}
    by_module, by_type = graphs(table, types, {"block": 4})
    block, one, two = "block: Block", "block.one: Linear", "two: ReLU"
    assert paths(by_module) == {
        ("get_attr",): 2,
        ("x",): 3,
        (block,): 0,
        (block, one): 105,
        (block, "add"): 10,
        (two,): 0,
        (two, "two"): 20,
        (two, "two_1"): 30,
    }
    assert {path: own for path, own in paths(by_type).items() if own} == {
        ("get_attr", "get_attr"): 2,
        ("get_attr", one): 5,
        ("placeholder", "x"): 3,
        ("Linear", one): 100,
        ("operator.add", "add"): 10,
        ("ReLU", "two"): 20,
        ("ReLU", "two_1"): 30,
    }
    links = dict(zip(by_module["names"], by_module["targets"], strict=True))
    assert links == {
        "get_attr": None,
        "x": "#graph?node=1",
        block: "#graph?frame=4",
        one: "#graph?node=3",
        "add": "#graph?node=4",
        two: "#graph?node=5",
        "two": "#graph?node=5",
        "two_1": "#graph?node=6",
    }
    assert dict(zip(by_module["names"], by_module["labels"], strict=True))[one] == "one: Linear"


def test_the_summary_names_what_takes_the_most_time() -> None:
    facts = shown(page(GRAPH, "Graph", TYPES))["sections"]["summary"]["facts"]
    assert facts == [
        ["1.000 µs", "node time of a run: the sum of the medians of 9 nodes"],
        ["79.0%", "in block: Block, the module with the most time"],
        ["90.0%", "in operator.add, the module type or function with the most time"],
        ["60.0%", "in linear, the node with the most time"],
    ]


def test_the_page_opens_where_it_can_be_read() -> None:
    def opened(width: int) -> tuple[int, list[int]]:
        rows = [
            {"name": f"n{a}_{b}", "module_path": f"a{a}", "inputs": ""}
            for a in range(10)
            for b in range(width)
        ]
        graph = payload(nodes(*rows), "Graph", {}, [])["sections"]["graph"]
        return graph["shown"], [view["boxes"] for view in graph["views"]]

    assert opened(4) == (1, [10, 40])
    assert opened(5) == (0, [10, 50])


def test_the_page_needs_nothing_and_lets_nothing_else_run() -> None:
    text = page(GRAPH, HOSTILE, TYPES, [HOSTILE])
    assert not re.search(r"<(link|img|iframe|object|form)\b|@import|\sstyle=\"|\son\w+=\"", text)
    assert "alert" not in text.replace("&lt;script&gt;alert", "")
    hashes = {
        tag: b64encode(sha256(content.encode()).digest()).decode()
        for tag in ("script", "style")
        for content in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    }
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert policy[1] == (
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; base-uri 'none'; "
        f"form-action 'none'; script-src 'sha256-{hashes['script']}'"
    )


def test_a_deep_graph_opens_in_few_steps() -> None:
    deep = [".".join("abcdefgh"[:depth]) for depth in range(9) for _ in range(2)]
    rows = [{"name": f"n{at}", "module_path": path} for at, path in enumerate(deep)]
    assert [view.depth for view in views(nodes(*rows), {})] == [0, 1, 2, 3, 8]


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
    assert profile.module_types == {
        "inner": "Sequential",
        "inner.0": "Linear",
        "inner.1": "ReLU",
    }
    machine = Machine("this one", {"float32": 10**10}, 10**9)
    path = profile.save_html(tmp_path / "graph.html", machine)
    sections = shown(path.read_text(encoding="utf-8"))["sections"]
    table = sections["graph"]["nodes"]
    assert table["cells"]["name"] == profile.nodes.column("name")
    heads = {column["title"] for column in table["columns"]}
    assert {"alive memory", "freed memory", "bound by", "bound", "bound share"} <= heads
    assert "inner: Sequential" in sections["graph"]["times"][0]["names"]
    assert sections["summary"]["notes"] == [
        f"Captured by {profile.how}.",
        str(profile.overhead),
        str(profile.memory),
        f"The bounds are computed from the rates of {machine}.",
    ]
    assert str(machine) == "this one: 10.00 G float32 FLOPs, 953.67 MiB a second"
    frame = re.fullmatch(r'<iframe srcdoc="([^"]*)" style="[^"]*"></iframe>', profile._repr_html_())
    assert frame
    columns = shown(unescape(frame[1]))["sections"]["graph"]["nodes"]["columns"]
    assert "bound" not in [column["title"] for column in columns], "a notebook measures nothing"


@pytest.mark.parametrize(
    "table", [nodes({"name": "output", "op": "output"}), Table({n: [] for n in GRAPH.columns})]
)
def test_the_smallest_graphs(table: Table, opened: Callable[..., Page], tmp_path: Path) -> None:
    path = tmp_path / "graph.html"
    path.write_text(page(table, "Graph"), encoding="utf-8")
    tab = opened(path, "#graph")
    tab.wait_for_selector(".graph svg", state="attached")
    assert tab.locator(".graph .node").count() == len(table)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "graph.html"
    path.write_text(page(GRAPH, HOSTILE, TYPES, [HOSTILE]), encoding="utf-8")
    return path


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_serious(opened: Callable[..., Page], written: Path, dark: bool) -> None:
    tab = opened(written, "#graph?node=3", dark=dark)
    tab.get_by_role("button", name="Open all").click()
    tab.wait_for_selector(".picked dd")
    assert problems(tab) == []


def test_names_are_text(opened: Callable[..., Page], tmp_path: Path) -> None:
    evil = "\x1b[2J\u202e"
    table = nodes(
        {"name": "x"}, *({"name": f"y{k}", "target": evil, "module_path": evil} for k in (1, 2))
    )
    path = tmp_path / "graph.html"
    path.write_text(page(table, evil, {evil: HOSTILE}, [evil]), encoding="utf-8")
    tab = opened(path, "#graph?node=1")
    assert tab.locator("h1").inner_text() == "\\x1b[2J\\u202e"
    label = tab.locator(".graph .frame text").text_content()
    assert label is not None
    assert label.startswith("\\x1b[2J\\u202e: ")
    assert label.endswith("</script>&")
    tab.wait_for_selector(".picked dd")
    assert "\\x1b[2J\\u202e" in tab.locator(".picked").inner_text()
    assert "\u202e" not in tab.locator("body").inner_text()


def test_modules_open_and_nodes_show_their_numbers(
    opened: Callable[..., Page], written: Path
) -> None:
    tab = opened(written, "#graph?view=0")
    boxes = tab.locator(".graph .node:visible")
    boxes.first.wait_for()
    assert boxes.count() == 4
    tab.locator(".graph a", has_text="block: Block").focus()
    tab.keyboard.press("Enter")
    tab.locator(".graph .frame.on").wait_for()
    assert tab.get_by_label("Depth of the graph").input_value() == "1"
    # `linear` is inside a closed module: the link opens the picture with all nodes.
    tab.locator("td a", has_text="linear").click()
    tab.wait_for_selector(".graph .node.on")
    assert tab.get_by_label("Depth of the graph").input_value() == "2"
    assert "600 ns" in tab.locator(".picked").inner_text()
    assert tab.locator(".graph .edge.on:not(.parameter)").count() >= 2, "from x and to relu"


def test_parameters_are_shown_on_demand(opened: Callable[..., Page], written: Path) -> None:
    tab = opened(written, "#graph?view=2")
    badges = tab.locator(".graph .badge:visible")
    tab.wait_for_selector(".graph .badge", state="attached")
    assert badges.count() == 0
    names = tab.locator("td a")
    assert names.all_inner_texts()[:3] == ["linear", "twice", "relu"], "sorted by share"
    assert names.count() == 7
    in_picture, in_table = tab.get_by_label("Parameters (get_attr)").all()
    in_picture.check()
    assert badges.count() == 3
    in_table.check()
    assert names.count() == 9


def test_a_module_of_the_icicle_leads_to_the_picture(
    opened: Callable[..., Page], written: Path
) -> None:
    tab = opened(written, "#graph?view=0")
    tab.wait_for_selector(".flame canvas[data-rectangles]")
    tab.locator(".flame canvas").focus()
    tab.keyboard.press("ArrowDown")
    status = tab.locator("p[role=status]")
    assert status.inner_text().startswith("block: Block: 790 ns, 79.0% of the node time")
    status.get_by_role("link", name="Show in the graph").click()
    tab.wait_for_selector(".graph .frame.on")
    assert tab.locator(".graph .frame.on text").text_content() == "block: Block"
