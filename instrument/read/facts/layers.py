"""Find the layer of each device event, and say on what evidence.

The first evidence that answers counts: what was recorded around the launch, torch's annotation of
the nodes of CUDA graphs, the name of the kernel, another trace of the same program, or the sequence
of the kernels. What none of them answers stays unknown.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from string import digits
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.base.range_names import COMPILED_CODE, RECOMPUTED
from instrument.read.facts.call_tree import nest
from instrument.read.facts.cuda_graphs import replayed
from instrument.read.facts.device_work import COMMUNICATION, KERNEL, KINDS, Work, launched_ns
from instrument.read.facts.groupby import distinct, intern
from instrument.read.facts.launches import have_work
from instrument.read.facts.links import Links
from instrument.read.facts.memory_attribution import module_frames
from instrument.read.facts.paths import Paths, paths_of
from instrument.read.facts.sequence import Blocks, aligned, blocks, kinds_of_names
from instrument.read.facts.step_index import step_at
from instrument.read.trace.events import Flags, Ints, is_runtime

EVIDENCE = ("recorded", "annotation", "kernel name", "other trace", "sequence", "unknown")
RECORDED, ANNOTATION, KERNEL_NAME, OTHER_TRACE, SEQUENCE, UNKNOWN = range(6)
# The share of the time that is right, as measured by test_layers.py on traces whose modules are
# known; of annotations and names of kernels there is no such trace. For the sequence, by the least
# agreement of the layers.
_RIGHT = (1.0, 0.9, 0.9, 0.98)
_RIGHT_BY_AGREEMENT = ((0.98, 0.98), (0.95, 0.93), (0.9, 0.88))
_IN_KERNEL = re.compile(r"(?<![a-z])(?:layers?|blocks?|h)[._]\d+(?![a-z0-9])", re.IGNORECASE)
# Numbered ranges of a program's loops, which are no layers.
_LOOPS = re.compile(r"step|iter|batch|epoch|request|token|sample|rank|execute|prefill|decode", re.I)
# Modules are layers if there are so many of one class in a module, or two that call modules.
_FEWEST = 3
# Blocks with one number are the layer that holds this share of what was recorded in them.
_MOSTLY = 0.8


class Layers(NamedTuple):
    """The layers of a trace; all arrays but `of_node` have an entry for each row of the work.

    Attributes:
        names: the layers, each once.
        of: the layer as an index into `names`; -1 outside of all layers, and if it is not known.
        evidence: an index into `EVIDENCE`.
        confidence: the probability that the layer is right; 0 if it is not known.
        of_node: the recorded layer of each node of the call tree; -1 for none.
    """

    names: list[str]
    of: Ints
    evidence: Ints
    confidence: NDArray[np.float64]
    of_node: Ints


class _Answer(NamedTuple):
    """What one kind of evidence says; `of` is -1 outside of all layers if it is `known`."""

    names: list[str]
    of: Ints
    known: Flags
    confidence: float | NDArray[np.float64]


def layers(links: Links, work: Work, like: tuple[Links, Work] | None = None) -> Layers:
    """Find the layers of the device events; `like` is another trace of the same program.

    Cost: two searches for each CPU event, and about 4 µs for each device event.
    """
    answers, of_node = _direct(links, work)
    answers.append(_unanswered(work) if like is None else _as_in(links, work, *like))
    found = _first(answers, of_node)
    return _first([*answers, _by_sequence(links, work, found)], of_node)


def layers_of_nodes(links: Links, found: Layers) -> Ints:
    """The layer of each node of the call tree: the recorded one, or that of all its device work."""
    tree, node = links.call_tree, links.launched[1]
    order = np.argsort(node, kind="stable")
    at, of = node[order], found.of[order]
    first, after = (np.searchsorted(at, each) for each in (np.arange(len(tree)), tree.until))
    changes = np.cumsum(np.append(False, of[1:] != of[:-1]))
    is_one = after > first
    is_one[is_one] = changes[first[is_one]] == changes[after[is_one] - 1]
    return np.where((found.of_node < 0) & is_one, np.append(of, -1)[first], found.of_node)


def _direct(links: Links, work: Work) -> tuple[list[_Answer], Ints]:
    """The answers that come from the trace itself without comparing kernels."""
    recorded, of_node = _recorded(links, work)
    return [recorded, _annotated(links, work), _in_kernels(links, work)], of_node


def _first(answers: list[_Answer], of_node: Ints) -> Layers:
    """For each row, the first answer."""
    codes, names = intern(name for answer in answers for name in answer.names)
    of, evidence = np.full(len(answers[0].of), -1), np.full(len(answers[0].of), UNKNOWN)
    confidence, begin = np.zeros(len(of)), 0
    for kind, answer in enumerate(answers):
        new = answer.known & (evidence == UNKNOWN)
        code = np.append(codes[begin : begin + len(answer.names)], -1)
        of[new], evidence[new] = code[answer.of[new]], kind
        confidence = np.where(new, answer.confidence, confidence)
        if kind == RECORDED:
            of_node = code[of_node]
        begin += len(answer.names)
    return Layers(names, of, evidence, confidence, of_node)


def _unanswered(work: Work) -> _Answer:
    count = len(work.event)
    return _Answer([], np.full(count, -1), np.zeros(count, np.bool_), 0.0)


def _recorded(links: Links, work: Work) -> tuple[_Answer, Ints]:
    """The ranges or modules around the launches; also the layer of each node of the call tree."""
    events, tree, scopes = links.events, links.call_tree, links.scopes
    names, code, known = list[str](), np.full(len(tree) + 1, -1), np.zeros(len(tree) + 1, np.bool_)
    of_path, names = _layers_of_paths(scopes.paths, modules=False)
    if names:
        code = np.append(of_path, -1)[scopes.path_of_node]
        known = scopes.path_of_node >= 0
    elif len(modules := nest(events, module_frames(events))) and len(tree):
        texts = [name.partition(": ")[2] for name in events.names]
        paths, path = paths_of(modules, events.name[modules.index].astype(np.int64), texts)
        of_path, names = _layers_of_paths(paths, modules=True)
        scope, place = scopes.innermost, np.arange(len(tree))
        in_backward = np.append(scopes.backward, False)[scope]
        place = np.where(in_backward, np.append(scopes.forward, -1)[scope], place)
        around = modules.node_at(tree.thread[place], tree.start_ns[place])
        code[:-1] = np.append(of_path, -1)[np.append(path, -1)[np.where(place >= 0, around, -1)]]
        known[:-1] = place >= 0
    if not names:
        return _unanswered(work), np.full(len(tree), -1)
    # Inside compiled code and graphs, modules do not run.
    is_compiled = events.named(lambda name: COMPILED_CODE.search(name) is not None)
    hides = tree.at_or_inside(is_compiled[tree.index])
    known[:-1] &= (code[:-1] >= 0) | ~hides
    node = tree.nodes_of(work.launch)
    of, is_known = code[node], known[node] & (node >= 0)
    is_known &= (of >= 0) | ~replayed(events, work.event, work.call)
    return _Answer(names, of, is_known, _RIGHT[RECORDED]), code[:-1]


def _layers_of_paths(paths: Paths, *, modules: bool) -> tuple[Ints, list[str]]:
    """The layer of each path as an index into the returned names; -1 outside of all layers.

    Layers are numbered siblings, such as `layers.0` to `layers.23`, the outermost ones. Other
    modules beside them, such as an embedding, are layers of their own. There are no names if
    nothing is numbered.
    """
    plain = [name.removesuffix(RECOMPUTED) for name in paths.names]
    siblings = defaultdict[tuple[int, str], list[int]](list)
    for k, (above, name) in enumerate(zip(paths.above.tolist(), plain)):
        if (base := name.rstrip(digits)) != name and (modules or not _LOOPS.search(base)):
            siblings[above, base].append(k)
    is_layer, calls = np.zeros((2, len(plain)), np.bool_)
    calls[:] = paths.after - np.arange(len(plain)) > 1
    for group in siblings.values():
        count = len({plain[k] for k in group})
        is_layer[group] = count >= _FEWEST or (count > 1 and calls[group].all())
    holds = np.append(paths.with_descendants(is_layer.astype(np.int64)) > is_layer, modules)
    top = np.full(len(plain) + 1, -1)  # the last is for no path above
    for k, above in enumerate(paths.above.tolist()):
        is_top = is_layer[k] or (holds[above] and not holds[k])
        top[k] = k if top[above] < 0 and is_top else top[above]
    codes, names = intern(plain)
    return np.append(codes, -1)[top[:-1]], names if is_layer.any() else []


def _annotated(links: Links, work: Work) -> _Answer:
    """What torch's tool wrote on the nodes of CUDA graphs: the numbered part, or all of it."""
    codes, texts = intern([each.annotation for each in links.events.details] + [None])
    of = codes[links.events.detail[work.event]]
    parts = [str(text).split("/") for text in texts]
    names = [next((each for each in some if each[-1:].isdigit()), "/".join(some)) for some in parts]
    known = np.array([text is not None for text in texts], np.bool_)
    return _Answer(names, of, known[of], _RIGHT[ANNOTATION])


