"""Random traces of steps, and an independent way to split their time: each microsecond is painted by itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from builders import REDUCES, Event, annotation, call, kernel, made, node, span, step

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
PLAIN_LOADER = "enumerate(DataLoader)"
Cell = tuple[str, str]


@dataclass
class Block:
    """Something on a thread from one microsecond to another, in a range."""

    kind: str
    start: int
    end: int
    path: str
    correlation: int = 0

    def covers(self, at: int) -> bool:
        return self.start <= at < self.end


@dataclass
class Program:
    """A random trace, with what the painter needs to know about it."""

    random: Random
    length: int
    events: list[Event] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    cpu: list[Block] = field(default_factory=list)
    engine: list[Block] = field(default_factory=list)
    device: list[Block] = field(default_factory=list)
    correlation: int = 0

    def make(self) -> Program:
        """Three steps with a gap between them, nested work in each, and a backward on another thread."""
        for number in range(3):
            start = number * (self.length + 2)
            self.steps.append((start, start + self.length))
            self.events.append(step(number, start, self.length))
            self._fill(start, start + self.length, "", 0)
        self._backward()
        return self

    def _fill(self, start: int, end: int, path: str, depth: int) -> None:
        at = start
        while at < end - 1:
            at += self.random.randint(0, 4)
            until = min(at + self.random.randint(1, max((end - start) // 2, 2)), end)
            if at >= until:
                return
            self._block(at, until, path, depth)
            at = until

    def _block(self, start: int, end: int, path: str, depth: int) -> None:
        kinds = ["range", "range", "operator", "launch", "launch", "wait", "loader", "loader op"]
        kind = self.random.choice(kinds if depth < 4 else ["operator", "launch", "wait"])
        lasts = end - start
        if kind == "range":
            name = self.random.choice("abc")
            inner = f"{path}/{name}" if path else name
            self.cpu.append(Block(kind, start, end, inner))
            self.events.append(annotation(name, start, lasts))
            self._fill(start, end, inner, depth + 1)
        elif kind == "operator":
            self.cpu.append(Block(kind, start, end, path))
            self.events.append(span("aten::mul", start, lasts))
            self._fill(start, end, path, depth + 1)
        elif kind == "loader":
            inner = f"{path}/{PLAIN_LOADER}" if path else PLAIN_LOADER
            self.cpu.append(Block(kind, start, end, inner))
            self.events.append(annotation(LOADER, start, lasts))
            if depth < 3:
                self._fill(start, end, inner, depth + 3)
        elif kind == "loader op":
            self.cpu.append(Block("loader", start, end, path))
            self.events.append(span(LOADER, start, lasts))
        elif kind == "wait":
            self.cpu.append(Block(kind, start, end, path))
            self.events.append(call("cudaDeviceSynchronize", start, lasts))
        else:
            self._launch(start, end, path)

    def _launch(self, start: int, end: int, path: str) -> None:
        self.correlation += 1
        self.cpu.append(Block("launch", start, end, path, self.correlation))
        self.events.append(call("cudaLaunchKernel", start, end - start, self.correlation))
        begin = start + self.random.randint(0, 15)
        name, category, kind = self.random.choice(
            [
                ("gemm", "kernel", "compute"),
                ("Memset (Device)", "gpu_memset", "compute"),
                (REDUCES, "kernel", "exposed communication"),
                ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", "copy"),
            ]
        )
        lasts, stream = self.random.randint(1, 12), self.random.choice((7, 8))
        self.events.append(
            span(name, begin, lasts, category, tid=stream, correlation=self.correlation)
        )
        self.device.append(Block(kind, begin, begin + lasts, path, self.correlation))

    def _backward(self) -> None:
        """An operator in a range of the first step, and its backward nodes in later steps."""
        last = self.steps[-1][1]
        self.events += [annotation("head", last + 10, 5), made("aten::mul", last + 11, 3, 1)]
        for start, end in self.steps[1:]:
            if self.random.random() < 0.7:
                begin = self.random.randint(start, end - 2)
                until = min(begin + self.random.randint(1, 20), end)
                self.events.append(node("MulBackward0", begin, until - begin, 1))
                self.engine.append(Block("backward", begin, until, "head"))
        self.events.append(kernel("early", -50, 20))  # its launch is not in the trace
        self.device.append(Block("compute", -50, -30, "(no launch)"))

    def lasting(self) -> list[tuple[int, int]]:
        """The steps, each until the device has ended what it launched."""
        found, until = [], self.steps[0][0]
        for start, end in self.steps:
            launches = (block for block in self.cpu if block.kind == "launch")
            launched = {block.correlation for block in launches if start <= block.start < end}
            ends = [block.end for block in self.device if block.correlation in launched]
            found.append((max(start, until), max(end, until, *ends)))
            until = found[-1][1]
        return found

    def painted(self) -> dict[Cell, int]:
        """The time of the second and third step by range and kind, in ns."""
        found: Counter[Cell] = Counter()
        for start, end in self.lasting()[1:]:
            for at in range(start, end):
                found[self._cell(at)] += 1000
        return dict(found)

    def _cell(self, at: int) -> Cell:
        for kind in ("compute", "exposed communication", "copy"):
            working = [block for block in self.device if block.kind == kind and block.covers(at)]
            if working:
                return min(working, key=lambda block: block.start).path or "(no range)", kind
        engine = [block for block in self.engine if block.covers(at)]
        stack = [block for block in self.cpu if block.covers(at)]
        innermost = max(stack, key=self.cpu.index) if stack else None
        path = engine[0].path if engine else innermost.path if innermost else ""
        loading = [block for block in stack if block.kind == "loader"]
        if loading:
            return loading[0].path or PLAIN_LOADER, "waiting for data"
        if launching := [block for block in stack if block.kind == "launch"]:
            return launching[0].path or "(no range)", "launch"
        later = [block for block in self.device if block.start > at]
        if later and self.device and at >= min(block.start for block in self.device):
            following = min(later, key=lambda block: block.start)
            launches = [
                b for b in self.cpu if b.correlation == following.correlation and b.kind == "launch"
            ]
            if launches and at >= launches[0].end:
                return following.path or "(no range)", "launch"
        working = "operator" if engine else innermost.kind if innermost else "wait"
        kind = {"range": "Python", "wait": "idle"}.get(working, "CPU operators")
        return path or "(no range)", kind
