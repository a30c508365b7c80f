from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from installed import need
from omegaconf import OmegaConf
from torch.profiler import ProfilerActivity

from instrument import ProfilerConfig, Sink
from instrument.base.errors import ConfigError
from instrument.config.instantiate import sink_of_class
from instrument.config.presets import _yaml, preset, presets, shipped
from instrument.config.schema import as_config
from instrument.sinks.stacks import Stacks
from instrument.sinks.table import TableSink


class Loud(Sink):
    """A sink of a user's own."""

    volume: int = 1

    def write(self, capture: Any, folder: Any) -> None:
        """Do nothing."""


class Never:
    """A trigger of a user's own."""

    def fires(self, step: Any) -> bool:
        return False


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"active": 0}, "profiler.active is 0, but a window needs at least one step."),
        ({"wait": -1}, "profiler.wait is -1, but it must be 0 or more."),
        ({"export_queue": 0}, "profiler.export_queue is 0, but it must be 1 or more."),
        ({"warmup": "x"}, "profiler.warmup is 'x', but it must be a whole number."),
        (
            {"record_shapes": "maybe"},
            "profiler.record_shapes is 'maybe', but it must be true or false.",
        ),
        ({"actve": 3}, "profiler.actve is not an option; did you mean profiler.active?"),
        (
            {"sinks": 3},
            "profiler.sinks is 3, but it must be a mapping with names as keys.",
        ),
        (
            {"activities": "cpu"},
            "profiler.activities is 'cpu', but it must be a list such as [cpu, cuda].",
        ),
        (
            {"activities": ["gpu"]},
            "profiler.activities holds 'gpu', which is no activity: choose from cpu, cuda, xpu, mtia, hpu, "
            "or set the option to null to record all that this machine has.",
        ),
        (
            {"activities": []},
            "profiler.activities is empty, but a window needs at least one activity: name one, or use profiler=disabled.",
        ),
        (
            {"activities": ["cpu", {"cuda": "GPU_MEMCPY"}]},
            "profiler.activities holds the types 'GPU_MEMCPY' for cuda, but they must be a list such as [GPU_MEMCPY].",
        ),
        (
            {"activities": ["cuda", {"cuda": ["GPU_MEMCPY"]}]},
            "profiler.activities holds 'cuda' twice with different types: name each activity once.",
        ),
        (
            {"activities": [{"cpu": ["CPU_OP"]}], "with_stack": True},
            "profiler.activities holds the types ['CPU_OP'] for cpu, but profiler.with_stack=true needs "
            "PYTHON_FUNCTION among them.",
        ),
        (
            {"activities": [{"cpu": ["CPU_OP"]}], "profile_memory": True},
            "profiler.activities holds the types ['CPU_OP'] for cpu, but profiler.profile_memory=true needs "
            "CPU_INSTANT_EVENT among them.",
        ),
        (
            {"experimental_config": {"trace_only": True}, "with_stack": True},
            "profiler.experimental_config.trace_only is true, so torch would lose what profiler.with_stack=true "
            "records: leave one of the two out.",
        ),
        (
            {"experimental_config": {"profile_all_threads": True}, "profile_memory": True},
            "profiler.experimental_config.profile_all_threads is true, so torch would lose what "
            "profiler.profile_memory=true records: leave one of the two out.",
        ),
        ({"max_window_s": 0}, "profiler.max_window_s is 0, but it must be more than 0."),
        ({"active": True}, "profiler.active is True, but it must be a whole number."),
        (
            {"at_steps": [True, 5], "active": 1},
            "profiler.at_steps.0 is True, but it must be a whole number.",
        ),
        ({"max_window_s": True}, "profiler.max_window_s is True, but it must be a number."),
        ({"disk_budget": False}, "profiler.disk_budget is False, but it must be a whole number."),
        (
            {"timings": {"every": True}},
            "profiler.timings.every is True, but it must be a whole number.",
        ),
        (
            {"max_window_memory": "lots"},
            "profiler.max_window_memory is 'lots', but it must be a number of bytes, such as 4GB.",
        ),
        (
            {"disk_budget": "4XB"},
            "profiler.disk_budget is '4XB', but it must be a number of bytes, such as 4GB.",
        ),
        ({"max_window_s": "long"}, "profiler.max_window_s is 'long', but it must be a number."),
        (
            {"metadata": {"traceEvents": 1}},
            "profiler.metadata cannot hold 'traceEvents': torch writes that key; choose another name.",
        ),
        (
            {"metadata": {"when": {1}}},
            "profiler.metadata 'when' is of type set, which JSON cannot hold; give it as text.",
        ),
        (
            {"repeat": 2},
            "profiler.repeat is 2, but without profiler.active the first window has no end: "
            "set profiler.active to the number of steps of a window.",
        ),
        (
            {"at_steps": [10], "active": 1, "every_n_steps": 5},
            "profiler.at_steps and profiler.every_n_steps are both given, but each is a schedule: leave one out.",
        ),
        (
            {"at_steps": [10], "active": 1, "repeat": 2},
            "profiler.repeat is 2, but profiler.at_steps says which windows there are: leave one out.",
        ),
        (
            {"at_steps": [5], "active": 1, "skip_first_wait": 3},
            "profiler.skip_first_wait is 3, but profiler.at_steps says which windows there are: leave one out.",
        ),
        (
            {"every_n_steps": 10},
            "profiler.every_n_steps is 10, but without profiler.active a window has no end: "
            "set profiler.active to the number of steps of a window.",
        ),
        (
            {"every_n_steps": 2, "active": 3},
            "profiler.every_n_steps is 2, but a window has profiler.active=3 steps: lower profiler.active.",
        ),
        (
            {"at_steps": [10, 12], "active": 3},
            "profiler.at_steps holds 10 and 12, but a window from 10 on lasts until 12 (profiler.active=3): "
            "lower profiler.active, or leave out 12.",
        ),
        ({"at_steps": [-1], "active": 3}, "profiler.at_steps.0 is -1, but it must be 0 or more."),
        (
            {"phases": ["val"]},
            "profiler.phases.0 is 'val', but it must be 'train', 'validation', 'test' or 'predict'.",
        ),
        (
            {"triggers": {"slow_step": {"factr": 2}}},
            "The slow_step trigger has no option 'factr'; did you mean 'factor'?",
        ),
        (
            {"triggers": {"signal": {"name": "SIGUSR3"}}},
            "The signal trigger was given 'SIGUSR3', which is not a signal of this system; did you mean 'SIGUSR",
        ),
        (
            {"triggers": ["slow"]},
            "profiler.triggers.slow is none of the built-in triggers (file, ",
        ),
        (
            {"sinks": {"stacks": {}}},
            "The stacks sink needs profiler.with_stack=true, but it is false.",
        ),
        (
            {"sinks": {"memory": {"forms": ["jsn"]}}},
            "The memory sink's option 'forms.0' cannot be 'jsn'; did you mean 'json'?",
        ),
        (
            {"sinks": {"tabel": {}}},
            "profiler.sinks.tabel is none of the built-in sinks (chrome_trace, memory, mlflow, parquet, report, "
            "stacks, table, tensorboard, wandb), and has no _target_; did you mean table?",
        ),
        (
            {"sinks": [TableSink]},
            "profiler.sinks is a list that holds <class 'instrument.sinks.table.TableSink'>, but a list "
            "may hold only names of built-in sinks: give a mapping instead, whose keys are names that "
            "you choose.",
        ),
        (
            {"sinks": {"mine": TableSink}},
            "profiler.sinks.mine is the class TableSink: give an instance, TableSink().",
        ),
        (
            {"sinks": TableSink(rows=3)},
            "but it must be a mapping with names as keys.",
        ),
        (
            {"sinks": {"mine": {"_target_": "json.JSONDecoder"}}},
            "must have a method write(self, capture, folder).",
        ),
        ({"communication": "nccl"}, "profiler.communication is 'nccl', but it must be a list."),
        (
            {"communication": ["mine", "nccl|rccl"]},
            "profiler.communication holds 'nccl|rccl', which looks like a regular expression: give globs, "
            "which match the whole name, such as ['*nccl*', '*rccl*'] instead of nccl|rccl.",
        ),
        *(
            ({"communication": [regex]}, f"holds {regex!r}, which looks like a regular expression")
            for regex in (".*ring", "a.+b", "^ring", "ring$", "[^a]b", r"\bring", "(?:ring)")
        ),
        (
            {"communication": ["**"]},
            "profiler.communication holds '**', which selects no kernels in particular: give a part of the "
            "names of communication kernels, such as '*my_all_reduce*'.",
        ),
        (
            {"communication": ["a"] * 21},
            "profiler.communication holds 21 globs, but at most 20 are allowed: match several names with one "
            "glob, such as '*my_library*'.",
        ),
        (
            {"communication": ["ring" * 26]},
            "profiler.communication holds 'ringringringringring…' of 104 characters, but a glob has at most "
            "100: replace parts of it with *.",
        ),
        (
            {"emit": ["nvtxx"]},
            "profiler.emit.0 is 'nvtxx', but it must be 'torch', 'nvtx' or 'itt'.",
        ),
        ({"emit": []}, "profiler.emit is [], but it needs at least one item."),
        (
            {"modules": {"dept": 2}},
            "profiler.modules.dept is not an option; did you mean profiler.modules.depth?",
        ),
        (
            {"modules": 2},
            "profiler.modules is 2, but it must be a mapping with keys such as enabled and depth.",
        ),
        (
            {"timings": 5},
            "profiler.timings is 5, but it must be a mapping with keys such as every and device.",
        ),
        (
            {"timings": {"evry": 5}},
            "profiler.timings.evry is not an option; did you mean profiler.timings.every?",
        ),
        ({"timings": {"every": 0}}, "profiler.timings.every is 0, but it must be 1 or more."),
        (
            {"active": -1, "timings": {}},
            "profiler.active is -1, but a window needs at least one step.",
        ),
        (
            {"triggers": {"mine": {"k": 2}}},
            "profiler.triggers.mine is none of the built-in triggers (file, memory_growth, non_finite_loss, "
            "out_of_memory, signal, slow_step), and has no _target_: give the class to build.",
        ),
        (
            {"sinks": {"mine": {"_target_": "no_such_package.Sink"}}},
            "profiler.sinks.mine._target_ is 'no_such_package.Sink', which cannot be built: ",
        ),
    ],
)
def test_bad_options_get_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ProfilerConfig(**options)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


