from __future__ import annotations

import copy
import gc
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from recording import recorded, window
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from instrument import Session, instrument_model, profiled
from instrument.annotate import backends, module_calls
from instrument.annotate.modules import ModuleRanges, forget, instrumented_models
from instrument.base.errors import ConfigError
from instrument.read.show.text import render

pytestmark = pytest.mark.usefixtures("inline_export")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) * self.k(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


X = torch.ones(2, 4)
LAYER = ["attention", "attention.q", "attention.k", "mlp", "mlp.0", "mlp.1"]
ALL = [
    "Model",
    *(n for i in (0, 1) for n in (f"layers.{i}", *(f"layers.{i}.{m}" for m in LAYER))),
    "head",
]


TORCHS_CALL = nn.Module.__call__


def hooked(model: nn.Module) -> bool:
    left_wrapped = nn.Module.__call__ is not TORCHS_CALL
    return left_wrapped or any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def names(folder: Path, model: nn.Module, call: Any = None, **choice: Any) -> list[str]:
    instrument_model(model, **choice)
    try:
        with recorded(folder) as seen, ModuleRanges():
            (call or model)(X)
    finally:
        forget(model)
    assert not hooked(model)
    return seen.names


def test_every_submodule_that_is_called_has_its_qualified_name(tmp_path: Path) -> None:
    assert names(tmp_path, Model()) == ALL


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"depth": 0}, ["Model"]),
        ({"depth": 1}, ["Model", "head"]),
        ({"depth": 2}, ["Model", "layers.0", "layers.1", "head"]),
        ({"include": ["layers.*.attention"]}, ["layers.0.attention", "layers.1.attention"]),
        (
            {"include": ["layers.*"], "exclude": ["*.q", "*.k", "*.mlp*"]},
            ["layers.0", "layers.0.attention", "layers.1", "layers.1.attention"],
        ),
        ({"types": ["*Attention"]}, ["layers.0.attention", "layers.1.attention"]),
        ({"types": [nn.Linear], "exclude": ["layers.*"]}, ["head"]),
        ({"types": ["Module"], "depth": 1}, ["Model", "head"]),
    ],
)
def test_choosing_submodules(tmp_path: Path, choice: dict[str, Any], expected: list[str]) -> None:
    assert names(tmp_path, Model(), **choice) == expected


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        (
            {"include": ["layer.*"]},
            "include='layer.*', which matches no submodule; similar names: layers.1, layers.0, layers.",
        ),
        (
            {"exclude": ["nothing"]},
            "exclude='nothing', which matches no submodule; similar names: ",
        ),
        (
            {"types": ["Conv*"]},
            "options that select no submodule of Model: depth=None, include=[], exclude=[], "
            "types=['Conv*']; change them.",
        ),
    ],
)
def test_a_choice_that_leaves_nothing_is_refused(choice: dict[str, Any], sentence: str) -> None:
    model = Model()
    with pytest.raises(ConfigError) as raised:
        instrument_model(model, **choice)
    assert str(raised.value).startswith(f"instrument_model was given {sentence}")
    assert model not in instrumented_models()


def test_a_module_called_outside_the_models_forward(tmp_path: Path) -> None:
    model = Model()
    assert names(tmp_path, model, call=model.encode) == [n for n in ALL if n.startswith("layers.0")]


def test_a_shared_module_bears_its_first_name(tmp_path: Path) -> None:
    shared = nn.Linear(4, 4)
    assert names(tmp_path, nn.Sequential(shared, shared)) == ["Sequential", "0", "0"]


