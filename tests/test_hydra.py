"""Our config groups inside somebody else's Hydra application."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import warm
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from omegaconf import OmegaConf

from instrument import ProfilerConfig
from instrument.base.errors import ConfigError
from instrument.base.presets import preset, presets
from instrument.export.sinks.table import TableSink
from instrument.record.config.schema import ModulesConfig, as_config

FOREIGN = """
import hydra
from omegaconf import OmegaConf

@hydra.main(config_path=None, version_base=None)
def main(cfg):
    print("PROFILER", OmegaConf.to_yaml(cfg.get("profiler", {})))
    from instrument import Session, profiled
    import torch
    with Session(cfg.get("profiler")) as session:
        for _ in session.steps(range(8)):
            with profiled("mine"):
                torch.ones(4).sum()
    import instrument
    print("FROM", instrument.__file__)
    print("CAPTURES", *[c.folder for c in session.captures])

main()
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "their_app.py").write_text(FOREIGN)
    return tmp_path


def run(app: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, warm.EXPORTER: "yes"}
    return warm.run_apart(["their_app.py", *overrides], app, environment)


@pytest.mark.parametrize("name", presets())
def test_a_preset_named_in_python_is_what_hydra_composes(name: str) -> None:
    with initialize(config_path=None, version_base=None):
        composed = compose(overrides=[f"+profiler={name}"])
    assert OmegaConf.to_container(composed.profiler) == preset(name)
    assert as_config(composed.profiler) == as_config(name)


def test_reading_presets_leaves_hydras_global_state_alone() -> None:
    with initialize(config_path=None, version_base=None):  # a nested one would raise
        assert as_config("full", active=4).active == 4
        assert compose(overrides=["+profiler=trace"]).profiler.active == 5


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [
                "profiler.active=5", "profiler.record_shapes=true", "profiler.activities=[cpu]",
                "+profiler.metadata.model=vit", "+profiler.metadata.n=12",
                "+profiler.experimental_config.verbose=true", "profiler.output_dir=/tmp/there",
            ],
            {
                "active": 5,
                "record_shapes": True,
                "activities": ["cpu"],
                "metadata": {"model": "vit", "n": 12},
                "experimental_config": {"verbose": True},
                "output_dir": "/tmp/there",
            },
        ),
        (
            ["profiler.activities=[cpu,{cuda:[GPU_MEMCPY]}]"],
            {"activities": ["cpu", {"cuda": ["GPU_MEMCPY"]}]},
        ),
    ],
)  # fmt: skip
def test_overrides(overrides: list[str], expected: dict[str, object]) -> None:
    with initialize(config_path=None, version_base=None):
        config = as_config(compose(overrides=["+profiler=trace", *overrides]).profiler)
    assert {name: getattr(config, name) for name in expected} == expected


def test_sinks_are_chosen_added_and_left_out() -> None:
    with initialize(config_path=None, version_base=None):

        def sinks(*overrides: str) -> dict[str, object]:
            return as_config(compose(overrides=["+profiler=trace", *overrides]).profiler).sinks

        assert list(sinks()) == ["table", "chrome_trace"]
        stacks = ["profiler/sinks=[table,stacks]", "profiler.with_stack=true"]
        chosen = sinks(*stacks, "profiler.sinks.table.rows=30")
        assert list(chosen) == ["table", "stacks"]
        assert chosen["table"].rows == 30  # type: ignore[attr-defined]
        lake = sinks("profiler/sinks=[table,parquet]", "profiler.sinks.parquet.dir=lake")["parquet"]
        assert lake.dir == "lake"  # type: ignore[attr-defined]
        assert list(sinks("~profiler.sinks.table")) == ["chrome_trace"]
        added = sinks("+profiler.sinks.mine._target_=test_config.Loud")
        assert list(added) == ["table", "chrome_trace", "mine"]


@pytest.mark.parametrize("name", presets())
def test_triggers_are_chosen_for_any_preset(name: str) -> None:
    overrides = [
        f"+profiler={name}",
        "profiler/triggers=[signal,slow_step]",
        "profiler.triggers.slow_step.factor=2",
    ]
    with initialize(config_path=None, version_base=None):
        composed = as_config(compose(overrides=[*overrides, "profiler.enabled=true"]).profiler)
    its_own = {"file": {"max_windows": None}} if name == "on_demand" else {}
    expected = ProfilerConfig(triggers=its_own | {"signal": {}, "slow_step": {"factor": 2}})
    assert composed.triggers == expected.triggers


def test_a_preset_can_stand_at_another_place_of_the_config() -> None:
    with initialize(config_path=None, version_base=None):
        moved = compose(overrides=["+profiler@trainer.callbacks.profiler=trace"])
    assert as_config(moved.trainer.callbacks.profiler) == as_config("trace")


def test_an_application_that_knows_nothing_of_us(app: Path) -> None:
    for command in (
        "init -q",
        "add their_app.py",
        "-c user.name=me -c user.email=me@here commit -q -m first",
    ):
        subprocess.run(["git", *command.split()], cwd=app, check=True)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=app, text=True).strip()
    overrides = ["+profiler=trace", "profiler.active=3", "+profiler.metadata.model=vit"]
    # test_package.py starts it in a new process, where nothing of ours is loaded before Hydra composes
    done = run(app, *overrides)
    assert done.returncode == 0, done.stderr
    (folder,) = done.stdout.split("CAPTURES ")[1].split()
    assert Path(folder).parent.name == "profile"
    assert Path(folder).parent.parent.parent.parent == app / "outputs", (
        "the folder is in Hydra's run folder"
    )
    about = json.loads((Path(folder) / "capture.json").read_text())
    assert about["window"]["steps"] == 3
    assert about["git"] == {"commit": commit, "dirty": False}
    assert about["overrides"] == overrides
    assert about["command"] == ["their_app.py", *overrides]
    assert about["user_metadata"] == {"model": "vit"}
    assert "mine" in done.stderr, "the table names the range"


