"""Layers of device events: what was recorded, and what is found where nothing was recorded.

The truth of real traces is in the `nn.Module` frames around the launches, or in ranges; then launches, frames and
ranges are taken away.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import real_traces
from builders import Event, annotation, call, capture, frame, kernel, launched, span, step
from commands import Command

from instrument.base.prose import escaped
from instrument.read.advise.diagnosis import as_json, as_markdown, as_text
from instrument.read.capture import Capture
from instrument.read.facts.layers import EVIDENCE
from instrument.read.facts.sequence import Kinds, aligned, blocks, kinds_of_names
from instrument.read.show.page.page import payload
from instrument.read.trace.events import Ints
from instrument.read.views.layers import NO_LAYER, UNKNOWN_LAYER, layer_evidence

GEMM = (
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize{}x128x64_warpgroupsize1x1x1_execute_kernel"
)
NORM, ATTENTION = "rms_norm_kernel", "flash_fwd_kernel"
LAYER = (
    NORM,
    GEMM.format(64),
    ATTENTION,
    GEMM.format(128),
    NORM,
    GEMM.format(192),
    "silu",
    GEMM.format(256),
)
BEFORE, AFTER = ("embedding_kernel",), (NORM, GEMM.format(96), "argmax")
MORE = tuple(f"routing_{name}" for name in "abcdefgh")
COUNT = 6


class Run(NamedTuple):
    """A kernel, and the modules around its launch."""

    name: str
    modules: tuple[str, ...]


def forward(layers: int = COUNT) -> list[Run]:
    """The kernels of a model: an embedding, equal layers, a normalisation, the product with the vocabulary."""
    return [
        *(Run(name, ("Model_0", "Embedding_0")) for name in BEFORE),
        *(Run(name, ("Model_0", f"Block_{k}")) for k in range(layers) for name in LAYER),
        *(Run(name, ("Model_0", "Norm_0")) for name in AFTER[:1]),
        *(Run(name, ("Model_0", "Linear_0")) for name in AFTER[1:2]),
        *(Run(name, ()) for name in AFTER[2:]),
    ]


def events_of(runs: Iterable[Run], around: Callable[..., Event] | None = None) -> list[Event]:
    """A launch of each kernel every 20 µs, and the modules around it as frames, or as ranges with `around`."""
    events, make = list[Event](), around or (lambda name, *time: frame(f"nn.Module: {name}", *time))
    runs = list(runs)
    for k, run in enumerate(runs):
        events += launched(run.name, 20 * k + 2, 20 * k + 10, 8, k + 1)
    spans: dict[tuple[str, ...], list[int]] = {}
    for k, run in enumerate(runs):
        for depth in range(len(run.modules)):
            spans.setdefault(run.modules[: depth + 1], []).append(k)
    for path, places in sorted(spans.items()):
        events.append(
            make(
                path[-1],
                20 * places[0] + len(path) / 9,
                20 * (places[-1] - places[0] + 1) - len(path) / 4,
            )
        )
    return events


def in_one_graph(events: Iterable[Event]) -> list[Event]:
    """The same kernels, as one launch of a graph replays them; nothing of the CPU is left."""
    work = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    first = min(event["ts"] for event in work)
    launch = call("cudaGraphLaunch", first - 5, 4, 1)
    plain = [
        {
            **event,
            "args": {k: v for k, v in event["args"].items() if k != "External id"}
            | {"correlation": 1},
        }
        for event in work
    ]
    return [launch, *plain]


def of_work(found: Capture, *columns: str) -> list[Any]:
    """Columns of the kernels in the order of their starts."""
    rows = found.facts.events("kind", "start_ns", *columns).sort("start_ns")
    rows = rows.filter(rows["kind"].is_in(["kernel", "communication"])).select(columns)
    return [row[0] if len(columns) == 1 else row for row in rows.rows()]


def of_modules(runs: Iterable[Run]) -> list[str | None]:
    return [run.modules[1] if run.modules else None for run in runs]


class TestRecorded:
    def test_modules_around_the_launches_are_layers(self, tmp_path: Path) -> None:
        found = capture(tmp_path, events_of(forward()))
        assert of_work(found, "layer") == of_modules(forward())
        assert {*of_work(found, "evidence", "confidence")} == {("recorded", 1.0)}

    def test_ranges_around_the_launches_are_layers(self, tmp_path: Path) -> None:
        runs = [
            Run(run.name, tuple(each.replace("Block_", "layers.") for each in run.modules))
            for run in forward()
        ]
        found = capture(tmp_path, events_of(runs, annotation))
        assert of_work(found, "layer") == of_modules(runs)

    def test_numbered_ranges_of_a_loop_are_none(self, tmp_path: Path) -> None:
        runs = [Run("add", ("train", f"iteration_{k}")) for k in range(4)]
        found = capture(tmp_path, events_of(runs, annotation))
        assert of_work(found, "layer", "evidence") == [(None, "unknown")] * 4

    def test_outermost_numbered_modules_are_the_layers(self, tmp_path: Path) -> None:
        runs = [
            Run("add", ("Model_0", f"Block_{k}", f"Expert_{e}")) for k in range(2) for e in range(4)
        ]
        found = capture(tmp_path, events_of(runs))
        assert of_work(found, "layer") == ["Block_0"] * 4 + ["Block_1"] * 4

    def test_a_graph_inside_a_model_is_not_outside_of_its_layers(self, tmp_path: Path) -> None:
        """The launch of the graph is in no layer, but its kernels may be."""
        runs = forward()
        more = [call("cudaGraphLaunch", 5000, 5, 777), kernel("add", 5010, 5, correlation=777)]
        found = capture(tmp_path, [*events_of(runs), *more])
        assert of_work(found, "layer", "evidence")[-1] == (None, "unknown")

    def test_the_backward_is_in_the_layer_of_its_forward(self, tmp_path: Path) -> None:
        from builders import made, node

        events = list[Event]()
        for k in range(3):
            events += [
                frame(f"nn.Module: Block_{k}", 100 * k, 90),
                made("aten::mm", 100 * k + 10, 50, k + 1),
                *launched("forward", 100 * k + 20, 100 * k + 30, 10, k + 1),
                node("MmBackward0", 1000 - 100 * k, 50, k + 1),
                call("cudaLaunchKernel", 1010 - 100 * k, 5, k + 11, tid=2),
                kernel("backward", 1020 - 100 * k, 10, correlation=k + 11),
            ]
        found = capture(tmp_path, [frame("nn.Module: Model_0", 0, 300), *events])
        got = of_work(found, "layer")
        assert got == [*(f"Block_{k}" for k in range(3)), *(f"Block_{k}" for k in (2, 1, 0))]


class TestOtherEvidence:
    def test_annotations_of_graph_nodes(self, tmp_path: Path) -> None:
        nodes = [
            kernel(
                "add",
                10 * k,
                5,
                correlation=1,
                graph_node_id=k + 1,
                annotation=f"layers.{k}/attention",
            )
            for k in range(3)
        ]
        found = capture(tmp_path, nodes)
        assert of_work(found, "layer", "evidence") == [
            (f"layers.{k}", "annotation") for k in range(3)
        ]

    def test_names_of_kernels(self, tmp_path: Path) -> None:
        found = capture(tmp_path, [kernel(f"fused_layers_{k}_mlp", 10 * k, 5) for k in range(3)])
        assert of_work(found, "layer", "evidence") == [
            (f"layers_{k}", "kernel name") for k in range(3)
        ]

    def test_a_number_after_layer_norm_is_no_layer(self, tmp_path: Path) -> None:
        found = capture(
            tmp_path, [kernel(f"triton_poi_fused_layer_norm_{k}", 10 * k, 5) for k in range(3)]
        )
        assert {*of_work(found, "evidence")} == {"unknown"}

    def test_another_trace_with_other_copies_and_a_missing_kernel(self, tmp_path: Path) -> None:
        runs = forward()
        (other := tmp_path / "other.json").write_text(json.dumps({"traceEvents": events_of(runs)}))
        graph = in_one_graph(events_of(run for k, run in enumerate(runs) if k != 20))
        found = capture(
            tmp_path, [*graph, span("Memset (Device)", 105, 1, "gpu_memset", correlation=1)]
        )
        found.like = Capture.load(other)
        expected = [layer for k, layer in enumerate(of_modules(runs)) if k != 20]
        assert of_work(found, "layer") == expected
        assert {*of_work(found, "evidence")} == {"other trace"}

    def test_the_capture_of_the_graph(self, tmp_path: Path) -> None:
        """Its kernels do not run; on ROCm, their launches have their names."""
        calls = [
            {**event, "args": {"kernel": runs.name}}
            for event, runs in zip(
                (event for event in events_of(forward()) if event["cat"] == "cuda_runtime"),
                forward(),
            )
        ]
        frames = [event for event in events_of(forward()) if event["cat"] == "python_function"]
        (other := tmp_path / "other.json").write_text(
            json.dumps({"traceEvents": [*calls, *frames]})
        )
        found = capture(tmp_path, in_one_graph(events_of([*forward(), *forward()])))
        found.like = Capture.load(other)
        assert of_work(found, "layer") == of_modules(forward()) * 2
        evidence = of_work(found, "evidence")
        assert evidence == (["other trace"] * (len(forward()) - 1) + ["unknown"]) * 2

    def test_another_trace_is_one_pass_of_many(self, tmp_path: Path) -> None:
        (other := tmp_path / "other.json").write_text(
            json.dumps({"traceEvents": events_of(forward())})
        )
        found = capture(
            tmp_path, in_one_graph(events_of([*forward()[30:], *forward(), *forward()]))
        )
        found.like = Capture.load(other)
        assert of_work(found, "layer") == of_modules([*forward()[30:], *forward(), *forward()])


class TestSequence:
    def test_layers_of_a_graph_are_numbered(self, tmp_path: Path) -> None:
        found = capture(tmp_path, in_one_graph(events_of([*forward(), *forward()])))
        layers = [
            layer and layer.startswith("Block") and layer.replace("Block_", "layer ")
            for layer in of_modules(forward())
        ]
        assert of_work(found, "layer") == [layer or None for layer in layers] * 2
        assert {*of_work(found, "evidence")} == {"sequence", "unknown"}

    def test_layers_of_two_lengths_that_take_turns(self, tmp_path: Path) -> None:
        """As in a model with two kinds of attention, one of which has a kernel more."""
        runs = [Run(name, ()) for name in BEFORE]
        for k in range(COUNT):
            runs += [Run(name, (f"layer {k}",)) for name in (*LAYER, *MORE)]
            if k % 2:
                runs.insert(len(runs) - len(MORE) - 5, Run("reduce_segments", (f"layer {k}",)))
        runs += [Run(name, ()) for name in AFTER]
        events = in_one_graph(events_of(runs))
        events = [
            event | {"dur": 9 if event["name"] == LAYER[-1] else event["dur"]} for event in events
        ]
        expected = [run.modules[0] if run.modules else None for run in runs]
        layers = of_work(capture(tmp_path, events), "layer")
        # The normalisation after the last layer could be the first of one more.
        assert [*layers[:-3], *layers[-2:]] == [*expected[:-3], *expected[-2:]]

    def test_of_a_pass_cut_by_the_start_the_last_layers_are_there(self, tmp_path: Path) -> None:
        found = capture(tmp_path, in_one_graph(events_of([*forward()[11:], *forward()])))
        assert of_work(found, "layer")[:6] == ["layer 1"] * 6
        assert of_work(found, "layer")[6] == "layer 2"

    def test_backward_layers_have_the_numbers_of_their_forward_layers(self, tmp_path: Path) -> None:
        back = [
            *(Run(name, ()) for name in (GEMM.format(31), "norm_backward")),
            *(
                Run(name, (f"layer {k}",))
                for k in reversed(range(COUNT))
                for name in (GEMM.format(1), "silu_backward", GEMM.format(2), "norm_backward", GEMM.format(3),
                             "flash_bwd_kernel", GEMM.format(4), "reduce_kernel", "norm_backward")
            ),
        ]  # fmt: skip
        found = capture(tmp_path, in_one_graph(events_of([*forward(), *back, *forward(), *back])))
        layers = of_work(found, "layer")
        begin = len(forward())
        got = layers[begin : begin + len(back)]
        right = [got[k] == (run.modules[0] if run.modules else None) for k, run in enumerate(back)]
        assert sum(right) / len(right) > 0.9

    def test_recorded_layers_give_the_blocks_their_names(self, tmp_path: Path) -> None:
        """The first pass was launched before the recording began."""
        events = events_of([*forward(), *forward()])
        first = 20 * len(forward())
        events = [event for event in events if event["cat"] == "kernel" or event["ts"] > first]
        events += [frame("nn.Module: Model_0", first, first)]
        events += [
            frame(f"nn.Module: Block_{k}", first + 20 * (1 + 8 * k), 159) for k in range(COUNT)
        ]
        layers = of_work(capture(tmp_path, events), "layer", "evidence")
        assert layers[1:49] == [(f"Block_{k}", "sequence") for k in range(COUNT) for _ in LAYER]
        assert layers[53:101] == [(f"Block_{k}", "recorded") for k in range(COUNT) for _ in LAYER]

    def test_steps_are_no_layers(self, tmp_path: Path) -> None:
        name = [GEMM.format(1), "relu", *[f"sgd_{k}" for k in range(7)]]
        events = [
            *events_of(Run(each, ()) for each in name * 5),
            *(step(k, 180 * k, 179) for k in range(5)),
        ]
        assert {*of_work(capture(tmp_path, events), "layer")} == {None}

    def test_an_empty_trace_has_none(self, tmp_path: Path) -> None:
        found = capture(tmp_path, [span("aten::add", 0, 10)])
        assert len(found.layers) == 0
        assert layer_evidence(found) is None

    def test_of_what_differs_there_are_none(self) -> None:
        random = np.random.default_rng(3)
        kinds = kinds_of_names([*{*LAYER}, *BEFORE, *AFTER[1:]])
        name = random.integers(0, len(kinds.token), 3000)
        found = blocks(name, kinds, np.ones(3000, np.int64), np.zeros(3000, np.int64))
        assert (found.layer < 0).all()


class TestView:
    @pytest.fixture
    def trace(self, tmp_path: Path) -> Capture:
        return capture(tmp_path, events_of(forward()))

    def test_rows_are_layers_in_their_order_and_sum_to_all(self, trace: Capture) -> None:
        rows = [*trace.layers]
        names = [
            "Embedding_0",
            *(f"Block_{k}" for k in range(COUNT)),
            "Norm_0",
            "Linear_0",
            NO_LAYER,
        ]
        assert [row.name for row in rows] == names
        assert sum(row.device_ns for row in rows) == 8000 * len(forward())
        assert sum(row.share for row in rows) == pytest.approx(1)
        block = rows[1]
        got = (block.kernels, block.device_ns, block.attention_ns, block.product_ns)
        assert got == (8, 64000, 8000, 32000)
        got = (block.role, block.evidence)
        assert got == ("matrix product, normalisation, attention, elementwise", "recorded")

    def test_what_is_unknown_is_last(self, tmp_path: Path) -> None:
        rows = [*capture(tmp_path, in_one_graph(events_of(forward()))).layers]
        got = (rows[-1].name, rows[-1].evidence, rows[-1].confidence)
        assert got == (UNKNOWN_LAYER, "unknown", None)
        assert rows[0].confidence == pytest.approx(0.98)

    def test_kernels_and_operators_by_layer(self, trace: Capture) -> None:
        of_layer = Counter(row.layer for row in trace.kernels_by_layer())
        assert of_layer["Block_3"] == len({*LAYER})
        assert sum(row.device_ns for row in trace.kernels_by_layer()) == sum(
            row.device_ns for row in trace.kernels
        )
        calls = {
            row.layer: row.calls
            for row in trace.operators_by("layer")
            if row.name == "cudaLaunchKernel"
        }
        assert calls["Block_3"] == 8

    def test_coverage_has_the_evidence(self, tmp_path: Path) -> None:
        found = capture(tmp_path, in_one_graph(events_of(forward())))
        (row,) = found.coverage.where(name="device time with a layer")
        assert row.share == pytest.approx(48 / 52)
        assert "sequence 92 %, unknown 7.7 %" in row.why
        assert "without CUDA graphs" in row.why

    def test_texts_json_and_page_have_one_line_on_the_evidence(self, tmp_path) -> None:
        found = capture(tmp_path, in_one_graph(events_of(forward())))
        diagnosis = found.diagnose()
        line = str(layer_evidence(found))
        assert line.startswith("Layers of the device time: sequence 92 %, unknown 7.7 %. To name")
        assert line in as_text(diagnosis).replace("\n", " ")
        assert escaped(line) in as_markdown(diagnosis)
        shares = json.loads(as_json(diagnosis))["layers"]
        assert shares == pytest.approx({"sequence": 48 / 52, "unknown": 4 / 52})
        page = payload([found])
        assert line in [part.get("text") for part in page["head"]]
        titles = [part["title"] for part in page["sections"]["tables"]["parts"]]
        assert titles[:2] == ["Operators", "Layers"]

    def test_of_recorded_layers_and_of_none_nothing_is_said(self, trace, tmp_path) -> None:
        folder = tmp_path / "other"
        other = capture(folder, events_of(Run("add", ()) for _ in range(4)))
        for each, shares in (trace, {"recorded": 1.0}), (other, {"unknown": 1.0}):
            assert json.loads(as_json(each.diagnose()))["layers"] == shares
            assert "Layers of" not in as_text(each.diagnose())
        assert str(layer_evidence(trace)) == "Layers of the device time: recorded 100 %."
        assert "Layers" not in json.dumps(payload([other])["sections"]["tables"])

    def test_work_without_a_launch_is_said_to_be_from_before_the_recording(self, tmp_path) -> None:
        events, end = events_of([*forward(), *forward()]), 20 * 2 * len(forward())
        events = [each for each in events if each["cat"] == "kernel" or each["ts"] > end / 2]
        events += [
            frame(f"nn.Module: Block_{k}", end / 2 + 160 * k + 20, 159) for k in range(COUNT)
        ]
        known = layer_evidence(
            capture(tmp_path, [frame("nn.Module: Model_0", end / 2, end), *events])
        )
        assert known is not None
        assert "synchronise before the window begins" in known.remedy

    def test_coverage_of_recorded_layers_says_nothing(self, trace: Capture) -> None:
        (row,) = trace.coverage.where(name="device time with a layer")
        assert (row.share, row.why) == (1, None)

    def test_the_command(self, command: Command, tmp_path: Path) -> None:
        (other := tmp_path / "other.json").write_text(
            json.dumps({"traceEvents": events_of(forward())})
        )
        graph = capture(tmp_path, in_one_graph(events_of(forward()))).trace_path
        out = command("show", graph, "--layers").out
        assert all(text in out for text in ("layer 5", "without CUDA graphs"))
        out = command("show", graph, "--layers", "--like", other).out
        assert all(text in out for text in ("Block_5", "other trace"))
        assert "without CUDA graphs" not in out
        assert "Block_5" in command("show", other, "--kernels", "--by", "layer").out
        assert "Block_5" in command("show", other, "--kernels", "--by", "layer", "--csv").out
        assert "Block_5" in command("show", other, "--ops", "--by", "layer").out
        assert "remove --by" in command("show", other, "--copies", "--by", "layer", status=2).err


# What numbers the layers of the real traces whose layers are known.
REAL = {
    "b200_eager": "TransformerBlock_",
    "h100_qwen_0.5b_inference": "Qwen2DecoderLayer_",
    "h100_timesformer_inference": "TimesformerLayer_",
}


def truth(name: str) -> tuple[Capture, dict[tuple[int, str], str | None]]:
    """The trace, and the layer of each device event with a launch, by its start and name."""
    found = real_traces.load(name)
    rows = found.facts.events("kind", "start_ns", "name", "layer", "evidence")
    rows = rows.filter(rows["evidence"] == "recorded")
    return found, {
        (start, each): layer if layer and layer.startswith(REAL[name]) else None
        for start, each, layer in rows.select("start_ns", "name", "layer").iter_rows()
    }


def without(name: str, *lost: str) -> list[Event]:
    """A real trace without some kinds of events: launches, frames, ranges; or all work as one graph."""
    categories = {
        "launches": ("cuda_runtime", "cuda_driver", "ac2g"),
        "frames": ("python_function",),
        "ranges": ("user_annotation", "gpu_user_annotation"),
    }
    events = [
        event
        for event in json.loads(gzip.decompress(real_traces.path(name).read_bytes()))["traceEvents"]
        if event.get("ph") == "X"
    ]
    gone = {each for what in lost if what != "graph" for each in categories[what]}
    if "launches" in lost:
        for event in events:
            event.get("args", {}).pop("correlation", None)
            event.get("args", {}).pop("External id", None)
    kept = [event for event in events if event.get("cat") not in gone]
    return in_one_graph(kept) if "graph" in lost else kept


def right_share(found: Capture, known: dict[tuple[int, str], str | None]) -> float:
    """The share of the known time whose layer is right, up to names: one layer of the found for one of the known."""
    rows = found.facts.events("kind", "start_ns", "name", "layer", "evidence", "duration_ns")
    rows = rows.filter(rows["evidence"].is_not_null())
    cells = [
        (layer, known[start, name], ns)
        for start, name, layer, ns in rows.select(
            "start_ns", "name", "layer", "duration_ns"
        ).iter_rows()
        if (start, name) in known
    ]
    together = Counter[tuple[str, str]]()
    for layer, real, ns in cells:
        if layer is not None and real is not None:
            together[layer, real] += ns
    names: dict[str, str] = {}
    for (layer, real), _ in together.most_common():
        if layer not in names and real not in names.values():
            names[layer] = real
    right = sum(ns for layer, real, ns in cells if (names.get(layer) if layer else None) == real)
    return right / sum(ns for _, _, ns in cells)


@real_traces.needs_traces
class TestRealTraces:
    @pytest.mark.parametrize(
        ("name", "lost"),
        real_traces.each(
            (name, lost)
            for name in REAL
            for lost in (("frames",), ("frames", "ranges", "launches"), ("graph",))
        ),
    )
    def test_sequence_and_another_trace_find_the_modules(self, name, lost, tmp_path) -> None:
        original, known = truth(name)
        assert len({*known.values()} - {None}) in (36, 24, 12)
        found = capture(tmp_path, without(name, *lost))
        assert right_share(found, known) >= 0.98
        found = Capture.load(tmp_path / "trace.json")
        found.like = original
        assert right_share(found, known) >= 0.99
        assert {*of_work(found, "evidence")} >= {"other trace"}

    def test_blocks_of_a_pipeline_schedule(self, tmp_path: Path) -> None:
        """One forward and one backward layer at a time, four times; each time begins with the range `combine(B)`."""
        name = "h800_deepseek_train"
        original = real_traces.load(name)
        ranges = original.facts.events("name", "kind", "start_ns")
        begins = np.sort(
            ranges.filter((ranges["name"] == "combine(B)") & (ranges["kind"] == "range"))[
                "start_ns"
            ].to_numpy()
        )
        rows = original.facts.events("kind", "start_ns", "name", "path", "launcher", "evidence")
        starts = rows["start_ns"].to_numpy()
        known = {
            (start, each): str(np.searchsorted(begins, starts[launcher], "right"))
            for start, each, path, launcher, evidence in rows.select(
                "start_ns", "name", "path", "launcher", "evidence"
            ).iter_rows()
            if evidence and path and launcher is not None
        }
        found = capture(tmp_path, without(name, "frames", "ranges"))
        assert right_share(found, known) >= 0.85

    @pytest.mark.parametrize(
        ("name", "layers"), [("mi300x_vllm_graph", 24), ("a100_megatron_tp8_rank0", 40)]
    )
    def test_number_of_layers_without_modules(self, name: str, layers: int) -> None:
        """gpt-oss-20b has 24 layers; the model of the eight ranks has 40."""
        rows = [*real_traces.load(name).layers]
        assert [row.name for row in rows[:-1]] == [f"layer {k}" for k in range(layers)]
        assert sum(row.share for row in rows if row.evidence == "sequence") > 0.9

    @pytest.mark.parametrize(
        "name",
        [
            "v100_resnet50_workers0",
            "v100_ns_resolution",
            "v100_216k_events",
            "a100_nccl_2ranks_rank0",
            "hta_simple_add",
        ],
    )
    def test_no_layers_where_most_differ(self, name: str) -> None:
        assert {*of_work(real_traces.load(name), "layer")} == {None}


# What CUDA calls the kernels of operators that a training step calls on the CPU.
KERNELS = {
    "aten::native_layer_norm": "vectorized_layer_norm_kernel",
    "aten::native_layer_norm_backward": "layer_norm_grad_input_kernel",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash_fwd_kernel",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "flash_bwd_dq_dk_dv_kernel",
    "aten::gelu": "GeluCUDAKernelImpl",
    "aten::gelu_backward": "GeluBackwardCUDAKernelImpl",
    "aten::add": "vectorized_elementwise_kernel<add>",
    "aten::add_": "vectorized_elementwise_kernel<add>",
    "aten::mul_": "vectorized_elementwise_kernel<mul>",
    "aten::copy_": "direct_copy_kernel",
    "aten::sum": "reduce_kernel<sum>",
    "aten::mm": GEMM.format(64),
    "aten::addmm": GEMM.format(128),
}


def trained(recomputes: bool, path: Path) -> list[Event]:
    """Two training steps of six blocks that torch recorded on the CPU, with a kernel for each operator."""
    torch = pytest.importorskip("torch")

    class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            norms = (torch.nn.LayerNorm(16) for _ in range(2))
            self.before, self.between = norms
            self.qkv, self.out, self.up, self.down = (
                torch.nn.Linear(*size) for size in ((16, 48), (16, 16), (16, 64), (64, 16))
            )

        def forward(self, x: Any) -> Any:
            heads = self.qkv(self.before(x)).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
            mixed = torch.nn.functional.scaled_dot_product_attention(*heads)
            x = x + self.out(mixed.transpose(1, 2).reshape(2, 8, 16))
            return x + self.down(torch.nn.functional.gelu(self.up(self.between(x))))

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(COUNT))

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                again = torch.utils.checkpoint.checkpoint
                x = again(block, x, use_reentrant=False) if recomputes else block(x)
            return x

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    with torch.profiler.profile(record_shapes=True, with_stack=True) as recorded:
        for _ in range(2):
            model(torch.ones(2, 8, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    recorded.export_chrome_trace(str(path))
    events = [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]
    operators = [each for each in events if each["cat"] == "cpu_op" and each["name"] in KERNELS]
    end = max(each["ts"] + each["dur"] for each in events)
    until, number = dict[Any, float](), 0
    for each in sorted(operators, key=lambda each: (each["ts"], -each["dur"])):
        if each["ts"] < until.get(each["tid"], 0):
            continue  # inside another one
        until[each["tid"]] = each["ts"] + each["dur"]
        number, name = number + 1, KERNELS[each["name"]]
        lasts = 30 if name.startswith("sm90") else 10 if name.startswith("flash") else 2
        launch = call("cudaLaunchKernel", 0, 1, number)
        time = {"ts": each["ts"] + each["dur"] * 0.4, "dur": each["dur"] * 0.2}
        events.append(launch | time | {"pid": each["pid"], "tid": each["tid"]})
        events.append(kernel(name, end + 50 * number, lasts, correlation=number))
    return events


@pytest.mark.parametrize("recomputes", [False, True])
def test_backward_layers_of_training_have_the_layers_of_their_forward(
    recomputes: bool, tmp_path: Path
) -> None:
    """The order is that of torch's autograd; the truth comes from modules and sequence numbers."""
    events = trained(recomputes, tmp_path / "recorded.json")
    rows = capture(tmp_path / "all", events).facts.events(
        "kind", "start_ns", "layer", "evidence", "pass", "duration_ns"
    )
    rows = rows.filter(rows["kind"] == "kernel").sort("start_ns")
    assert {*rows["evidence"]} == {"recorded"}
    found = of_work(capture(tmp_path / "graph", in_one_graph(events)), "layer")
    right, whole = Counter[Any](), Counter[Any]()
    for layer, real, of, ns in zip(found, rows["layer"], rows["pass"], rows["duration_ns"]):
        expected = real and real.startswith("Block") and real.replace("Block_", "layer ")
        right[of] += ns * (layer == (expected or None))
        whole[of] += ns
    assert whole["backward"] > 0.5 * whole.total()
    assert min(right[of] / whole[of] for of in whole if of != "optimizer") > 0.95


