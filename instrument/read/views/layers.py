"""The layers of the model: the device's time by layer, and the evidence for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from instrument.base.units import percent
from instrument.read.facts.cuda_graphs import replayed
from instrument.read.facts.device_work import KINDS
from instrument.read.facts.layers import EVIDENCE, RECORDED, UNKNOWN
from instrument.read.facts.schema import Schema, names_of, schema
from instrument.read.views.table import Table

if TYPE_CHECKING:
    from instrument.read.views.views import Views

#: The rows of device events in no layer, and of those whose layer is not known.
NO_LAYER, UNKNOWN_LAYER = "(outside of layers)", "(layer unknown)"
# Kinds of kernels count for the role of a layer from this share of its time on.
_PART = 0.1
# The share of the device time from which a line says that its layers are not recorded.
_MANY = 0.05

LAYERS: Schema = schema(
    name="the layer, such as `layers.3` or `TransformerBlock_3`; `layer 3` if only its place among "
    "the layers is known: the first layer of a forward pass is `layer 0`. `(outside of layers)` "
    "for device events that are in no layer, as recorded; `(layer unknown)` for the others",
    device_ns="the sum of their durations",
    share="`device_ns` as a fraction of that of all layers and rows",
    kernels="the number of its kernels, copies and memsets",
    role="the kinds of kernels that take 10 % of its device time or more, the most first, as in "
    "the column `class` of the table of events",
    attention_ns="the part of `device_ns` in attention",
    product_ns="the part of `device_ns` in matrix products and convolutions",
    communication_ns="the part of `device_ns` in communication",
    evidence="what the layer is known from, for most of its time: recorded, annotation, kernel "
    "name, other trace, sequence, or unknown; docs/how-to/layers.md",
    confidence="the probability that a device event of the layer is in it, averaged over its time; "
    "None if the layer is not known",
)


def layers(capture: Views) -> Table:
    """Return one row for each layer, in the order in which they run; see `LAYERS`.

    A layer that runs several times, such as in each step, and in forward and backward, has one row.
    The last rows are the rest. The rows sum to all device time.
    """
    ns, kind, name = pl.col("duration_ns"), pl.col("class"), pl.col("name")
    is_layer = pl.col("layer").is_not_null()
    is_unknown = pl.col("evidence") == EVIDENCE[UNKNOWN]
    rest = pl.when(is_unknown).then(pl.lit(UNKNOWN_LAYER)).otherwise(pl.lit(NO_LAYER))
    rows = capture.rows(
        "layer", "kind", "class", "start_ns", "duration_ns", "evidence", "confidence"
    )
    rows = rows.filter(pl.col("kind").is_in(KINDS)).sort("start_ns", maintain_order=True)
    rows = rows.with_columns(
        name=pl.when(is_layer).then("layer").otherwise(rest),
        rank=pl.when(is_layer).then(0).when(is_unknown).then(2).otherwise(1),
    ).with_columns(
        of_class=ns.sum().over("name", "class"),
        of_evidence=ns.sum().over("name", "evidence"),
        is_part=ns.sum().over("name", "class") >= _PART * ns.sum().over("name"),
    )
    by_time = (
        pl.when("is_part").then("class").sort_by("of_class", "class", descending=[True, False])
    )
    found = rows.group_by("name", "rank", maintain_order=True).agg(
        role=by_time.drop_nulls().unique(maintain_order=True).str.join(", "),
        kernels=pl.len().cast(pl.Int64),
        device_ns=ns.sum(),
        attention_ns=ns.filter(kind == "attention").sum(),
        product_ns=ns.filter(kind.is_in(["matrix product", "convolution"])).sum(),
        communication_ns=ns.filter(kind == "communication").sum(),
        evidence=pl.col("evidence").sort_by("of_evidence").last(),
        confidence=pl.when(ns.sum() > 0).then((pl.col("confidence") * ns).sum() / ns.sum()),
    )
    total = pl.col("device_ns").sum()
    found = (
        found.with_row_index("row")
        .with_columns(
            share=pl.when(total > 0).then(pl.col("device_ns") / total),
            confidence=pl.when(pl.col("rank") < 2).then("confidence"),
            place=pl.col("row").min().over(name.str.extract(r"^(.*?)\d*$")),
            number=name.str.extract(r"(\d{1,9})$").cast(pl.Int64),
        )
        .sort("rank", "place", "number", maintain_order=True)
    )
    return Table.of(LAYERS, found.select(names_of(LAYERS)))


class LayerEvidence(NamedTuple):
    """The share of the device time by what its layer is known from.

    Attributes:
        shares: by each of `EVIDENCE` that has time.
        remedy: what to record, for names of all layers; "" if at least 95 % is recorded.
    """

    shares: dict[str, float]
    remedy: str

    @property
    def is_partial(self) -> bool:
        """Whether layers are known, but of less than 95 % of the time from what was recorded."""
        return self.remedy != "" and self.shares.get(EVIDENCE[UNKNOWN]) != 1

    def __str__(self) -> str:
        told = ", ".join(f"{name} {percent(share)}" for name, share in self.shares.items())
        return f"Layers of the device time: {told}. {self.remedy}".rstrip()


def layer_evidence(capture: Views) -> LayerEvidence | None:
    """Return what the layers are known from, computed once; None without device time."""
    return capture.whole.once("evidence of layers", lambda: _layer_evidence(capture.whole))


def _layer_evidence(capture: Views) -> LayerEvidence | None:
    work, of = capture.work, capture.facts.layers.evidence
    if not work.duration_ns.any():
        return None
    by_kind = np.bincount(of, work.duration_ns, minlength=len(EVIDENCE)) / work.duration_ns.sum()
    shares = {name: share for name, share in zip(EVIDENCE, by_kind.tolist()) if share}
    early = float(work.duration_ns[work.launch < 0].sum() / work.duration_ns.sum())
    if by_kind[RECORDED] > 1 - _MANY:
        remedy = ""
    elif replayed(capture.events, work.event, work.call).any():
        remedy = (
            "To name them, record once without CUDA graphs, with model=… or with_stack=true, and "
            "give that trace with --like."
        )
    elif max(_MANY, 0.5 * (1 - by_kind[RECORDED])) < early < 1 - _MANY:  # above, no launches
        remedy = (
            "Work from before the recording counts, so some layers run once more than others: "
            "synchronise before the window begins."
        )
    else:
        remedy = "To name them, give the session the model (model=…), or record with_stack=true."
    return LayerEvidence(shares, remedy)
