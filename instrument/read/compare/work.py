"""Compares the work of two programs, as `record.work` has observed it: is it the same work?

A difference refuses if the programs do not do the same work. Fewer tokens or operations refuse
unless the losses are equal: work that changes no loss may be left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from instrument.base import files
from instrument.base.errors import CaptureError
from instrument.base.printable import printable
from instrument.base.units import count, few, percent
from instrument.read.trace.capture_json import BAD_JSON

Equality = Literal["bit-equal", "equal within rounding", "different", "unknown"]
Declared = Literal["same", "rounding", "precision"]
_MOST_BYTES = 64 << 20
Number = Annotated[int, Meta(ge=0, le=2**60)]
Amount = Annotated[float, Meta(ge=0, le=1e24)]
Name = Annotated[str, Meta(max_length=400)]
Hex = Annotated[str, Meta(max_length=32)]
Values = Annotated[list[Hex | None], Meta(max_length=1 << 17)]
Counts = Annotated[dict[Name, Amount], Meta(max_length=256)]

# The bits of the numbers' fractions: a product of fewer bits is less precise.
_BITS = {"float64": 52, "float32": 23, "tf32": 10, "float16": 10, "bfloat16": 7}
_FEWEST = 3
# By these bits, the largest relative difference of the first losses, which the same weights give.
# Training amplifies it, by a factor for each step or that of the largest difference so far, until
# single losses say nothing: from then on, means of so many are compared. docs/proof.md says more.
_FIRST, _FIRST_COARSE = {52: 1e-12, 23: 5e-6, 10: 1e-3}, 5e-3
_GROWTH, _AMPLIFIED, _MOST, _AVERAGED, _MOST_OF_MEANS = 1.3, 10.0, 0.01, 20, 0.1
# Counts that differ by less than these shares are alike; hardly any work is left below the last.
_LESS, _FEWER_SAMPLES, _CACHED = 0.01, 0.1, 0.1
_SHOWN = 5


class Calls(Struct, frozen=True):
    """Calls of a program's models; see `record.work`."""

    calls: Number
    samples: Number
    tokens: Number | None
    elements: Number
    rows: Number
    distinct: Number | None
    digest: Name
    shapes: Annotated[list[Name], Meta(max_length=32)]
    is_whole: bool = True


_NO_CALLS, _PHASES = Calls(0, 0, None, 0, 0, None, "", []), ("training", "evaluation")


class Loader(Struct, frozen=True):
    """A data loader: its length, that of its dataset, and how many batches it gave."""

    length: Number | None
    dataset: Number | None
    batches: Number


class Parameters(Struct, frozen=True):
    """How many numbers are trained, had a gradient, and changed in a step; None: not seen."""

    trained: Number | None = None
    with_gradients: Number | None = None
    changed: Number | None = None


class Environment(Struct, frozen=True):
    """Where a program ran."""

    torch: Name
    python: Name
    system: Name
    processor: Name
    devices: Annotated[list[Name], Meta(max_length=64)]
    threads: Number | None
    cpus: Number | None


class Facts(Struct, frozen=True):
    """What work a program did; None: not seen."""

    steps: Number | None
    backwards: Number
    batches: Number | None
    loaders: Annotated[list[Loader], Meta(max_length=16)]
    training: Calls | None
    evaluation: Calls | None
    parameters: Parameters
    checked_steps: Number
    idle_steps: Number
    gradient_norms: Values | None
    counted_steps: Number
    flops: Amount | None
    precision: Counts | None
    operators: Counts | None
    slept_s: Amount
    compiles: bool
    failure: Name | None
    environment: Environment


class Work(Struct, frozen=True):
    """The work of a program, its losses, and numbers of its evaluations, as `float.hex` writes."""

    losses: Values
    evaluations: Values
    facts: Facts
    format: Literal[1]


class Difference(Struct, frozen=True):
    """A difference between the work of A and B; `refuses`: it is not the same work."""

    what: Name
    refuses: bool
    text: Annotated[str, Meta(max_length=4000)]


class Numbers(Struct, frozen=True):
    """How the losses of B, and the outputs of its evaluations, compare with those of A.

    Attributes:
        compared: how many numbers were compared.
        largest: the largest relative difference; None if that is not known.
        why: why the equality is not known, or where the numbers differ.
    """

    equality: Equality
    compared: Number
    largest: float | None
    why: Annotated[str, Meta(max_length=400)]