class Model(NamedTuple):
    """The kernels of a real trace in order, with their durations and layers; -1 outside of layers."""

    name: Ints
    kinds: Kinds
    weight: Ints
    layer: Ints


def model(name: str) -> Model:
    found = real_traces.load(name)
    rows = found.facts.events("kind", "start_ns", "name", "layer", "evidence", "duration_ns").sort(
        "start_ns"
    )
    rows = rows.filter(
        rows["kind"].is_in(["kernel", "communication"]) & (rows["evidence"] == "recorded")
    )
    names = sorted({*rows["name"]})
    codes = {each: k for k, each in enumerate(names)}
    layers = [
        int(layer.removeprefix(REAL[name])) if layer and layer.startswith(REAL[name]) else -1
        for layer in rows["layer"]
    ]
    return Model(
        np.array([codes[each] for each in rows["name"]]),
        kinds_of_names(names),
        rows["duration_ns"].to_numpy(),
        np.array(layers),
    )


def changed(of: Model, how: str, random: np.random.Generator) -> Model:
    """The trace with kernels that are lost, doubled, exchanged with the next one, or replaced by another."""
    count = len(of.name)
    what, share = how.split()
    chosen = np.flatnonzero(random.random(count - 1) < float(share))
    order, name = np.arange(count), of.name.copy()
    if what == "lost":
        order = np.delete(order, chosen)
    elif what == "doubled":
        order = np.insert(order, chosen, chosen)
    elif what == "exchanged":
        order[chosen], order[chosen + 1] = order[chosen + 1], order[chosen]
    else:
        name[chosen] = random.choice(of.name, len(chosen))
    return Model(name[order], of.kinds, of.weight[order], of.layer[order])


