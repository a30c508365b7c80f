"""The parts of the steps that do not train: validation, checkpoints, logging."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from instrument.read.facts.graph_nodes import has_run, makers, ran, ranges_around, wasteful_ranges
from instrument.read.facts.groupby import intern
from instrument.read.facts.intervals import Intervals, concatenated, interval_at, merged, within
from instrument.read.facts.links import thread_of_steps
from instrument.read.facts.places import users_source
from instrument.read.trace.events import Flags, Ints, called_operators
from instrument.read.views.views import TRAIN, Views

#: A tenth of the training time is usual for a validation, so a smaller part does not count.
LEAST_PART = 0.1
# The names of ranges and functions, and what to do about each kind. Words with another meaning in a
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
# Functions of libraries whose names alone do not say what they are for: how a user calls them, and
# their kind.
_LIBRARIES = tuple(
    (re.compile(rf"(?:^|/){frame}"), call, kind)
    for frame, call, kind in (
        (r"torch/serialization\.py\(\d+\): (save\w*)", "torch.{}", 1),
        (r"safetensors/torch\.py\(\d+\): (save\w*)", "safetensors.torch.{}", 1),
        (
            r"torch/distributed/checkpoint/\w+\.py\(\d+\): (save)",
            "torch.distributed.checkpoint.{}",
            1,
        ),
        (r"torch/utils/tensorboard/writer\.py\(\d+\): (\w+)", "SummaryWriter.{}", 2),
        (r"(wandb|mlflow|matplotlib)/[\w/]+\.py\(\d+\): (log\w*|savefig)", "{}.{}", 2),
        (r"logging/__init__\.py\(\d+\): _log", "logging", 2),
    )
)
#: What to do about calls in eval mode; training may need their results, such as those of a rollout.
EVAL = (
    "Give one call more samples; call the model for validation less often, such as once in an "
    "epoch, or on fewer samples; if these calls are no validation, keep their results"
)
_REPEATED = (
    "Use the results of the other call, which is trained: call detach() on them for metrics or logs"
)
_NONE = np.zeros(0, np.int64), np.zeros(0, np.int64)


class Part(NamedTuple):
    """Time of the steps that does not train.

    Attributes:
        name: what the time goes to.
        change: what to do about it.
        spans: the starts and ends, on the thread of the steps; sorted, without overlaps.
        events: the positions of the ranges or Python frames of these spans.
        is_range: whether the events are ranges.
    """

    name: str
    change: str
    spans: Intervals
    events: Ints
    is_range: bool


def untrained_parts(capture: Views) -> list[Part]:
    """Return the parts of the steps that do not train, each of at least a tenth of them.

    A part is a range with a name such as `validation`, `save_checkpoint` or `log_metrics`; with
    Python stacks, a function with such a name, `torch.save`, or a writer of logs; or calls of a
    model in eval mode or with the inputs of another call, if other calls of the same model have a
    backward. Nothing in it has a backward in the window. There are none in a window without a
    backward, such as one of inference.
    """
    return capture.once("untrained parts", lambda: _parts(capture))


def _parts(capture: Views) -> list[Part]:
    if capture.phase != TRAIN or not len(ran(capture.links)):
        return []
    steps, found = capture.links.counted_steps, list[Part]()
    for search in (_named_ranges, _functions, _calls_without_backward):
        known = merged(*concatenated([_NONE, *(part.spans for part in found)]))
        found += [
            part
            for part in search(capture, known)
            if steps.covered(*part.spans) >= LEAST_PART
            and (steps.holds(part.spans[0]) >= 0).any()  # it may begin between steps
        ]
    return found


def _named_ranges(capture: Views, _: Intervals) -> Iterator[Part]:
    """The outermost ranges whose names say that they do not train, by path."""
    scopes, modules = capture.links.scopes, capture.about.module_types
    change = [None if name in modules else change_of(name) for name in scopes.paths.names]
    is_named = np.array([*map(bool, change)], np.bool_)[scopes.opened]
    is_named &= scopes.ranges.thread == thread_of_steps(capture.links)
    chosen = scopes.ranges.outermost(is_named) & ~trains(capture)
    for path in np.unique(scopes.opened[chosen]).tolist():
        yield _of_ranges(
            capture, chosen & (scopes.opened == path), _quoted(capture, path), change[path] or ""
        )


def _calls_without_backward(capture: Views, known: Intervals) -> Iterator[Part]:
    """The outermost calls, in eval mode or with old inputs, of modules that other calls train.

    They are outside of `known`.
    """
    # The first call in the window may repeat an earlier one.
    repeated = {name: number + 1 for name, number in capture.about.repeated_calls.items()}
    kinds = (
        (capture.about.eval_calls, "in eval mode", EVAL),
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
    trained = _count(name[trains(capture)], len(names)) > 0
    for counts, how, change in kinds:
        # Only the number of these calls is known: it must be that of the calls found, or more.
        most = np.array([counts.get(each, 0) for each in names], np.int64)
        fits = trained & (_count(name[found], len(names)) <= most)
        chosen = ranges.outermost(found & fits[name])
        for path in np.unique(scopes.opened[chosen]).tolist():
            what = f"calls of {_quoted(capture, path)} {how}"
            yield _of_ranges(capture, chosen & (scopes.opened == path), what, change)
        found &= ~ranges.at_or_inside(chosen)


def _functions(capture: Views, known: Intervals) -> Iterator[Part]:
    """The outermost calls of functions that do not train, by function, outside of `known`."""
    frames, events = capture.links.frames, capture.events
    if not len(frames):
        return
    chosen = events.named(lambda name: _of_frame(name) is not None)[frames.index]
    chosen &= frames.thread == thread_of_steps(capture.links)
    chosen &= within(known, frames.start_ns, frames.end_ns) == 0
    made = makers(capture.links)
    times = np.sort(events.start_ns[made[has_run(capture.links, made)]])
    first, last = (np.searchsorted(times, each) for each in (frames.start_ns, frames.end_ns))
    chosen = frames.outermost(chosen & (first == last))
    for code in np.unique(events.name[frames.index[chosen]]).tolist():
        own = np.flatnonzero(chosen & (events.name[frames.index] == code))
        name, change = _of_frame(events.names[code]) or ("", "")
        spans = merged(frames.start_ns[own], frames.end_ns[own])
        yield Part(name, change, spans, frames.index[own], is_range=False)


def _of_ranges(capture: Views, chosen: Flags, name: str, change: str) -> Part:
    ranges = capture.links.scopes.ranges
    spans = merged(ranges.start_ns[chosen], ranges.end_ns[chosen])
    return Part(name, change, spans, ranges.index[chosen], is_range=True)


def _quoted(capture: Views, path: int) -> str:
    return f"range {capture.links.scopes.paths.names[path]!r}"


def trains(capture: Views) -> Flags:
    """A mask of the ranges in which an operator made a node that a backward of the window ran."""
    made, ranges = makers(capture.links), capture.links.scopes.ranges
    around = ranges_around(capture.links, made[has_run(capture.links, made)])
    found: Flags = ranges.with_descendants(_count(around, len(ranges))) > 0
    return found


def _count(of: Ints, groups: int) -> Ints:
    return np.bincount(of[of >= 0], minlength=groups)


@lru_cache(maxsize=100_000)
def change_of(name: str) -> str | None:
    """What to do about a range or function of this name; None if it may train."""
    last = re.sub(r"(?<=[a-z])(?=[A-Z])|\s+", "_", name.rpartition(".")[2]).strip("_ ").lower()
    if len(last) > _LONGEST_NAME:  # the time of a search grows with the square of the length
        return None
    return next((change for pattern, change in _KINDS if pattern.fullmatch(last)), None)


@lru_cache(maxsize=100_000)
def _of_frame(name: str) -> tuple[str, str] | None:
    """The name of a function that does not train, and what to do about it; None for others."""
    source = users_source(name)
    if source is not None:
        change = change_of(source.rpartition(" in ")[2])
        return None if change is None else (source, change)
    for pattern, call, kind in _LIBRARIES:
        if match := pattern.search(name):
            return call.format(*match.groups()), _KINDS[kind][1]
    return None