def read_work(path: Path) -> Work:
    """Read the file that a program has written.

    Raises:
        CaptureError: there is none, or it is damaged.
    """
    try:
        return msgspec.json.decode(files.read_bytes(path, _MOST_BYTES), type=Work)
    except OSError as error:
        raise CaptureError(
            f"{path} cannot be read ({error.strerror}): the program must use a Session, or be run "
            "with `instrument run`, and end by itself."
        ) from None
    except BAD_JSON as error:
        raise CaptureError(f"{path} is damaged, or of another version ({error}).") from None


# The losses.


def compare_numbers(a: Work, b: Work, again: Work | None) -> Numbers:
    """Compare the losses and evaluations of B with those of A, and A with a second run of it."""
    bits = lowest_bits(a.facts.precision)
    own = _compare(a, again, bits) if again is not None else None
    if own is not None and own.equality in ("different", "unknown"):
        why = f"A's own losses differ from run to run: {own.why}" if own.compared else own.why
        return Numbers("unknown", own.compared, own.largest, why)
    found = _compare(a, b, bits)
    if found.equality == "bit-equal" and own is not None and own.equality != "bit-equal":
        return msgspec.structs.replace(found, equality=own.equality, why=own.why)
    return found


def _compare(a: Work, b: Work, bits: int) -> Numbers:
    if not a.facts.backwards:
        return compare_values(a.losses, b.losses, bits, "call", None)
    losses = compare_values(a.losses, b.losses, bits)
    outputs = compare_values(a.evaluations, b.evaluations, bits, "evaluation", len(a.losses))
    order = ("bit-equal", "equal within rounding", "unknown", "different")
    if losses.equality == "unknown" or order.index(losses.equality) >= order.index(
        outputs.equality
    ):
        return losses
    return outputs if outputs.compared else losses


