from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from golden import Golden
from installed import need
from omegaconf import OmegaConf
from torch.profiler import ProfilerActivity

from instrument import ProfilerConfig, Sink
from instrument.base.errors import ConfigError
from instrument.base.instantiate import sink_of_class
from instrument.base.presets import _yaml, preset, presets, shipped
from instrument.export.sinks.stacks import Stacks
from instrument.export.sinks.table import TableSink
from instrument.record.config import schedule
from instrument.record.config.schema import as_config


class Loud(Sink):
    """A sink of a user's own."""

    volume: int = 1

    def write(self, capture: Any, folder: Any) -> None:
        """Do nothing."""


class Never:
    """A trigger of a user's own."""

    def fires(self, step: Any) -> bool:
        return False


MISTAKES: list[dict[str, Any]] = [
    {"active": 0}, {"wait": -1}, {"warmup": "x"}, {"record_shapes": "maybe"}, {"actve": 3},
    {"sinks": 3}, {"activities": "cpu"}, {"activities": ["gpu"]}, {"activities": []},
    {"activities": ["cpu", {"cuda": "GPU_MEMCPY"}]},
    {"activities": ["cuda", {"cuda": ["GPU_MEMCPY"]}]},
    {"activities": [{"cpu": ["CPU_OP"]}], "with_stack": True},
    {"activities": [{"cpu": ["CPU_OP"]}], "profile_memory": True},
    {"experimental_config": {"trace_only": True}, "with_stack": True},
    {"experimental_config": {"profile_all_threads": True}, "profile_memory": True},
    {"profile_all_threads": True, "profile_memory": True}, {"max_window_s": 0}, {"active": True},
    {"at_steps": [True, 5], "active": 1}, {"max_window_s": True}, {"disk_budget": False},
    {"timings": {"every": True}}, {"max_window_memory": "lots"}, {"disk_budget": "4XB"},
    {"max_window_s": "long"}, {"metadata": {"traceEvents": 1}}, {"metadata": {"when": {1}}},
    {"repeat": 2}, {"at_steps": [10], "active": 1, "every_n_steps": 5},
    {"at_steps": [10], "active": 1, "repeat": 2}, {"every_n_steps": 10},
    {"every_n_steps": 2, "active": 3}, {"at_steps": [10, 12], "active": 3},
    {"at_steps": [-1], "active": 3}, {"phases": ["val 1/2"]},
    {"triggers": {"slow_step": {"factr": 2}}}, {"triggers": ["slow"]}, {"sinks": {"stacks": {}}},
    {"sinks": {"memory": {"forms": ["jsn"]}}}, {"sinks": {"tabel": {}}}, {"sinks": [TableSink]},
    {"sinks": {"mine": TableSink}}, {"sinks": "table"}, {"on_capture": "wandb"},
    {"communication": "nccl"}, {"communication": ["mine", "nccl|rccl"]},
    {"communication": [".*ring"]}, {"communication": ["a.+b"]}, {"communication": ["^ring"]},
    {"communication": ["ring$"]}, {"communication": ["[^a]b"]}, {"communication": [r"\bring"]},
    {"communication": ["(?:ring)"]}, {"communication": ["**"]}, {"communication": ["a"] * 21},
    {"communication": ["ring" * 26]}, {"emit": ["nvtxx"]}, {"emit": []}, {"modules": {"dept": 2}},
    {"modules": 2}, {"timings": 5}, {"timings": {"evry": 5}}, {"timings": {"every": 0}},
    {"active": -1, "timings": {}}, {"triggers": {"mine": {"k": 2}}},
]  # fmt: skip


def refused(**options: Any) -> str:
    """The sentence that refuses the options."""
    with pytest.raises(ConfigError) as raised:
        ProfilerConfig(**options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_bad_options_get_one_sentence(golden: Golden) -> None:
    said = [f"{options}\n    {refused(**options)}\n" for options in MISTAKES]
    golden("refused_options.txt", "".join(said))


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [
        ("sinks", TableSink(rows=3), "but it must be a mapping with names as keys."),
        (
            "sinks",
            {"a": {"_target_": "json.JSONDecoder"}},
            "a method write(self, capture, folder).",
        ),
        (
            "sinks",
            {"a": {"_target_": "gone.Sink"}},
            ".a._target_ is 'gone.Sink', which cannot be built: ",
        ),
        (
            "triggers",
            {"signal": {"name": "SIGUSR3"}},
            "'SIGUSR3', which is not a signal of this system; did you mean 'SIGUSR",
        ),
    ],
)
def test_refused_objects_and_names(option: str, value: Any, part: str) -> None:
    assert part in refused(**{option: value})


LEAST = {
    "wait": 0, "warmup": 0, "active": 1, "repeat": 0, "skip_first": 0, "every_n_steps": 1,
    "total_steps": 1, "keep": 1, "max_window_memory": 1,
}  # fmt: skip