def test_a_module_that_calls_itself(tmp_path: Path) -> None:
    class Recursive(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return self(x, depth - 1) if depth else x

    model = nn.Sequential(Recursive())
    instrument_model(model)
    with recorded(tmp_path) as seen, ModuleRanges():
        model(X)
    assert seen.ranges == [("Sequential", None), ("0", "Sequential"), ("0", "0"), ("0", "0")]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_modules_are_recomputed(tmp_path: Path, reentrant: bool) -> None:
    class Checkpointed(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return self.head(x)

    model = Checkpointed()
    x = X.clone().requires_grad_()

    def train(_: torch.Tensor) -> None:
        model(x).sum().backward()
        with profiled("after"):
            pass

    seen = names(tmp_path, model, call=train)
    assert seen.count("layers.0.attention.q") == 2
    assert seen.count("layers.1") == 2
    assert seen[-1] == "after"


def test_an_exception_in_a_forward_ends_its_ranges_and_the_hooks_go(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    model = instrument_model(nn.Sequential(nn.ReLU(), Broken()))
    with recorded(tmp_path) as seen:
        with pytest.raises(ValueError, match="no"), ModuleRanges():
            model(X)
        with profiled("after"), pytest.raises(ValueError, match="no"):
            model(X)
    assert not hooked(model)
    inner = [("0", "Sequential"), ("1", "Sequential")]
    assert seen.ranges == [("Sequential", None), *inner, ("after", None)]


def test_what_was_not_called_is_told(tmp_path: Path) -> None:
    model = Model()
    instrument_model(model, depth=2)
    with recorded(tmp_path), ModuleRanges() as ranges:
        assert ranges.unseen() == {"Model", "layers.0", "layers.1", "head"}
        model.encode(X)
    assert ranges.unseen() == {"Model", "layers.1", "head"}


def test_a_model_is_neither_kept_alive_nor_changed() -> None:
    import gc
    import weakref

    model = instrument_model(Model())
    assert not hooked(model)
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_copied_or_saved_model_has_no_ranges(tmp_path: Path) -> None:
    model = instrument_model(Model())
    before = saved(model)
    with recorded(tmp_path) as seen, ModuleRanges():
        model(X)
        copied, shallow = copy.deepcopy(model), copy.copy(model)
        within = saved(model)
        replica: Any = model._replicate_for_data_parallel()
        for each in (copied, torch.load(within), replica):
            assert torch.equal(each(X), model(X))
    assert within.getvalue() == before.getvalue()
    assert seen.names.count("Model") == 4, "the calls of the model itself"
    # a replica of DataParallel's shares its modules until it is moved
    assert len(seen.names) == 5 * len(ALL) - 1
    assert not hooked(copied)
    assert vars(copied).keys() == vars(shallow).keys() == vars(Model()).keys()


def saved(model: nn.Module) -> io.BytesIO:
    """As `torch.save` writes it, to be loaded with `weights_only`."""
    torch.serialization.add_safe_globals(
        [Model, Block, Attention, nn.Linear, nn.ReLU, nn.Sequential, nn.ModuleList]
    )
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.filterwarnings("ignore:.torch.jit")  # TorchScript is deprecated
def test_what_captures_a_model_in_a_window_sees_no_range(tmp_path: Path) -> None:
    model = instrument_model(Block())
    expected = model(X)
    with recorded(tmp_path), ModuleRanges():
        made = [
            torch.jit.script(model),
            torch.fx.symbolic_trace(model),
            *(torch.export.export(model, (X,), strict=strict).module() for strict in (True, False)),
        ]
        assert [torch.equal(each(X), expected) for each in made] == [True] * 4
    assert [torch.equal(each(X), expected) for each in made] == [True] * 4
    forget(model)


def test_ranges_leave_torchs_fast_path_for_inference_on(tmp_path: Path) -> None:
    layer = profiled("marked")(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval())
    x = torch.ones(2, 4, 16)
    instrument_model(layer)
    with torch.inference_mode():
        capture = window(tmp_path, lambda: layer(x), model=layer)
    assert "aten::_transformer_encoder_layer_fwd" in [each.name for each in capture.operators]
    assert [each.name for each in capture.ranges] == ["TransformerEncoderLayer", "marked"]
    assert "self_attn" in capture.metadata["modules_not_seen"]
    forget(layer)


def test_the_types_of_parameters(tmp_path: Path) -> None:
    """A parameter that two models share counts once, one whose shape is not known yet does not count."""
    shared = nn.Linear(3, 2, dtype=torch.float64)
    models = {"one": nn.Sequential(shared, nn.LazyLinear(4)), "other": nn.Sequential(shared)}
    models["other"].append(nn.Linear(2, 1, dtype=torch.bfloat16))
    capture = window(tmp_path, model=models)
    assert capture.metadata["parameter_types"] == {"float64": 8, "bfloat16": 3}


@pytest.mark.parametrize(
    ("optimizers", "expected"),
    [
        ([[2]], {"0": False, "2": True}),
        ([[2], [0]], {"0": True, "2": True}),  # one that never steps holds the backbone
        ([[2], [0, 2]], {"0": True}),  # two hold the head
        ([], None),
        ([[0, 2]], {"Sequential": True}),
        ([[2, None]], None),  # it also holds what may be copies of parameters
    ],
)
def test_which_optimizer_trains_which_submodules(
    tmp_path: Path, optimizers: list[list[int | None]], expected: dict[str, bool] | None
) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU(), nn.Linear(2, 1))
    other = nn.Linear(2, 2)
    held = [[other if k is None else model[k] for k in parts] for parts in optimizers]
    every = [torch.optim.SGD(nn.ModuleList(each).parameters(), lr=0.1) for each in held]

    def train() -> None:
        model(torch.ones(1, 2)).sum().backward()
        for optimizer in every[:1]:
            optimizer.step()

    capture = window(tmp_path, train, model=model)
    assert trained(capture) == expected


def trained(capture: Any) -> dict[str, bool | str] | None:
    """Whether an optimizer trains submodules, or the program "changed" them; None if that is not known."""
    owners = capture.about.owners
    return owners and {
        name: each.optimizer is not None or ("changed" if each.changed else False)
        for name, each in owners.items()
    }


def test_order_of_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # other tests may have compiled graphs: then the order is not recorded
    monkeypatch.setattr("instrument.record.recorder._compiled_graphs", lambda: 0)

    class Features(nn.Linear):
        def forward(self, inputs: Any) -> torch.Tensor:
            return super().forward(*inputs)

    inputs = torch.ones(1, 2)
    models = {
        "generator": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        "critic": nn.Linear(2, 1),
        "average": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        "features": Features(2, 3).requires_grad_(False),
    }
    frozen = [*models["features"].parameters()]
    first, second = (
        torch.optim.SGD([*models[name].parameters(), *frozen], lr=0.1)
        for name in ("critic", "generator")
    )

    def train() -> None:
        for _ in range(2):
            first.step()
            for _ in range(2):  # the second call has the inputs of the first one
                models["critic"](inputs)
            models["critic"](models["generator"](inputs)).sum().backward()
            models["features"]([inputs])
            second.step()

    capture = window(tmp_path, train, model=models)
    assert capture.metadata["optimizer_steps"] == [0, 1, 0, 1]
    assert capture.metadata["repeated_calls"] == {"critic": 2, "generator": 1}
    owners = capture.about.owners or {}
    known = {"generator": (1, 4), "critic": (0, 2), "average": (None, 4), "features": (None, 0)}
    assert {name: (each.optimizer, each.gradients) for name, each in owners.items()} == known
    # inputs of an unknown kind, such as a list, may require gradients
    assert {name for name, each in owners.items() if each.differentiates} == {"critic", "features"}
    assert {name for name, each in owners.items() if each.is_copy} == {"average"}
    assert not _global_optimizer_pre_hooks


@pytest.mark.parametrize("through_data", [False, True])
def test_parameter_without_optimizer_is_used(tmp_path: Path, through_data: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)

    def train() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for each in model[0].parameters():
                (each.data if through_data else each).sub_(0.1)

    capture = window(tmp_path, train, model=model)
    assert trained(capture) == {"0": "changed", "1": True, "2": False}


def test_modes_of_the_program_see_nothing_of_ours(tmp_path: Path) -> None:
    seen = list[str]()

    def noted(_: Any, function: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(function))
        return function(*args, **kwargs or {})

    class Operators(TorchDispatchMode):
        __torch_dispatch__ = noted

    class Functions(TorchFunctionMode):
        __torch_function__ = noted

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)

    def train() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with Operators(), Functions():
        train()
        seen.clear()
        train()
        alone, seen[:] = [*seen], []
        capture = window(tmp_path, train, model=model)
    assert trained(capture) == {"0": False, "1": True}
    ours, theirs = ([each for each in of if "profiler" not in each] for of in (seen, alone))
    assert ours == theirs


def test_a_model_with_parameters_of_its_own_kind_is_recorded(tmp_path: Path) -> None:
    class Groups(nn.Linear):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([{"params": [*super().parameters(recurse)]}])

    capture = window(tmp_path, model=Groups(2, 2))
    assert trained(capture) is None


def test_calls_in_eval_mode_are_counted_beside_those_in_train_mode(tmp_path: Path) -> None:
    student, teacher = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2).eval()

    def each() -> None:
        teacher(torch.ones(1, 2))
        student.train()(torch.ones(1, 2))
        for _ in range(2):
            student.eval()(torch.ones(1, 2))

    capture = window(tmp_path, each, model={"student": student, "teacher": teacher})
    assert len(capture.steps) == 1
    assert capture.metadata["eval_calls"] == {"student": 2, "student.0": 2}


