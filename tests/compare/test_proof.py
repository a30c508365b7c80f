"""Certificates: `ab --proof` writes one, and `verify` finds what is wrong with one."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import warm

from instrument.base.errors import CaptureError
from instrument.cli.command import main
from instrument.read.compare.ab_runs import Program
from instrument.read.compare.proof import (
    PROOF_FILE,
    Proof,
    RunTime,
    Works,
    change_of,
    proof_of,
    read_proof,
    save,
    save_work,
    verdict_of,
)
from instrument.read.compare.statistics import Change
from instrument.read.compare.work import Difference, Numbers, Work
from instrument.read.show.proof import markdown

FACTS: dict[str, Any] = {
    "steps": 3,
    "backwards": 3,
    "batches": 3,
    "loaders": [{"length": 3, "dataset": 12, "batches": 3}],
    "training": {
        "calls": 3,
        "samples": 12,
        "tokens": None,
        "elements": 120,
        "rows": 12,
        "distinct": 12,
        "digest": "0123456789abcdef",
        "shapes": ["4×10"],
    },
    "evaluation": None,
    "parameters": {"trained": 10, "with_gradients": 10, "changed": 10},
    "checked_steps": 3,
    "idle_steps": 0,
    "gradient_norms": ["0x1.0p+0", "0x1.0p-1", "0x1.0p-2"],
    "counted_steps": 2,
    "flops": 240.0,
    "precision": {"float32": 1.0},
    "operators": {"mm": 2.0},
    "slept_s": 0.0,
    "compiles": False,
    "failure": None,
    "environment": {
        "torch": "2.13.0",
        "python": "3.11.7",
        "system": "Linux",
        "processor": "",
        "devices": [],
        "threads": 1,
        "cpus": 2,
    },
}
LOSSES = ["0x1.8p+0", "0x1.4p+0", "0x1.0p+0"]

# As the program of test_ab.py, but it also writes the work that its first argument holds.
PROGRAM = """
import json, os, pathlib, random, sys
if "INSTRUMENT_WORK" in os.environ:
    pathlib.Path(os.environ["INSTRUMENT_WORK"]).write_text(pathlib.Path(sys.argv[1]).read_text())
    sys.exit()
folder = pathlib.Path(os.environ["INSTRUMENT_DIR"]) / "steps_0-8"
folder.mkdir(parents=True)
step_ns = int(sys.argv[-1]) * random.Random(os.getpid()).uniform(990, 1010)
events = [{"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}", "pid": 1,
           "tid": 1, "ts": number * step_ns / 1000, "dur": step_ns / 1000} for number in range(9)]
(folder / "trace.json").write_text(json.dumps({"traceEvents": events}))
(folder / "capture.json").write_text(json.dumps({"format": 1, "name": folder.name}))
"""


def work(losses: list[str] = LOSSES, **changes: Any) -> dict[str, Any]:
    facts = {**FACTS, **changes}
    return {"format": 1, "losses": losses, "evaluations": [], "facts": facts}


def as_work(content: dict[str, Any]) -> Work:
    return msgspec.convert(content, type=Work)


def blocks(ratio: float, number: int = 8) -> list[list[RunTime]]:
    noise = [1 + each / 1000 for each in range(number)]
    return [
        [RunTime(label, 1e6 * x * (ratio if label == "B" else 1)) for label in "ABBA"]  # type: ignore[arg-type]
        for x in noise
    ]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate that is right: its folder."""
    folder = tmp_path / "certificate"
    folder.mkdir()
    works = Works(*(as_work(work()) for _ in range(3)))
    save_work(works, folder)
    programs = [Program(label, label, ["train", f"--{label}"], tmp_path) for label in "AB"]  # type: ignore[arg-type]
    proof = proof_of(programs, blocks(0.8), works, folder, margin=0.02, gradients=True)
    save(proof, markdown(proof), folder)
    return folder


