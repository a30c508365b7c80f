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

# Kernels of these classes count as alike; others by their labels without types and sizes.
_ALL_ALIKE = ("matrix product", "attention", "convolution", "communication", "normalisation")
_SOFTMAX = re.compile("softmax", re.IGNORECASE)
_BACKWARD = re.compile(r"[Bb]ackward|Bwd|bwd|[dw]grad")
_SIZES = re.compile(r"<.*|[\d×]+|(?:un)?fused_?|vectorized_?")
# There are so many layers or more. Of a stretch of layers, this share agrees with the layer before,
# of those that are a little different this, and of all layers of one kind that.
_FEWEST, _ALIKE, _ODD, _LEAST = 3, 0.75, 0.7, 0.9
# A kind of layer has these shares of the time and of the attention, and all kinds have this share.
_TIME, _MARKS, _MAIN = 0.15, 0.2, 0.5
# Attention marks layers if there is so much of it for each matrix product. What has more marks than
# this is no layer, but a whole step.
_PER_PRODUCT, _MOST_MARKS = 1 / 16, 12
_CANDIDATES, _KINDS_OF_LAYERS, _LONGEST = 12, 4, 4096
# A layer may begin by this part of its length sooner or later; so many kernels decide where.
_NEAR, _REACH = 1 / 8, 16
# A part of a layer counts from this share on; where the recording begins or ends, from the other.
_PART = 0.5, 0.25
# Two sequences are aligned at runs of these lengths. After a difference they go on at the next run
# of four that both have among so many kernels.
_ANCHORS, _AGAIN, _AROUND = (16, 8), 4, 24


class Kinds(NamedTuple):
    """What is known of each kernel name: `token` numbers kinds, the masks say what it is.

    `product` has convolutions too; `attention` has softmax if there is no attention in one kernel.
    """

    token: Ints
    norm: Flags
    attention: Flags
    product: Flags
    backward: Flags


class Blocks(NamedTuple):
    """The layers of a sequence of kernels.

    Attributes:
        layer: the number of the layer of each kernel in its pass; -1 for none.
        kind: the number of the kind of layer, such as those of an encoder and of a decoder.
        block: the place of the first kernel of its block; -1 for none.
        agreement: how much the layers of this kind agree, as a fraction; 0 in no layer.
    """

    layer: Ints
    kind: Ints
    block: Ints
    agreement: NDArray[np.float64]


class _Found(NamedTuple):
    """Layers of one kind: the kernels of one of them, and the bounds of those of each pass."""

    template: Ints
    is_backward: bool
    passes: list[Ints]
    most: int


def kinds_of_names(names: list[str]) -> Kinds:
    """Classify kernel names."""
    classes = [kernel_class(name) for name in names]
    softmax = np.array([_SOFTMAX.search(name) is not None for name in names], np.bool_)
    token, _ = intern(
        "softmax" if is_softmax
        else kind if kind in _ALL_ALIKE
        else _SIZES.sub("", kernel_label(name))
        for name, kind, is_softmax in zip(names, classes, softmax.tolist())
    )  # fmt: skip
    kind = np.array(classes, np.str_)
    attention = kind == "attention"
    return Kinds(
        token=token,
        norm=(kind == "normalisation") & ~softmax,
        attention=attention if attention.any() else softmax,
        product=np.isin(kind, ["matrix product", "convolution"]),
        backward=np.array([_BACKWARD.search(name) is not None for name in names], np.bool_),
    )


