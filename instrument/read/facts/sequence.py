"""Find layers by the sequence of kernels: blocks of kernels that repeat, one block a layer.

The kernels of a stream are compared with those p places before. Where most agree for three blocks
or more, p is the length of a layer. A kernel counts here by its kind, not by its name, because the
tiles of a matrix product differ between layers of one kind, and so do two kinds of attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.read.facts.groupby import intern
from instrument.read.facts.kernel_names import kernel_class, kernel_label
from instrument.read.trace.events import Flags, Ints

#: Kinds by which kernels are compared, in place of their names.
_HEAVY = ("matrix product", "attention", "convolution", "communication")
_SOFTMAX = re.compile("softmax", re.IGNORECASE)
_BACKWARD = re.compile(r"[Bb]ackward|Bwd|bwd|[dw]grad")
# The parts of a label that differ between layers of one kind: element types and sizes.
_SIZES = re.compile(r"<.*|[\d×]+|(?:un)?fused_?|vectorized_?")
# How much of a block must agree with the block before it, and how alike an odd block must be.
_ALIKE, _ODD = 0.75, 0.7
_FEWEST = 3
# Kinds of layers of which less agrees are not told.
_LEAST = 0.9
# A kind of layer has at least these shares of the time and of the kernels that mark a layer.
_TIME, _MARKS = 0.15, 0.2
_CANDIDATES, _FAMILIES, _LONGEST = 16, 4, 4096
# The first layer may lack this part of the kernels of the others, or have this part in addition.
_SLACK, _NEAR = 0.1, 8
# A part of a layer counts from this share on; where the recording begins or ends, from the other.
_PART = 0.5, 0.25
# What has more attention or convolutions is no layer but a whole step.
_MOST_MARKS, _MOST_WORKS = 12, 16
# The next layer is looked for near its place, by this many kernels before and after its start.
_REACH = 12
# To align two sequences: the length of a run that tells a place, how far to look for the next run
# after a difference, and the length of this run.
_ANCHOR, _AROUND, _AGAIN = 16, 24, 4
# Kernels are those of a backward pass if this share of their names says so.
_BACKWARDS = 0.1


class Kinds(NamedTuple):
    """What is known of each kernel name: `token` numbers kinds, the masks say what it is."""

    token: Ints
    norm: Flags
    attention: Flags
    softmax: Flags
    product: Flags
    convolution: Flags
    backward: Flags


class Blocks(NamedTuple):
    """The layers of a sequence of kernels.

    Attributes:
        layer: the number of the layer of each kernel in its pass; -1 for none.
        family: which kind of layer it is, such as those of the encoder and those of the decoder.
        block: the place of the first kernel of its block; -1 for none.
        agreement: how much the layers of its family agree, as a fraction; 0 in no layer.
    """

    layer: Ints
    family: Ints
    block: Ints
    agreement: NDArray[np.float64]


def kinds_of_names(names: list[str]) -> Kinds:
    """Classify kernel names."""
    classes = [kernel_class(name) for name in names]
    softmax = np.array([_SOFTMAX.search(name) is not None for name in names], np.bool_)
    token, _ = intern(
        kind if kind in _HEAVY
        else "softmax" if is_softmax
        else "norm" if kind == "normalisation"
        else _SIZES.sub("", kernel_label(name))
        for name, kind, is_softmax in zip(names, classes, softmax.tolist())
    )  # fmt: skip
    kind = np.array(classes, np.str_)
    return Kinds(
        token=token,
        norm=(kind == "normalisation") & ~softmax,
        attention=kind == "attention",
        softmax=softmax,
        product=kind == "matrix product",
        convolution=kind == "convolution",
        backward=np.array([_BACKWARD.search(name) is not None for name in names], np.bool_),
    )


class _Family(NamedTuple):
    """Layers of one kind: the kernels of one of them, and the bounds of those of each pass."""

    template: Ints
    is_backward: bool
    passes: list[Ints]

    @property
    def most(self) -> int:
        """The number of layers of the longest pass."""
        return max(len(bounds) for bounds in self.passes) - 1


def blocks(name: Ints, kinds: Kinds, weight: Ints, part: Ints) -> Blocks:
    """Find the layers in a sequence of kernels, in the order in which a stream ran them.

    Args:
        name: the index of each kernel's name in `kinds`.
        kinds: what is known of the names.
        weight: the duration of each kernel.
        part: the number of the step or replay of each kernel; a layer is within one.

    Cost: linear in the number of kernels for each of at most 48 lengths of a layer, and a sort.
    """
    layer, family, block = np.full((3, len(name)), -1)
    agreement, families = np.zeros(len(name)), list[_Family]()
    token, marks = kinds.token[name], _marks(name, kinds)
    works = (kinds.product | kinds.convolution)[name]
    free = token.copy()  # kernels in a layer get tokens of their own
    for p in _lengths(token, weight):
        if any(_same_time(free, weight, q) > _same_time(free, weight, p) for q in _near(p)):
            continue
        spans = [
            (a, b)
            for a, b in _stretches(free, part, p)
            if 0 < marks[a : a + p].sum() <= _MOST_MARKS and works[a : a + p].any()
        ]
        time, marked = (sum(int(each[a:b].sum()) for a, b in spans) for each in (weight, marks))
        if time < _TIME * weight.sum() or marked < max(_MARKS * marks.sum(), _FEWEST):
            continue
        found = _family(spans, p, name, kinds, marks)
        if not found.passes:
            continue
        number = _number(found, families)
        for bounds in found.passes:
            for k, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist())):
                layer[begin:end], family[begin:end] = _layer(k, bounds, found), number
                block[begin:end] = begin
                agreement[begin:end] = _agreement(token[begin:end], found.template)
        families.append(found)
        free[layer >= 0] = -1 - np.flatnonzero(layer >= 0)
        if len(families) == _FAMILIES:
            break
    time = weight.astype(np.float64)
    means = np.bincount(family + 1, agreement * time) / np.bincount(family + 1, time).clip(1)
    agreement = np.where(layer >= 0, means[family + 1], 0)
    is_layer = agreement >= _LEAST
    if 2 * weight[is_layer].sum() < weight.sum():  # what repeats is not the main part
        is_layer[:] = False
    found = (np.where(is_layer, each, -1) for each in (layer, family, block))
    return Blocks(*found, np.where(is_layer, agreement, 0))


def _marks(name: Ints, kinds: Kinds) -> Flags:
    """The kernels that each layer has: attention, else softmax, convolutions or products."""
    masks = (kinds.attention, kinds.softmax, kinds.convolution, kinds.product)
    least = max(_FEWEST, int((kinds.product | kinds.convolution)[name].sum()) // _MOST_WORKS)
    return next((each[name] for each in masks if each[name].sum() >= least), masks[-1][name])


def _lengths(token: Ints, weight: Ints) -> list[int]:
    """Lengths that a layer may have: the usual distances between equal runs of kernels."""
    found = set[int]()
    for size in (1, 4, 16):
        starts = len(token) - size + 1
        if starts < 2:
            break
        gram = _grams(token, size)
        order = np.argsort(gram, kind="stable")
        distance = np.diff(order)
        chosen = (np.diff(gram[order]) == 0) & (distance > 1) & (distance <= _LONGEST)
        sums = np.bincount(distance[chosen], weight[order[1:]][chosen])
        usual = np.argsort(-sums)[:_CANDIDATES]
        found |= {*usual[sums[usual] > 0].tolist()}
    return sorted(found)


def _stretches(token: Ints, part: Ints, p: int) -> Iterator[tuple[int, int]]:
    """The stretches of three layers or more, of which each has about `p` kernels."""
    size, near = min(4, max(p // 4, 1)), _near(p)[-1] - p
    starts = len(token) - size + 1
    if starts < 2 * p:
        return
    gram = _grams(token, size) * 1_000_003 + part[:starts]
    same = np.zeros(starts, np.bool_)
    for lag in range(p - near, p + near + 1):
        same[lag:] |= gram[lag:] == gram[:-lag]
    sums = np.append(0, np.cumsum(same))
    alike = np.concatenate([[False], sums[p:] - sums[:-p] >= _ALIKE * p, [False]])
    edges = np.flatnonzero(alike[1:] != alike[:-1]).reshape(-1, 2)
    run = 1 if size > 1 else min(3, p)
    steady = np.flatnonzero(sums[run:] - sums[:-run] == run)
    for first, last in edges.tolist():
        at = steady[
            np.searchsorted(steady, first) : np.searchsorted(steady, last + p - 1 - run, "right")
        ]
        if len(at) and at[-1] + run - at[0] >= (_FEWEST - 1 - _SLACK) * p:
            yield max(int(at[0]) - p, 0), int(at[-1]) + run + size - 1


def _near(p: int) -> range:
    """Lengths that differ so little from `p` that they find the same stretches."""
    return range(p - min(p // 20, 3), p + min(p // 20, 3) + 1)


def _same_time(token: Ints, weight: Ints, p: int) -> int:
    """The time of the kernels that have the token of the kernel `p` places before."""
    return int(weight[p:][token[p:] == token[:-p]].sum())


def _grams(token: Ints, size: int) -> Ints:
    """A number for each run of `size` tokens."""
    starts = len(token) - size + 1
    gram = token[:starts].copy()
    for k in range(1, size):
        gram = gram * 1_000_003 + token[k : starts + k]
    return gram


def _family(
    spans: list[tuple[int, int]], p: int, name: Ints, kinds: Kinds, marks: Flags
) -> _Family:
    """Cut stretches into layers; layers that are a little different join two stretches."""
    token = kinds.token[name]
    a, b = max(spans, key=lambda span: (span[0] > 0, span[1] - span[0]))
    anchor, is_backward = _first(a, b, p, name, kinds)
    anchor += p * ((b - anchor) // p // 2)
    template = token[anchor : anchor + p]
    passes: list[Ints] = []
    ends: list[tuple[int, int]] = []
    for a, b in spans:
        a = max(a, ends[-1][1]) if ends else a
        if b - a < p:
            continue
        bounds = _bounds(a, b, template, token)
        end = int(passes[-1][-1]) if passes else a - 2 * _FEWEST * p
        odd = round((int(bounds[0]) - end) / p)
        if odd <= _FEWEST and _is_odd(end, int(bounds[0]), odd, template, token, marks):
            between = np.linspace(end, bounds[0], max(odd, 1) + 1)[1:-1].astype(np.int64)
            passes[-1] = np.concatenate([passes[-1], between, bounds[odd == 0 :]])
            ends[-1] = ends[-1][0], b
        else:
            passes.append(bounds)
            ends.append((a, b))
    passes = [_with_ends(bounds, *end, template, token, marks) for bounds, end in zip(passes, ends)]
    most = max((len(bounds) for bounds in passes), default=0)
    # Which layers are missing from a shorter pass is known only where the recording cut it.
    passes = [
        bounds
        for bounds in passes
        if len(bounds) > 1 and (len(bounds) == most or bounds[0] < p or bounds[-1] > len(token) - p)
    ]
    return _Family(template, is_backward, passes)


def _first(a: int, b: int, p: int, name: Ints, kinds: Kinds) -> tuple[int, bool]:
    """Where the first layer of a stretch begins, and whether layers are those of a backward pass.

    Before and after the layers there are kernels that look like parts of one. So a layer begins
    with a normalisation before a product and its attention: the one nearest to where the stretch
    begins, or else the last; and a layer of a backward pass ends with it. Without normalisation or
    attention, it begins with the stretch.
    """
    block = name[a + np.arange(p)]
    attention = kinds.attention[block] if kinds.attention[block].any() else kinds.softmax[block]
    norm, is_backward = np.flatnonzero(kinds.norm[block]), kinds.backward[block]
    forward = np.flatnonzero(attention & ~is_backward)
    places = forward if len(forward) else np.flatnonzero(attention)
    if not len(norm) or not len(places):
        spare = np.flatnonzero(norm <= (b - a) % p)
        return a + (int(norm[spare[0]]) if len(spare) else 0), is_backward.mean() > _BACKWARDS
    products = np.append(0, np.cumsum(np.tile(kinds.product[block], 2)))
    if not len(forward):
        last = int(places[np.argmax(np.diff(places, append=places[0] + p))])
        distance = (norm - last) % p
        between = products[last + distance] > products[last]
        end = int(norm[np.argmin(np.where(between, distance, 2 * p))])
        ends = ~kinds.norm[block[(end + np.arange(p)) % p]]
        return a + (end + int(np.argmax(ends))) % p, True
    # Of attention in several kernels, the first is the one after the longest distance.
    first = int(places[np.argmax(np.diff(places, prepend=places[-1] - p))])
    distance = (first - norm) % p
    between = products[norm + distance] > products[norm]
    from_start = np.minimum(norm, p - norm)
    is_near = between & (from_start <= p // _NEAR)
    order = np.where(is_near, from_start, np.where(between, p + distance, 3 * p))
    return a + int(norm[np.argmin(order)]), False


def _bounds(a: int, b: int, template: Ints, token: Ints) -> Ints:
    """Where the layers of a stretch begin, and the end of the last whole one."""
    p = len(template)
    turned = np.lib.stride_tricks.sliding_window_view(np.tile(template, 2), p)
    first = a + -int(np.argmax((turned == token[a : a + p]).sum(axis=1)[:p])) % p
    far, reach = p // _NEAR, min(p // 2, _REACH)
    if not far:
        return np.arange(first, b + 1, p)
    shifts = np.array(sorted(range(-far, far + 1), key=abs))
    around = np.arange(-reach, reach)
    found, wanted = [first], template[around]
    while found[-1] + p <= b + far:
        places = found[-1] + p + shifts
        places = places[places <= b]
        if not len(places):
            break
        fit = token[np.clip(places[:, None] + around, 0, len(token) - 1)] == wanted
        found.append(int(places[np.argmax(fit.sum(axis=1))]))
    return np.array(found)


def _is_odd(end: int, start: int, count: int, template: Ints, token: Ints, marks: Flags) -> bool:
    """Whether the kernels between two stretches are `count` layers that are a little different."""
    p, length = len(template), start - end
    far = p // _NEAR
    if not count or abs(length - count * p) > far * count:
        return length == 0
    place = np.arange(length) * count * p // length
    shifted = template[(place + np.arange(-far, far + 1)[:, None]) % p]
    alike = (shifted == token[end:start]).any(axis=0).mean() >= _ODD
    return bool(alike) and int(marks[end:start].sum()) >= count


def _with_ends(bounds: Ints, a: int, b: int, template: Ints, token: Ints, marks: Flags) -> Ints:
    """Add the layers at both ends of a pass of which a part is missing or different."""
    p, first, last = len(template), int(bounds[0]), int(bounds[-1])
    if _PART[b == len(token)] * p <= b - last and (b == len(token) or marks[last:b].any()):
        bounds = np.append(bounds, b)
    if _PART[a == 0] * p <= first - a and (a == 0 or marks[a:first].any()):
        near = np.arange(max(first - p - p // _NEAR, 0), a + 1)
        near = near[token[near] == template[0]]
        begin = near[np.argmin(np.abs(near - (first - p)))] if a and len(near) else a
        bounds = np.append(begin, bounds)
    return bounds


def _layer(place: int, bounds: Ints, family: _Family) -> int:
    """The number of the layer at a place in a pass; a backward pass begins with the last layer."""
    count = len(bounds) - 1
    if (
        bounds[0] < len(family.template) and count < family.most
    ):  # the recording began within this pass
        place += family.most - count
    return family.most - 1 - place if family.is_backward else place


def _number(found: _Family, families: list[_Family]) -> int:
    """The number of a family; a backward pass has that of its forward pass."""
    for number, other in enumerate(families):
        if found.is_backward and not other.is_backward and found.most == other.most:
            return number
    return len(families)


def _agreement(tokens: Ints, template: Ints) -> float:
    """Which fraction of a layer's pairs of successive kernels are also in the template."""
    size = min(2, len(tokens), len(template))
    both = [_grams(each, size) for each in (tokens, template)]
    _, kind = np.unique(np.concatenate(both), return_inverse=True)
    most = int(kind.max()) + 1
    counts = (np.bincount(each, minlength=most) for each in np.split(kind, [len(both[0])]))
    return float(np.minimum(*counts).sum() / max(map(len, both)))