def test_short_sequences_of_any_kernels_are_read() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        count = int(random.integers(1, 8))
        kinds = Kinds(np.arange(count), *(random.random((4, count)) < 0.3))
        layer = random.integers(0, count, int(random.integers(1, 10)))
        name = np.concatenate(
            [random.integers(0, count, 3), np.tile(layer, int(random.integers(0, 9)))]
        )
        found = blocks(
            name, kinds, random.integers(0, 50, len(name)), np.zeros(len(name), np.int64)
        )
        assert ((found.layer >= 0) == (found.agreement > 0)).all()
        other = name[int(random.integers(0, len(name))) :]
        label = random.integers(-2, 4, len(other))
        assert {*aligned(name, other, label).tolist()} <= {-2, *label.tolist()}


@real_traces.needs_traces
@pytest.mark.nightly
def test_the_confidence_of_another_trace_is_the_share_that_is_right() -> None:
    from instrument.read.facts.layers import _RIGHT, OTHER_TRACE

    random, right, said = np.random.default_rng(6), 0, 0
    for name in REAL:
        whole = model(name)
        for how in ("lost", "doubled", "exchanged", "replaced"):
            for share in (0.002, 0.01, 0.02, 0.05, 0.1):
                of = changed(whole, f"{how} {share}", random)
                found = aligned(of.name, whole.name, whole.layer)
                said += int(of.weight[found != -2].sum())
                right += int(of.weight[found == of.layer].sum())
    assert abs(right / said - _RIGHT[OTHER_TRACE]) < 0.05


