"""Traces of real hardware: the replay of each, and edits whose right answer is known.

The recordings of one program with and without an edit decide most: `v100_resnet50_workers0` loads
its batches itself, `v100_resnet50_workers4` in worker processes.
"""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest
import real_traces
from real_traces import KNOWN, load

from instrument.read.simulate.model import CPU, KINDS, LOADER
from instrument.read.simulate.scenario import MOST_UNEXPLAINED, Scenario
from instrument.read.trace.events import is_loader

pytestmark = real_traces.needs_traces
# The traces in which the model explains nearly all starts.
EXPLAINED = {
    *(f"a100_megatron_tp8_rank{k}" for k in range(8)),
    "a100_nccl_2ranks_rank0",
    "b200_eager",
    "h100_qwen_0.5b_inference",
    "h100_timesformer_inference",
    "v100_216k_events",
    "v100_ns_resolution",
    "v100_resnet50_workers0",
}


def share_won(found: Scenario) -> float:
    return found.saving_ns / found.baseline_ns


@pytest.mark.parametrize("name", real_traces.each(sorted(EXPLAINED)))
def test_the_replay_without_residues_is_near_where_little_is_unexplained(name) -> None:
    model = load(name).whatif.model
    assert model.unexplained <= MOST_UNEXPLAINED
    times = model.program.run(model.weights(model.typical))
    steps, typical = model.steps_ns(model.moments.time_ns), model.steps_ns(times)
    assert typical == pytest.approx(steps, rel=0.01)
    if len(model.moments.end_of):
        ended = model.moments.time_ns[model.moments.end_of].max()
        assert abs(times[model.moments.end_of].max() - ended) <= 0.01 * model.span_ns


# One has no launch, so that there is nothing to explain; the work of another is late before its only step.
@pytest.mark.parametrize(
    "name", real_traces.each(sorted({*KNOWN} - EXPLAINED - {"cupti_counters", "mi300x_vllm_graph"}))
)
def test_of_the_other_traces_more_is_unexplained(name) -> None:
    assert load(name).whatif.model.unexplained > MOST_UNEXPLAINED


@pytest.mark.parametrize("name", real_traces.each(["mi300x_vllm_graph"]))
def test_where_the_device_is_the_limit_half_a_layer_saves_half_its_device_time(name) -> None:
    of = {row.name: row.device_ns for row in load(name).layers}
    for layer in ("layer 3", "layer 20"):
        saved = load(name).whatif.scale(layer=layer, by=0.5).saving_ns
        assert saved == pytest.approx(of[layer] / 2, rel=0.001)


@pytest.mark.nightly
def test_kernels_of_a_training_that_waits_for_its_cpu_are_worth_nothing() -> None:
    whatif = load("a100_nccl_2ranks_rank0").whatif
    assert -1e-9 <= share_won(whatif.scale(kernel="*", by=0.5)) < 0.01
    assert share_won(whatif.scale(operator="*", by=0.5)) > 0.2


@pytest.mark.nightly
def test_kernels_of_a_training_that_fills_the_queue_are_worth_all() -> None:
    whatif = load("v100_ns_resolution").whatif
    assert share_won(whatif.scale(kernel="*", by=0.5)) > 0.4
    assert -1e-9 <= share_won(whatif.scale(operator="cudaLaunchKernel", by=0.5)) < 0.01


@pytest.mark.nightly
def test_a_step_without_its_loader_against_the_recording_with_workers() -> None:
    """By subtraction, the time of the loader goes, and nothing else waits longer."""
    slow, fast = load("v100_resnet50_workers0"), load("v100_resnet50_workers4")
    right = fast.whatif.baseline_ns
    predicted = slow.whatif.remove(operator="enumerate(DataLoader)*").step_ns
    events, steps = slow.events, slow.whatif.model.links.steps
    loads = np.flatnonzero(events.named(is_loader))
    subtracted = [
        whole - int(events.duration_ns[loads[_inside(events, step, loads)]].sum())
        for step, whole in zip(steps.tolist(), slow.whatif.steps)
    ]
    by_subtraction = median(subtracted[1:])
    assert abs(predicted / right - 1) < 0.1
    assert abs(predicted - right) < abs(by_subtraction - right)
    assert slow.whatif.workers(64).step_ns == pytest.approx(predicted, rel=0.05)


def _inside(events, step, chosen) -> np.ndarray:
    start_ns = events.start_ns[chosen]
    return (start_ns >= events.start_ns[step]) & (start_ns < events.end_ns[step])


@pytest.mark.nightly
def test_a_library_that_polls_is_no_cpu_time() -> None:
    """Four times, DeepEP polls for up to 23 ms until its kernel has written the counts."""
    whatif = load("h800_deepseek_train").whatif
    path = whatif.critical_path
    assert path[0].kind == "kernel"
    assert "grouped_gemm" in path[0].name
    on_cpu = [row for row in path if row.kind == KINDS[CPU] and "dispatch" in (row.name or "")]
    assert sum(row.share for row in on_cpu) < 0.02


@pytest.mark.nightly
def test_workers_that_are_ahead_leave_the_cpu_as_the_limit() -> None:
    """Taking over a batch takes 1.4 of 126 ms; the CPU's thread is 78 % of the critical path."""
    whatif = load("v100_resnet50_workers4").whatif
    assert share_won(whatif.scale(operator="*", by=0.5)) > 0.4
    shares = {row.kind: 0.0 for row in whatif.critical_path}
    for row in whatif.critical_path:
        shares[row.kind] += row.share
    assert 0.7 < shares[KINDS[CPU]] < 0.85
    assert KINDS[LOADER] not in shares
    assert not any("worker" in note for note in whatif.notes)


def test_the_folder_has_the_traces_that_are_named() -> None:
    assert set(KNOWN) >= EXPLAINED
    assert all(real_traces.path(name).is_file() for name in EXPLAINED)