def _in_kernels(links: Links, work: Work) -> _Answer:
    """The layers in the names of kernels, such as `layers_3`, if at least two differ."""
    found = [_IN_KERNEL.search(name) for name in links.events.names]
    codes, names = intern(each[0] if each else "" for each in found)
    of = codes[links.events.name[work.event]]
    known = np.array([name != "" for name in names], np.bool_)
    return _Answer(names, of, known[of] & (known.sum() > 1), _RIGHT[KERNEL_NAME])


def _as_in(links: Links, work: Work, other: Links, others_work: Work) -> _Answer:
    """The layers of another trace, whose kernels run in the same order, or were captured so."""
    known, events = _first(*_direct(other, others_work)), links.events
    kinds = range(len(KINDS))
    rows = max(_main_streams(other, others_work, kinds), key=len, default=known.of[:0])
    theirs = [other.events.names[k] for k in other.events.name[others_work.event[rows]].tolist()]
    label = np.where(known.evidence != UNKNOWN, known.of, -2)[rows]
    captured, kernels = _captured(other)
    if len(kernels) > len(theirs):
        theirs, of_node = kernels, known.of_node[other.call_tree.nodes_of(captured)]
        label = np.where(of_node >= 0, of_node, -2)
    of = np.full(len(work.event), -2)
    for ours in _main_streams(links, work, kinds):
        names = [events.names[k] for k in events.name[work.event[ours]].tolist()]
        codes, _ = intern([*names, *theirs])
        of[ours] = aligned(codes[: len(ours)], codes[len(ours) :], label)
    return _Answer(known.names, np.maximum(of, -1), of != -2, _RIGHT[OTHER_TRACE])