def blocks(name: Ints, kinds: Kinds, weight: Ints, part: Ints) -> Blocks:
    """Find the layers in a sequence of kernels, in the order in which a stream ran them.

    Args:
        name: the index of each kernel's name in `kinds`.
        kinds: what is known of the names.
        weight: the duration of each kernel.
        part: the number of the step of each kernel; a layer is within one.

    Cost: linear in the number of kernels for each of at most 36 lengths of a layer, and a sort.
    """
    layer, kind, block = np.full((3, len(name)), -1)
    agreement, found = np.zeros(len(name)), list[_Found]()
    token, product = kinds.token[name], kinds.product[name]
    marks = kinds.attention[name]
    if marks.sum() < max(_PER_PRODUCT * product.sum(), _FEWEST):
        marks = product
    free = token.copy()  # kernels in a layer get tokens of their own
    lengths = _lengths(token, weight)
    for p in lengths:
        if len(found) == _KINDS_OF_LAYERS or _has_better(free, weight, p, lengths):
            continue
        spans = [
            (a, b)
            for a, b in _stretches(free, part, p)
            if 0 < marks[a : a + p].sum() <= _MOST_MARKS and product[a : a + p].any()
        ]
        spent, marked = (sum(int(each[a:b].sum()) for a, b in spans) for each in (weight, marks))
        if spent < _TIME * weight.sum() or marked < max(_MARKS * marks.sum(), _FEWEST):
            continue
        new = _cut(spans, p, name, kinds, marks, weight)
        size = min(_AGAIN, p)
        grams, (inside, followed) = _grams(token, size), np.zeros((2, len(name)), np.bool_)
        for bounds in new.passes:
            inside[bounds[0] : bounds[-1]] = True
            followed[bounds[0] : bounds[-1] - size + 1] = True
        # Runs of kernels that a quarter of the layers have are usual.
        runs = grams[followed[: len(grams)]]
        _, of, count = np.unique(runs, return_inverse=True, return_counts=True)
        usual = 4 * count[of] >= max(sum(len(bounds) - 1 for bounds in new.passes), 8)
        time = weight[followed]
        alike = float(time[usual].sum() / max(time.sum(), 1))
        if alike < _LEAST:
            continue
        # A backward pass has the kind of the forward pass with as many layers.
        same = [k for k, old in enumerate(found) if new.is_backward and old.most == new.most]
        if not same and (kinds.attention & ~kinds.backward)[name[inside]].any():
            # A pipeline runs the forward of one batch beside the backward of another.
            new = new._replace(is_backward=False)
        kind[inside], agreement[inside] = [*same, len(found)][0], alike
        for bounds in new.passes:
            each = slice(bounds[0], bounds[-1])
            layer[each] = np.repeat(_numbers(bounds, new), np.diff(bounds))
            block[each] = np.repeat(bounds[:-1], np.diff(bounds))
        found.append(new)
        free[inside] = -1 - np.flatnonzero(inside)
    if weight[layer >= 0].sum() < _MAIN * weight.sum():
        layer[:], kind[:], block[:], agreement[:] = -1, -1, -1, 0
    return Blocks(layer, kind, block, agreement)


def _lengths(token: Ints, weight: Ints) -> list[int]:
    """Lengths that a layer may have: the usual distances between equal runs of kernels."""
    found = set[int]()
    for size in (1, 4, 16):
        gram = _grams(token, size)
        order = np.argsort(gram, kind="stable")
        distance = np.diff(order)
        chosen = (np.diff(gram[order]) == 0) & (distance > 1) & (distance <= _LONGEST)
        sums = np.bincount(distance[chosen], weight[order[1:]][chosen])
        usual = np.argsort(-sums)[:_CANDIDATES]
        found |= {*usual[sums[usual] > 0].tolist()}
    return sorted(found)


def _has_better(token: Ints, weight: Ints, p: int, lengths: list[int]) -> bool:
    """Whether more kernels repeat after another length that finds the same stretches."""

    def time(p: int) -> int:
        return int(weight[p:] @ (token[p:] == token[:-p]))

    rivals = [q for q in lengths if 0 < abs(q - p) <= _slack(p)]
    return bool(rivals) and max(map(time, rivals)) > time(p)