def test_wrapper_of_another_tool_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = instrument_model(Model())
    calls: list[nn.Module] = []

    def wrap() -> Any:
        inner: Any = nn.Module.__call__

        def counted(self: nn.Module, *args: Any) -> Any:
            calls.append(self)
            return inner(self, *args)

        monkeypatch.setattr(nn.Module, "__call__", counted)
        return counted

    with recorded(tmp_path) as first, ModuleRanges():
        wrapped = wrap()
        model(X)
    assert nn.Module.__call__ is wrapped
    with recorded(tmp_path) as second, ModuleRanges():
        model(X)
    assert nn.Module.__call__ is wrapped
    model(X)
    assert calls.count(model) == 3
    assert first.names == second.names == ALL
    monkeypatch.undo()  # puts back what was there: our wrapper of the first window
    model(X)
    with recorded(tmp_path) as third, ModuleRanges():
        model(X)
    assert third.names == ALL
    assert not hooked(model)
    forget(model)


def test_a_class_is_not_changed_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_calls, "_MOST_CHANGES", module_calls._changes + 1)
    model = instrument_model(Model())
    with recorded(tmp_path), ModuleRanges():
        pass
    stays = nn.Module.__call__
    assert stays is not TORCHS_CALL
    model(X)
    with recorded(tmp_path) as seen, ModuleRanges():
        model(X)
    assert nn.Module.__call__ is stays
    assert seen.names == ALL
    forget(model)
    monkeypatch.undo()
    backends.disarm()
    assert nn.Module.__call__ is TORCHS_CALL


