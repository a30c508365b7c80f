"""The eight steps of PyTorch's profiler recipe, with `instrument` and a ResNet-18.

    python examples/resnet_inference.py

Each step prints its result: the time of a forward pass by operator and by input shape, its memory,
the trace, the Python lines behind the operators, stacks for a flame graph, and windows of a longer
run. The model runs on the GPU if there is one. Each capture is a folder in `./profile/`.
"""

from importlib.metadata import version
from itertools import pairwise

import torch
from torch import Tensor, nn

from instrument import Capture, Session, profiled

INPUT = (5, 3, 224, 224)  # five images


@profiled("basic_block")
class BasicBlock(nn.Module):
    """Two 3×3 convolutions, whose output is added to their input.

    A 1×1 convolution adapts the input if the output has another shape.
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet18(nn.Module):
    """A stem, four stages of two blocks each, and a linear layer over 1,000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        widths = [64, 64, 128, 256, 512]
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            nn.Sequential(
                BasicBlock(before, width, stride=1 if before == width else 2),
                BasicBlock(width, width, 1),
            )
            for before, width in pairwise(widths)
        )
        self.fc = nn.Linear(512, 1000)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer4(self.layer3(self.layer2(self.layer1(self.stem(x)))))
        return self.fc(out.mean(dim=(2, 3)))


def record(model: nn.Module, inputs: Tensor, **options: object) -> Capture:
    """Record one forward pass after a warm-up pass, because the first pass can be much slower."""
    session = Session(warmup=1, active=1, **options)
    predict = session.record(model.__call__, name="model_inference")
    for _ in range(2):
        predict(inputs)
    return session.captures[0]


def heading(text: str) -> None:
    print(f"\n## {text}\n", flush=True)


@torch.inference_mode()
def main() -> None:
    heading("1. Import the libraries")
    print(f"torch {torch.__version__}, instrument {version('torch-instrument')}")

    heading("2. Make a ResNet-18 and its input")
    where = "device" if torch.cuda.is_available() else "cpu"  # show its times and memory
    device = torch.device("cuda" if where == "device" else "cpu")
    model = ResNet18().eval().to(device)
    inputs = torch.randn(INPUT, device=device)
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"ResNet-18 with {weights:,} parameters, input {tuple(inputs.shape)}, on {device}")

    heading("3. Execution time")
    capture = record(model, inputs, record_shapes=True)
    operators = capture.operators
    times = ["name", "calls", "self_cpu_ns", "cpu_ns"] + ["self_device_ns", "device_ns"] * (
        where == "device"
    )
    print(operators.sort(f"{where}_ns").head(10).select(times))
    print("\nBy input shape, the operators with the most self time:\n")
    by_shape = capture.operators_by("input_shapes").sort(f"self_{where}_ns").head(10)
    print(by_shape.select([*times, "input_shapes"]))

    heading("4. Memory")
    operators = record(model, inputs, profile_memory=True).operators
    memory = ["name", "calls", f"self_{where}_bytes", f"{where}_bytes"]
    print("Allocated and not freed, by each operator alone and with operators that it called:\n")
    print(operators.sort(f"self_{where}_bytes").head(10).select(memory))

    heading("5. Trace")
    trace = record(model, inputs).trace_path
    print(f"{trace}\nOpen it in https://ui.perfetto.dev; every capture has one.")

    heading("6. Stack traces")
    capture = record(model, inputs, with_stack=True, sinks={"stacks": {}})
    for row in capture.operators_by("stack", depth=5).sort(f"self_{where}_ns").head(3):
        print(row.name, *(row.stack or "outside Python").split(";"), sep="\n    ")

    heading("7. Flame graph")
    stacks = capture.folder / "stacks.txt"
    print(f"{len(stacks.read_text().splitlines())} call paths in {stacks}")
    print("Open it in https://www.speedscope.app, or draw it: flamegraph.pl stacks.txt > flame.svg")

    heading("8. Long-running jobs")
    print("One step waits, one warms up and two are recorded. Then the same happens again.")
    print("The table sink logs each window.\n")
    session = Session(wait=1, warmup=1, active=2, repeat=2, sinks={"table": {"rows": 5}})
    predict = session.record(model.__call__, name="model_inference")
    for _ in range(8):
        predict(inputs)
    for capture in session.captures:
        milliseconds = [f"{step.duration_ns / 1e6:.1f} ms" for step in capture.steps]
        print(f"{capture.name}: {', '.join(milliseconds)}")


if __name__ == "__main__":
    main()