def test_each_job_of_a_sweep_has_its_own_folder(app: Path) -> None:
    done = run(app, "--multirun", "+profiler=summary", "profiler.active=1,2")
    assert done.returncode == 0, done.stderr
    found = sorted((app / "multirun").rglob("capture.json"))
    steps = [json.loads(p.read_text())["window"]["steps"] for p in found]
    assert steps == [1, 2]
    assert [path.parent.parent.parent.name for path in found] == ["0", "1"], (
        "in the folders of the jobs"
    )
    assert all((path.parent / "table.txt").exists() for path in found), (
        "by the exporter of each job"
    )


def test_what_hydra_itself_says_and_what_we_say(app: Path) -> None:
    theirs = run(app, "+profiler=trace", "profiler.actve=3")
    assert "Key 'actve' is not in struct" in theirs.stderr
    ours = run(app, "+profiler=trace", "+profiler.actve=3")
    assert ours.returncode != 0
    assert "profiler.actve is not an option; did you mean profiler.active?" in ours.stderr
    sink = run(app, "+profiler=trace", "profiler/sinks=[tabel]")
    assert "Could not load 'profiler/sinks/tabel'" in sink.stderr


def test_a_config_can_itself_be_instantiated_by_hydra() -> None:
    sinks = {"table": {"_target_": "instrument.export.sinks.table.TableSink", "rows": 3}}
    config = instantiate({"_target_": "instrument.ProfilerConfig", "active": 2, "sinks": sinks})
    assert config == ProfilerConfig(active=2, sinks={"table": {"rows": 3}})


def test_a_config_that_hydra_has_not_built_is_built() -> None:
    node = {"_target_": "instrument.ProfilerConfig", "active": 2, "sinks": {"table": {"rows": 3}}}
    built = ProfilerConfig(active=2, sinks={"table": {"rows": 3}})
    assert as_config(OmegaConf.create(node)) == built
    assert as_config(node, active=4).active == 4
    with pytest.raises(
        ConfigError, match=r"^profiler\._target_ is 'instrument.Nothing', which cannot be built: "
    ):
        as_config({"_target_": "instrument.Nothing"})


def test_interpolations_are_looked_up_in_the_whole_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFILES", "/tmp/there")
    profiler = {"active": "${steps}", "warmup": "${.active}"}
    profiler["output_dir"] = "${oc.env:PROFILES}/here"
    sinks = {"table": {"rows": "${profiler.active}"}}
    app = {"steps": 4, "profiler": {**profiler, "sinks": sinks}}
    config = as_config(OmegaConf.create(app).profiler)
    assert (config.active, config.warmup, config.output_dir) == (4, 4, "/tmp/there/here")
    assert config.sinks["table"].rows == 4


@pytest.mark.parametrize(
    ("value", "why"), [("${nothing}", "Interpolation key 'nothing' not found"), ("???", "Missing")]
)
def test_a_value_that_is_not_there_is_told(value: str, why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        as_config(OmegaConf.create({"profiler": {"active": value}}).profiler)
    assert str(raised.value).startswith(
        f"The profiler config has a value that OmegaConf cannot resolve: {why}"
    )


@dataclass
class Profiling:
    """An application's own schema."""

    active: int = 2
    modules: dict[str, Any] = field(default_factory=lambda: {"depth": 1})
    sinks: dict[str, Any] = field(default_factory=lambda: {"table": {"rows": 3}})


def test_structured_configs() -> None:
    ConfigStore.instance().store("profiling", node=Profiling, group="profiler")
    with initialize(config_path=None, version_base=None):
        composed = compose(overrides=["+profiler=profiling", "profiler.active=5"]).profiler
    assert OmegaConf.get_type(composed) is Profiling
    expected = ProfilerConfig(active=5, modules={"depth": 1}, sinks={"table": {"rows": 3}})
    assert as_config(composed) == as_config(Profiling(active=5)) == expected
    built = Profiling(active=5, sinks={"table": TableSink(rows=3)})
    assert as_config(built) == expected


def test_hydra_zen_builds_configs_with_every_option() -> None:
    zen = pytest.importorskip("hydra_zen")
    full = zen.builds(ProfilerConfig, populate_full_signature=True)
    assert set(ProfilerConfig.model_fields) < set(full.__dataclass_fields__)
    with pytest.raises(TypeError, match="actve"):
        full(actve=3)
    table, modules = {"table": {"rows": 3}}, ModulesConfig(depth=1)
    expected = ProfilerConfig(active=3, modules=modules, sinks=table)
    table = zen.builds(TableSink, rows=3)
    app = zen.make_config(
        built=full(active=3, modules=zen.builds(ModulesConfig, depth=1), sinks={"table": table}),
        plain=zen.builds(ProfilerConfig, active=3, modules={"depth": 1}, sinks={"table": table}),
    )
    made = zen.instantiate(app)
    assert made.built == made.plain == as_config(app().plain) == expected
    assert as_config(app().built) == expected