def test_modules_with_stacks_after_timings(tmp_path: Path) -> None:
    code = """
        import sys, torch
        from torch import nn
        from torch.profiler import profile
        from instrument import Capture, Session
        model = nn.Sequential(nn.Linear(4, 4))
        options = {"active": 1, "output_dir": sys.argv[1], "export": "inline", "sinks": {}, "with_stack": True}
        with Session(options, model=model, timings={"modules": True}) as session:
            model(torch.ones(2, 4))
            session.step()
        assert [each.name for each in session.captures[0].ranges] == ["Sequential", "0"]
        with profile(with_stack=True) as profiler:
            model(torch.ones(2, 4))
        profiler.export_chrome_trace(sys.argv[1] + "/trace.json")
        for trace in (session.captures[0].trace_path, sys.argv[1] + "/trace.json"):
            frames = Capture.load(trace).events.names
            assert "nn.Module: Linear_0" in frames, trace
    """
    done = warm.run_code(code, str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_session_takes_modules_and_frees_the_model(tmp_path: Path) -> None:
    model = Model()
    for choice, expected in (
        ({"depth": 2}, ["Model", "layers.0", "layers.1", "head"]),
        ({"depth": 2, "enabled": False}, []),
    ):
        capture = window(tmp_path, lambda: model(X), model=model, modules=choice)
        assert model not in instrumented_models()
        assert capture.ranges.column("name") == expected


def test_a_model_instrumented_by_its_owner_keeps_that_choice(tmp_path: Path) -> None:
    model = instrument_model(Model(), include=["head"])
    capture = window(tmp_path, lambda: model(X), model=model)
    assert model in instrumented_models()
    assert capture.ranges.column("name") == ["head"]


class Generator(Model):
    """The same, by another name."""


def ranges_of(session: Session, *models: nn.Module) -> list[str]:
    """The outermost ranges of a step that calls the models."""
    for model in models:
        model(X)
    session.step()
    session.stop()
    return [row.name for row in session.captures[0].ranges if row.depth == 0]


def test_several_models_bear_their_index_and_class_or_their_key(tmp_path: Path) -> None:
    models = [Generator(), Model()]
    by_name = dict(zip(("G", "D"), models))
    options: dict[str, Any] = {"active": 1, "modules": {"depth": 0}, "output_dir": tmp_path}
    for given, expected in (
        (models, ["0.Generator", "1.Model"]),
        (by_name, ["G", "D"]),
        (models[1], ["Model"]),
    ):
        assert ranges_of(Session(options, model=given).start(), *models) == expected
        assert ranges_of(Session(options).start(given), *models) == expected
    assert not any(map(hooked, models))
    assert not {*models} & {*instrumented_models()}


def test_globs_match_the_names_that_ranges_bear(tmp_path: Path) -> None:
    models = {"G": Generator(), "D": Model()}
    chosen = {"include": ["G.head", "*.layers.0*"]}
    capture = window(
        tmp_path, lambda: [each(X) for each in models.values()], modules=chosen, model=models
    )
    layer = ["layers.0", *(f"layers.0.{name}" for name in LAYER)]
    expected = ["G.head", *(f"{key}.{name}" for key in models for name in layer)]
    assert sorted(capture.ranges.column("name")) == sorted(expected)


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ("net", "is of type str"),
        ([1, 2], "is a list that holds a value of type int"),
        ({"G": None}, "is a dict that holds a value of type NoneType"),
    ],
)
def test_what_is_no_model_is_refused(given: Any, held: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Session(active=None, model=given)
    assert str(refused.value) == (
        f"A session's model {held}, but it must be an nn.Module, or a list, tuple or dict of such modules."
    )


def test_no_models_at_all_are_none(tmp_path: Path) -> None:
    assert list(window(tmp_path, model=[]).ranges) == []


def test_the_classes_of_submodules_are_told_beside_their_names(tmp_path: Path) -> None:
    gc.collect()  # the marked modules of earlier tests would count as not called
    models = {"flat": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "deep": Model()}
    capture = window(tmp_path, lambda: (models["flat"](X), models["deep"].encode(X)), model=models)
    types = {row.name: row.module_type for row in capture.ranges}
    assert types == {
        "flat": "Sequential",
        "flat.0": "Linear",
        "flat.1": "ReLU",
        "flat.2": "Linear",
        "deep.layers.0": "Block",
        "deep.layers.0.attention": "Attention",
        "deep.layers.0.mlp": "Sequential",
        **{f"deep.layers.0.{name}": "Linear" for name in ("attention.q", "attention.k", "mlp.0")},
        "deep.layers.0.mlp.1": "ReLU",
    }
    text = render(capture)
    assert "\nflat: Sequential " in text
    assert "\n  flat.1: ReLU " in text
    assert "Modules not called in this window: deep (with 8 inside)" in " ".join(text.split())
    assert "flat/flat.0: Linear " in render(capture, sort_ranges="calls", rows=-1)


def test_one_name_of_two_models(tmp_path: Path) -> None:
    one, other = (instrument_model(nn.Sequential(each)) for each in (nn.Linear(4, 4), nn.ReLU()))
    text = render(window(tmp_path, lambda: other(one(X))))
    forget(one)
    forget(other)
    assert "\n  0: Linear or ReLU " in text
    assert "\nSequential  " in text


def test_recomputation_has_a_range_and_a_column(tmp_path: Path) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    model = Checkpointed()
    x = X.clone().requires_grad_()
    capture = window(tmp_path, lambda: model(x).sum().backward(), model=model)
    text = render(capture)
    assert "\nblock: Block (recomputed) " in text
    assert " recompute\n" in text
    with torch.no_grad():
        plain = window(tmp_path, lambda: model(X), model=model)
    assert "recompute" not in render(plain).lower()