LEAST = {
    "wait": 0, "warmup": 0, "active": 1, "repeat": 0, "skip_first": 0, "skip_first_wait": 0, "every_n_steps": 1,
    "total_steps": 1, "export_queue": 1, "keep": 1, "max_window_memory": 1,
}  # fmt: skip


@pytest.mark.parametrize(("option", "least"), LEAST.items())
def test_a_number_may_be_as_small_as_it_makes_sense(option: str, least: int) -> None:
    assert getattr(ProfilerConfig(**{"active": 1, option: least}), option) == least
    with pytest.raises(ConfigError, match=rf"^profiler\.{option} is {least - 1}, but "):
        ProfilerConfig(**{"active": 1, option: least - 1})


@pytest.mark.parametrize("option", ["max_window_s", "export_timeout_s", "preemption_grace_s"])
def test_an_amount_of_seconds_may_be_any_above_zero(option: str) -> None:
    assert getattr(ProfilerConfig(**{option: 0.001}), option) == 0.001
    with pytest.raises(
        ConfigError, match=rf"^profiler\.{option} is 0, but it must be more than 0\.$"
    ):
        ProfilerConfig(**{option: 0})


def test_timings_cost_least_unless_more_is_asked_for() -> None:
    timings = ProfilerConfig(timings={}).timings
    assert timings is not None
    assert timings.model_dump() == {
        "every": 100,
        "device": True,
        "modules": False,
        "tensorboard": False,
    }


