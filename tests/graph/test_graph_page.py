"""The page of a graph: the icicles of modules and types, and a row for each node."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from browsing import problems
from made_nodes import nodes, shown
from page_parts import parts, words
from torch import nn

from instrument.analysis.table import Table
from instrument.fx import profile_graph
from instrument.fx.page import icicles, page
from instrument.fx.roofline import Machine
from instrument.report.flame import Frame

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


def test_every_node_has_a_row() -> None:
    cells = shown(page(GRAPH, "Graph", TYPES))["sections"]["graph"]["nodes"]["cells"]
    assert cells["name"] == GRAPH.column("name")


def own_times(frame: Frame, around: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    """The own time of each frame, by the names of the frames around it."""
    found = {}
    for name, inner in frame.calls.items():
        path = (*around, name)
        found[path] = inner.value_ns - sum(each.value_ns for each in inner.calls.values())
        found |= own_times(inner, path)
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
    by_module, by_type = icicles(table, types).values()
    block, one, two = "block: Block", "block.one: Linear", "two: ReLU"
    assert own_times(by_module) == {
        ("get_attr",): 2,
        ("x",): 3,
        (block,): 0,
        (block, one): 105,
        (block, "add"): 10,
        (two,): 0,
        (two, "two"): 20,
        (two, "two_1"): 30,
        ("free",): 0,
    }
    assert {path: own for path, own in own_times(by_type).items() if own} == {
        ("get_attr", "get_attr"): 2,
        ("get_attr", one): 5,
        ("placeholder", "x"): 3,
        ("Linear", one): 100,
        ("operator.add", "add"): 10,
        ("ReLU", "two"): 20,
        ("ReLU", "two_1"): 30,
    }
    graph = shown(page(table, "Graph", types))["sections"]["graph"]["times"][0]
    assert dict(zip(graph["names"], graph["labels"], strict=True))[one] == "one: Linear"


def test_the_summary_names_what_takes_the_most_time() -> None:
    (found,) = parts(shown(page(GRAPH, "Graph", TYPES))["sections"]["summary"], "facts")
    assert [(box["value"], box["note"]) for box in found["items"]] == [
        ("1.000 µs", "node time of a run: the sum of the medians of 9 nodes"),
        ("79.0%", "in block: Block, the module with the most time"),
        ("90.0%", "in operator.add, the module type or function with the most time"),
        ("60.0%", "in linear, the node with the most time"),
    ]


def test_the_page_needs_nothing_and_lets_nothing_else_run() -> None:
    text = page(GRAPH, HOSTILE, TYPES, [HOSTILE])
    assert page(GRAPH, HOSTILE, TYPES, [HOSTILE]) == text
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
    assert words(sections["summary"]).split("\n") == [
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
    tab.wait_for_selector("#graph table", state="attached")
    assert tab.locator("#graph > .table tbody tr").count() == len(table)


def test_names_are_text(opened: Callable[..., Page], tmp_path: Path) -> None:
    evil = "\x1b[2J\u202e"
    table = nodes(
        {"name": "x"}, *({"name": f"y{k}", "target": evil, "module_path": evil} for k in (1, 2))
    )
    path = tmp_path / "graph.html"
    path.write_text(page(table, evil, {evil: HOSTILE}, [evil]), encoding="utf-8")
    tab = opened(path, "#graph")
    assert tab.locator("h1").inner_text() == "\\x1b[2J\\u202e"
    tab.wait_for_selector("#graph td")
    assert "\\x1b[2J\\u202e" in tab.locator("#graph > .table").inner_text()
    assert "\u202e" not in tab.locator("body").inner_text()


def test_the_icicle_and_the_table(opened: Callable[..., Page], tmp_path: Path) -> None:
    path = tmp_path / "graph.html"
    path.write_text(page(GRAPH, HOSTILE, TYPES, [HOSTILE]), encoding="utf-8")
    tab = opened(path, "#graph")
    tab.wait_for_selector(".flame canvas[data-rectangles]")
    tab.locator(".flame canvas").focus()
    tab.keyboard.press("ArrowDown")
    status = tab.locator("p[role=status]")
    assert status.inner_text() == "block: Block: 790 ns, 79.0% of the node time; self 0 ns"
    names = tab.locator("#graph > .table tbody td:first-child").all_inner_texts()
    assert names[:3] == ["linear", "twice", "relu"], "sorted by share"
    tab.get_by_role("button", name="Open all").click()
    assert problems(tab) == []
