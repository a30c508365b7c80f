"""Every kind of callable, marked: it behaves as before, and its ranges are those of its calls."""

from __future__ import annotations

import asyncio
import copy
import doctest
import functools
import inspect
import io
import multiprocessing
import os
import pickle
import pydoc
import sys
import threading
import traceback
import types
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import warm
from recording import recorded, window
from torch import nn
from torch.utils.data import DataLoader, Dataset

from instrument import profiled
from instrument.annotate import backends, wrapper
from instrument.base.errors import ConfigError


def everything(
    a: int, b: int, /, c: int, d: int = 4, *rest: int, e: int, f: int = 6, **more: int
) -> tuple[Any, ...]:
    return (a, b, c, d, rest, e, f, more)


def taken(handle_: int, armed: int = 2) -> tuple[int, int]:
    """A function whose parameters bear names that the wrapper uses itself."""
    return handle_, armed


def usual(
    name: str, function: int, value: int = 3, *, error: int = 4, backend_: int = 5
) -> tuple[Any, ...]:
    """Names that many functions have."""
    return name, function, value, error, backend_


SIGNATURES: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (lambda: 1, (), {}),
    (everything, (1, 2, 3), {"e": 5}),
    (everything, (1, 2, 3, 40, 50, 60), {"e": 5, "f": 7, "g": 8}),
    (everything, (1, 2), {"c": 3, "e": 5}),
    (lambda *args: args, (1, 2), {}),
    (lambda **kwargs: kwargs, (), {"x": 1}),
    (lambda x, *, y=3: (x, y), (1,), {}),
    (lambda x, /, **more: (x, more), (1,), {"x": 2}),
    (lambda x=[]: x, (), {}),
    (taken, (1,), {}),
    (usual, ("x", 2), {"error": 7}),
    (len, ([1, 2],), {}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), SIGNATURES)
def test_arguments_and_defaults_go_through_as_they_are(
    tmp_path: Path, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    marked = profiled("f")(function)
    assert inspect.signature(marked) == inspect.signature(function)
    assert marked(*args, **kwargs) == function(*args, **kwargs)
    with recorded(tmp_path) as seen:
        assert marked(*args, **kwargs) == function(*args, **kwargs)
    assert seen.names == ["f"]


def test_usual_parameters_keep_the_wrapper_exact() -> None:
    names = ("name", "function", "value", "error", "backend_")
    assert profiled(usual).__code__.co_varnames[:5] == names
    assert profiled(taken).__code__.co_varnames[:2] == ("args", "kwargs")


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1,), {}), ((1, 2, 3), {"g": 1}), ((1,), {"a": 1})]
)
def test_wrong_arguments_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    marked = profiled(everything)
    with pytest.raises(TypeError):
        everything(*args, **kwargs)
    with pytest.raises(TypeError):
        marked(*args, **kwargs)


class Many:
    """One of each kind of member."""

    __slots__ = ("index",)

    def __init__(self, index: int = 0) -> None:
        self.index = index

    @profiled
    def method(self) -> int:
        return self.index

    @profiled("outer")
    @classmethod
    def outer_class_method(cls) -> str:
        return cls.__name__

    @classmethod
    @profiled("inner")
    def inner_class_method(cls) -> str:
        return cls.__name__

    @profiled("outer static")
    @staticmethod
    def outer_static_method() -> int:
        return 1

    @staticmethod
    @profiled("inner static")
    def inner_static_method() -> int:
        return 2

    @property
    @profiled("inner property")
    def inner_property(self) -> int:
        return self.index

    @profiled("outer property")
    @property
    def outer_property(self) -> int:
        """The index."""
        return self.index

    @outer_property.setter
    def outer_property(self, value: int) -> None:
        self.index = value

    @profiled("call")
    def __call__(self, x: int) -> int:
        return x + self.index


@profiled("class with call")
class Callable_:  # noqa: N801
    def __call__(self, x: int) -> int:
        return x * 2


class Cached:
    @profiled("cached")
    @functools.cached_property
    def value(self) -> int:
        return 7