@real_traces.needs_traces
@pytest.mark.nightly
def test_the_confidence_of_the_sequence_is_the_share_that_is_right() -> None:
    from instrument.read.facts.layers import _RIGHT_BY_AGREEMENT

    random, shown = np.random.default_rng(7), dict[float, list[int]]()
    for name in REAL:
        whole = model(name)
        for how in ("lost 0", *(f"{what} {share}" for what in ("lost", "doubled", "exchanged", "replaced")
                                for share in (0.002, 0.005, 0.01, 0.02, 0.05) for _ in range(10))):  # fmt: skip
            of = changed(whole, how, random)
            found = blocks(of.name, of.kinds, of.weight, np.zeros(len(of.name), np.int64))
            together = Counter[tuple[int, int]]()
            for pair in zip(
                (found.kind * 1000 + found.layer).tolist(), of.layer.tolist(), of.weight.tolist()
            ):
                if min(pair) >= 0:
                    together[pair[:2]] += pair[2]
            names: dict[int, int] = {}
            for (layer, real), _ in together.most_common():
                if layer not in names and real not in names.values():
                    names[layer] = real
            said = found.layer >= 0
            is_right = (
                np.array([names.get(k, -9) for k in (found.kind * 1000 + found.layer).tolist()])
                == of.layer
            )
            for agreement in {*found.agreement[said].tolist()}:
                share = next(right for least, right in _RIGHT_BY_AGREEMENT if agreement >= least)
                sums = shown.setdefault(share, [0, 0])
                here = said & (found.agreement == agreement)
                sums[0] += int(of.weight[here & is_right].sum())
                sums[1] += int(of.weight[here].sum())
    for share, (right, whole_ns) in shown.items():
        assert abs(right / whole_ns - share) < 0.05, (share, right / whole_ns)


@real_traces.needs_traces
@pytest.mark.parametrize("name", real_traces.each(REAL))
@pytest.mark.parametrize("how", ["all", "within 40 kernels"])
def test_in_an_irregular_order_there_are_no_layers(name: str, how: str) -> None:
    of, random = model(name), np.random.default_rng(5)
    places = np.arange(len(of.name))
    pieces = [places] if how == "all" else np.array_split(places, len(places) // 40)
    order = np.concatenate([random.permutation(each) for each in pieces])
    found = blocks(of.name[order], of.kinds, of.weight[order], np.zeros(len(order), np.int64))
    assert (found.layer < 0).all()


def test_evidence_is_documented() -> None:
    from instrument.read.views.layers import LAYERS

    (column,) = (each for each in LAYERS if each.name == "evidence")
    assert all(each in column.doc for each in EVIDENCE)
