"""The parts of the steps that do not train: validation, checkpoints, logging."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from instrument.base.units import percent
from instrument.read.advise.check import ONE_STEP, Check, NotApplicable, Problem, samples_of_run
from instrument.read.facts.graph_nodes import (
    makers,
    ran,
    ranges_around,
    training_ranges,
    wasteful_ranges,
)
from instrument.read.facts.groupby import intern
from instrument.read.facts.intervals import Intervals, concatenated, interval_at, merged
from instrument.read.facts.links import thread_of_steps
from instrument.read.facts.step_index import step_at
from instrument.read.trace.events import Flags, Ints, called_operators
from instrument.read.trace.line_samples import LineSamples
from instrument.read.views.coverage_rows import CPU_IN_STEPS
from instrument.read.views.lines import share_interval
from instrument.read.views.views import TRAIN, Views

# A tenth of the training time is usual for a validation, so a smaller part does not count.
_LEAST_PART = 0.1
# The names of ranges, and what to do about each kind. Words with another meaning in a
# model are left out: `next_val` is a value, `log_prob` a logarithm, `save_for_backward` a tensor.
_WHEN = r"(?:(?:run|do|do_epoch|perform|maybe|on|after|before|final|full|mid|async|the)_)*"
_ALSO = r"(?:_(?:end|start|hook|\d+))*(?:_(?:and|every|if|to|on|with|in)_\w+)?"
_LONGEST_NAME = 500
_KINDS = tuple(
    (re.compile(f"{_WHEN}(?:{names}){_ALSO}", re.VERBOSE), change)
    for names, change in (
        (
            r"""(?:\w+_)?(?:val|valid|validation|eval|evaluation|test)_(?:(?:one|current|inner)_)?
            (?:epochs?|loop|steps?|phase|pass|run|round|iters?|iteration|batch(?:es)?|(?:data)?set)
            |(?:actual_|model_)?(?:validation|evaluation|evaluat(?:e|ing)|validat(?:e|ing)|val|eval)
            |(?:validat|evaluat)e_(?:one_)?(?:epochs?|loop|steps?|batch(?:es)?|model|policy|data\w*)
            |eval_(?:model|policy)|(?:(?:compute|log)_)?validation_(?:loss|metrics|accuracy)
            |log_validation|fit_valid|test|prediction_loop|inference_on_dataset|estimate_loss""",
            "Validate less often, such as once in an epoch, or on fewer samples",
        ),
        (
            r"""(?:save|write|dump|store|take)_(?:\w+_)?(?:checkpoints?|ckpts?|snapshots?)
            |save_(?:(?:best|last|latest|final|full|lora|ema|training|model|optimizer|sharded)_)*
            (?:models?|networks?|weights|state|state_dict|pretrained|optimizer|trainer|epoch|best
            |last|latest|recovery|progress|on_master)
            |save|checkpoint(?:_model|_save)?|ckpt|snapshot|push_to_hub""",
            "Save less often, or in the background: torch.distributed.checkpoint.async_save",
        ),
        (
            r"""log_(?:(?:to|train|training|val|eval|step|epoch|batch|loss|model|system|all)_)*
            (?:metrics?|scalars?|dict|stats|statistics|images?|histograms?|figures?|videos?|tables?
            |artifacts?|samples|gradients|grad_norms|hyperparams|wandb|tensorboard)
            |log_(?:step|epoch|progress|everything)|(?:tensorboard|wandb|mlflow)(?:_log)?|training_log
            |(?:compute|update|write|save|reduce|gather)_metrics|(?:dump|write)_logs?|log|logging
            |metrics|(?:write|update)_summary|add_(?:scalars?|histogram|images?|figure|video)
            |save_(?:images?|samples|figures?|plots?)|(?:plot|visuali[sz]e)(?:_\w+)?""",
            "Log less often, such as in every 50th step, or in another thread",
        ),
    )
)
# Functions of libraries by their files and names, how a user calls them, and their kind.
_LIBRARIES = tuple(
    (re.compile(file), re.compile(function), call, _KINDS[kind][1])
    for file, function, call, kind in (
        (r"torch/serialization\.py", r"_?(save)", "torch.{}", 1),
        (r"torch/distributed/checkpoint/\w+\.py", "(save)", "torch.distributed.checkpoint.{}", 1),
        (r"safetensors/torch\.py", r"(save\w*)", "safetensors.torch.{}", 1),
        (r"torch/utils/tensorboard/writer\.py", r"SummaryWriter\.(add_\w+)", "SummaryWriter.{}", 2),
        (r"(?:wandb|mlflow)/.*", r"(?:\w+\.)*(log\w*)", "{}", 2),
        (r"matplotlib/.*", r"(?:\w+\.)*(savefig)", "{}", 2),
        (r"logging/__init__\.py", r"Logger\.(_log)", "logging", 2),
    )
)
# A part with more of the samples is the program, not beside it.
_ALMOST_ALL = 0.9
# What to do about calls in eval mode; training may need their results, such as those of a rollout.
_EVAL = (
    "Give one call more samples; call the model for validation less often, such as once in an "
    "epoch, or on fewer samples; if these calls are no validation, keep their results"
)
_REPEATED = (
    "Use the results of the other call, which is trained: call detach() on them for metrics or logs"
)
_FEW_CALLS = 4  # in eval mode, in a step; after more of them, training may need their results
_ONCE = (
    "{change}. In this window it occurs once, which does not show how often it occurs: if it is in "
    "one of many steps, it costs little."
)


class _Part(NamedTuple):
    """Ranges that do not train, and their times on the thread of the steps, without overlaps."""

    name: str
    change: str
    spans: Intervals
    events: Ints


def not_training(capture: Views) -> Iterator[Problem]:
    """Find the parts of the steps that do not train; the simulation leaves them out.

    A part is a range with a name such as `validation`, `save_checkpoint` or `log_metrics`; or calls
    of a model in eval mode or with the inputs of another call, if other calls of the same model
    have a backward. Nothing in it has a backward in the window. There are none in a window without
    a backward, such as one of inference.

    The saving is unknown if a part occurs only in one of several steps, or if a step calls a model
    in eval mode many times.
    """
    if capture.phase != TRAIN or not len(ran(capture.links)):
        return
    steps, parts = capture.links.counted_steps, [*_named_ranges(capture)]
    none = np.zeros(0, np.int64), np.zeros(0, np.int64)
    known = merged(*concatenated([none, *(part.spans for part in parts)]))
    for part in (*parts, *_calls_without_backward(capture, known)):
        at = steps.holds(part.spans[0])
        holding = len(np.unique(at[at >= 0]))
        often = f"{(at >= 0).sum() / holding:,.0f}× a step"
        if holding < steps.count:
            often = f"in {holding} of {steps.count} steps"
        every = step_at(capture.events, capture.links.steps, part.spans[0])
        is_once = len(capture.links.steps) > 1 and len(np.unique(every[every >= 0])) == 1
        may_train = part.change == _EVAL and (at >= 0).sum() > _FEW_CALLS * holding
        share = steps.covered(*part.spans)
        yield Problem(
            f"{percent(share)} of the {steps.what} goes to {part.name}"
            f"{'' if may_train else ', not to training'}: {often}",
            part.events,
            None if is_once else share,
            edit=None
            if is_once or may_train
            else lambda whatif, of=part.events: whatif.scale_events(of, by=0),  # type: ignore[misc]
            change=_ONCE.format(change=part.change) if is_once else f"{part.change}.",
            is_large=is_once,
        )


NOT_TRAINING = Check(
    "not-training",
    not_training,
    verify="--ranges",
    least_share=_LEAST_PART,
    lowest=_LEAST_PART,
    least_saving=0.05,
    needs=(ONE_STEP,),
    coverage=(CPU_IN_STEPS,),
)


def beside_training(capture: Views) -> Iterator[Problem]:
    """Find the functions by which a run validates, saves or logs, by the samples of its lines.

    Raises:
        NotApplicable: the run was not sampled, or it does not train.
    """
    found, whole = samples_of_run(capture)
    if capture.phase != TRAIN or not len(ran(capture.links)):
        raise NotApplicable
    parts = Counter[tuple[str, str | None, str]]()
    for _, stack, count in found.of_phase(TRAIN):
        if (part := _beside(found, stack)) is not None:
            parts[part] += count
    for (name, place, change), count in parts.most_common():
        share, (low, high) = count / whole, share_interval(count, whole)
        if share <= _ALMOST_ALL:
            yield Problem(
                name,
                share=share,
                place=(None, place),
                variant=f"{name} {place}",
                change=f"{change}.",
                saves=(share, (low or 0.0) / 2, high or share),  # some of it stays
            )


BESIDE_TRAINING = Check(
    "beside-training",
    beside_training,
    title="{share} of the run goes to {what}, not to training",
    verify="--lines",
    least_share=_LEAST_PART,
    lowest=_LEAST_PART,
)


def _beside(found: LineSamples, stack: int) -> tuple[str, str | None, str] | None:
    """The outermost function of a stack that does not train, where it is called, and a change."""
    caller = None
    for frame in reversed(found.stacks[stack]):
        kind, _, _, function = found.frames[frame]
        if kind == "user":
            if caller is not None and (change := change_of(function.rpartition(".")[2])):
                return function.rpartition(".<locals>.")[2], found.place_of(caller), change
            caller = frame
            continue
        for file, name, call, change in _LIBRARIES:
            if file.fullmatch(found.file(frame)) and (match := name.fullmatch(function)):
                place = None if caller is None else found.place_of(caller)
                return call.format(match.group(1)), place, change
    return None


def _named_ranges(capture: Views) -> Iterator[_Part]:
    """The outermost ranges whose names say that they do not train, by path."""
    scopes, modules = capture.links.scopes, capture.about.module_types
    change = [None if name in modules else change_of(name) for name in scopes.paths.names]
    is_named = np.array([*map(bool, change)], np.bool_)[scopes.opened]
    is_named &= scopes.ranges.thread == thread_of_steps(capture.links)
    chosen = scopes.ranges.outermost(is_named) & ~training_ranges(capture.links)
    for path in np.unique(scopes.opened[chosen]).tolist():
        name, own = f"range {scopes.paths.names[path]!r}", chosen & (scopes.opened == path)
        yield from _of_ranges(capture, own, name, change[path] or "")


def _calls_without_backward(capture: Views, known: Intervals) -> Iterator[_Part]:
    """The outermost calls, in eval mode or with old inputs, of modules that other calls train.

    They are outside of `known`.
    """
    # The first call in the window may repeat an earlier one.
    repeated = {name: number + 1 for name, number in capture.about.repeated_calls.items()}
    kinds = (
        (capture.about.eval_calls, "in eval mode", _EVAL),
        (repeated, "with the inputs of another call", _REPEATED),
    )
    if not any(counts for counts, *_ in kinds):
        return
    events, links = capture.events, capture.links
    tree, scopes = links.call_tree, links.scopes
    ranges, (codes, names) = scopes.ranges, intern(scopes.paths.names)
    name = codes[scopes.opened]
    called = np.flatnonzero(called_operators(events)[tree.index])
    calls, records = (
        ranges.with_descendants(_count(ranges_around(links, tree.index[nodes]), len(ranges))) > 0
        for nodes in (called, called[scopes.recording[called]])
    )
    in_backward = scopes.nodes.inside(scopes.backward)[~scopes.backward]
    found = calls & (~records | wasteful_ranges(links, makers(links))) & ~in_backward
    found &= interval_at(known, ranges.start_ns) < 0
    found &= ranges.thread == thread_of_steps(links)
    trained = _count(name[training_ranges(links)], len(names)) > 0
    for counts, how, change in kinds:
        # Only the number of these calls is known: it must be that of the calls found, or more.
        most = np.array([counts.get(each, 0) for each in names], np.int64)
        fits = trained & (_count(name[found], len(names)) <= most)
        chosen = ranges.outermost(found & fits[name])
        for path in np.unique(scopes.opened[chosen]).tolist():
            what = f"calls of range {scopes.paths.names[path]!r} {how}"
            yield from _of_ranges(capture, chosen & (scopes.opened == path), what, change)
        found &= ~ranges.at_or_inside(chosen)


def _of_ranges(capture: Views, chosen: Flags, name: str, change: str) -> Iterator[_Part]:
    ranges, steps = capture.links.scopes.ranges, capture.links.counted_steps
    spans = merged(ranges.start_ns[chosen], ranges.end_ns[chosen])
    begins_in_step = (steps.holds(spans[0]) >= 0).any()  # it may begin between steps
    if begins_in_step and steps.covered(*spans) >= _LEAST_PART:
        yield _Part(name, change, spans, ranges.index[chosen])


def _count(of: Ints, groups: int) -> Ints:
    return np.bincount(of[of >= 0], minlength=groups)


@lru_cache(maxsize=100_000)
def change_of(name: str) -> str | None:
    """What to do about a range of this name; None if it may train."""
    last = re.sub(r"(?<=[a-z])(?=[A-Z])|\s+", "_", name.rpartition(".")[2]).strip("_ ").lower()
    if len(last) > _LONGEST_NAME:  # the time of a search grows with the square of the length
        return None
    return next((change for pattern, change in _KINDS if pattern.fullmatch(last)), None)
