"""Whether a trace can be believed; `benchmarks/witness.py` plants the damage, and prints the table of all real traces."""

from __future__ import annotations

import gzip
import importlib.util
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from builders import capture, write_capture
from real_traces import FOLDER, needs_traces
from real_traces import each as each_trace
from real_traces import load as load_trace

from instrument.read.views.witness import CLAIMS, Claim, claims, consequences

_SPEC = importlib.util.spec_from_file_location(
    "benchmark_of_witness", Path(__file__).parents[2] / "benchmarks" / "witness.py"
)
assert _SPEC
assert _SPEC.loader
benchmark = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(benchmark)

# Where all replays of a graph lack the same nodes, nothing shows it.
UNNOTICED = {"all kernels of some names lost"}
REAL = sorted(file.name.removesuffix(".json.gz") for file in FOLDER.glob("*.json.gz"))


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = benchmark.sound()
    return found


def judged(folder: Path, events: list[Any], **document: Any) -> dict[str, Claim]:
    return {each.code: each for each in claims(capture(folder, events, **document))}


def test_every_claim_is_judged_and_holds_for_a_sound_trace(tmp_path, events) -> None:
    found = judged(tmp_path, events, **{**benchmark.trace([]), "traceEvents": events})
    assert [*found] == [*CLAIMS]
    assert {code: (each.share, each.why) for code, each in found.items()} == dict.fromkeys(
        CLAIMS, (1.0, "")
    )


@pytest.mark.parametrize("name", [each.name for each in (*benchmark.DAMAGES, *benchmark.STEPS)])
def test_damage_in_5_percent_of_the_events_breaks_a_claim(tmp_path, events, name) -> None:
    (damage,) = (d for d in (*benchmark.DAMAGES, *benchmark.STEPS) if d.name == name)
    found = benchmark.found(benchmark.trace(events), damage, 0.05, tmp_path)
    assert bool(found) == (name not in UNNOTICED), found


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("kernels lost here and there", "launches"),
        ("launches lost here and there", "launched"),
        ("launches and kernels lost in a row", "always"),
        ("operators lost in a row", "numbers"),
        ("Python frames lost here and there", "numbers"),
        ("memory events lost", "memory"),
        ("nodes of replays lost here and there", "graphs"),
        ("last nodes of some replays lost", "graphs"),
        ("kernels before their launch", "order"),
        ("kernels of 0 ns", "times"),
        ("kernels twice", "streams"),
        ("kernels after the end", "inside"),
        ("device clock steps ahead", "waits"),
        ("operators three times as long", "nesting"),
        ("calls moved out of their operators", "always"),
        ("a long flush of buffers", "flushes"),
        ("a step lost", "steps"),
        ("events of an unknown category", "file"),
    ],
)
def test_damage_breaks_the_claim_that_is_about_it(tmp_path, events, name, claim) -> None:
    (damage,) = (d for d in (*benchmark.DAMAGES, *benchmark.STEPS) if d.name == name)
    assert claim in benchmark.found(benchmark.trace(events), damage, 0.05, tmp_path)


def test_the_figure_is_the_share_of_the_launches_that_have_work(tmp_path, events) -> None:
    kernels = [each for each in events if each["name"].startswith("gemm")]
    lost = {id(each) for each in kernels[::4]}
    found = judged(tmp_path, [each for each in events if id(each) not in lost])
    assert (found["launches"].share, found["launches"].total) == (1 - 200 / 808, 808)
    assert found["launches"].why == "200 of 808 launches have no device work in the trace"


def test_a_trace_of_a_cpu_alone_leaves_what_it_cannot_show_unknown(tmp_path, events) -> None:
    only = [each for each in events if each.get("cat") == "cpu_op"]
    unknown = {
        code: each.why for code, each in judged(tmp_path, only).items() if each.share is None
    }
    assert {"launches", "launched", "order", "streams", "waits", "graphs", "memory"} <= {*unknown}
    assert all(unknown.values())