def test_members_of_every_kind(tmp_path: Path) -> None:
    many = Many(3)
    with recorded(tmp_path) as seen:
        assert (many.method(), many.inner_property, many.outer_property, many(1)) == (3, 3, 3, 4)
        assert (many.outer_class_method(), many.inner_class_method()) == ("Many", "Many")
        assert (many.outer_static_method(), many.inner_static_method()) == (1, 2)
        many.outer_property = 5
        assert many.index == 5
        assert Callable_()(4) == 8
        cached = Cached()
        assert (cached.value, cached.value) == (7, 7)
    assert seen.names == [
        "Many.method", "inner property", "outer property", "call", "outer", "inner", "outer static",
        "inner static", "class with call", "cached",
    ]  # fmt: skip
    assert Many.outer_property.__doc__ == "The index."


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_an_autograd_function_has_a_forward_and_a_backward(tmp_path: Path) -> None:
    marked = profiled("square")(type("Marked", (Square,), {}))
    x = torch.tensor([3.0], requires_grad=True)
    with recorded(tmp_path) as seen:
        marked.apply(x).sum().backward()
    assert seen.names == ["square.forward", "square.backward"]
    assert x.grad.item() == 6.0
    with recorded(tmp_path) as again:
        Square.apply(x)
    assert again.names == [], "the class it was derived from is untouched"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_a_module_instance_is_marked_in_place_and_no_other(tmp_path: Path) -> None:
    net, other = Net(), Net()
    assert profiled("mine")(net) is net
    x = torch.ones(1, 3)
    with recorded(tmp_path) as seen:
        expected = net(x)
        other(x)
        copied = copy.deepcopy(net)
        copied.linear.weight.data.zero_()
        assert not torch.equal(copied(x), expected), "the copy's forward is the copy's own"
        shallow = copy.copy(net)
        shallow._modules = {"linear": copied.linear}
        assert torch.equal(shallow(x), copied(x))
        assert torch.equal(net(x), expected)
    assert seen.names == ["mine"] * 5
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), expected)


def test_hooks_on_a_marked_module_lie_in_its_range(tmp_path: Path) -> None:
    net = profiled("net")(Net())
    net.register_forward_pre_hook(lambda *_: profiled("before")(lambda: None)())
    net.register_forward_hook(lambda *_: profiled("after")(lambda: None)())
    with recorded(tmp_path) as seen:
        net(torch.ones(1, 3))
    assert seen.ranges == [("net", None), ("before", "net"), ("after", "net")]


@pytest.mark.filterwarnings("ignore:.torch.jit")  # TorchScript is deprecated
def test_a_marked_module_is_saved_scripted_and_loaded_without_this_package(tmp_path: Path) -> None:
    layer = profiled(nn.Linear(2, 2), name="layer")
    torch.save(layer, tmp_path / "layer.pt")
    assert b"instrument" not in (tmp_path / "layer.pt").read_bytes()
    with torch.serialization.safe_globals([nn.Linear]):
        loaded = torch.load(tmp_path / "layer.pt")
    x = torch.ones(1, 2)
    with recorded(tmp_path) as seen:
        assert torch.equal(loaded(x), layer(x))
        assert torch.equal(torch.jit.script(layer)(x), layer(x))
    assert seen.names == ["layer"] * 3


def test_a_name_given_later_to_a_module_replaces_the_earlier(tmp_path: Path) -> None:
    net = profiled("later")(profiled("earlier")(Net()))
    with recorded(tmp_path) as seen:
        net(torch.ones(1, 3))
    assert seen.names == ["later"]


def test_a_marked_module_is_nested_in_the_range_of_its_place_in_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(profiled("mine")(Net()))
    capture = window(tmp_path, lambda: model(torch.ones(1, 3)), model=model, export="inline")
    inner = [f"Sequential/0{below}" for below in ("", "/mine", "/mine/0.linear")]
    assert capture.ranges.column("path") == ["Sequential", *inner]


