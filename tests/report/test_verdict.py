"""The verdict: how long a step takes, and the first finding that is worth a headline."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import real_traces
from golden import Golden

from instrument.base.prose import escaped, wrapped
from instrument.read.advise.diagnosis import Diagnosis, as_markdown, as_text
from instrument.read.advise.finding import Finding, Saving
from instrument.read.advise.verdict import changes, first_lines, notes, verdict
from instrument.read.show.verdict import first_parts, markdown_of


def _finding(
    title: str, saving_ns: int | None, share: float | None = None, low_ns: int | None = None
) -> Finding:
    saving = None
    if saving_ns is not None:
        low_ns = saving_ns if low_ns is None else low_ns
        saving = Saving(1_000, saving_ns, low_ns, saving_ns)
    return Finding(title.replace(" ", "-"), title, "change", "verify", saving, share=share)


def _diagnosis(
    *findings: Finding, step_ns: int | None = 1_000, unexplained: float = 0.0
) -> Diagnosis:
    return Diagnosis(("capture",), findings, (), (), step_ns=step_ns, unexplained=unexplained)


STEP = "A step takes 1.000 µs. "
A_WAITS = "A waits; without this, a step would take 700 ns (30 % less)."


def _busy(share: float) -> Finding:
    return Finding("busy-cpus", "busy", "", "", None, share=share, is_caveat=True)


WAITS, OTHER, SMALL = _finding("A waits", 300), _finding("B waits", 200), _finding("A waits", 29)
AT_LINE = replace(_finding("A waits: 300 ns in each step", 300), source="train.py:7")
IN_RANGE = replace(AT_LINE, range="net/layers.0")
LOADER = "run/enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
GROWS, IDLE = _finding("Memory grows", None), _finding("The device is idle", None, 0.5)
PARTS = "The largest parts: 43 % in conv."
HEAVIEST = {
    "heaviest": "43 % ± 2 of it is a\x1b.py:1.",
    "heaviest_share": 0.43,
    "largest_parts": PARTS,
}
CASES = {
    "the finding that saves most": _diagnosis(WAITS, OTHER),
    "the line, but no details of the title": _diagnosis(AT_LINE),
    "the range": _diagnosis(IN_RANGE),
    "the range, which the title names": _diagnosis(replace(IN_RANGE, range="A")),
    "the loader, which the title names": _diagnosis(replace(IN_RANGE, range=LOADER)),
    "a long range": _diagnosis(replace(IN_RANGE, range="net/" * 50, source=None)),
    "a colon in a name": _diagnosis(_finding("A wait in range 'stage: rollout': 300 ns", None)),
    "a colon in a name with an apostrophe": _diagnosis(_finding('A thread\'s wait in "a: child\'s": 1', None)),
    "3 percent": _diagnosis(_finding("A waits", 30)),
    "less than 3 percent": _diagnosis(SMALL),
    "less than 3 percent, and an unknown saving": _diagnosis(SMALL, GROWS),
    "less than 3 percent in most windows": _diagnosis(SMALL, OTHER),
    "an unknown saving": _diagnosis(GROWS),
    "what ends the run": _diagnosis(replace(GROWS, ends_run=True)),
    "no finished step": replace(_diagnosis(WAITS), has_steps=False),
    "no finished step and no finding": replace(_diagnosis(), has_steps=False),
    "a larger share of unknown saving": _diagnosis(IDLE, WAITS, _finding("Data waits", None, 0.2)),
    "a smaller share of unknown saving": _diagnosis(WAITS, _finding("Data waits", None, 0.2), GROWS),
    "two unknown savings": _diagnosis(IDLE, _finding("Data waits", None, 0.2)),
    "the step of another phase": _diagnosis(replace(WAITS, phase="validation"), step_ns=5_000),
    "what takes most": replace(_diagnosis(), **HEAVIEST),
    "what takes most, near the peak": replace(_diagnosis(), **HEAVIEST, near_peak="it computes at 90 % of the peak"),
    "what takes most, before a small saving": replace(_diagnosis(SMALL), **HEAVIEST),
    "what takes most, before a cause of a part of it": replace(_diagnosis(_finding("A waits", 99)), **HEAVIEST),
    "what takes most, behind a large saving": replace(_diagnosis(_finding("A waits", 108)), **HEAVIEST),
    "what takes most, before an unknown saving": replace(_diagnosis(_finding("A waits", None, 0.3)), **HEAVIEST),
    "what the lines show": replace(_diagnosis(_finding("A waits", 108)), **HEAVIEST, lines=("43 %", "12 %")),
    "a machine that is not too busy": replace(_diagnosis(_busy(0.5)), largest_parts=PARTS),
    "a machine that is too busy": replace(_diagnosis(_busy(0.51)), largest_parts=PARTS),
    "what the device does": replace(_diagnosis(WAITS), device_use="The device computes for 92 % of it."),
    "several captures": replace(
        _diagnosis(replace(WAITS, capture="steps_3-4"), step_ns=2_000), captures=("steps_3-4", "steps_5-6")
    ),
    "no simulated step": _diagnosis(step_ns=None),
}  # fmt: skip


def test_what_the_verdict_says(golden: Golden) -> None:
    golden(
        "verdicts.txt", "\n".join(f"{name}:\n  {verdict(found)!r}" for name, found in CASES.items())
    )
    listed = as_text(CASES["what takes most"]).replace("\n", " ")
    assert listed.startswith(verdict(CASES["what takes most"]).replace("\x1b", "\\x1b"))
    got = first_lines(CASES["what the lines show"])[2]
    assert got == ["Where the time goes, by samples of the whole run:", "43 %", "12 %"]
    text = " ".join(as_text(CASES["no finished step"]).split())
    assert "saves 300 ns of the recording (30 %): the recording would take 700 ns" in text


@pytest.mark.parametrize(
    ("low_ns", "would_take", "saves"),
    [
        (150, "700 ns (30 % less).", "300 ns (30 %)"),
        (149, "700 ns to 851 ns (15 % to 30 % less).", "149 ns to 300 ns (15 % to 30 %)"),
        (10, "700 ns to 990 ns (1.0 % to 30 % less).", "10 ns to 300 ns (1.0 % to 30 %)"),
        (9, "at least 700 ns (up to 30 % less).", "up to 300 ns (30 %)"),
        (0, "at least 700 ns (up to 30 % less).", "up to 300 ns (30 %)"),
    ],
)
def test_bounds_that_are_far_apart_replace_the_saving(low_ns, would_take, saves) -> None:
    found = _diagnosis(_finding("A waits", 300, 0.3, low_ns))
    assert verdict(found).endswith(f"without this, a step would take {would_take}")
    assert changes(found) == [(f"A waits; saves {saves}", "change")]
    text = " ".join(as_text(found).split())
    bounds = "" if low_ns == 300 else f", between {low_ns} ns and 300 ns"
    assert f"saves 300 ns of a step (30 %){bounds}: a step would take 700 ns" in text


def test_a_title_between_the_bounds_needs_no_reason() -> None:
    within = _diagnosis(_finding("A waits", 300, 0.2, 140))
    assert verdict(within).endswith("(14 % to 30 % less).")
    beyond = _diagnosis(_finding("A waits", 300, 0.5, 0))
    assert verdict(beyond).endswith("(up to 30 % less).")
    assert "not 50 %, because other work hides" in " ".join(as_text(beyond).split())


@pytest.mark.parametrize("name", real_traces.every())
def test_the_verdict_is_about_the_first_findings_of_the_list(name: str) -> None:
    found = real_traces.load(name).diagnose()
    sentence, listed = verdict(found), [problem for problem, _ in changes(found)]
    causes = [each for each in found.findings if not each.is_caveat]
    if not causes:
        assert "othing" in sentence
        return
    place = [sentence.find(each.title.partition(": ")[0]) for each in causes]
    assert place[0] >= 0
    assert place[0] == min(at for at in place if at >= 0)
    assert all(at < 0 for at in place[len(listed) :])
    saving = causes[0].saving
    if saving is not None:
        assert saving.low_ns >= 0
        assert saving.is_wide == bool(re.search(r"\(up to|% to [0-9.]+ % less", sentence))


def test_a_saving_that_assumes_something_says_it_instead_of_a_reason() -> None:
    found = replace(_finding("A is Python", 300, 0.6), assumes="with half of this time")
    sentence = "A is Python; with half of this time, a step would take 700 ns (30 % less)."
    assert verdict(_diagnosis(found)) == STEP + sentence
    ((problem, _),) = changes(_diagnosis(found))
    assert problem == "A is Python; saves 300 ns (30 %) with half of this time"
    text = " ".join(as_text(_diagnosis(found)).split())
    assert "a step (30 %): with half of this time, a step would take 700 ns change" in text


@pytest.mark.parametrize(
    ("share", "why"),
    [
        (0.32, ""),
        (0.27, ""),
        (0.34, ": not 34 %, because other work hides a part of this time, or the change removes only a part"),
        (0.42, ": not 42 %, because other work hides a part of this time, or the change removes only a part"),
        (0.2, ": more than the 20 %, because other time in the step gets shorter too"),
    ],
)  # fmt: skip
def test_a_saving_that_is_not_the_share_of_the_title_says_why(share: float, why: str) -> None:
    found = _diagnosis(_finding("A waits", 300, share))
    assert verdict(found).endswith(" (30 % less).")
    saves = f"saves 300 ns of a step (30 %): a step would take 700 ns{why.replace(':', ';')}"
    assert saves in " ".join(as_text(found).split())


def test_a_caveat_is_a_note_and_never_the_verdict() -> None:
    busy = replace(_finding("The machine is busy", None, 0.9), is_caveat=True)
    found = _diagnosis(_finding("A waits", 300), busy)
    assert verdict(found) == STEP + A_WAITS
    assert notes(found) == ["Note: The machine is busy."]
    assert changes(found) == [("A waits; saves 300 ns (30 %)", "change")]
    assert first_lines(found) == [[*wrapped(STEP + A_WAITS)], ["Change: change"], notes(found)]
    text = as_text(found)
    assert text.count("saves") == 1
    assert text.index("Note: ") < text.index("\n1. ") < text.index("\n2. The machine is busy")
    assert first_lines(_diagnosis(busy)) == [
        [f"{STEP}Nothing found that saves more than 3 % of a step.", *notes(found)]
    ]


def test_the_list_of_findings_does_not_repeat_the_verdict() -> None:
    found = _diagnosis(_finding("A waits", 300), _finding("B waits", 200))
    text = as_text(found)
    assert (text.count("A waits"), text.count("B waits")) == (1, 1)
    said = "\n".join(line for each in first_lines(found) for line in each)
    assert (said.count("A waits"), said.count("B waits")) == (1, 1)
    assert "What to change next:\n2. B waits; saves 200 ns (20 %)" in said


def test_three_findings_stand_before_the_tables() -> None:
    found = _diagnosis(*(_finding(f"{name} waits", 300) for name in "ABCD"))
    assert first_lines(found)[1] == ["Change: change"]
    heading, *lines = first_lines(found)[2]
    assert heading == "What to change next, 3 of 4 findings:"
    assert [line[0] for line in lines[::2]] == ["2", "3"]


def test_time_that_is_not_explained_is_a_note_below_the_verdict() -> None:
    late = _diagnosis(unexplained=0.487)
    assert verdict(late) == f"{STEP}Nothing found that saves more than 3 % of a step."
    (note,) = notes(late)
    assert note.startswith("Note: for 49 % of the time, the trace does not show why")
    assert "record several whole steps" in note
    assert note in as_text(late).replace("\n", " ")
    assert escaped(note) in as_markdown(late)
    assert not notes(_diagnosis(_finding("A waits", 300), unexplained=0.487))
    assert not notes(_diagnosis(unexplained=0.05))
    assert notes(_diagnosis(_finding("A waits", 29), unexplained=0.051))


def test_a_capture_that_cannot_be_diagnosed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ValueError("no luck")

    monkeypatch.setattr("instrument.read.show.verdict.diagnose", fail)
    capture = SimpleNamespace(once=lambda name, find: find())
    assert first_parts(capture) == [["The capture could not be diagnosed: no luck."]]
    assert markdown_of(capture) == "The capture could not be diagnosed: `no luck`"


# What a person who reads the trace finds, as the verdict says it, in this order.
SAYS = {
    "h100_qwen_0.5b_inference": (
        "computes for 92 % of it and is idle for 8.1 %", "35 % elementwise", "26 % matrix products (gemm 128×128 tn bf16)",
        "21 % copying",
    ),
    "mi300x_vllm_graph": (
        "computes for 99.7 % and is idle for 0.2 %", "91 % matrix products (53 % matmul_ogs", "25 % matmul_ogs",
    ),
    "h800_deepseek_train": (
        "computes for 96 % of it (84 % while it communicates)", "54 % matrix products (21 % grouped_gemm", "17 % attention",
    ),
    "h100_timesformer_inference": (
        "idle for 59 %, mostly waiting for launches: the CPU is the limit", "18 % cunn_SoftMaxForward",
        "image_transforms.py:390 in normalize",
    ),
    "b200_eager": ("idle for 86 %, mostly waiting for launches: the CPU is the limit", "waits 70 % of the recording for launches in short gaps"),
    "a100_nccl_2ranks_rank0": ("idle for 76 %, mostly waiting for launches: the CPU is the limit", "waits 52 % of the step for launches in short gaps"),
    "v100_216k_events": (
        "only communicates for 21 %", "idle for 42 %, mostly waiting for launches",
        "exposed communication (nccl AllReduce sum f32 ring LL; 404 kernels a step)",
    ),
    "v100_ns_resolution": ("computes for 98 %", "38 % convolutions", "multiply float32 without tensor cores"),
    "v100_resnet50_workers0": ("idle for 43 %, mostly waiting for data", "33 % of the step waits for data"),
    "v100_resnet50_workers4": ("idle for 23 %, mostly waiting for launches: the CPU is the limit", "44 % convolutions"),
    "v100_resnet50_autograd_api": ("idle for 81 %, mostly waiting for launches", "1.565 s of cudaLaunchKernel in aten::add"),
    "mi300x_resnet_checkpoint_train": ("only communicates for 62 %", "62 % exposed communication", "all_reduce"),
    "mtia_rank0": (
        "computes for 55 % of it", "idle for 42 %, mostly waiting for work whose launch is not in the trace",
        "44 % matrix products (43 % fc<f32>)",
    ),
    "a100_megatron_tp8_rank0": ("only communicates for 40 % and is idle for 38 %, mostly waiting for launches",),
    "a100_megatron_tp8_rank7": ("only communicates for 77 % and is idle for 2.2 %", "perhaps with waits for late ranks"),
    "hta_simple_add": ("idle for 99.7 %", "24.59 s of cudaDeviceGetStreamPriorityRange in aten::to"),
    "kineto_before_fix": ("takes 130 ns", "From its first to its last work, 20 ns"),
    "no_categories_gpu": ("only copies for 29 %", "29 % exposed copies"),
    "unsloth_no_steps": ("takes 13.57 ms", "82 % in no operator, 14 % in aten::mm"),
    "cpu_particle_transformer": ("takes 4.848 s", "22 % in aten::conv1d, 21 % in aten::dropout"),
}  # fmt: skip


@real_traces.needs_traces
@pytest.mark.parametrize("name", real_traces.each(SAYS))
def test_the_verdict_says_what_a_reader_of_the_trace_finds(name: str) -> None:
    sentence = verdict(real_traces.load(name).diagnose())
    place = [sentence.find(text) for text in SAYS[name]]
    assert -1 not in place, sentence
    assert place == sorted(place)
    assert "in no range and no operator; the saving is not known" not in sentence


@pytest.mark.parametrize("name", real_traces.every())
def test_the_first_sentences_have_one_basis(name: str) -> None:
    capture = real_traces.load(name)
    use = capture.diagnose().device_use
    if not capture.work.duration_ns.any():
        assert not use
        return
    first, _, kernels = use.partition(" The kernels with the most time: ")
    does = {
        word: float(share)
        for word, share in re.findall(r"(computes|only \w+|is idle) for ([\d.]+) %", first)
    }
    assert 97.5 <= sum(does.values()) <= 101.5
    classes = [float(share) for share in re.findall(r"(?:^|\), )([\d.]+) %", kernels)]
    assert classes == sorted(classes, reverse=True)
    assert len(classes) <= 3
    several_streams = len(capture.streams) > 1
    assert several_streams or sum(classes) <= 100 - does["is idle"] + 1.5
    exposed = re.search(r"([\d.]+) % exposed communication", kernels)
    assert exposed is None or float(exposed[1]) == does["only communicates"]
