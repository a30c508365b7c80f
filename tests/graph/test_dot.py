"""The graph as DOT: each node once, an edge for each input, frames of modules, and escaped names."""

from __future__ import annotations

import re

from made_nodes import nodes

from instrument.graph.dot import dot

GRAPH = nodes(
    {"name": "x", "op": "placeholder", "target": "x", "module_path": None, "median_ns": 0},
    {"name": "weight", "op": "get_attr", "module_path": "block.one"},
    {"name": "linear", "inputs": "x, weight", "module_path": "block.one", "median_ns": 600},
    {
        "name": "relu",
        "inputs": "linear",
        "module_path": "block",
        "module_type": "Block",
        "median_ns": 400,
    },
    {"name": "add", "inputs": "relu, x", "median_ns": None, "output_shape": None},
    {"name": "last", "inputs": "add", "module_path": "block", "median_ns": 1000},
)


def edges(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^(n\d+) -> (n\d+)$", text, re.MULTILINE)


def test_nodes_edges_and_frames() -> None:
    text = dot(GRAPH)
    lines = text.splitlines()
    assert lines[0] == "digraph {"
    assert lines[-1] == "}"
    assert edges(text) == [("n0", "n1"), ("n1", "n2"), ("n2", "n3"), ("n0", "n3"), ("n3", "n4")]
    labels = re.findall(r'^n(\d) \[label="([^"]*)" fillcolor="0.06 ([\d.]+) 1"\](}*)$', text, re.M)
    assert [number for number, *_ in labels] == ["0", "1", "2", "3", "4"]
    assert labels[1][1].startswith("linear (operator.add)\\n600 ns, 2")
    assert labels[3][1] == "add (operator.add)", "no time and no shape"
    shares = [float(saturation) for _, _, saturation, _ in labels]
    assert shares[0] == shares[3] == 0 < shares[2] < shares[1] < shares[4] == 1
    assert lines.count('subgraph "cluster block" { label="block: Block"') == 3
    assert "block.one" not in text, "the module has one node"
    assert text.count("{") == text.count("}")


def test_names_are_text() -> None:
    evil = '"] x [label="\\N &lt; \x1b\n\u202e'
    rows = (
        {"name": name, "target": evil, "module_path": evil, "module_type": evil} for name in "ab"
    )
    text = dot(nodes(*rows))
    strings = re.findall(r'"(?:[^"\\]|\\.)*"', text)
    rest = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    assert "x" not in rest.replace("box", "")
    assert "\x1b" not in text
    assert any('\\"] x [label=\\"\\\\N &amp;lt; \\\\x1b\\\\n\\\\u202e' in each for each in strings)


def test_the_smallest_graphs() -> None:
    assert dot(nodes().head(0)).splitlines()[-1] == "}"
    assert edges(dot(nodes({"name": "output", "op": "output"}))) == []