def aligned(token: Ints, other: Ints, label: Ints) -> Ints:
    """The label of each kernel in another sequence of the same kernels; -2 if it is not known.

    Runs of kernels that have the same labels wherever they are in `other` say where a pass is. From
    there on, both sequences are followed in both directions, past small differences.

    Args:
        token: a number for the name of each kernel.
        other: the same for the other sequence.
        label: the label of each kernel of `other`; -2 if it has none.

    Cost: linear, a sort, and about 50 µs for each difference.
    """
    found, size = np.full(len(token), -2), min(_ANCHOR, len(other))
    if not size or len(token) < size:
        return found
    gram, theirs = _grams(token, size), _grams(other, size)
    labels, is_known = _grams(label, size), label != -2
    whole = np.append(0, np.cumsum(is_known))
    places = np.flatnonzero(whole[size:] - whole[:-size] == size)
    places = places[np.argsort(theirs[places], kind="stable")]
    if not len(places):
        return found
    starts = np.flatnonzero(np.append(True, np.diff(theirs[places]) != 0))
    least, most = (each.reduceat(labels[places], starts) for each in (np.minimum, np.maximum))
    places = places[starts[least == most]]
    if not len(places):
        return found
    at = np.minimum(np.searchsorted(theirs[places], gram), len(places) - 1)
    anchors = np.flatnonzero(theirs[places][at] == gram)
    reached = 0
    while (next_ := np.searchsorted(anchors, reached)) < len(anchors):
        i, j = int(anchors[next_]), int(places[at[anchors[next_]]])
        _follow(token[reached:i][::-1], other[:j][::-1], label[:j][::-1], found[reached:i][::-1])
        reached = i + max(_follow(token[i:], other[j:], label[j:], found[i:]), size)
    return _filled(found)