def _captured(links: Links) -> tuple[Ints, list[str]]:
    """The launches without device work, as those of a graph's capture, and their kernels.

    Only ROCm writes the kernel on the launch.
    """
    events = links.events
    details = [each.launched_kernel for each in events.details] + [None]
    calls = np.flatnonzero(events.among(is_runtime))
    calls = calls[~have_work(events, links.launches.device, calls)]
    calls = calls[np.argsort(events.start_ns[calls], kind="stable")]
    names = [details[k] for k in events.detail[calls].tolist()]
    has_name = np.array([name is not None for name in names], np.bool_)
    return calls[has_name], [name for name in names if name is not None]


def _main_streams(
    links: Links, work: Work, kinds: Sequence[int] = (KERNEL, COMMUNICATION)
) -> list[Ints]:
    """For each device, the work of the stream that computes most, as rows, by their start."""
    thread, device = links.events.thread[work.event], _devices(links, work)
    computes = np.bincount(thread, work.duration_ns * (work.kind == KERNEL))
    order = work.by_start[np.isin(work.kind, kinds)[work.by_start]]
    found = []
    for each in distinct(device[order]).tolist():
        own = order[device[order] == each]
        main = distinct(thread[own])
        found.append(own[thread[own] == main[np.argmax(computes[main])]])
    return found