def test_ab_writes_a_certificate_that_verify_checks(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    Path("work.json").write_text(json.dumps(work()))
    command = f"{sys.executable} program.py work.json"
    sides = ["--a", f"{command} 3000", "--b", f"{command} 2000"]
    assert main(["ab", *sides, "--blocks", "6", "--proof", "p", "--gradients"]) == 0
    printed = capsys.readouterr().out
    assert "Certificate: faster and equal. B is faster, and its losses are bit-equal." in printed
    proof = read_proof(Path("p/proof.json"))
    assert proof.verdict == "faster and equal"
    assert proof.change.share == pytest.approx(-1 / 3, abs=0.02)
    got = [each.path for each in proof.files]
    assert got == ["work-A.json", "work-B.json", "work-A-again.json"]
    assert sorted(each.name for each in Path("p").iterdir()) == sorted(
        ["proof.json", "proof.md", *(each.path for each in proof.files)]
    )
    assert len(Path("p/proof.md").read_text().splitlines()) <= 40
    assert main(["verify", "p"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert "Verdict: faster and equal" in lines
    assert main(["verify", "p/proof.json", "--repeat"]) == 0
    assert re.search(r"repeated, −3\d\.?\d* %: right", capsys.readouterr().out)


def test_another_work_is_not_the_same(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    Path("a.json").write_text(json.dumps(work()))
    Path("b.json").write_text(json.dumps(work(steps=2)))
    command = f"{sys.executable} program.py"
    sides = ["--a", f"{command} a.json 3000", "--b", f"{command} b.json 2000"]
    assert main(["ab", *sides, "--blocks", "1", "--proof", "p", "--json"]) == 0
    assert json.loads((out := capsys.readouterr()).out)["verdict"] == "undecided"
    assert "not the same work. B has 2 steps of optimizers, A has 3." in out.err
    assert main(["verify", "p"]) == 0


def test_a_program_whose_work_is_not_seen(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    command = f"{sys.executable} -c pass"
    assert main(["ab", "--a", command, "--b", command, "--proof", "p"]) == 2
    assert "the program must use a Session" in capsys.readouterr().err


FORGERIES: dict[str, tuple[Callable[[Any], object], str]] = {
    "verdict": (lambda x: x.update(verdict="faster, numbers differ"), "verdict"),
    "reason": (lambda x: x.update(reason="It is much faster."), "reason"),
    "change": (lambda x: x["change"].update(share=-0.5), "change"),
    "interval": (lambda x: x["change"].update(low=-0.21), "change"),
    "blocks": (lambda x: x["blocks"][0][0].update(step_ns=2e6), "change"),
    "losses": (lambda x: x["numbers"].update(compared=100), "numbers"),
    "gradients": (lambda x: x["gradients"].update(largest=0.1), "gradients"),
    "work": (lambda x: x["work"]["B"].update(steps=4), "work"),
    "differences": (
        lambda x: x["differences"].append({"what": "x", "refuses": False, "text": "x"}),
        "differences",
    ),
    "hash": (lambda x: x["files"][1].update(sha256="0" * 64), "work-B.json"),
    "no file": (lambda x: x["files"].pop(1), "work"),
    "another file": (
        lambda x: x["files"].append({"path": "missing.json", "sha256": "0" * 64}),
        "missing.json",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_certificate(name, certificate, capsys) -> None:
    forge, part = FORGERIES[name]
    content = json.loads((certificate / PROOF_FILE).read_text())
    forge(content)
    (certificate / PROOF_FILE).write_text(json.dumps(content))
    assert main(["verify", str(certificate)]) == 1
    wrong = [each for each in capsys.readouterr().out.splitlines() if not each.endswith(": right")]
    assert part in [each.partition(":")[0] for each in wrong]
    assert wrong[-1] == "The certificate is not right."


def test_a_file_that_was_changed(certificate: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (certificate / "work-B.json").write_text(json.dumps(work(steps=1)))
    assert main(["verify", str(certificate)]) == 1
    printed = capsys.readouterr().out
    assert "work-B.json: is another file" in printed
    assert "verdict: is not what the files and the blocks give" in printed


@pytest.mark.parametrize(
    "path", ["../outside", "/etc/passwd", "a/../../outside", "link", "link/outside", "..\\outside"]
)
def test_a_path_that_leads_out_of_the_folder(path, certificate, capsys) -> None:
    outside = certificate.parent / "outside"
    outside.write_text("secret")
    (certificate / "link").symlink_to(outside if path == "link" else certificate.parent)
    content = json.loads((certificate / PROOF_FILE).read_text())
    content["files"].append({"path": path, "sha256": "0" * 64})
    (certificate / PROOF_FILE).write_text(json.dumps(content))
    assert main(["verify", str(certificate)]) == 2
    assert "which is not in its folder" in capsys.readouterr().err


DAMAGES: list[Callable[[Any], object]] = [
    lambda x: x.update(schema=2),
    lambda x: x.pop("blocks"),
    lambda x: x.update(blocks=[]),
    lambda x: x["blocks"][0].pop(),
    lambda x: x["blocks"][0][0].update(step_ns=-1),
    lambda x: x["blocks"][0][0].update(ranges_ns={"mlp": 1}),
    lambda x: x["programs"].reverse(),
    lambda x: x["programs"].pop(),
    lambda x: x["work"].pop("B"),
    lambda x: x["change"].update(level=0),
    lambda x: x.update(verdict="much faster"),
    lambda x: x["files"][0].update(sha256="x"),
]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_a_damaged_certificate(number: int, certificate: Path) -> None:
    content = json.loads((certificate / PROOF_FILE).read_text())
    DAMAGES[number](content)
    (certificate / PROOF_FILE).write_text(json.dumps(content))
    with pytest.raises(CaptureError, match=r"certificate of schema 1|damaged"):
        read_proof(certificate / PROOF_FILE)


@pytest.mark.parametrize("content", ["", "{", "[]", "{" * 100_000, '{"format": 2}'])
def test_a_damaged_work_file(content, certificate, capsys) -> None:
    (certificate / "work-A.json").write_text(content)
    assert main(["verify", str(certificate)]) == 1
    assert "work-A.json is damaged" in capsys.readouterr().out


def test_a_missing_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_names_of_a_stranger_are_escaped(certificate: Path) -> None:
    content = json.loads((certificate / PROOF_FILE).read_text())
    content["programs"][0].update(name="a\x1b[2J|b\n# title", command=["`x`", "@user"])
    content["differences"].append({"what": "x", "refuses": True, "text": "<b>\n@user | x"})
    text = markdown(msgspec.convert(content, type=Proof))
    assert "\x1b" not in text
    assert "\n# title" not in text
    assert "<b>" not in text
    assert all(line.count("|") == 4 for line in text.splitlines() if line.startswith("| "))


def test_all_keys_are_documented(certificate: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "proof.md").read_text("utf-8")
    files = [certificate / PROOF_FILE, certificate / "work-A.json"]
    named = {"A", "B", "float32", "mm"}

    def keys(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(keys, value))
        return {*value, *keys([*value.values()])} - named if isinstance(value, dict) else set()

    for each in files:
        assert {
            key for key in keys(json.loads(each.read_text())) if f"`{key}`" not in page
        } == set()


CHANGES = {
    "faster": Change(-0.2, -0.25, -0.15, 0.01),
    "slower": Change(0.2, 0.15, 0.25, 0.01),
    "same": Change(0.0, -0.01, 0.01, 0.9),
    "undecided": Change(-0.2, None, None, 0.3),
}
REFUSING = Difference("steps", True, "B takes fewer.")
LISTED = Difference("operators", False, "Others.")
PRECISION = Difference("precision", False, "B multiplies in bfloat16.")


@pytest.mark.parametrize(
    ("change", "equality", "found", "verdict"),
    [
        ("faster", "bit-equal", [LISTED], "faster and equal"),
        ("faster", "equal within rounding", [], "faster and equal"),
        ("faster", "different", [], "faster, numbers differ"),
        ("faster", "equal within rounding", [PRECISION], "faster, numbers differ"),
        ("faster", "unknown", [], "undecided"),
        ("faster", "bit-equal", [REFUSING], "not the same work"),
        ("undecided", "bit-equal", [REFUSING], "not the same work"),
        ("slower", "bit-equal", [], "not faster"),
        ("same", "different", [], "not faster"),
        ("undecided", "bit-equal", [], "undecided"),
    ],
)
def test_verdicts(change: str, equality: Any, found: list[Difference], verdict: str) -> None:
    numbers = Numbers(equality, 1, 0.0, "")
    assert verdict_of(CHANGES[change], 0.02, numbers, found)[0] == verdict


def test_the_change_is_that_of_the_comparison() -> None:
    change = change_of(blocks(0.8))
    assert change.share == pytest.approx(-0.2)
    assert change.verdict(0.02) == "faster"
    assert change_of(blocks(1.0)).verdict(0.02) == "same"


SCRIPT = """
import torch
from torch import nn
{imports}
torch.manual_seed(0)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{session}
for _ in range(6):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item().hex())
    {step}
"""
WITH_SESSION = SCRIPT.format(
    imports="from instrument import Session",
    session="session = Session(active=2, wait=1).start()",
    step="session.step()",
)


@pytest.mark.parametrize("command", [[], ["-m", "instrument", "run"]], ids=["session", "run"])
def test_a_script_writes_its_work(command: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(imports="", session="", step="") if command else WITH_SESSION)
    file = tmp_path / "work.json"
    variables = {"INSTRUMENT_WORK": str(file), "INSTRUMENT_DIR": str(tmp_path / "captures")}
    ran = warm.run_apart([*command, str(script)], tmp_path, {**os.environ, **variables})
    assert ran.returncode == 0, ran.stderr
    found = msgspec.json.decode(file.read_bytes(), type=Work)
    assert [f"loss {each}" for each in found.losses] == ran.stdout.splitlines()[: len(found.losses)]
    assert len(found.losses) == found.facts.steps == 6
    assert found.facts.training is not None
    assert found.facts.training.samples == 24
    assert found.facts.failure is None
