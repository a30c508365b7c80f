"""All kinds of annotations, and the ranges that a window records for them.

    python examples/annotate_everything.py
    INSTRUMENT_DISABLE=1 python examples/annotate_everything.py   # annotations change nothing

The name of a range comes from the code, from the annotation, or from the arguments of the call. A
coroutine or generator has a range for each slice between two suspensions, so the time while it is
suspended does not count. Ranges inside a compiled region are listed with the region, without times.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from instrument import Session, instrument_model, profiled
from instrument.read.show.text import render


@profiled
def a_function(x: Tensor) -> Tensor:
    return x + 1


@profiled("named in the mark")
def another(x: Tensor) -> Tensor:
    return a_function(x) * 2


@profiled("power {n}")  # the name is made from the arguments, only while a window records
def power(x: Tensor, n: int = 2) -> Tensor:
    return x**n


@profiled("{x.shape[0]} rows")
def counted(x: Tensor) -> Tensor:
    return x.sum(0)


class Members:
    @profiled
    def method(self) -> None: ...

    @profiled("class method")
    @classmethod
    def of_the_class(cls) -> None: ...

    @staticmethod
    @profiled("static method")
    def static() -> None: ...

    @property
    @profiled("property")
    def value(self) -> int:
        return 1

    @profiled("callable object")
    def __call__(self) -> None: ...


@profiled
def a_generator(n: int) -> Iterator[int]:
    for i in range(n):
        a_function(torch.ones(4))
        yield i


@profiled
async def a_coroutine(name: str) -> str:
    a_function(torch.ones(4))
    await asyncio.sleep(0)  # the other coroutine runs
    return name


@profiled
async def an_async_generator(n: int) -> AsyncIterator[int]:
    for i in range(n):
        await asyncio.sleep(0)
        yield i


@profiled("square")  # gives the ranges square.forward and square.backward
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@profiled("layer {self.index}")
class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


async def take_turns() -> None:
    await asyncio.gather(a_coroutine("first"), a_coroutine("second"))
    async for _ in an_async_generator(2):
        pass


def main() -> None:
    x = torch.ones(4, 8, requires_grad=True)
    layers = nn.Sequential(Layer(0), Layer(1))
    one_instance = profiled("one instance")(nn.Linear(8, 8))
    # This model has no marks in its code.
    untouched = instrument_model(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    partial = profiled("partial")(functools.partial(torch.add, other=1))
    compiled = torch.compile(another, backend="eager")
    compiled(x)  # compile before the window

    with Session(active=None) as session:
        with profiled("functions"):
            another(x)
            power(x, n=3)
            counted(x)
            partial(x)
        with profiled("members"):
            members = Members()
            members.method()
            members.of_the_class()
            members.static()
            _ = members.value
            members()
        with profiled("slices"):
            for _ in a_generator(2):
                with profiled("work between two slices"):
                    torch.ones(4)
            asyncio.run(take_turns())
        with profiled("models"):
            Square.apply(untouched(one_instance(layers(x)))).sum().backward()
        with profiled("compiled"):
            compiled(x)

    print(render(session.captures[0], rows=60, operators=False))


if __name__ == "__main__":
    main()