def test_nodes_without_ids_are_not_compared(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    plain = deepcopy(events)
    for each in plain:
        each.get("args", {}).pop("graph node id", 0)
    assert "no two replays" in judged(tmp_path, plain)["graphs"].why


def test_a_replay_without_any_work_lacks_as_many_nodes_as_the_others_have(tmp_path, events) -> None:
    nodes = [each for each in events if each["name"].startswith("node_")]
    lost = {id(each) for each in nodes[-64:]}
    found = judged(tmp_path, [each for each in events if id(each) not in lost])["graphs"]
    assert (found.share, found.total) == (1 - 64 / len(nodes), len(nodes))


def test_a_wait_for_one_of_several_devices_is_not_judged(tmp_path, events) -> None:
    other = [{**each, "pid": 1} if each["name"] == "gemm_0" else each for each in events]
    assert judged(tmp_path, other)["waits"].share is None


def test_known_faults_of_the_versions_are_named_with_their_threads(tmp_path, events) -> None:
    old = judged(tmp_path, events, cuda_runtime_version=12080)["versions"]
    assert old.holds() is None
    assert "CUDA 12.8: kernels at the start" in old.why
    assert "pytorch/pytorch#192021" in old.why
    assert "pytorch/kineto#1165" in old.why  # the trace has graphs
    assert judged(tmp_path, events, cuda_runtime_version=13020)["versions"].holds() is True
    assert "ROCm 7.0" in judged(tmp_path, events, hip_runtime_version=70051831)["versions"].why
    assert "names no version" in judged(tmp_path, events)["versions"].why
    assert "names no version" in judged(tmp_path, events, cuda_runtime_version="12")["versions"].why


@pytest.mark.parametrize("name", [*benchmark.JOBS])
def test_ranks_that_are_missing_or_of_another_window_break_a_claim(tmp_path, events, name) -> None:
    assert benchmark.of_job(benchmark.trace(events), name, tmp_path)


def test_the_exit_status_says_whether_all_claims_hold(tmp_path, events, command) -> None:
    path = tmp_path / "sound.json"
    path.write_text(json.dumps(benchmark.trace(events)))
    lines = command("check", path).out.splitlines()
    assert lines[:2] == ["sound", "  holds   100.00 %  the file is whole"]
    claims = [line for line in lines if line[:2] == "  " and line[2:3].strip()]
    assert len(claims) == len(CLAIMS)  # the others go on with a sentence
    assert max(map(len, lines)) <= 80
    kernels = [each for each in events if each["name"].startswith("gemm")]
    lost = {id(each) for each in kernels[:40]}
    path.write_text(json.dumps(benchmark.trace([e for e in events if id(e) not in lost])))
    said = " ".join(command("check", path, status=1).out.split())
    assert (
        "broken 95.04 % launches have their device work: 40 of 808 launches have no device work in "
        "the trace, so device times are too small" in said
    )
    command("check", path, "--require", 0.95)
    found = json.loads(command("check", path, "--json", status=1).out)
    assert found["holds"] is False
    (of,) = found["captures"]
    assert [each["code"] for each in of["claims"] if each["holds"] is False] == ["launches"]
    command("check", tmp_path / "none.json", status=2)
    with pytest.raises(SystemExit, match="2"):
        command("check", path, "--require", "99")


def test_traces_of_a_job_are_checked_together(tmp_path, events, command) -> None:
    for rank in range(benchmark.WORLD):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(benchmark.trace(events, rank)))
    paths = sorted(tmp_path.glob("*.json"))
    assert "  holds   100.00 %  each rank of the job is there once" in command("check", *paths).out
    said = " ".join(command("check", *paths[1:], status=1).out.split())
    assert "1 of 8 ranks are missing, or given twice" in said


def test_show_and_diagnose_say_once_what_a_loss_means(tmp_path, events, command) -> None:
    kernels = [each for each in events if each["name"].startswith("gemm")]
    lost = {id(each) for each in kernels[::6]}
    found = write_capture(tmp_path, [each for each in events if id(each) not in lost])
    sentence = "17 % of the launches have no device work in the trace: device times are too small."
    assert consequences(found) == [sentence]
    for words in (("diagnose", found.folder), ("show", found.folder)):
        assert " ".join(command(*words).out.split()).count(sentence) == 1
    assert consequences(found.during(steps=4)) == []


@needs_traces
@pytest.mark.parametrize("name", REAL)
def test_no_claim_is_broken_on_real_traces(name: str) -> None:
    assert [each for each in claims(load_trace(name)) if each.holds() is False] == []


@needs_traces
@pytest.mark.parametrize("name", each_trace())
def test_damage_of_real_traces_is_found(tmp_path: Path, name: str) -> None:
    document = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    by_name = {each.name: each for each in benchmark.DAMAGES}
    for kind in ("kernels lost here and there", "operators lost in a row", "kernels twice"):
        if benchmark.is_possible(by_name[kind], document["traceEvents"]):
            assert benchmark.found(document, by_name[kind], 0.05, tmp_path), kind
