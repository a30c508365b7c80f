"""`instrument samples`: captures that come with the package, and what `diagnose` says of them."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from commands import Command

from instrument.cli.samples import FOLDER, SAMPLES
from instrument.read.advise.diagnose import diagnose
from instrument.read.capture import Capture
from instrument.read.views.find_captures import captures_at

# Folders of the machine that recorded, such as /home/me.
_OF_A_MACHINE = re.compile(rb"/(?:home|root|tmp|work|Users|opt|mnt|private)/|site-packages")


def captures(name: str) -> list[Capture]:
    return [Capture.load(each) for each in captures_at(FOLDER / name)]


def test_each_folder_is_in_the_table() -> None:
    assert {each.name for each in FOLDER.iterdir()} - {"__pycache__"} == {*SAMPLES}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_diagnosis_names_the_fault_first(name: str) -> None:
    found = [each.code for each in diagnose(captures(name)).findings]
    assert "busy-cpus" not in found
    assert (found[0] if found else None) == SAMPLES[name].fault


@pytest.mark.parametrize("name", SAMPLES)
def test_the_table_says_what_was_recorded(name: str) -> None:
    sample, found = SAMPLES[name], captures(name)
    assert sorted(each.about.rank or 0 for each in found) == [*range(sample.ranks)]
    for each in found:
        assert each.about.command == [sample.program]
        assert {device.name for device in each.about.devices} == {sample.device} - {"CPU"}
    assert (FOLDER / name / sample.program).is_file()


def test_nothing_in_a_sample_speaks_of_a_machine() -> None:
    for file in (each for each in FOLDER.rglob("*.*") if each.is_file()):
        content = file.read_bytes()
        content = gzip.decompress(content) if file.suffix == ".gz" else content
        assert not _OF_A_MACHINE.search(content), file
    for name in SAMPLES:
        assert {each.about.host for each in captures(name)} == {"host"}


def test_the_fix_is_faster() -> None:
    (before,), (after,) = captures("before"), captures("after")
    assert max(after.steps.column("duration_ns")) < min(before.steps.column("duration_ns"))


def test_the_samples_are_listed(command: Command) -> None:
    printed = command("samples").out
    for name, sample in SAMPLES.items():
        assert re.search(rf"^{name} .* {re.escape(sample.shows)}$", printed, re.MULTILINE)


def test_a_copy_is_read_as_its_lines_say(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = command("samples", "starved").out
    assert "instrument run starved/train.py" in printed
    (said,) = re.findall(r"instrument diagnose (.*)", printed)
    assert "of the step waits for data" in command("diagnose", said).out
    copied = {str(each.relative_to(tmp_path / said)) for each in Path(tmp_path, said).rglob("*")}
    source = {str(each.relative_to(FOLDER / "starved")) for each in (FOLDER / "starved").rglob("*")}
    assert copied == {each for each in source if "__pycache__" not in each}


def test_a_copy_of_ranks_is_recorded_by_torchrun(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "two ranks"
    printed = command("samples", "two-ranks", folder).out
    assert f"torchrun --nproc-per-node 2 -m instrument run -- '{folder}/train.py'" in printed


def test_a_folder_that_exists_is_not_changed(command: Command, tmp_path: Path) -> None:
    failed = command("samples", "after", tmp_path, status=2)
    assert failed.err == f"instrument: {tmp_path} exists: name a new folder after after.\n"
    assert not [*tmp_path.iterdir()]


def test_an_unknown_name_is_answered_with_a_known_one(command: Command) -> None:
    failed = command("samples", "befor", status=2)
    assert "no sample 'befor'; did you mean 'before'?" in failed.err
