"""The changes that can be made to a script from outside: on, off, and what then is as if they had never been on."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as Workers

from instrument import ProfilerConfig
from instrument.base.errors import ConfigError
from instrument.record import changes
from instrument.record.applied_changes import AppliedChanges, program_of
from instrument.record.changes import CHANGES, Change, Program, applicable, parse
from instrument.record.unedited import Watch


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, as others would only wait for each other; Dynamo turns these checks off."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def program(
    *models: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    loaders: Sequence[DataLoader[Any]] = (),
) -> Program:
    return Program({f"model{k}": each for k, each in enumerate(models)}, optimizers, loaders)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)]
    return nn.Sequential(*layers)


class Training:
    """A training whose steps draw their data from a seed of their own."""

    def __init__(self, kind: Callable[..., Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        self.model = network()
        self.optimizer = kind(self.model.parameters(), lr=0.01, **options)
        self.program = program(self.model, optimizers=[self.optimizer])
        self.steps = 0

    def step(self, times: int = 1) -> list[float]:
        losses = []
        for _ in range(times):
            torch.manual_seed(100 + self.steps)
            self.steps += 1
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(6, 3, 8, 8)).square().mean()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def state(self) -> list[torch.Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [each for each in states if isinstance(each, torch.Tensor)]
        return [*self.model.state_dict().values(), *tensors]


def switched(name: str, value: str, its: Program) -> Callable[[], None]:
    change = CHANGES[name]
    return change.on(its, value)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
        for a, b in zip(one, other)
    )


SWITCHED = [
    ("threads", "2"), ("fused", ""), ("foreach", ""), ("gc-freeze", ""), ("no-anomaly", ""),
    ("no-deterministic", ""), ("no-validation", ""), ("non-blocking", ""), ("channels-last", ""),
    ("tf32", ""), ("bf16", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), SWITCHED)
def test_a_change_that_is_off_again_has_left_nothing(name: str, value: str) -> None:
    twin, training = Training(), Training()
    assert twin.step(2) == training.step(2)
    before = copy.deepcopy(training.state())
    off = switched(name, value, training.program)
    try:
        if CHANGES[name].numbers == "same":
            assert training.step(2) == twin.step(2)
    finally:
        off()
    if CHANGES[name].numbers != "same":
        assert same(training.state(), before)
    assert training.step(3) == twin.step(3)
    assert same(training.state(), twin.state())
    assert "_compiled_call_impl" not in vars(training.model)


@pytest.mark.parametrize(
    ("name", "value"), [each for each in SWITCHED if CHANGES[each[0]].numbers != "same"]
)
def test_a_change_of_the_rounding_changes_no_more(name: str, value: str) -> None:
    twin, training = Training(), Training()
    twin.step(2)
    training.step(2)
    off = switched(name, value, training.program)
    tolerance = 0.05 if CHANGES[name].numbers == "precision" else 1e-4
    assert training.step(2) == pytest.approx(twin.step(2), rel=tolerance)
    off()
    assert training.step(2) == pytest.approx(twin.step(2), rel=tolerance)
    kinds = [[(each.dtype, each.stride()) for each in its.state()] for its in (training, twin)]
    assert kinds[0] == kinds[1]


def test_every_change_that_can_be_switched_is_tested() -> None:
    tested = {name for name, _ in SWITCHED} | {"compile"}
    assert tested == {name for name, each in CHANGES.items() if each.on is not None}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_change_is_made_in_one_way(change: Change) -> None:
    assert sum(each is not None for each in (change.on, change.prepare, change.environment)) == 1
    assert ("{value}" in change.by_hand) == bool(change.values)
    assert change.does.endswith(".")


def test_the_text_of_with_is_split_into_names_and_values() -> None:
    assert parse("fused, workers=2,compile") == [("fused", ""), ("workers", "2"), ("compile", "")]
    assert parse("") == []
    parsed = [("compile", "reduce-overhead"), ("workers", "0")]
    assert parse("compile=reduce-overhead,workers=0") == parsed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fussed", "There is no change 'fussed'; did you mean 'fused'?"),
        ("?", "There is no change '?'; choose from 'threads', 'fused',"),
        ("fused=1", "The change 'fused' has the value '1': write fused."),
        ("workers", "The change 'workers' has no value: write workers=2."),
        ("workers=two", "The change 'workers' has the value 'two': write workers=2."),
        ("threads=0", "The change 'threads' has the value '0': write threads=2."),
        ("compile=fast", "has the value 'fast': write compile=reduce-overhead."),
        ("fused,fused", "'fused,fused' names the change 'fused' twice: name it once."),
    ],
)
def test_a_wrong_text_of_with_is_an_error_of_one_sentence(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert says in str(error.value)


def rows(its: Program) -> dict[str, dict[str, Any]]:
    return {each["with"]: each for each in applicable(its)}


def test_a_row_says_how_to_write_a_change_by_hand() -> None:
    training = Training()
    found = rows(training.program)
    assert found["fused"]["findings"] == ["optimizer-not-fused"]
    assert found["fused"]["switchable"]
    for text, row in found.items():
        assert parse(text) == [(row["name"], row["value"])]
        assert "{" not in row["by_hand"]
    assert json.loads(json.dumps(found)) == found
    loader = DataLoader(TensorDataset(torch.zeros(8)))
    row = rows(program(loaders=[loader]))["workers=1"]
    assert row["by_hand"] == "DataLoader(..., num_workers=1, persistent_workers=True)"
    assert not row["switchable"]


def test_the_findings_of_the_table_exist() -> None:
    from instrument.read.advise.diagnose import CHECKS
    from instrument.read.advise.operators import _KINDS

    codes = {each.code for each in CHECKS}
    variants = {f"tensor-cores:{each.does}" for each in _KINDS} | {"layout-and-casts:layout"}
    named = {code for each in CHANGES.values() for code in each.findings}
    assert named <= codes | variants


def test_a_change_of_an_odd_program_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(nn.Module):
        @property
        def forward(self) -> Any:
            raise ValueError("not yet")

    assert "compile" not in rows(program(Odd()))


def fits(name: str, its: Program) -> list[str]:
    return [*CHANGES[name].fits(its)]


def test_the_numbers_of_threads_are_others_than_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "usable_cpus", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert fits("threads", Training().program) == ["1", "8"]
    monkeypatch.setattr(changes, "local_ranks", lambda: 4)
    assert fits("threads", Training().program) == ["1", "2"]


def test_hyperthreads_are_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "usable_cpus", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(changes.Path, "read_text", lambda self: f"{int(self.parts[-3][3:]) % 4}")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert fits("threads", Training().program) == ["1", "2", "4"]


@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]
)
def test_an_optimizer_that_can_be_fused_steps_alike(kind: Callable[..., Optimizer]) -> None:
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    twin, training = Training(kind, **options), Training(kind, **options)
    assert (fits("fused", training.program), fits("foreach", training.program)) == ([""], [])
    fused = Training(kind, fused=True, **options)
    assert not fits("fused", fused.program)
    off = switched("fused", "", training.program)  # before the first step
    assert not fits("fused", training.program)
    assert training.step(3) == fused.step(3)  # as by hand
    assert same(training.state(), fused.state())
    off()
    twin.step(3)
    assert training.step() == pytest.approx(twin.step(), rel=1e-4)
    assert [e.dtype for e in training.state()] == [e.dtype for e in twin.state()]


def test_the_steps_of_a_fused_optimizer_are_of_the_right_type() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        training = Training()
        training.step()
        types = [each.dtype for each in training.state()]
        off = switched("fused", "", training.program)
        training.step()
        assert {s["step"].dtype for s in training.optimizer.state.values()} == {torch.float32}
        off()
        assert [each.dtype for each in training.state()] == types
        training.step()
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_steps_of_an_optimizer_are_where_its_implementation_wants_them() -> None:
    param = nn.Parameter(torch.zeros(2, device="meta"))  # in place of a device
    optimizer = torch.optim.Adam([param])
    state = optimizer.state[param] = {"step": torch.tensor(3.0)}
    changes._choose(optimizer, optimizer.param_groups[0], {"foreach": True, "fused": False})
    assert state["step"].device.type == "cpu"
    changes._choose(optimizer, optimizer.param_groups[0], {"foreach": False, "fused": True})
    assert state["step"].device.type == "meta"


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Adamax,
        torch.optim.ASGD,
    ],
)
def test_an_optimizer_that_cannot_be_fused_runs_foreach(kind: Callable[..., Optimizer]) -> None:
    training = Training(kind)
    assert (fits("fused", training.program), fits("foreach", training.program)) == ([], [""])
    by_hand = Training(kind, foreach=True)
    assert not fits("foreach", by_hand.program)
    off = switched("foreach", "", training.program)
    assert training.step(3) == by_hand.step(3)
    off()
    assert not training.optimizer.param_groups[0]["foreach"]


def test_an_optimizer_stays_as_it_is_where_torch_would_refuse() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    sparse = torch.optim.SGD(table.parameters())
    table(torch.tensor([1])).sum().backward()

    class Own(torch.optim.SGD):
        pass

    model = network()
    others = [
        sparse,
        Own(model.parameters()),
        torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1)),
        torch.optim.Adam(model.parameters(), differentiable=True),
        torch.optim.LBFGS(model.parameters()),
    ]
    for each in others:
        its = program(model, optimizers=[each])
        assert (fits("fused", its), fits("foreach", its)) == ([], []), each
        before = [dict(group) for group in each.param_groups]
        switched("fused", "", its)()
        assert [{**group} for group in each.param_groups] == before


def test_the_collector_is_frozen_and_is_again_as_before() -> None:
    its = program()
    gc.unfreeze()  # the objects that the suite has frozen
    assert fits("gc-freeze", its)
    off = switched("gc-freeze", "", its)
    assert not gc.isenabled()
    assert gc.get_freeze_count()
    assert not fits("gc-freeze", its)
    off()
    assert gc.isenabled()
    assert not gc.get_freeze_count()


def test_anomaly_detection_stays_off_though_the_script_turns_it_on() -> None:
    class Spoils(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * torch.nan

    def step() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly():
                Spoils.apply(torch.ones(1, requires_grad=True)).sum().backward()

    off = switched("no-anomaly", "", program())
    step()
    torch.autograd.set_detect_anomaly(True)  # the script wants it from now on
    assert not torch.is_anomaly_enabled()
    off()
    try:
        assert torch.is_anomaly_enabled()
        assert fits("no-anomaly", program())
        with pytest.raises(RuntimeError, match="nan"):
            step()
    finally:
        torch.autograd.set_detect_anomaly(False)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_around_a_part_of_the_step_is_seen() -> None:
    model = network()
    loss = model(torch.randn(1, 3, 8, 8)).sum()
    loss.backward()
    assert not fits("no-anomaly", program(model))
    with torch.autograd.detect_anomaly():
        loss = model(torch.randn(1, 3, 8, 8)).sum()
        loss.backward()
    assert fits("no-anomaly", program(model))
    del loss


def test_deterministic_algorithms_come_back_with_their_strictness() -> None:
    assert not fits("no-deterministic", program())
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert fits("no-deterministic", program())
        off = switched("no-deterministic", "", program())
        assert not torch.are_deterministic_algorithms_enabled()
        off()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_distributions_check_their_arguments_again() -> None:
    kept = torch.distributions.Normal(0.0, 1.0)
    assert fits("no-validation", program())
    off = switched("no-validation", "", program())
    torch.distributions.Normal(0.0, -1.0)
    off()
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(0.0, -1.0)
    del kept


def test_pinned_batches_are_copied_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copied.append((args, kwargs))
        return self

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: len(self) > 1)
    pinned, other = torch.zeros(2), torch.zeros(1)
    off = switched("non-blocking", "", program())
    pinned.to("cuda")
    other.to("cuda")
    pinned.to("cuda", non_blocking=False)
    pinned.to("cuda", torch.float16, False)
    off()
    pinned.to("cuda")
    flags = [kwargs.get("non_blocking") for _, kwargs in copied]
    assert flags == [True, None, False, None, None]


def test_filters_gradients_states_and_inputs_have_their_channels_last() -> None:
    training = Training()
    training.step()
    assert fits("channels-last", training.program)
    seen: list[bool] = []
    training.model[0].register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
    )
    off = switched("channels-last", "", training.program)
    assert not fits("channels-last", training.program)
    weight = training.model[0].weight
    for _ in range(2):
        every = [weight, weight.grad, training.optimizer.state[weight]["exp_avg"]]
        assert all(each.is_contiguous(memory_format=torch.channels_last) for each in every)
        training.step()
    off()
    assert weight.grad.is_contiguous()
    training.step()
    assert seen == [True, True, False]
    assert all(each.is_contiguous() for each in [weight, weight.grad])
    assert not fits("channels-last", program(nn.Linear(2, 2)))


def test_models_run_in_bfloat16_and_their_results_are_float32() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    seen = []
    model[0].register_forward_hook(lambda _, __, result: seen.append(result.dtype))
    its = program(model, model[0])
    x = torch.randn(4, 8)
    before = model(x)
    off = switched("bf16", "", its)
    result = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16  # the script's own
    off()
    assert result.dtype == torch.float32
    assert 0 < (result - before).abs().max() < 0.05
    assert torch.equal(model(x), before)
    assert seen == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]


def test_bf16_needs_a_cpu_and_a_script_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_slow_types", lambda: {torch.float16})
    assert fits("bf16", Training().program)
    scaler = torch.amp.GradScaler("cpu")
    assert not fits("bf16", Training().program)
    del scaler
    assert not fits("bf16", program(network().bfloat16()))
    monkeypatch.setattr(changes, "_slow_types", lambda: {torch.float16, torch.bfloat16})
    assert not fits("bf16", Training().program)


def test_a_run_knows_in_which_type_models_are_called() -> None:
    watch = Watch(ProfilerConfig())
    assert program_of(watch).autocast is None
    with torch.autocast("cpu", torch.float16):
        watch._ends_step("forward", nn.Linear(2, 2))
    assert program_of(watch).autocast == torch.float16


def test_a_run_knows_a_loader_without_a_name_while_it_is_read() -> None:
    watch, data = Watch(ProfilerConfig()), TensorDataset(torch.zeros(8))
    batches = watch._noticing_loader(DataLoader.__iter__)(DataLoader(data, 2))
    watch._loader = None  # as once the session knows it
    assert [each.batch_size for each in program_of(watch).loaders if each.dataset is data] == [2]
    del batches
    assert not [each for each in program_of(watch).loaders if each.dataset is data]
    lasting, iterator = DataLoader(data, num_workers=1, persistent_workers=True), SimpleNamespace()
    watch._noticing_loader(lambda _: iterator)(lasting)
    assert not vars(iterator)  # which the loader holds


def test_a_compiled_model_runs_as_before_when_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    own = torch.compile
    monkeypatch.setattr(changes, "_compiled", [])
    monkeypatch.setattr(torch, "compile", lambda call, mode: own(call, backend=backend))
    twin, training = Training(), Training()
    assert twin.step() == training.step()
    off = switched("compile", "", training.program)
    assert not fits("compile", training.program)
    assert training.step(2) == pytest.approx(twin.step(2), rel=1e-5)
    off()
    off = switched("compile", "", training.program)
    assert training.step(2) == pytest.approx(twin.step(2), rel=1e-5)
    assert len(graphs) == 1  # it is compiled once
    off()
    assert torch.distributions.Distribution._validate_args  # Dynamo sets it
    assert "_compiled_call_impl" not in vars(training.model)
    twin.model.load_state_dict(training.model.state_dict())
    twin.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    assert training.step(2) == twin.step(2)
    assert len(graphs) == 1


def test_what_cannot_be_compiled_runs_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    own = torch.compile
    monkeypatch.setattr(changes, "_compiled", [])
    monkeypatch.setattr(torch, "compile", lambda call, mode: own(call, backend=backend))
    twin, training = Training(), Training()
    off = switched("compile", "", training.program)
    assert training.step(2) == twin.step(2)
    off()
    torch._dynamo.reset()


def test_a_model_is_compiled_where_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes.shutil, "which", lambda name: f"/bin/{name}")
    assert fits("compile", Training().program) == [""]
    monkeypatch.setattr(changes.shutil, "which", lambda _: None)
    assert not fits("compile", Training().program)


def test_changes_lie_over_each_other_and_go_in_reverse_order() -> None:
    training, twin = Training(), Training()
    training.step()
    twin.step()
    offs = [switched(name, "", training.program) for name in ("channels-last", "bf16", "fused")]
    for off in reversed(offs):
        off()
    assert training.step(2) == twin.step(2)
    assert same(training.state(), twin.state())


def test_changes_do_not_hide_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.compile
    monkeypatch.setattr(changes, "_compiled", [])
    monkeypatch.setattr(changes, "_slow_types", set)
    monkeypatch.setattr(changes.shutil, "which", lambda name: name)
    monkeypatch.setattr(torch, "compile", lambda call, mode: own(call, backend="eager"))
    gc.unfreeze()  # the objects that the suite has frozen
    kept = torch.distributions.Normal(0.0, 1.0)
    training, twin = Training(), Training()
    applied = AppliedChanges()
    chosen = parse("gc-freeze,no-validation,bf16,compile")  # frozen objects cannot be found
    for _ in range(2):
        applied.switch(training.program, chosen)
        assert applied.switched == chosen
        assert not torch.distributions.Distribution._validate_args
        assert training.model._compiled_call_impl is changes._compiled[0][2]
        applied.switch(training.program)
        assert applied.switched == []
        assert training.step() == twin.step()
    assert gc.isenabled()
    del kept


def test_a_change_that_does_not_fit_is_named_and_left_out(log: Any) -> None:
    applied, training = AppliedChanges(), Training()
    applied.switch(training.program, parse("no-deterministic,fused"))
    assert "no-deterministic does not fit" in log.at("WARNING")[0]
    assert training.optimizer.param_groups[0]["fused"]
    applied.switch(training.program)
    assert not training.optimizer.param_groups[0]["fused"]


# Changes that are made before the script builds its objects.


@pytest.fixture
def _own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_loader_arguments", {})
    monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)
    monkeypatch.setattr(Workers, "_reset", Workers._reset)


def prepare(text: str) -> None:
    for name, value in parse(text):
        its = CHANGES[name].prepare
        its(value)


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.usefixtures("_own_classes")
def test_loaders_are_built_with_other_arguments() -> None:
    data = TensorDataset(torch.arange(8))
    prepare("workers=2")
    loader = DataLoader(data, 2)
    settings = (loader.batch_size, loader.num_workers, loader.persistent_workers)
    assert settings == (2, 2, True)
    assert [each[0].tolist() for each in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    stream = DataLoader(Counting(), batch_size=2)
    assert (stream.num_workers, stream.prefetch_factor) == (0, None)
    assert [each.tolist() for each in stream] == [[0, 1], [2, 3]]


@pytest.mark.usefixtures("_own_classes")
@pytest.mark.parametrize("text", ["workers=1", "persistent-workers"])
def test_persistent_workers_load_the_same_batches_in_later_epochs(text: str) -> None:
    def epochs(**options: Any) -> list[Any]:
        torch.manual_seed(0)
        loader = DataLoader(TensorDataset(torch.arange(8)), 4, shuffle=True, **options)
        return [[each[0].tolist() for each in loader] for _ in range(3)] + [torch.rand(1).item()]

    options = {"num_workers": 1} if text == "persistent-workers" else {}
    before, by_hand = epochs(**options), epochs(num_workers=1, persistent_workers=True)
    prepare(text)
    assert epochs(**options) == before != by_hand
    assert epochs(num_workers=1, persistent_workers=True) == by_hand  # as the script wants it


@pytest.mark.usefixtures("_own_classes")
def test_loaders_lose_their_workers_with_all_that_needs_them() -> None:
    prepare("workers=0")
    data = TensorDataset(torch.arange(2))
    options: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 2, "timeout": 3}
    loader = DataLoader(data, num_workers=2, multiprocessing_context="fork", **options)
    assert (loader.num_workers, loader.persistent_workers, loader.timeout) == (0, False, 0)
    assert len([*loader]) == 2


@pytest.mark.usefixtures("_own_classes")
def test_workers_stay_from_epoch_to_epoch() -> None:
    prepare("persistent-workers")
    data = TensorDataset(torch.arange(2))
    assert DataLoader(data, num_workers=1).persistent_workers
    assert not DataLoader(data).persistent_workers


@pytest.mark.usefixtures("_own_classes")
def test_batches_are_pinned_and_copied_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **given: copied.append(given))
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.cuda)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    prepare("pin-memory")
    assert DataLoader(TensorDataset(torch.arange(2))).pin_memory
    torch.zeros(1).to("cuda")
    assert copied == [{"non_blocking": True}]


def test_settings_of_a_device_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    prepare("cudnn-benchmark")
    assert torch.backends.cudnn.benchmark
    assert variables("expandable-segments") == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"
    }


def test_loaders_get_the_changes_that_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "usable_cpus", lambda: 8)
    monkeypatch.setattr("torch._utils.cpu_count", lambda: 8)
    data = TensorDataset(torch.arange(2))
    plain = program(loaders=[DataLoader(data)])
    working = program(loaders=[DataLoader(data, num_workers=4)])
    assert fits("workers", plain) == ["1", "4", "8"]
    assert fits("workers", working) == ["0", "1", "8"]
    assert not fits("workers", program(loaders=[DataLoader(Counting())]))
    assert not fits("persistent-workers", plain)
    assert fits("persistent-workers", working)
    assert [fits(name, working) for name in ("pin-memory", "non-blocking")] == [[], []]  # no device


def test_a_loader_that_a_worker_builds_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_loader_arguments", {"num_workers": 2})
    monkeypatch.setattr(changes, "get_worker_info", lambda: object())
    given: dict[str, Any] = {"self": None, "dataset": []}
    changes._edit_loader(given)
    assert given == {"self": None, "dataset": []}


def test_float32_replaces_named_16_bit_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_slow_types", lambda: {torch.float16})
    for owner, names in (
        (torch, changes._FACTORIES),
        (torch.Tensor, ("to", "type", "half")),
        (torch.autocast, ("__init__",)),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    assert fits("no-float16", program(network().half()))
    for kind, expected in ((torch.float16, [""]), (torch.bfloat16, [])):
        mixed = replace(program(network()), autocast=kind)
        assert [fits(name, mixed) for name in ("no-float16", "bf16")] == [expected, []]
    assert not fits("no-float16", program(network().bfloat16()))
    prepare("no-float16")
    model = nn.Linear(2, 2).half()
    x = torch.ones(1, 2, dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.float16):
        result = model(x.half())
    kinds = {model.weight.dtype, x.dtype, result.dtype, nn.Linear(2, 2).to(torch.half).weight.dtype}
    kinds |= {
        nn.Linear(2, 2, dtype=torch.float16).weight.dtype,
        torch.zeros(1).to("cpu", torch.half).dtype,
    }
    assert kinds == {torch.float32}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    assert torch.zeros(1).bfloat16().dtype == torch.bfloat16


@pytest.fixture
def _group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kind = nn.parallel.DistributedDataParallel
    monkeypatch.setattr(kind, "__init__", kind.__init__)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    gc.collect()  # the reducer must go first
    torch.distributed.destroy_process_group()


class Partly(nn.Module):
    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(2, 2), nn.Linear(2, 2), unused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return x if self.unused else self.second(x)  # type: ignore[no-any-return]


@pytest.mark.usefixtures("_group")
def test_ddp_is_built_with_other_arguments() -> None:
    kind = nn.parallel.DistributedDataParallel
    for unused, expected in ((False, [""]), (True, [])):
        model = kind(Partly(unused), find_unused_parameters=True)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        assert fits("no-find-unused", program(model)) == expected
        assert fits("no-find-unused", program(model.module)) == expected  # as a run knows it
    assert fits("static-graph", program(model)) == fits("bucket-view", program(model)) == [""]
    prepare("no-find-unused,static-graph,bucket-view")
    model = kind(Partly(False), find_unused_parameters=True)
    settings = (model.find_unused_parameters, model.static_graph, model.gradient_as_bucket_view)
    assert settings == (False, True, True)
    names = ("no-find-unused", "static-graph", "bucket-view", "channels-last")
    assert [fits(name, program(model)) for name in names] == [[], [], [], []]
    model(torch.ones(1, 2)).sum().backward()


# Variables.

_TOUCH = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def touch():
    at = libc.malloc(64 << 20)
    ctypes.memset(at, 1, 64 << 20)
    libc.free(at)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4): touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def printed(code: str, **variables: str) -> str:
    own = ("MALLOC_", "PYTHON")
    env = {key: value for key, value in os.environ.items() if not key.startswith(own)} | variables
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


def variables(name: str, value: str = "") -> dict[str, str]:
    its = CHANGES[name].environment
    return {**its(value)}


@pytest.mark.skipif(not CHANGES["malloc"].fits(program()), reason="not glibc, or tuned already")
def test_freed_memory_is_kept_for_later_tensors() -> None:
    assert int(printed(_TOUCH)) > 1000
    assert int(printed(_TOUCH, **variables("malloc"))) < 1000


def test_a_variable_that_is_set_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    assert not fits("malloc", program())


# Changes that need a device: what applies is asked of parameters that say they are on one.


class OnDevice(Program):
    """A program whose parameters are on a device, as far as `fits` asks."""

    device = "cuda"  # type: ignore[assignment]


def test_changes_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(torch.arange(2))
    its = OnDevice({"model": network()}, [], [DataLoader(data)])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(changes, "find_spec", lambda _: object())
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    found = set(rows(its))
    assert found >= {"tf32", "bf16", "pin-memory", "cudnn-benchmark", "compile=reduce-overhead"}
    assert found >= {"expandable-segments", "channels-last"}
    assert not {"non-blocking", "malloc", "no-float16"} & found
    attends, pinned = nn.MultiheadAttention(2, 1), DataLoader(data, pin_memory=True)
    attention = OnDevice({"model": attends}, [], [pinned])
    found = set(rows(attention))
    assert "non-blocking" in found
    assert not {"pin-memory", "cudnn-benchmark", "channels-last"} & found
    on_cpu = set(rows(program(nn.MultiheadAttention(2, 1))))
    assert not {"tf32", "pin-memory", "cudnn-benchmark", "expandable-segments"} & on_cpu
