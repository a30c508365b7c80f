"""A real Prometheus scrapes two ranks of a training, and answers every query of the Grafana dashboard."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waits import until

pytestmark = pytest.mark.nightly

DASHBOARD = Path(__file__).parents[1] / "examples" / "grafana-dashboard.json"
TRAINING = """
import json, os, sys, time
from pathlib import Path

import torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel

from instrument import Session, Trigger, profiled


class Hundredth(Trigger):
    def fires(self, step):
        return "it is time" if step.number == 100 else None


folder, port = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(64, 64))
options = dict(
    metrics={"prometheus_port": port},
    triggers={"hundredth": Hundredth(cooldown=0, max_windows=1)},
    at_steps=[10], active=1, sinks=[], output_dir=str(folder / "profile"),
)
counts = {"forward": [0, 0.0], "steps": 0}
with Session("timings", **options) as session:
    over = torch.zeros(1)
    while not over:
        began = time.perf_counter()
        with profiled("forward"):
            loss = model(torch.ones(8, 64)).mean()
            time.sleep(0.02 if rank else 0.005)
        counts["forward"][0] += 1
        counts["forward"][1] += time.perf_counter() - began
        with profiled("backward"):
            loss.backward()
        over = torch.tensor([float((folder / "enough").exists())])
        dist.all_reduce(over)
        counts["steps"] += 1
        session.step()
    (folder / f"counts{rank}.json").write_text(json.dumps(counts))
    while not (folder / "seen").exists():
        time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prometheus: the installed one, or Debian's, unpacked into a folder of the test."""
    if found := shutil.which("prometheus"):
        return found
    folder = tmp_path_factory.mktemp("prometheus")
    if shutil.which("apt-get") is None:
        pytest.skip("no prometheus, and no apt-get that could fetch it")
    subprocess.run(["apt-get", "update", "-qq"], check=False)
    fetched = subprocess.run(["apt-get", "download", "-qq", "prometheus"], cwd=folder, check=False)
    if fetched.returncode != 0:
        pytest.skip("apt-get cannot fetch prometheus")
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
    return str(folder / "usr" / "bin" / "prometheus")


def free_ports() -> tuple[int, int]:
    """Two ports in a row."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = one.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return port, port + 1
            except OSError:
                continue


class Asked:
    """A Prometheus that scrapes two ports every second, and the training that has them."""

    training: subprocess.Popen[bytes]

    def __init__(self, program: str, folder: Path, ports: tuple[int, int]) -> None:
        targets = [f"127.0.0.1:{port}" for port in ports]
        (folder / "prometheus.yaml").write_text(
            "scrape_configs:\n  - job_name: training\n    scrape_interval: 1s\n"
            f"    static_configs:\n      - targets: {json.dumps(targets)}\n"
        )
        port = free_ports()[0]
        self.url = f"http://127.0.0.1:{port}/api/v1/"
        self.process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
                "--log.level=warn",
            ]
        )

    def get(self, what: str, **values: str) -> list[dict[str, Any]]:
        """The answer; nothing while Prometheus starts."""
        try:
            with urllib.request.urlopen(f"{self.url}{what}?{urllib.parse.urlencode(values)}") as at:
                data = json.load(at)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it starts
                return []
            raise AssertionError(error.read().decode()) from error
        except urllib.error.URLError:
            return []
        return list(data["result"] if what == "query" else data)

    def by(self, label: str, expression: str) -> dict[str, float]:
        return {
            each["metric"].get(label, ""): float(each["value"][1])
            for each in self.get("query", query=expression)
        }


@pytest.fixture
def asked(program: str, tmp_path: Path) -> Iterator[Asked]:
    (tmp_path / "train.py").write_text(TRAINING)
    ports = free_ports()
    prometheus = Asked(program, tmp_path, ports)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--standalone", "train.py", str(tmp_path), str(ports[0])]
    prometheus.training = subprocess.Popen(command, cwd=tmp_path)
    yield prometheus
    for process in (prometheus.training, prometheus.process):
        process.terminate()
        process.wait()


def expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    values = {"$__rate_interval": "8s", "$__range": "30s", "$range": "forward", "$run": ".*"}
    return [re.sub(r"\$\w+", lambda name: values[name[0]], each) for each in found]


def test_prometheus_answers_every_query_of_the_dashboard(asked: Asked, tmp_path: Path) -> None:
    recorded = "sum by (trigger) (instrument_windows_recorded_total)"
    until(lambda: asked.by("trigger", recorded) == {"(schedule)": 2, "hundredth": 2})
    until(lambda: len(asked.by("rank", "rate(instrument_step_duration_seconds_count[5s])")) == 2)
    answers = {each: asked.get("query", query=each) for each in expressions()}
    assert len(answers) == 8
    for expression, answer in answers.items():
        assert answer, expression
        assert all(float(each["value"][1]) >= 0 for each in answer), expression
    # all steps take about as long; rank 1 is slower in `forward`
    p50, p95, share, per_call, steps, forward, windows, fired = expressions()
    assert all(0.01 < each < 0.1 for each in asked.by("rank", p50).values())
    assert asked.by("rank", p95)["0"] >= asked.by("rank", p50)["0"] * 0.99
    for expression in (p50, p95, steps, forward):
        assert asked.by("rank", expression).keys() == {"0", "1"}
    mean, slow = asked.by("rank", steps), asked.by("rank", forward)
    assert mean["0"] == pytest.approx(mean["1"], rel=0.3)
    assert slow["1"] > 1.5 * slow["0"]
    assert {"forward", "backward", "(other ranges)"} <= asked.by("range", share).keys()
    assert asked.by("range", per_call)["forward"] > 0.01
    assert asked.by("trigger", windows) == {"(schedule)": 2, "hundredth": 2}
    assert asked.by("trigger", fired) == {"hundredth": 2}
    # the last figures are those that the training counts itself
    (tmp_path / "enough").touch()
    counts = [until(lambda at=rank: read(tmp_path / f"counts{at}.json")) for rank in (0, 1)]
    name = "instrument_step_duration_seconds_count"
    until(lambda: asked.by("rank", name) == {str(at): counts[at]["steps"] for at in (0, 1)})
    for rank, count in enumerate(counts):
        calls = asked.by("rank", 'instrument_range_duration_seconds_count{range="forward"}')
        total = asked.by("rank", 'instrument_range_duration_seconds_sum{range="forward"}')
        assert calls[str(rank)] == count["forward"][0]
        assert total[str(rank)] == pytest.approx(count["forward"][1], rel=0.02)
    (series, *_) = asked.get(
        "query_exemplars",
        query='instrument_windows_recorded_total{trigger="hundredth"}',
        start="0",
        end="9999999999",
    )
    path = series["exemplars"][-1]["labels"]["capture"]
    assert re.search(r"steps_\d+-\d+_rank[01]$", path)
    (tmp_path / "seen").touch()
    assert asked.training.wait() == 0


def read(file: Path) -> Any:
    """The content of a file that another process writes; None before it is whole."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None
