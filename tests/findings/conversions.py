"""Twins without a device: casts and copies that a step does not need, and attention that is not fused."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import scaled_dot_product_attention

from findings.twins import Twin

SIZE = 256
TIMES = 20  # that a step does the same


@cache
def _weight() -> torch.Tensor:
    return torch.randn(SIZE, SIZE)


@cache
def _cast() -> torch.Tensor:
    return _weight().to(torch.float64)


@cache
def _stored() -> torch.Tensor:
    return _weight().t().contiguous()


@cache
def _query() -> torch.Tensor:
    return torch.randn(1, 1, SIZE, 16)


def cast_each_time() -> None:
    hidden = torch.ones(1, SIZE, dtype=torch.float64)
    for _ in range(TIMES):
        hidden = hidden @ _weight().to(torch.float64)


def cast_once() -> None:
    hidden = torch.ones(1, SIZE, dtype=torch.float64)
    for _ in range(TIMES):
        hidden = hidden @ _cast()


def copy_each_time() -> None:
    hidden = torch.ones(1, SIZE)
    for _ in range(TIMES):
        hidden = hidden @ _weight().t().contiguous()


def copy_once() -> None:
    hidden = torch.ones(1, SIZE)
    for _ in range(TIMES):
        hidden = hidden @ _stored()


def separate_attention() -> None:
    query = _query()
    for _ in range(TIMES):
        torch.softmax(query @ query.transpose(-2, -1) / 4, dim=-1) @ query


def fused_attention() -> None:
    query = _query()
    for _ in range(TIMES):
        scaled_dot_product_attention(query, query, query)


TWINS = (
    Twin("a weight cast at each use", cast_each_time, cast_once, "layout-and-casts"),
    Twin("a weight copied at each use", copy_each_time, copy_once, "layout-and-casts"),
    Twin(
        "attention",
        separate_attention,
        fused_attention,
        "attention-not-fused",
        options={"record_shapes": True},
    ),
)