def test_the_first_step_and_rank_0_can_be_chosen() -> None:
    config = ProfilerConfig(at_steps=[0], active=1, ranks=[0])
    assert (config.at_steps, config.ranks) == ([0], [0])


def test_a_wrong_option_of_a_sink_reads_as_if_the_sink_were_built_by_hand() -> None:
    with pytest.raises(ConfigError) as by_hand:
        TableSink(row=3)
    with pytest.raises(ConfigError) as by_config:
        ProfilerConfig(sinks={"table": {"row": 3}})
    assert str(by_config.value) == str(by_hand.value)


def test_a_disabled_config_looks_at_nothing_further() -> None:
    config = ProfilerConfig(
        enabled=False, repeat=5, sinks={"stacks": {}, "other": {"_target_": "not.there"}}
    )
    assert not config.enabled


def test_activities_are_accepted_in_torch_spelling_too() -> None:
    assert ProfilerConfig(activities=[ProfilerActivity.CPU, "CUDA", "cpu"]).activities == [
        "cpu",
        "cuda",
    ]
    types = ["GPU_MEMCPY", "CUDA_RUNTIME"]
    assert ProfilerConfig(activities=["CPU", {ProfilerActivity.CUDA: types}]).activities == [
        "cpu",
        {"cuda": types},
    ]