def test_a_module_whose_class_overrides_call(tmp_path: Path) -> None:
    @profiled("own call")
    class OwnCall(nn.Module):
        def __call__(self, x: int) -> int:
            return x + 1

    with recorded(tmp_path) as seen:
        assert OwnCall()(1) == 2
    assert seen.names == ["own call"]


@pytest.mark.filterwarnings("ignore:.torch.jit")  # TorchScript is deprecated
def test_what_a_fork_of_torch_runs_is_under_the_range(tmp_path: Path) -> None:
    @profiled("forked")
    def work(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with recorded(tmp_path) as seen, profiled("around"):
        assert torch.jit._wait(torch.jit._fork(work, torch.ones(1))).item() == 2
    assert seen.ranges == [("around", None), ("forked", "around")]


# Coroutines and generators


@profiled("counting")
def counting(n: int) -> Iterator[Any]:
    """Count."""
    got = []
    try:
        for i in range(n):
            try:
                got.append((yield i))
            except KeyError as error:
                got.append(error.args[0])
    finally:
        with profiled("cleanup"):
            got.append("cleaned")
    return got


def drain(generator: Any) -> Any:
    try:
        next(generator)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("there was more")


def test_a_generator_has_a_range_for_each_slice(tmp_path: Path) -> None:
    with recorded(tmp_path) as seen:
        generator = counting(2)
        assert next(generator) == 0
        with profiled("between"):
            pass
        assert generator.send("sent") == 1
        assert drain(generator) == ["sent", None, "cleaned"]
    resumed = "counting (resumed)"
    outer = [("counting", None), ("between", None), (resumed, None), (resumed, None)]
    assert seen.ranges == [*outer, ("cleanup", resumed)]
    assert inspect.isgeneratorfunction(counting)


def test_a_generator_is_thrown_into_and_closed_as_before(tmp_path: Path) -> None:
    with recorded(tmp_path) as seen:
        generator = counting(3)
        next(generator)
        assert generator.throw(KeyError("thrown")) == 1
        generator.close()
        with pytest.raises(StopIteration):
            next(generator)
        unhandled = counting(1)
        next(unhandled)
        with pytest.raises(ValueError, match="not caught"):
            unhandled.throw(ValueError("not caught"))
        with profiled("after"):
            pass
    assert seen.names.count("cleanup") == 2
    assert seen.ranges[-1] == ("after", None)
    assert list(counting(3)) == [0, 1, 2]


@profiled("fetch")
async def fetch(name: str, rounds: int = 2) -> str:
    for _ in range(rounds):
        with profiled(f"work {name}"):
            pass
        await asyncio.sleep(0)
    return name


@profiled("stream")
async def stream(n: int) -> AsyncIterator[int]:
    try:
        for i in range(n):
            await asyncio.sleep(0)
            yield i
    finally:
        with profiled("stream cleanup"):
            pass


def test_coroutines_that_take_turns_do_not_swallow_each_other(tmp_path: Path) -> None:
    async def both() -> list[str]:
        return await asyncio.gather(fetch("a"), fetch("b"))

    with recorded(tmp_path) as seen:
        assert asyncio.run(both()) == ["a", "b"]
    assert seen.names.count("fetch") == 2, "calls"
    assert seen.names.count("fetch (resumed)") == 4, "resumptions"
    around = {parent for name, parent in seen.ranges if name.startswith("work")}
    assert around <= {"fetch", "fetch (resumed)"}
    assert all(parent is None for name, parent in seen.ranges if name.startswith("fetch"))
    assert inspect.iscoroutinefunction(fetch)


def test_a_generator_that_types_makes_a_coroutine_can_be_awaited(tmp_path: Path) -> None:
    @types.coroutine
    def twice(x: int) -> Iterator[None]:
        yield
        return 2 * x

    marked = profiled("twice")(twice)
    partial = profiled("twice")(functools.partial(twice, 2))

    async def main() -> list[int]:
        return [await marked(1), await partial()]

    with recorded(tmp_path) as seen:
        assert asyncio.run(main()) == [2, 4]
    assert seen.names == ["twice", "twice (resumed)"] * 2
    assert list(marked(1)) == [None], "it is a generator too"


def test_a_coroutine_that_fails_or_is_cancelled(tmp_path: Path) -> None:
    @profiled("failing")
    async def failing() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    @profiled("waiting")
    async def waiting() -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        with pytest.raises(ValueError, match="no"):
            await failing()
        task = asyncio.ensure_future(waiting())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with recorded(tmp_path) as seen:
        asyncio.run(run())
    assert seen.names == ["failing", "failing (resumed)", "waiting", "waiting (resumed)"]


def test_async_generators(tmp_path: Path) -> None:
    async def run() -> list[int]:
        found = [i async for i in stream(2)]
        left = stream(5)
        assert await left.__anext__() == 0
        await left.aclose()
        thrown = stream(5)
        await thrown.__anext__()
        with pytest.raises(KeyError):
            await thrown.athrow(KeyError("x"))
        return found

    with recorded(tmp_path) as seen:
        assert asyncio.run(run()) == [0, 1]
    assert seen.names.count("stream") == 3
    assert seen.names.count("stream cleanup") == 3
    assert inspect.isasyncgenfunction(stream)


# Never in the way


@profiled
def fails(depth: int) -> None:
    if depth:
        return fails(depth - 1)
    raise ValueError("deep")


@pytest.mark.parametrize("armed", [False, True])
def test_our_frames_add_one_line_to_a_traceback(tmp_path: Path, armed: bool) -> None:
    recording = recorded(tmp_path) if armed else nullcontext()
    with recording, pytest.raises(ValueError, match="deep") as raised:
        fails(0)
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert [f.filename for f in frames].count("<profiled>") == 1


def test_a_body_that_raises_runs_once() -> None:
    runs = []

    @profiled
    def body() -> None:
        runs.append(1)
        raise RuntimeError("once")

    backends.arm()
    try:
        with pytest.raises(RuntimeError):
            body()
    finally:
        backends.disarm()
    assert runs == [1]


@functools.singledispatch
@profiled("dispatched")
def dispatched(x: Any) -> str:
    return "any"


@dispatched.register
@profiled("dispatched int")
def _(x: int) -> str:
    return "int"


@profiled
def documented(x: int) -> int:
    """Double a number.

    >>> documented(2)
    4
    """
    return 2 * x


def test_tools_that_look_at_functions(tmp_path: Path) -> None:
    with recorded(tmp_path) as seen:
        assert (dispatched("x"), dispatched(1)) == ("any", "int")
    assert seen.names == ["dispatched", "dispatched int"]
    tests = doctest.DocTestFinder().find(sys.modules[__name__])
    (found,) = [each for each in tests if each.name.endswith(".documented")]
    assert doctest.DocTestRunner().run(found) == doctest.TestResults(0, 1)
    assert "Double a number." in pydoc.render_doc(documented)
    assert "return 2 * x" in inspect.getsource(documented)
    assert pickle.loads(pickle.dumps(documented)) is documented
    assert copy.deepcopy(documented) is documented


def in_child(queue: Any) -> None:
    queue.put((backends.armed, documented(3)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork while threads run
def test_marked_functions_in_other_processes() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    backends.arm()
    try:
        process = context.Process(target=in_child, args=(queue,))
        process.start()
        assert queue.get() == (False, 6)
        process.join()
    finally:
        backends.disarm()


class Items(Dataset[tuple[int, bool]]):
    @profiled("item")
    def __getitem__(self, index: int) -> tuple[int, bool]:
        return index, backends.armed

    def __len__(self) -> int:
        return 3


@pytest.mark.nightly  # the worker is a new interpreter that loads torch
def test_a_marked_dataset_in_a_worker_that_is_spawned(tmp_path: Path) -> None:
    loader = DataLoader(Items(), None, num_workers=1, multiprocessing_context="spawn")
    with recorded(tmp_path) as seen, profiled("loading"):
        assert [*loader] == [[0, False], [1, False], [2, False]]
    assert [name for name in seen.names if not name.startswith("enumerate(DataLoader)")] == [
        "loading"
    ]


@pytest.mark.parametrize(
    ("threads", "rounds"), [(2, 20), pytest.param(4, 50, marks=pytest.mark.nightly)]
)
def test_each_thread_has_its_own_nesting(threads: int, rounds: int) -> None:
    """Every open is closed on its thread, in the reverse order, while recording goes on and off around them."""
    opened: dict[int, list[int]] = {}
    count, wrong = iter(range(10**9)), []
    opening, running, done = threading.Event(), threading.Event(), threading.Event()

    def opens(name: str) -> int:
        handle = next(count)
        opened.setdefault(threading.get_ident(), []).append(handle)
        opening.set()
        return handle

    def closes(handle: int) -> None:
        if opened[threading.get_ident()].pop() != handle:
            wrong.append(handle)

    @profiled
    def nest(depth: int) -> None:
        running.set()
        with profiled("block"):
            if depth:
                nest(depth - 1)

    def work() -> None:
        while not done.is_set():
            nest(4)

    def happens(event: threading.Event) -> None:
        event.clear()
        assert event.wait(120)

    ours, interval = backends.Backend(opens, closes), sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # more often than usual, and this thread has its turn sooner
    workers = [threading.Thread(target=work) for _ in range(threads)]
    try:
        for worker in workers:
            worker.start()
        for _ in range(rounds):
            backends.arm(ours)
            happens(opening)
            backends.disarm()
            happens(running)
    finally:
        backends.disarm()
        done.set()
        for worker in workers:
            worker.join()
        sys.setswitchinterval(interval)
    assert wrong == []
    assert all(not handles for handles in opened.values())


# Names


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    @profiled("layer{self.index}")
    def forward(self, x: int, *, scale: int = 2) -> int:
        return x * scale


@profiled("size {x:.0f}")
def sized(x: int, **more: Any) -> int:
    return x


@profiled("generated {n}")
def generated(n: int) -> Iterator[int]:
    yield n


def test_names_from_the_arguments(tmp_path: Path) -> None:
    variadic = profiled("both {rest[0]} {c}")(everything)
    through = profiled("n={b}")(functools.partial(everything, 1))
    outer = profiled("e={e}")(functools.wraps(everything)(lambda *args, **kwargs: (args, kwargs)))
    with recorded(tmp_path) as seen:
        Layer(3)(1)
        Layer(4).forward(1, scale=3)
        sized(5, y=1)
        variadic(1, 2, 3, 4, 50, e=5)
        through(2, 3, e=5)
        outer(1, 2, 3, e=5)
        list(generated(2))
    assert seen.names == [
        "layer3", "layer4", "size 5", "both 50 3", "n=2", "e=5", "generated 2",
        "generated 2 (resumed)",
    ]  # fmt: skip


def test_a_name_that_cannot_be_made_costs_nothing_but_the_name(tmp_path: Path) -> None:
    with recorded(tmp_path) as seen:
        assert profiled("{x.y}")(documented)(1) == 2
        assert profiled("a { brace")(documented)(1) == 2
    assert seen.names[::2] == ["{x.y}", "a { brace"]


@pytest.mark.parametrize("name", ["block{self.i}", "f{nope}", "{x} {y[0]}", "{}", "{0}", "{x:{n}}"])
def test_a_name_of_what_is_no_parameter_is_refused_where_the_mark_is_made(name: str) -> None:
    made = [lambda: profiled(name)(documented), lambda: profiled(documented, name=name)]
    made.append(lambda: profiled(name)(functools.wraps(documented)(lambda *args: args)))
    made.append(lambda: profiled(name)(staticmethod(documented)))
    for make in made:
        with pytest.raises(ConfigError) as raised:
            make()
        said = f"profiled was given the name {name!r}, but documented has no parameter "
        assert str(raised.value).startswith(said)
    with pytest.raises(ConfigError, match="plain text as the name of a module instance"):
        profiled(name)(nn.Linear(1, 1))


def test_a_name_is_made_only_while_recording() -> None:
    made = []

    class Shown(int):
        def __format__(self, spec: str) -> str:
            made.append(spec)
            return "shown"

    profiled("{x}")(documented)(Shown(1))
    assert made == []


# What cannot be marked


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (3, "cannot mark 3: give a callable, a class or a method."),
        (
            dict,
            "cannot mark the class dict: it is no nn.Module and has no __call__; mark its methods.",
        ),
        (
            type(len),
            "cannot mark the class builtin_function_or_method: it is built in and cannot be changed; "
            "mark its caller.",
        ),
        ("", "was given an empty name: pass a name, or leave it out."),
    ],
)
def test_what_cannot_be_marked_gets_one_sentence(target: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        profiled(target)
    assert str(raised.value) == f"profiled {sentence}"


def test_a_builtin_that_tells_no_signature(tmp_path: Path) -> None:
    relu, largest = profiled(torch.relu), profiled("largest")(max)
    with pytest.raises(ConfigError, match="max has no parameter 'args'"):
        profiled("largest of {args}")(max)
    compiled = torch.compile(relu, backend="eager", fullgraph=True)
    x = torch.tensor([-1.0, 2.0])
    with recorded(tmp_path) as seen:
        assert torch.equal(relu(x), torch.relu(x))
        assert largest(1, 3, key=lambda each: -each) == 1
        assert torch.equal(compiled(x), torch.relu(x))
    assert seen.names[:2] == [torch.relu.__qualname__, "largest"]
    assert (relu.__name__, relu.__doc__) == (torch.relu.__name__, torch.relu.__doc__)
    for function in (relu, torch.relu):
        with pytest.raises(ValueError, match="no signature found"):
            inspect.signature(function)


@pytest.mark.filterwarnings("ignore:.torch.jit")  # TorchScript is deprecated
def test_torchscript_cannot_be_marked() -> None:
    for scripted in (torch.jit.script(Net()), torch.jit.trace(lambda x: x + 1, torch.ones(1))):
        with pytest.raises(
            ConfigError, match="TorchScript runs it outside Python; mark its caller"
        ):
            profiled(scripted)


def test_the_kill_switch_hands_back_the_very_object(tmp_path: Path) -> None:
    code = """
        import sys, torch
        from torch import nn
        for name in [name for name in sys.modules if name.partition(".")[0] == "instrument"]:
            del sys.modules[name]  # the variable is read at import
        from instrument import Session, instrument_model, profiled

        def f(x): return x
        class Net(nn.Module):
            def forward(self, x): return x
        forward, method = Net.forward, staticmethod(f)
        assert profiled(f) is f and profiled("name")(f) is f and profiled()(f) is f and profiled(method) is method
        assert profiled(Net) is Net and Net.forward is forward
        net = profiled(Net())
        instrument_model(net)
        with Session(active=1, export="inline") as session, profiled("block"):
            net(torch.ones(1) + 1)
            session.step()
        (capture,) = session.captures
        assert capture.metadata["annotations_disabled"] is True
        assert list(capture.ranges) == []
        assert "aten::add" in [o.name for o in capture.operators]
    """
    env = {**os.environ, "INSTRUMENT_DISABLE": "1"}
    done = warm.run_apart(["-c", dedent(code)], tmp_path, env)
    assert done.returncode == 0, done.stderr
    said = "INSTRUMENT_DISABLE is set: annotations do nothing, and no named range will be recorded."
    assert said in done.stderr


# What a mark must not change


def test_an_autograd_function_with_vjp_and_a_module_with_a_static_forward(tmp_path: Path) -> None:
    @profiled("cube")
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def vjp(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return 3 * x**2 * grad

    @profiled("static")
    class Static(nn.Module):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x + 1

    x = torch.tensor([2.0], requires_grad=True)
    with recorded(tmp_path) as seen:
        Cube.apply(Static()(x)).backward()
    assert seen.names == ["static", "cube.forward", "cube.backward"]
    assert x.grad.item() == 27.0


def test_callable_objects_keep_their_attributes(tmp_path: Path) -> None:
    partial = profiled("partial")(functools.partial(int, base=2))
    many = profiled("many")(Many(4))
    unnamed = functools.partial(everything, 1, 2, e=5)
    with recorded(tmp_path) as seen:
        assert (partial("11"), many(1), many.method()) == (3, 5, 4)
        assert profiled(unnamed)(3) == unnamed(3)
    assert seen.names == ["partial", "many", "call", "Many.method", "everything"]
    assert inspect.signature(profiled(unnamed)) == inspect.signature(unnamed)
    assert (partial.func, partial.keywords) == (int, {"base": 2})
    assert many.index == 4
    assert pickle.loads(pickle.dumps(many))(1) == 5
    assert copy.deepcopy(partial)("10") == 2
    assert repr(many) == repr(many.__wrapped__)
    assert (many.__doc__, many.__module__) == (Many.__doc__, Many.__module__)
    assert inspect.signature(many) == inspect.signature(many.__wrapped__)


class Kernels:
    """An object that is more than its call, such as a Triton kernel: `kernels[grid](x)`."""

    def __call__(self, x: int) -> int:
        return x

    def __getitem__(self, grid: int) -> Callable[[int], int]:
        return self


@pytest.mark.parametrize(
    ("target", "name", "method"),
    [(Kernels(), "Kernels", "__getitem__"), (functools.lru_cache(usual), "usual", "__get__")],
)
def test_an_object_with_special_methods_is_refused(target: Any, name: str, method: str) -> None:
    with pytest.raises(ConfigError) as raised:
        profiled(target)
    assert str(raised.value) == (
        f"profiled cannot mark {name}: the mark would hide its {method}. Write "
        f"`with profiled('{name}'):` around its calls, or mark the function in it."
    )


class Encoder:
    def __init__(self, index: int) -> None:
        self.index = index

    def encode(self, by: int) -> int:
        return self.index + by


def test_a_marked_bound_method_stays_bound(tmp_path: Path) -> None:
    one = Encoder(2)
    method = one.encode
    one.encode = profiled(method)  # type: ignore[method-assign]
    assert one.encode.__self__ is one  # type: ignore[attr-defined]
    other = copy.deepcopy(one)
    other.index = 7
    with recorded(tmp_path) as seen:
        assert (one.encode(1), other.encode(1)) == (3, 8)
        assert profiled("by {by}")(method)(3) == 5
        assert profiled("index {self.index}")(method)(1) == 3
    assert seen.names == ["Encoder.encode", "Encoder.encode", "by 3", "index 2"]
    assert inspect.signature(one.encode) == inspect.signature(method)
    assert pickle.loads(pickle.dumps(profiled(method)))(1) == 3


def test_an_object_whose_call_is_a_coroutine(tmp_path: Path) -> None:
    class Fetcher:
        async def __call__(self, name: str) -> str:
            with profiled("inside"):
                pass
            await asyncio.sleep(0)
            return name

    marked = profiled("fetcher")(Fetcher())
    with recorded(tmp_path) as seen:
        assert asyncio.run(marked("a")) == "a"
    assert seen.ranges[:2] == [("fetcher", None), ("inside", "fetcher")]
    assert "fetcher (resumed)" in seen.names


@pytest.mark.parametrize("function", [counting, fetch, stream])
def test_wrong_arguments_are_refused_at_the_call(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError):
        function(1, 2, 3, 4)


def test_a_class_bears_its_qualified_name(tmp_path: Path) -> None:
    class Outer:
        @profiled
        class Inner(nn.Module):
            def forward(self, x: int) -> int:
                return x

    with recorded(tmp_path) as seen:
        Outer.Inner()(1)
    assert seen.names == [Outer.Inner.__qualname__]
    assert seen.names[0].endswith("Outer.Inner")


def test_a_wrapper_is_told_from_other_callables() -> None:
    def plain() -> None: ...

    async def later() -> None: ...

    assert all(wrapper.is_ranged(profiled(each)) for each in (plain, later))
    assert not any(map(wrapper.is_ranged, (plain, later, len, None, wrapper.is_ranged)))