@pytest.mark.parametrize(("option", "least"), LEAST.items())
def test_a_number_may_be_as_small_as_it_makes_sense(option: str, least: int) -> None:
    assert getattr(ProfilerConfig(**{"active": 1, option: least}), option) == least
    sentence = refused(**{"active": 1, option: least - 1})
    assert sentence.startswith(f"profiler.{option} is {least - 1}, but ")


@pytest.mark.parametrize("option", ["max_window_s", "export_timeout_s", "preemption_grace_s"])
def test_an_amount_of_seconds_may_be_any_above_zero(option: str) -> None:
    assert getattr(ProfilerConfig(**{option: 0.001}), option) == 0.001
    assert refused(**{option: 0}) == f"profiler.{option} is 0, but it must be more than 0."


def test_timings_cost_least_unless_more_is_asked_for() -> None:
    timings = ProfilerConfig(timings={}).timings
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
    assert as_config() == as_config({}) == as_config("summary")


@pytest.mark.parametrize("source", [3, ["active"], object()])
def test_a_source_of_another_kind_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="must be a mapping, a preset's name or a ProfilerConfig"):
        as_config(source)


def test_the_config_of_a_whole_application_is_refused_with_the_key_to_take() -> None:
    whole = {"n": 3, "profiler": {"active": 3}}
    for source in (whole, OmegaConf.create(whole)):
        with pytest.raises(ConfigError, match=r'as in Session\(cfg\["profiler"\]\)'):
            as_config(source)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as raised:
        as_config("sumary")
    assert str(raised.value) == (
        "'sumary' is none of the presets (disabled, full, memory, on_demand, stacks, summary, timings, trace); "
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


def test_a_config_is_frozen_and_replace_makes_another_one() -> None:
    config = ProfilerConfig(active=3, timings={})
    for owner, name in ((config, "active"), (config.timings, "every")):
        with pytest.raises(ConfigError, match=rf"\.{name} is 4, but it cannot be set on a config"):
            setattr(owner, name, 4)
    other = config.replace(active=4, sinks=["table"])
    assert (other.active, list(other.sinks), config.active, config.sinks) == (4, ["table"], 3, {})
    with pytest.raises(ConfigError, match=r"did you mean profiler\.active"):
        config.replace(actve=3)  # type: ignore[call-arg]


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


@pytest.mark.parametrize(
    "options",
    [{}, {"metadata": {"a": 1}}, {"active": 3}, {"timings": {}}, {"sinks": ["table"]}, {"wait": 2}],
    ids=str,
)
def test_without_a_config_nothing_is_recorded_whatever_the_options(options: Any) -> None:
    assert not as_config(None, **options).enabled


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({}, (2, 6)),
        ({"metadata": {"a": 1}}, (2, 6)),
        ({"sinks": ["stacks"], "with_stack": True}, (2, 6)),
        ({"wait": 9}, (10, 14)),
        ({"active": 3}, (0, 2)),
        ({"active": None}, (0, None)),
        ({"timings": {}}, None),
        ({"timings": {}, "metadata": {"a": 1}}, None),
        ({"triggers": ["slow_step"]}, None),
        ({"triggers": ["out_of_memory"]}, None),
        ({"triggers": ["out_of_memory"], "active": 2}, (0, 1)),
    ],
    ids=str,
)
def test_no_window_is_without_end_unless_that_is_asked_for(options: Any, first: Any) -> None:
    for config in (as_config(**options), as_config(options), as_config(ProfilerConfig(**options))):
        window = schedule.next_window(config, 0)
        assert config.enabled
        assert (window and (window.first, window.last)) == first


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        ({"profile_memry": True}, "The mine trigger's records are {'profile_memry': True}, but"),
        ({"active": 3}, "The mine trigger's records are {'active': 3}, but they must be a mapping"),
        (["with_stack"], "The mine trigger's records are ['with_stack'], but they must be"),
        ({"with_stack": "much"}, "profiler.with_stack is 'much', but it must be true or false."),
        ({"max_window_s": -1}, "profiler.max_window_s is -1, but it must be more than 0."),
    ],
)
def test_what_a_trigger_records_is_checked(records: Any, sentence: str) -> None:
    trigger = Never()
    vars(trigger)["records"] = records
    with pytest.raises(ConfigError) as raised:
        ProfilerConfig(triggers={"mine": trigger})
    assert str(raised.value).startswith(sentence)


def test_what_a_trigger_records_has_the_types_of_options_and_turns_on_what_it_needs() -> None:
    trigger = Never()
    vars(trigger)["records"] = {"max_window_memory": "1MB", "with_flops": True}
    config = ProfilerConfig(triggers={"mine": trigger}, sinks=["table"], active=3)
    windows = config.of_trigger("mine")
    assert (windows.max_window_memory, windows.record_shapes, windows.active) == (10**6, True, 3)
    assert config.of_trigger(None) is config
    assert not config.record_shapes


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