def test_flops_turn_shapes_on_and_say_so() -> None:
    config = ProfilerConfig(with_flops=True)
    assert config.record_shapes
    assert config.notes == [
        "profiler.with_flops=true turned profiler.record_shapes on: FLOPs are computed from shapes."
    ]
    assert ProfilerConfig(with_flops=True, record_shapes=True).notes == []


def test_sinks_and_triggers_come_as_mappings_and_as_instances() -> None:
    loud, never = Loud(volume=3), Never()
    config = ProfilerConfig(
        with_stack=True,
        sinks={
            "given": loud,
            "built": {"_target_": f"{__name__}.Loud", "volume": 5},
            "table": {"rows": 7},
            "stacks": {},
        },
        triggers={"given": never, "built": {"_target_": f"{__name__}.Never"}},
    )
    assert config.sinks["given"] is loud
    assert config.sinks["built"] == Loud(volume=5)
    assert config.sinks["table"] == TableSink(rows=7)
    assert config.sinks["stacks"] == Stacks()
    assert config.triggers["given"] is never
    assert isinstance(config.triggers["built"], Never)


def test_every_source_gives_the_same_config() -> None:
    @dataclass
    class Structured:
        active: int = 3
        warmup: int = 1
        sinks: dict[str, Any] = field(default_factory=dict)

    expected = ProfilerConfig(active=3, warmup=1)
    for source in (
        {"active": 3, "warmup": 1},
        OmegaConf.create({"n": 3, "profiler": {"active": "${n}", "warmup": 1}}).profiler,
        Structured(),
        expected,
    ):
        assert as_config(source) == expected
    assert as_config({"active": 9}, active=3, warmup=1) == expected
    assert as_config(expected, active=4) == ProfilerConfig(active=4, warmup=1)
    assert as_config() == ProfilerConfig()


@pytest.mark.parametrize("source", [3, ["active"], object()])
def test_a_source_of_another_kind_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="must be a mapping, a preset's name or a ProfilerConfig"):
        as_config(source)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as raised:
        as_config("sumary")
    assert str(raised.value) == (
        "'sumary' is none of the presets (disabled, full, memory, stacks, summary, timings, trace); "
        "did you mean summary?"
    )


def test_the_base_lists_every_option_with_its_default() -> None:
    model = ProfilerConfig()
    base = _yaml("_instrument_base.yaml")
    del base["defaults"]
    assert base == model.plain()
    assert set(model.plain()) == set(ProfilerConfig.model_fields)


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_valid_config_with_every_option(name: str) -> None:
    options = preset(name)
    assert set(options) == set(ProfilerConfig.model_fields)
    assert as_config(name).enabled == (name != "disabled")


def test_a_config_survives_the_way_through_json() -> None:
    config = as_config("full", active=5)
    assert as_config(config.plain()) == config


@pytest.mark.parametrize("name", shipped("sinks"))
def test_every_sink_that_ships_is_built_the_same_by_name_and_by_config(name: str) -> None:
    if name in ("wandb", "mlflow"):
        need(name)
    by_config = ProfilerConfig(with_stack=True, profile_memory=True, sinks={name: {}}).sinks[name]
    assert sink_of_class(name, {}) == by_config


def test_a_sink_of_the_users_is_built_by_its_path() -> None:
    assert sink_of_class(f"{__name__}.Loud", {"volume": 3}) == Loud(volume=3)


@pytest.mark.parametrize("name", shipped("triggers"))
def test_each_trigger_that_ships_lists_all_its_options_with_their_defaults(name: str) -> None:
    listed = _yaml(f"triggers/{name}.yaml")[name]
    del listed["_target_"]
    (trigger,) = ProfilerConfig(triggers=[name]).triggers.values()
    assert listed == trigger.model_dump()
    assert trigger.display_name() == f"The {name} trigger"
    config = ProfilerConfig(triggers={name: listed})
    assert as_config(config.plain()) == config


def test_what_was_disabled_keeps_its_sinks_when_it_is_enabled() -> None:
    disabled = ProfilerConfig(
        enabled=False, sinks={"table": {"rows": 3}, "stacks": None}, triggers=["slow_step"]
    )
    config = as_config(disabled, enabled=True, active=2)
    assert {name: sink.rows for name, sink in config.sinks.items()} == {"table": 3}
    assert list(config.triggers) == ["slow_step"]