def compare_values(
    a: Sequence[str | None],
    b: Sequence[str | None],
    bits: int,
    noun: str = "step",
    done: int | None = 0,
) -> Numbers:
    """Compare numbers step by step; `done` steps were before the first, or None: no training."""
    pairs = [(_number(x), _number(y)) for x, y in zip(a, b)]
    known = [abs(x) for x, _ in pairs if math.isfinite(x)]
    if a == b and known:
        return Numbers("bit-equal", len(a), 0.0, "")
    if not known:
        return Numbers("unknown", 0, None, "no loss was seen")
    least = median(known) / 100  # losses near zero are compared with the usual ones
    first = _FIRST.get(bits, _FIRST_COARSE)
    changes = [0.0 if p == q else _change(x, y, least) for (x, y), p, q in zip(pairs, a, b)]
    where = f"{len(a)} in A and {len(b)} in B" if len(a) != len(b) else ""
    single, seen = 0, 0.0
    for step, change in enumerate(changes):
        limit = first if done is None else max(first * _GROWTH ** (step + done), _AMPLIFIED * seen)
        if done is not None and max(seen, first * _GROWTH ** (step + done)) > _MOST:
            break
        if not where and change > limit:
            x, y = pairs[step]
            where = f"{x:.7g} in A and {y:.7g} in B at {noun} {step}"
        single, seen = step + 1, max(seen, change)
    later = pairs[single:]
    parts = max(len(later) // _AVERAGED, 1)
    for part in range(parts if later and not where else 0):
        some = np.array(later[part * len(later) // parts : (part + 1) * len(later) // parts])
        with np.errstate(invalid="ignore"):  # of losses that are not finite
            x, y = map(float, some.mean(axis=0))
            chance = 2 * math.sqrt(some.var(axis=0).sum() / len(some))
        if not (_change(x, y, least) <= _MOST_OF_MEANS or abs(x - y) <= chance):
            where = f"a mean of {x:.4g} in A and {y:.4g} in B over {noun}s after {single}"
            break
    equality: Equality = "different" if where else "equal within rounding"
    largest = max(changes if where else changes[:single], default=0.0)
    if not where and max(changes[single:], default=0.0) > _MOST:
        where = f"training amplifies rounding: later ones differ by {max(changes[single:]):.2g}"
    return Numbers(equality, len(pairs), largest if largest < math.inf else None, where)


def _change(a: float, b: float, least: float) -> float:
    """The relative difference of two numbers; infinite if one of them is not finite."""
    scale = max(abs(a), abs(b), least)
    return abs(a - b) / scale if scale and math.isfinite(a + b) else math.inf


def _number(text: str | None) -> float:
    try:
        return math.nan if text is None else float.fromhex(text)
    except (ValueError, OverflowError):
        return math.nan


def lowest_bits(precision: Mapping[str, float] | None) -> int:
    """The bits of the least precise numbers that take a part in the products."""
    used = [kind for kind, share in (precision or {}).items() if share >= _LESS]
    return min((_BITS.get(each, _FEWEST) for each in used), default=_BITS["float32"])


# The work.


def differences(a: Facts, b: Facts, numbers: Numbers, declared: Declared) -> list[Difference]:
    """The differences between the work of A and B: first those that refuse."""
    is_equal = numbers.equality in ("bit-equal", "equal within rounding")
    found = [
        *_unseen(a, b),
        *_amounts(a, b),
        *_data(a, b),
        *(each for phase in _PHASES for each in _calls(phase, a, b, is_equal)),
        *_operations(a, b, is_equal, declared),
        *_operators(a.operators, b.operators),
    ]
    here, there = (msgspec.structs.asdict(each.environment) for each in (a, b))
    if changed := [f"{k} {here[k]} in A, {there[k]} in B" for k in here if here[k] != there[k]]:
        found.append(_difference("environment", False, f"Environment: {'; '.join(changed)}."))
    return sorted(found, key=lambda each: not each.refuses)


def _difference(what: str, refuses: bool, text: str) -> Difference:
    return Difference(what, refuses, printable(text)[:2000])


def _unseen(a: Facts, b: Facts) -> Iterator[Difference]:
    for label, facts in (("A", a), ("B", b)):
        if facts.failure is not None:
            text = f"The work of {label} was not seen to its end: {facts.failure}."
            yield _difference("unseen", True, text)
    if abs(a.slept_s - b.slept_s) > 0.05 * max(a.slept_s, b.slept_s):
        text = f"A sleeps {a.slept_s:.3g} s in time.sleep, B {b.slept_s:.3g} s."
        yield _difference("sleep", False, text)


def _amounts(a: Facts, b: Facts) -> Iterator[Difference]:
    x, y = a.parameters, b.parameters
    for what, noun, p, q in (
        ("steps", "steps of optimizers", a.steps, b.steps),
        ("backwards", "backwards", a.backwards, b.backwards),
        ("trained", "trained parameters", x.trained, y.trained),
        ("gradients", "parameters with a gradient", x.with_gradients, y.with_gradients),
        ("changed", "parameters that its steps change", x.changed, y.changed),
    ):
        if p is not None and q is not None and p != q:
            yield _difference(what, True, f"B has {q:,} {noun}, A has {p:,}.")
    idle = [each.idle_steps / max(each.checked_steps, 1) for each in (a, b)]
    if idle[1] > idle[0] + _FEWER_SAMPLES:
        text = f"{percent(idle[1])} of B's steps change no parameter, {percent(idle[0])} of A's."
        yield _difference("idle", True, text)


def _data(a: Facts, b: Facts) -> Iterator[Difference]:
    is_same = all(_is_same_data(_calls_of(a, phase), _calls_of(b, phase)) for phase in _PHASES)
    sizes = [sum(each.dataset or 0 for each in side.loaders) for side in (a, b)]
    if not is_same and sizes[1] < sizes[0]:
        text = f"The datasets of B's loaders have {sizes[1]:,} samples, those of A {sizes[0]:,}."
        yield _difference("dataset", True, text)
    if a.batches is not None and b.batches is not None and a.batches != b.batches:
        text = f"B's loaders give {b.batches:,} batches, those of A {a.batches:,}."
        yield _difference("batches", not is_same, text)


def _is_same_data(a: Calls | None, b: Calls | None) -> bool:
    """Whether both have the same samples, in any order."""
    return bool(a and b and (a.samples, a.digest) == (b.samples, b.digest))


def _calls_of(facts: Facts, phase: str) -> Calls | None:
    """The calls of models in a phase; None if they were not seen, because of compiled functions."""
    calls: Calls | None = getattr(facts, phase)
    if calls is None:
        is_seen = not facts.compiles or (facts.training is not None and facts.training.is_whole)
        return _NO_CALLS if is_seen else None
    return calls if calls.is_whole else None


def _calls(phase: str, a: Facts, b: Facts, is_equal: bool) -> Iterator[Difference]:
    x, y = _calls_of(a, phase), _calls_of(b, phase)
    if x is None or y is None:
        if x is not y:
            label = "A" if x is None else "B"
            text = f"Samples of {phase} are not seen in {label}: compiled functions call models."
            yield _difference(f"{phase}-unseen", False, text)
        return
    if x.samples != y.samples:
        text = f"In {phase}, B's models get {y.samples:,} samples, those of A {x.samples:,}."
        yield _difference(f"{phase}-samples", True, text)
    shares = [
        each.distinct / each.rows for each in (x, y) if each.distinct is not None and each.rows
    ]
    if len(shares) == 2 and shares[1] < (1 - _FEWER_SAMPLES) * shares[0]:
        texts = [*map(percent, shares)]
        text = f"Of B's samples in {phase}, {texts[1]} are distinct, of A's {texts[0]}."
        yield _difference(f"{phase}-distinct", True, text)
    for noun, p, q in (("tokens", x.tokens, y.tokens), ("numbers", x.elements, y.elements)):
        if p and q is not None and x.samples == y.samples and abs(q - p) > _LESS * p:
            text = f"In {phase}, B's models get {q:,} {noun} in as many samples, those of A {p:,}"
            shapes = f"inputs of {few(y.shapes, 3)} in B, {few(x.shapes, 3)} in A"
            yield _difference(f"{phase}-{noun}", q < p and not is_equal, f"{text}: {shapes}.")
            return


def _operations(a: Facts, b: Facts, is_equal: bool, declared: Declared) -> Iterator[Difference]:
    if (
        a.precision
        and b.precision
        and _mean_bits(b.precision) < (1 - _LESS) * _mean_bits(a.precision)
    ):
        text = f"B multiplies {_kinds(b.precision)}, A {_kinds(a.precision)}: lower precision."
        yield _difference("precision", declared != "precision", text)
    if a.flops and b.flops is None:
        yield _difference("operations", False, "The operations of B's steps are not known.")
    if not a.flops or b.flops is None or abs(b.flops / a.flops - 1) <= _LESS:
        return
    text = f"A step of B computes {count(b.flops)} operations, one of A {count(a.flops)}"
    if b.flops < _CACHED * a.flops:
        yield _difference("operations", True, f"{text}: B reuses results, or leaves them out.")
    elif b.flops > a.flops:
        yield _difference("operations", False, f"{text}.")
    elif is_equal:
        yield _difference("operations", False, f"{text}, and the losses are equal.")
    else:
        yield _difference("operations", True, f"{text}, and the losses are not equal.")


def _mean_bits(precision: Mapping[str, float]) -> float:
    return sum(share * _BITS.get(kind, _FEWEST) for kind, share in precision.items())


def _kinds(precision: Mapping[str, float]) -> str:
    kinds = sorted(precision.items(), key=lambda pair: -pair[1])
    return few((f"{percent(share)} in {kind}" for kind, share in kinds), 3)


def _operators(
    a: Mapping[str, float] | None, b: Mapping[str, float] | None
) -> Iterator[Difference]:
    """The operators whose calls in a step differ most."""
    if a is None or b is None or a == b:
        return
    changes = {name: abs(a.get(name, 0) - b.get(name, 0)) for name in (*a, *b)}
    names = sorted((name for name in changes if changes[name]), key=lambda name: -changes[name])
    rows = [f"{each} {a.get(each, 0):.4g} in A, {b.get(each, 0):.4g} in B" for each in names]
    sums = f"{sum(a.values()):.4g} in A, {sum(b.values()):.4g} in B"
    text = f"Calls of operators in a step: {sums}: {few(rows, _SHOWN)}."
    yield _difference("operators", False, text)