def _slack(p: int) -> int:
    """By how many kernels a layer of about `p` may be longer or shorter than the one before."""
    return min(p // 16, 3)


def _grams(token: Ints, size: int) -> Ints:
    """A number for each run of `size` tokens; none if there are fewer."""
    count = max(len(token) - size + 1, 0)
    gram = token[:count].copy()
    for k in range(1, size):
        gram = gram * 1_000_003 + token[k : count + k]
    return gram


def _stretches(token: Ints, part: Ints, p: int) -> Iterator[tuple[int, int]]:
    """The stretches of three layers or more, of which each has about `p` kernels."""
    size, run = min(4, max(p // 4, 1)), 1 if p >= 8 else min(3, p)
    gram = _grams(token, size)
    gram = gram * 1_000_003 + part[: len(gram)]
    if len(gram) < 2 * p:
        return
    same = np.zeros(len(gram), np.bool_)
    for lag in range(p - _slack(p), p + _slack(p) + 1):
        same[lag:] |= gram[lag:] == gram[:-lag]
    sums = np.append(0, np.cumsum(same))
    alike = np.concatenate([[False], sums[p:] - sums[:-p] >= _ALIKE * p, [False]])
    steady = np.flatnonzero(sums[run:] - sums[:-run] == run)
    for first, last in np.flatnonzero(alike[1:] != alike[:-1]).reshape(-1, 2).tolist():
        begin, end = np.searchsorted(steady, [first, last + p - run])
        if end > begin and steady[end - 1] + run - steady[begin] >= (_FEWEST - 1.1) * p:
            yield max(int(steady[begin]) - p, 0), int(steady[end - 1]) + run + size - 1


def _cut(
    spans: list[tuple[int, int]], p: int, name: Ints, kinds: Kinds, marks: Flags, weight: Ints
) -> _Found:
    """Cut stretches into layers; layers that are a little different join two stretches."""
    token, passes = kinds.token[name], list[Ints]()
    a, b = max(spans, key=lambda span: (span[0] > 0, span[1] - span[0]))
    anchor, is_backward = _first(a, b, p, name, kinds, weight)
    template, ends = token[anchor : anchor + p], list[tuple[int, int]]()
    size = min(_AGAIN, p)
    usual = np.isin(_grams(token, size), _grams(np.tile(template, 2)[: p + size - 1], size))
    for a, b in spans:
        a = max(a, ends[-1][1]) if ends else a
        if b - a < p or usual[a:b].mean() < _ODD:
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
    floors = [0, *(end for _, end in ends)]
    passes = [
        _with_ends(bounds, *end, floor, template, token, marks)
        for bounds, end, floor in zip(passes, ends, floors)
    ]
    counts = np.array([len(bounds) - 1 for bounds in passes], np.int64)
    most = int(np.bincount(counts, counts, 1).argmax())
    # Which layers a shorter pass lacks is known only where the recording cut it.
    is_whole = [
        bounds[0] < p or bounds[-1] > len(token) - p if count < most else count == most
        for bounds, count in zip(passes, counts.tolist())
    ]
    kept = [bounds for bounds, whole in zip(passes, is_whole) if whole and len(bounds) > 1]
    return _Found(template, is_backward, kept, most)


def _first(a: int, b: int, p: int, name: Ints, kinds: Kinds, weight: Ints) -> tuple[int, bool]:
    """Where a layer in a stretch begins, and whether layers are those of a backward pass.

    Before and after the layers there are kernels that look like parts of one. So a layer begins
    with the first normalisation after the heaviest product that is not beside attention, as the
    feed-forward part is; and a layer of a backward pass ends with the first one after attention and
    a product. Without these kernels, or with both passes in one block, as where activations are
    recomputed, a layer begins with the stretch, or its first normalisation if a part of a layer is
    left over.
    """
    middle = a + p * ((b - a) // p // 2 - 1)
    block = name[middle + np.arange(p)]
    attention, norm, is_backward = (
        each[block] for each in (kinds.attention, kinds.norm, kinds.backward)
    )
    ends = is_backward[attention].any()  # rather than begins
    if norm.any() and attention.any() and ends == is_backward[attention].all():
        # Of attention in several kernels, the last is the one before the longest distance.
        places = np.flatnonzero(attention)
        last = int(places[np.argmax(np.diff(places, append=places[0] + p))])
        order = (last + 1 + np.arange(p)) % p
        products = np.flatnonzero(kinds.product[block[order]][: int(np.argmax(attention[order]))])
        products = products[:1] if ends else products[1:]
        heaviest = products[np.argsort(-weight[middle + order[products]], kind="stable")][:1]
        norms = (
            np.flatnonzero(norm[order] & (np.arange(p) > heaviest)) if len(heaviest) else heaviest
        )
        while ends and len(norms) > 1 and norms[1] == norms[0] + 1:
            norms = norms[1:]
        if len(norms):
            return middle + int(order[(norms[0] + int(ends)) % p]), bool(ends)
    spare = np.flatnonzero(kinds.norm[name[a : a + (b - a) % p + 1]])
    return middle + int(next(iter(spare), 0)), bool(ends or is_backward.mean() > 0.1)


def _bounds(a: int, b: int, template: Ints, token: Ints) -> Ints:
    """Where the layers of a stretch begin, and the end of the last whole one."""
    p, far = len(template), int(len(template) * _NEAR)

    def best(places: Ints, reach: int) -> int:
        # Only the kernels after the start, because the layer before may be longer or shorter.
        around = np.minimum(places[:, None] + np.arange(reach), len(token) - 1)
        at = int(places[np.argmax((token[around] == template[:reach]).sum(axis=1))])
        starts = places[(token[around[:, 0]] == template[0]) & (np.abs(places - at) <= far)]
        return int(min(starts, key=lambda start: abs(start - at), default=at))

    shifts = np.array(sorted(range(-far, far + 1), key=abs))
    found = [best(a + np.arange(p), min(p, 4 * _REACH))]
    while len(places := found[-1] + p + shifts[found[-1] + p + shifts <= b]):
        found.append(best(places, min(p, _REACH)))
    return np.array(found)


def _is_odd(end: int, start: int, count: int, template: Ints, token: Ints, marks: Flags) -> bool:
    """Whether the kernels between two stretches are `count` layers that are a little different."""
    p, length = len(template), start - end
    far = int(p * _NEAR)
    if not count or abs(length - count * p) > far * count:
        return length == 0
    place = np.arange(length) * count * p // length
    shifted = template[(place + np.arange(-far, far + 1)[:, None]) % p]
    alike = (shifted == token[end:start]).any(axis=0).mean() >= _ODD
    return bool(alike) and int(marks[end:start].sum()) >= count


def _with_ends(
    bounds: Ints, a: int, b: int, floor: int, template: Ints, token: Ints, marks: Flags
) -> Ints:
    """Add the layers at both ends of a pass of which a part is missing or different.

    The first one begins at `floor` or later, where the pass before ended.
    """
    p, first, last = len(template), int(bounds[0]), int(bounds[-1])
    if _PART[b == len(token)] * p <= b - last and (b == len(token) or marks[last:b].any()):
        bounds = np.append(bounds, b)
    if _PART[a == 0] * p <= first - a:
        near = np.arange(max(first - p - int(p * _NEAR), floor), a + 1)
        near = near[token[near] == template[0]]
        begin = int(near[np.argmin(np.abs(near - (first - p)))]) if a and len(near) else a
        if a == 0 or marks[begin:first].any():
            bounds = np.append(begin, bounds)
    return bounds


def _numbers(bounds: Ints, found: _Found) -> Ints:
    """The numbers of the layers of a pass; a backward pass begins with the last layer."""
    number = np.arange(len(bounds) - 1)
    if bounds[0] < len(found.template):  # the recording may have begun within this pass
        number += found.most - len(number)
    return found.most - 1 - number if found.is_backward else number


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
    found = np.full(len(token), -2)
    for size in _ANCHORS:
        gram, theirs, labels = (_grams(each, size) for each in (token, other, label))
        if not len(gram) or not len(theirs):
            continue
        places = np.flatnonzero(np.convolve(label == -2, np.ones(size), "valid") == 0)
        places = places[np.argsort(theirs[places], kind="stable")]
        starts = np.flatnonzero(np.diff(theirs[places], prepend=-1) != 0)
        if not len(starts):
            continue
        least, most = (each.reduceat(labels[places], starts) for each in (np.minimum, np.maximum))
        places = places[starts[least == most]]
        at = np.searchsorted(theirs[places], gram)
        anchors = np.flatnonzero(np.append(theirs[places], -1)[at] == gram)
        reached = 0
        while (k := np.searchsorted(anchors, reached)) < len(anchors):
            i, j = int(anchors[k]), int(places[at[anchors[k]]])
            if found[i] != -2:
                reached = i + 1
                continue
            before, back = slice(reached, i), slice(None, None, -1)
            _follow(token[before][back], other[:j][back], label[:j][back], found[before][back])
            reached = i + max(_follow(token[i:], other[j:], label[j:], found[i:]), size)
    return found


def _follow(token: Ints, other: Ints, label: Ints, found: Ints) -> int:
    """Write the labels while both sequences go on alike; return how many kernels were followed."""
    i = j = 0
    while True:
        length = _common(token[i:], other[j:])
        found[i : i + length] = label[j : j + length]
        i, j = i + length, j + length
        ours = _grams(token[i : i + _AROUND], _AGAIN)
        same = np.equal.outer(ours, _grams(other[j : j + _AROUND], _AGAIN))
        down, right = np.nonzero(same)
        if not len(down):
            return i
        least = int(np.argmin(down + right))
        if j and label[j - 1] == label[j + right[least]]:
            found[i : i + down[least]] = label[j - 1]
        i, j = i + int(down[least]), j + int(right[least])


def _common(one: Ints, other: Ints) -> int:
    """The number of first tokens that are equal."""
    done, least, size = 0, min(len(one), len(other)), 64
    while done < least:
        end = min(done + size, least)
        differs = one[done:end] != other[done:end]
        if differs.any():
            return done + int(np.argmax(differs))
        done, size = end, 2 * size
    return done
