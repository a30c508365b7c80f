"""What the names of ranges that inference engines and training pipelines write say of a step.

`GRAMMARS` has a row for each form of name. docs/engines.md lists the programs, and which rows real
traces have confirmed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from instrument.read.facts.intervals import interval_at

if TYPE_CHECKING:
    from instrument.read.facts.links import Links
    from instrument.read.trace.events import Ints

PREFILL, DECODE, MIXED, DRAFT, VERIFY = "prefill", "decode", "mixed", "draft", "verify"
FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weight gradients"
STAGES = (PREFILL, DECODE, MIXED, DRAFT, VERIFY, FORWARD, BACKWARD, WEIGHTS)
#: The programs that annotate no steps, but the stages of a pipeline.
PIPELINES = frozenset({"torch", "DualPipe"})
# More new tokens of a request than this are not drafts: it was preempted, and is computed again.
_MOST_DRAFTS = 32


class Annotation(NamedTuple):
    """What the name of a range says; what it does not say is None.

    `stage` is one of `STAGES`. `label` is the name of the range in paths, without what differs from
    step to step. A range that `is_step` is one forward pass of an engine, with the number of
    requests and the new tokens of its batch. `captured` is the batch size of the CUDA graph in
    which it runs.
    """

    program: str | None
    stage: str | None
    label: str
    is_step: bool = False
    requests: int | None = None
    prefill_tokens: int | None = None
    decode_tokens: int | None = None
    captured: int | None = None


def parse(name: str) -> Annotation | None:
    """Return what the name of a range says of a step; None if no grammar fits."""
    if _BEGIN.match(name) is None:
        return None
    for program, pattern, read in GRAMMARS:
        if found := re.fullmatch(pattern, name):
            return read(program, found)
    return None


def range_label(name: str) -> str:
    """Return the name of a range in paths: steps of an engine that differ in tokens share one."""
    found = parse(name)
    return name if found is None else found.label


def stages(links: Links) -> Ints:
    """Return the stage of each node of the call tree as an index into `STAGES`; -1 for none.

    It is the stage of the innermost range around the node that has one; inside a draft, all is
    draft. Backward nodes run on threads without ranges: they have the stage of the range of a
    pipeline at their time. One more entry with the value -1 is for the node -1.
    """
    events, scopes, ranges = links.events, links.scopes, links.scopes.ranges
    name = events.name[ranges.index]
    said = {code: parse(events.names[code]) for code in np.unique(name).tolist()}
    engines = {each.program for each in said.values() if each and each.is_step}
    stage_of = {
        code: STAGES.index(each.stage)
        for code, each in said.items()
        if each and each.stage and each.program in engines | PIPELINES
    }
    own = np.array([stage_of.get(code, -1) for code in name.tolist()], np.int64)
    of_path = np.full(len(scopes.paths.names) + 1, -1)
    of_path[scopes.opened] = own
    for path, above in enumerate(scopes.paths.above.tolist()):
        if of_path[path] < 0 or of_path[above] == STAGES.index(DRAFT):
            of_path[path] = of_path[above]
    around = np.append(scopes.enclosing, -1)[scopes.innermost]
    found = of_path[around]
    lost = np.append(scopes.backward, False)[scopes.innermost] & (around < 0)
    if lost.any() and (own >= 0).any():
        known = np.flatnonzero(own >= 0)
        known = known[np.argsort(ranges.start_ns[known], kind="stable")]
        start_ns, end_ns = ranges.start_ns[known], ranges.end_ns[known].copy()
        end_ns[:-1] = np.minimum(end_ns[:-1], start_ns[1:])
        at = interval_at((start_ns, end_ns), links.call_tree.start_ns[lost])
        found[lost] = np.append(own[known], -1)[at]
    return np.append(found, -1)


def _of_counts(program: str, found: re.Match[str]) -> Annotation:
    """The requests in prefill (`context`) and decode (`generation`), with their tokens."""
    said = {key: int(text) for key, text in found.groupdict().items() if text is not None}
    context, generation = said["context"], said["generation"]
    decode = said.get("decode_tokens") if generation else 0
    prefill = said.get("prefill_tokens", None if context else 0)
    stage = (MIXED if generation else PREFILL) if context else _decoding(generation, decode)
    return _step(program, stage, context + generation, prefill, decode)


def _of_mode(program: str, found: re.Match[str]) -> Annotation:
    """A mode and `key=value` in brackets, as SGLang and ATOM write them."""
    fields = {key: int(value) for key, value in _FIELD.findall(found["fields"])}
    stage, requests = _STAGES.get(found["mode"]), fields.get("bs")
    tokens, captured = fields.get("tok", fields.get("toks")), None
    if "raw_bs" in fields:
        requests, captured = fields["raw_bs"], requests
    if padded := re.match(r"bs=\d+/(\d{1,15})", found["fields"]):
        captured = int(padded[1])
    if stage == DECODE and fields.get("p"):
        return _step(program, MIXED, requests, None, None, captured)
    if stage == PREFILL:
        return _step(program, stage, requests, tokens, 0, captured)
    if stage == MIXED:
        return _step(program, stage, requests, fields.get("c_sq"), fields.get("g_sq"), captured)
    decode = fields.get("g_sq", tokens)
    if stage == DECODE:
        decode = requests if decode is None else decode
        stage = _decoding(requests, decode)
    return _step(program, stage, requests, None if stage is None else 0, decode, captured)


def _decoding(requests: int | None, tokens: int | None) -> str | None:
    """The stage of a step without prefill; with more tokens than requests, it verifies drafts."""
    drafts = (tokens or 0) - (requests or 0)
    return DECODE if drafts <= 0 else VERIFY if drafts <= _MOST_DRAFTS * (requests or 0) else None


def _step(program: str, stage: str | None, *counts: int | None) -> Annotation:
    return Annotation(program, stage, f"{program} {stage or 'step'}", True, *counts)


def _of_new(program: str, found: re.Match[str]) -> Annotation:
    """Of the cached requests, some may be in prefill."""
    new, cached = map(int, found.groups())
    return _step(program, PREFILL if not cached else None, new + cached)


def _part(program: str, found: re.Match[str]) -> Annotation:
    groups = found.groupdict()
    return Annotation(program, _STAGES[found["mode"]], groups.get("label") or found[0])


_Read = Callable[[str, "re.Match[str]"], Annotation]
_COUNT = r"\((?:sq)?(?P<{}>\d{{1,15}})(?:_\d+|sk\d+sqsq\d+sqsk\d+)?\)"
_FIELD = re.compile(r"(\w+)=(\d{1,15})(?![\d.])")
_STAGES: dict[str, str] = {
    "EXTEND": PREFILL, "prefill": PREFILL, "DECODE": DECODE, "decode": DECODE,
    "eager_decode": DECODE, "MIXED": MIXED, "TARGET_VERIFY": VERIFY, "VERIFY": VERIFY,
    "DRAFT_LOOP": DRAFT, "DRAFT_EXTEND": DRAFT, "DRAFT_EXTEND_V2": DRAFT, "draft": DRAFT,
    "draft_extend": DRAFT, "F": FORWARD, "Forward": FORWARD, "B": BACKWARD, "I": BACKWARD,
    "Backward": BACKWARD, "W": WEIGHTS,
}  # fmt: skip

#: For each form: the program, a pattern for the whole name, and what reads the match.
GRAMMARS: tuple[tuple[str, str, _Read], ...] = (
    # vLLM 0.14, annotate_profile in v1/worker/gpu_worker.py. With detailed_trace_annotation (0.26),
    # the sums of the tokens, of the lengths and of their products; a trace has `(tokens_squares)`.
    (
        "vLLM",
        r"execute_(?:\d{1,15}_)?context_(?P<context>\d{1,15})"
        + _COUNT.format("prefill_tokens")
        + r"_generation_(?P<generation>\d{1,15})"
        + _COUNT.format("decode_tokens"),
        _of_counts,
    ),
    # Older vLLM (35d5cda1), at the same place.
    ("vLLM", r"execute_new_(\d{1,15})_cached_(\d{1,15})", _of_new),
    # vLLM, with VLLM_CUSTOM_SCOPES_FOR_PROFILING, in v1/worker/gpu_model_runner.py.
    ("vLLM", r"gpu_model_runner: (?P<mode>draft)", _part),
    # SGLang 0.5 (01144484), build_step_span_name in srt/utils/profile_utils.py, and the
    # replays in frozen_kv_mtp_cuda_graph_runner.py.
    ("SGLang", r"step\[(?P<mode>[A-Z_0-9]+) (?P<fields>(?:raw_)?bs=.*)\]", _of_mode),
    # SGLang 0.5, spec_stage_span, around steps of the draft model.
    ("SGLang", r"(?P<mode>draft|draft_extend)", _part),
    # TensorRT-LLM, _forward_step in _torch/pyexecutor/py_executor.py (NVTX).
    (
        "TensorRT-LLM",
        r"(?:\[Executor\] )?_forward_step(?: \d{1,15})?: (?P<context>\d{1,15}) ctx reqs, "
        r"(?:(?P<prefill_tokens>\d{1,15}) ctx tokens, )?(?P<generation>\d{1,15}) gen reqs",
        _of_counts,
    ),
    # ATOM at ffdf3bb5, build_run_label in model_engine/run_labels.py.
    ("ATOM", r"(?P<mode>prefill|(?:eager_)?decode)\[(?P<fields>bs=.*)\]", _of_mode),
    ("ATOM", r"(?P<label>(?P<mode>draft))\[.*\]", _part),
    # torch 2.13, distributed/pipelining/schedules.py, which torchtitan uses: stage and microbatch.
    ("torch", r"(?P<label>PP:\d{1,15}(?P<mode>F|B|I|W))\d*", _part),
    ("torch", r"(?P<mode>Forward|Backward) \d{1,15}", _part),
    # DualPipe, in DeepSeek's public traces of its training.
    ("DualPipe", r"(?:attn|mlp|dispatch|combine)\((?P<mode>F|B|W)\)", _part),
)
# What the names that a pattern fits begin with: most names in a trace are others.
_BEGIN = re.compile(
    r"execute_|gpu_model_runner: d|step\[|draft|\[Exec|_forward_step|prefill\[|decode\[|eager_d|"
    r"PP:|Forward |Backward |attn\(|mlp\(|dispatch\(|combine\("
)
