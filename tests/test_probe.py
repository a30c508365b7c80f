"""Options that depend on the torch at hand: its experimental ones, and the types of an activity."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from instrument import ProfilerConfig, Session
from instrument.base.errors import ConfigError
from instrument.read.capture import Capture
from instrument.record import torch_support

pytestmark = pytest.mark.usefixtures("inline_export")

TORCH = torch.__version__
needs_types = pytest.mark.skipif(
    not torch_support._takes_types(), reason=f"torch {TORCH} cannot choose types of an activity"
)


def categories(capture: Capture) -> Counter[str]:
    with gzip.open(capture.trace_path) as file:
        return Counter(event["cat"] for event in json.load(file)["traceEvents"] if "cat" in event)


def recorded(tmp_path: Path, **options: Any) -> Capture:
    with (
        Session(output_dir=tmp_path, active=None, **options) as session,
        torch.profiler.record_function("mine"),
    ):
        torch.ones(2) + 1
    return session.captures[0]


def test_torch_warns_of_no_option_of_the_preset_full(tmp_path: Path) -> None:
    with Session("full", sinks={}, output_dir=tmp_path) as session:
        for _ in range(8):
            torch.ones(3) + 1
            session.step()
    assert len(session.captures) == 1


class OlderConfig:
    """torch's options as they were before `trace_only`."""

    def __init__(self, verbose: bool = False, profile_all_threads: bool = False) -> None:
        """__init__(self: _ExperimentalConfig, verbose: bool = False, profile_all_threads: bool = False) -> None"""


def test_an_experimental_option_reaches_torch(tmp_path: Path) -> None:
    options = {"capture_overload_names": True}
    without, told = recorded(tmp_path), recorded(tmp_path, experimental_config=options)
    assert "Tensor" not in without.operators_by("overload").column("overload")
    assert "Tensor" in told.operators_by("overload").column("overload"), "that of aten::add.Tensor"
    assert told.metadata["config"]["experimental_config"] == options


def test_the_users_options_stand_over_ours() -> None:
    documented = torch._C._profiler._ExperimentalConfig.__init__.__doc__
    newer = {"trace_only": True} if "trace_only" in documented else {}
    of = torch_support.experimental_options
    assert of(ProfilerConfig()) == newer
    assert of(ProfilerConfig(profile_all_threads=True)) == {**newer, "profile_all_threads": True}
    assert of(ProfilerConfig(with_stack=True, profile_memory=True)) == {"verbose": True}
    options = {"profile_all_threads": False, "trace_only": False, "enable_cuda_sync_events": True}
    assert of(ProfilerConfig(experimental_config=options)) == options


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"experimental_config": {"vebose": True}},
            f"profiler.experimental_config.vebose is not an option of torch {TORCH}: choose from adjust_profiler_step, ",
        ),
        (
            {"experimental_config": {"verbose": "loud"}},
            f"profiler.experimental_config.verbose is 'loud', but torch {TORCH} needs true or false.",
        ),
        (
            {"experimental_config": {"profiler_metrics": "dram"}},
            f"profiler.experimental_config.profiler_metrics is 'dram', but torch {TORCH} needs a list of text.",
        ),
        pytest.param(
            {"activities": [{"cpu": ["CPU_OPS"]}]},
            f"torch {TORCH} refuses profiler.activities or profiler.experimental_config: "
            "Unknown or non-member activity type name: 'CPU_OPS'.",
            marks=needs_types,
        ),
    ],
)
def test_refused_by_this_torch(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Session(output_dir=tmp_path, **options).start()
    assert str(raised.value).startswith(sentence)
    assert "\n" not in str(raised.value)
    assert "aten::add" in recorded(tmp_path).operators.column("name"), (
        "nothing of it is left in the way of the next"
    )


def test_an_older_torch_is_told_which_options_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._profiler, "_ExperimentalConfig", OlderConfig)
    config = ProfilerConfig(profile_all_threads=True)
    assert torch_support.experimental_options(config) == {"profile_all_threads": True}
    with pytest.raises(ConfigError, match=r"choose from profile_all_threads, verbose\.$"):
        torch_support.refuse_unknown(ProfilerConfig(experimental_config={"nothing": True}))


def test_an_older_torch_cannot_choose_types(monkeypatch: pytest.MonkeyPatch) -> None:
    # as before torch 2.13
    monkeypatch.setattr(torch_support, "_KinetoProfile", lambda activities: set(activities))
    needs = r"chooses types of an activity, which needs torch 2\.13, but this is torch"
    with pytest.raises(ConfigError, match=needs):
        torch_support.refuse_unknown(ProfilerConfig(activities=[{"cpu": ["CPU_OP"]}]))


@needs_types
def test_only_the_types_chosen_are_recorded(tmp_path: Path) -> None:
    every, some = recorded(tmp_path), recorded(tmp_path, activities=[{"cpu": ["USER_ANNOTATION"]}])
    assert {"cpu_op", "user_annotation"} <= categories(every).keys()
    assert "cpu_op" not in categories(some)
    assert categories(some)["user_annotation"] == categories(every)["user_annotation"]
    assert some.metadata["activities"] == ["cpu"]
    assert some.metadata["config"]["activities"] == [{"cpu": ["USER_ANNOTATION"]}]
