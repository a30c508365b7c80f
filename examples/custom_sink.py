r"""Output of your own: a sink that writes the ranges of each window as CSV, and a callback.

    python examples/custom_sink.py

The script trains twice, and prints the file that the sink has written in `./profile/`. Another
process normally runs sinks, and must be able to import their class. It cannot import a class of
this script, so both sessions set `export="inline"`: the training process then runs the sinks. In an
application, put the class into a module, and leave `export` as it is:

    python train.py +profiler.sinks.csv._target_=my_package.RangesCsv \
        "+profiler.sinks.csv.separator=';'"

The second session also has a callback, which always runs in the training process. It gets the
numbers of each capture, and suits trackers and other objects that only this process has.
"""

import csv
from pathlib import Path

import torch
from torch import nn

from instrument import Capture, Session, Sink, profiled


class RangesCsv(Sink):
    """Writes `ranges.csv`: a line for each range, with its calls and its times in nanoseconds."""

    separator: str = ","  # every field is an option, checked before the first step

    def write(self, capture: Capture, folder: Path) -> None:
        table = capture.ranges.select(["path", "calls", "cpu_ns", "self_cpu_ns"])
        with (folder / "ranges.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter=self.separator)
            writer.writerow(table.columns)
            writer.writerows(table)


def train(session: Session) -> None:
    """Ten steps of a small regression."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with session:
        for _ in range(10):
            inputs = torch.randn(32, 16)
            with profiled("forward"):
                loss = (model(inputs).squeeze(1) - inputs.sum(dim=1)).square().mean()
            with profiled("backward"):
                loss.backward()
            with profiled("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            session.step(loss=loss)


def print_step(folder: Path, scalars: dict[str, float]) -> None:
    """Print the time of a step. `Capture.load(folder)` would have everything else."""
    print(f"{folder.name}: a step takes {scalars['window/step_ms']:.3f} ms")


def main() -> None:
    in_python = Session(wait=2, active=3, sinks={"csv": RangesCsv()}, export="inline")
    # `_target_` is an import path; for a class in this script it begins with __main__.
    sinks = {"csv": {"_target_": f"{__name__}.RangesCsv", "separator": ";"}}
    options = {"wait": 2, "active": 3, "sinks": sinks, "export": "inline"}
    by_name = Session(options, on_capture=print_step)
    for session in (in_python, by_name):
        train(session)
        for capture in session.captures:
            file = capture.folder / "ranges.csv"
            print(f"{file}\n{file.read_text()}")


if __name__ == "__main__":
    main()