def _by_sequence(links: Links, work: Work, found: Layers) -> _Answer:
    """The blocks of kernels that repeat; recorded layers in them give all of them their names."""
    events, device, names = links.events, _devices(links, work), list[str]()
    of, confidence = np.full(len(work.event), -1), np.zeros(len(work.event))
    for rows in _main_streams(links, work):
        is_other = device == device[rows[0]]
        time_ns, part = launched_ns(events, work), np.zeros(len(rows), np.int64)
        is_launched = bool(
            (work.launch[is_other] >= 0).all() and (np.diff(time_ns[rows]) > 0).all()
        )
        if is_launched:
            part = step_at(events, links.steps, time_ns[rows])
        codes, kernels = intern(events.names[k] for k in events.name[work.event[rows]].tolist())
        cut = blocks(codes, kinds_of_names(kernels), work.duration_ns[rows], part)
        of[rows] = _named(cut, rows, work, found, names)
        by_agreement = zip(*((cut.agreement >= at, right) for at, right in _RIGHT_BY_AGREEMENT))
        confidence[rows] = np.select(*map(list, by_agreement))
        # Copies, and what another stream ran, are in the layer in which they were launched; without
        # launches, in that around them if this stream waited for them.
        is_other[rows] = False
        others, time_ns = np.flatnonzero(is_other), time_ns if is_launched else work.start_ns
        before = np.searchsorted(time_ns[rows], time_ns[others], "right") - 1
        after = np.minimum(before + 1, len(rows) - 1)
        inside = (before >= 0) & (cut.layer[before] >= 0) & (cut.layer[after] >= 0)
        if is_launched:
            middle = (time_ns[rows[before]] + time_ns[rows[after]]) // 2
            before = np.where(time_ns[others] > middle, after, before)
        else:
            inside &= cut.block[before] == cut.block[after]
            inside &= work.start_ns[others] >= work.end_ns[rows[before]]
            inside &= work.end_ns[others] <= work.start_ns[rows[after]]
        of[others[inside]] = of[rows[before[inside]]]
        confidence[others[inside]] = confidence[rows[before[inside]]]
    return _Answer(names, of, of >= 0, confidence)


def _named(cut: Blocks, rows: Ints, work: Work, found: Layers, names: list[str]) -> Ints:
    """The layer of each kernel by its block, as an index into `names`, which grow; -1 for none."""
    width = int(cut.layer.max(initial=0)) + 1
    key = np.where(cut.layer >= 0, cut.kind * width + cut.layer, -1)
    votes = defaultdict[int, Counter[int]](Counter)
    known = np.flatnonzero((key >= 0) & (found.evidence[rows] != UNKNOWN))
    columns = (key[known], found.of[rows[known]], work.duration_ns[rows[known]])
    for each, of, ns in zip(*(column.tolist() for column in columns)):
        votes[each][of] += ns
    has_names = {each // width for each, some in votes.items() if max(some) >= 0}
    code = np.full(int(key.max(initial=0)) + 2, -1)  # the last is for -1
    for each in distinct(key[key >= 0]).tolist():
        kind, layer = divmod(each, width)
        of, ns = max(votes[each].items(), key=lambda item: item[1], default=(-1, 0))
        is_named = of >= 0 and ns >= _MOSTLY * votes[each].total()
        if is_named or kind not in has_names:
            code[each] = len(names)
            letter = chr(ord("A") + kind) if kind else ""
            names.append(found.names[of] if is_named else f"layer {letter}{layer}")
    return code[key]


def _devices(links: Links, work: Work) -> Ints:
    """A number for the device of each row."""
    device, _ = intern(process for process, _ in links.events.threads)
    found: Ints = device[links.events.thread[work.event]]
    return found