def _follow(token: Ints, other: Ints, label: Ints, found: Ints) -> int:
    """Write the labels while both sequences go on alike; return how many kernels were followed."""
    i = j = 0
    while True:
        length = _common(token[i:], other[j:])
        found[i : i + length] = label[j : j + length]
        i, j = i + length, j + length
        ours, theirs = token[i : i + _AROUND], other[j : j + _AROUND]
        if len(ours) < _AGAIN or len(theirs) < _AGAIN:
            return i
        same = np.equal.outer(_grams(ours, _AGAIN), _grams(theirs, _AGAIN))
        if not same.any():
            return i
        down, right = np.nonzero(same)
        least = int(np.argmin(down + right))
        i, j = i + int(down[least]), j + int(right[least])


def _common(one: Ints, other: Ints) -> int:
    """The number of first tokens that are equal."""
    done, size = 0, 64
    least = min(len(one), len(other))
    while done < least:
        end = min(done + size, least)
        differs = one[done:end] != other[done:end]
        if differs.any():
            return done + int(np.argmax(differs))
        done, size = end, 2 * size
    return done


def _filled(label: Ints) -> Ints:
    """Give kernels between two of the same label this label, if they are few."""
    known = np.flatnonzero(label != -2)
    if not len(known):
        return label
    place = np.searchsorted(known, np.arange(len(label)))
    after, before = known[np.minimum(place, len(known) - 1)], known[np.maximum(place - 1, 0)]
    between = (label[after] == label[before]) & (after - before <= _AROUND) & (after > before)
    return np.where((label == -2) & between, label[after], label)
