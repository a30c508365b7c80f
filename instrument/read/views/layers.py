"""The layers of the model: the device's time by layer, and the evidence for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from instrument.base.units import percent
from instrument.read.facts.cuda_graphs import replayed
from instrument.read.facts.device_work import KINDS
from instrument.read.facts.layers import EVIDENCE, SEQUENCE, UNKNOWN
from instrument.read.facts.schema import Schema, names_of, schema
from instrument.read.views.table import Table

if TYPE_CHECKING:
    from instrument.read.views.views import Views

#: The rows of device events in no layer, and of those whose layer is not known.
NO_LAYER, UNKNOWN_LAYER = "(outside of layers)", "(layer unknown)"
# Kinds of kernels count for the role of a layer from this share of its time on.
_PART = 0.1
# The share of the device time without a layer from which a line says what to record.
_MANY = 0.05

LAYERS: Schema = schema(
    name="the layer, such as `layers.3` or `TransformerBlock_3`; `layer 3` if only its place among "
    "the layers is known: the first layer of a forward pass is `layer 0`. `(outside of layers)` "
    "for device events that are in no layer, as recorded; `(layer unknown)` for the others",
    role="the kinds of kernels that take 10 % of its device time or more, the most first, as in "
    "the column `class` of the table of events",
    kernels="the number of its kernels, copies and memsets",
    device_ns="the sum of their durations",
    share="`device_ns` as a fraction of that of all layers and rows",
    attention_ns="the part of `device_ns` in attention",
    product_ns="the part of `device_ns` in matrix products and convolutions",
    communication_ns="the part of `device_ns` in communication",
    evidence="what the layer is known from, for most of its time: recorded (a range or module "
    "around the launches), annotation (torch's, of the nodes of CUDA graphs), kernel name, other "
    "trace (`--like`), sequence (the kernels repeat, layer by layer), or unknown",
    confidence="the probability that a device event of the layer is in it, averaged over its time, "
    "as measured on traces whose layers are known; None if the layer is not known",
)


def layers(capture: Views) -> Table:
    """Return one row for each layer, in the order in which they run; see `LAYERS`.

    A layer that runs several times, such as in each step, and in forward and backward, has one row.
    The last rows are the rest. The rows sum to all device time.
    """
    ns, kind, is_layer = pl.col("duration_ns"), pl.col("class"), pl.col("layer").is_not_null()
    is_unknown = pl.col("evidence") == EVIDENCE[UNKNOWN]
    rest = pl.when(is_unknown).then(pl.lit(UNKNOWN_LAYER)).otherwise(pl.lit(NO_LAYER))
    rows = (
        _work(capture, "class", "evidence", "confidence")
        .sort("start_ns", maintain_order=True)
        .with_columns(
            name=pl.when(is_layer).then("layer").otherwise(rest),
            rank=pl.when(is_layer).then(0).when(is_unknown).then(2).otherwise(1),
        )
    )
    found = rows.group_by("name", "rank", maintain_order=True).agg(
        kernels=pl.len().cast(pl.Int64),
        device_ns=ns.sum(),
        attention_ns=ns.filter(kind == "attention").sum(),
        product_ns=ns.filter(kind.is_in(["matrix product", "convolution"])).sum(),
        communication_ns=ns.filter(kind == "communication").sum(),
        confidence=pl.when(ns.sum() > 0).then((pl.col("confidence") * ns).sum() / ns.sum()),
    )
    for column, each, keeps in (
        ("role", "class", pl.col("part") >= _PART),
        ("evidence", "evidence", pl.int_range(pl.len()) == 0),
    ):
        texts = (
            rows.group_by("name", each)
            .agg(ns.sum())
            .sort("duration_ns", each, descending=[True, False])
            .with_columns(part=ns / ns.sum().over("name"))
            .group_by("name")
            .agg(pl.col(each).filter(keeps).str.join(", ").alias(column))
        )
        found = found.join(texts, on="name", how="left", maintain_order="left")
    total, name = pl.col("device_ns").sum(), pl.col("name")
    found = found.with_columns(
        share=pl.when(total > 0).then(pl.col("device_ns") / total),
        confidence=pl.when(pl.col("rank") < 2).then("confidence"),
        place=pl.int_range(pl.len()).min().over(name.str.extract(r"^(.*?)\d*$")),
        number=name.str.extract(r"(\d{1,9})$").cast(pl.Int64),
    ).sort("rank", "place", "number", maintain_order=True)
    return Table.of(LAYERS, found.select(names_of(LAYERS)))


def advice(capture: Views) -> str:
    """`sources` if layers are unknown, or most have no names; else ""."""
    shares = _shares(capture)
    unnamed, unknown = (shares.get(EVIDENCE[kind], 0) for kind in (SEQUENCE, UNKNOWN))
    return sources(capture) if unknown >= _MANY or unnamed >= 0.5 else ""


def sources(capture: Views) -> str:
    """Say what the layers are known from, and what to record so that they have names."""
    shares = ", ".join(f"{name} {percent(share)}" for name, share in _shares(capture).items())
    has_graphs = replayed(capture.events, capture.work.event, capture.work.call).any()
    how = (
        "record a window of the same program without CUDA graphs, with the session's model or "
        "with_stack=true, and give it with --like"
        if has_graphs
        else "give the session the model (model=…), or record with_stack=true"
    )
    return f"Layers of the device time by evidence: {shares}. So that layers have names, {how}."


def _shares(capture: Views) -> dict[str, float]:
    """The share of the device time by evidence, where it is not 0."""
    rows = _work(capture.whole, "evidence").group_by("evidence").agg(pl.col("duration_ns").sum())
    time = dict(rows.rows())
    total = max(sum(time.values()), 1)
    return {name: time[name] / total for name in EVIDENCE if time.get(name)}


def _work(capture: Views, *columns: str) -> pl.DataFrame:
    rows = capture.rows("name", "layer", "kind", "start_ns", "duration_ns", *columns)
    return rows.filter(pl.col("kind").is_in(KINDS))
