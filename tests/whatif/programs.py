"""Random programs for the simulator in `oracle`, each from its seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from builders import ENGINE, SINGLE_PROCESS

from whatif.oracle import (
    MAIN,
    Batch,
    Hand,
    Launch,
    Node,
    Op,
    Program,
    Range,
    StreamWait,
    Sync,
    Work,
    copy,
    loading,
    run,
    step,
)

ENGINE_THREAD, HELPER, ALONE = 2, 3, 4
KERNELS, OPERATORS = ("gemm", "relu", "add"), ("aten::mm", "aten::relu", "aten::add")
RANGES = ("encoder", "decoder", "head")


@dataclass(frozen=True)
class Features:
    """What the steps of a program have; everything else is drawn."""

    streams: bool = False
    backward: bool = False
    helper: bool = False
    alone: bool = False
    syncs: bool = False
    copies: bool = False
    loader: bool = False
    workers: bool = False
    queue: int = 1021


class Author:
    """Writes a program of some features."""

    def __init__(self, seed: int, features: Features) -> None:
        self.random, self.has = Random(seed), features
        # Whether the CPU or the device is the slower one.
        self.device_scale = self.random.choice((0.2, 1.0, 4.0))
        self.number = 0

    def program(self) -> Program:
        body = [*self.calibration()]
        for k in range(self.random.randint(3, 5)):
            body.append(step(k, *self.step()))
            body += [self.work(5)] if self.random.random() < 0.5 else []
        threads = {MAIN: tuple(body)}
        if self.has.alone:
            # It never pauses, so that nobody can take it for a thread that the main thread waits for.
            sorts = (
                Op("aten::sort", (self.work(60), Launch("sort", self.ns(40), 11), self.work(9)))
                for _ in range(200)
            )
            threads[ALONE] = (Range("background", tuple(sorts)),)
        found = Program(threads, self.has.queue)
        return with_workers(found, self.random) if self.has.workers else found

    def calibration(self) -> list[Node]:
        """What lets a reader of the trace see each constant of the machine: alone, queued, waited."""
        found: list[Node] = []
        for stream in (7, 9) if self.has.streams else (7,):
            found += [Launch("gemm", 800, stream), Work(40_000)] * 3
            found += [Launch("gemm", 80_000, stream), *[Launch("gemm", 800, stream)] * 3]
            found += [Work(200_000)]
        if self.has.queue < 1021:
            found += [
                Launch("gemm", 80_000),
                *[Launch("gemm", 800), Work(160)] * 2 * self.has.queue,
            ]
            found += [Work(400_000)]
        if self.has.copies:
            found += [copy(800), Work(40_000), *[copy(800, blocks=True), Work(8_000)] * 2]
        if self.has.syncs:
            found += [*[Sync(), Work(8_000)] * 3, Launch("gemm", 160_000), Sync(), Work(8_000)]
            found += [*[Sync(7), Work(8_000)] * 3, Launch("gemm", 160_000), Sync(7), Work(8_000)]
        if self.has.streams:
            pair = [Launch("gemm", 160_000), StreamWait(9, 7), Launch("gemm", 800, 9)]
            found += [*pair, Work(400_000)] * 3
        return found

    def step(self) -> list[Node]:
        found: list[Node] = []
        if self.has.loader:
            found.append(
                Range(SINGLE_PROCESS, (self.work(200), Op("aten::stack", (self.work(90),))))
            )
        if self.has.workers:
            found.append(Batch(0))
        numbers: list[int] = []
        for name in self.random.sample(RANGES, self.random.randint(1, 3)):
            found += [self.work(9), self.range(name, numbers)]
        if self.has.backward:
            found += [*self.backward(numbers), self.work(20)]
        if self.has.helper:
            found += [Op("aten::ones", (self.work(20),)), *self.helper(), self.work(20)]
        if self.has.streams:
            pair = (StreamWait(9, 7), self.join(9), StreamWait(7, 9), self.join(7))
            found.append(Op("aten::record_stream", pair))
        if self.has.queue < 1021:
            # The CPU waits for a place in the queue, and then works for longer than the device.
            pairs = ((self.launch(7), Work(160)) for _ in range(2 * self.has.queue))
            burst = tuple(each for pair in pairs for each in pair)
            found += [Op("aten::foreach", burst), self.work(400)]
        found.append(Op("Optimizer.step", (self.work(30), self.launch(7), self.work(3))))
        if self.has.syncs and self.random.random() < 0.7:
            found.append(Op("aten::item", (self.work(3), self.sync(), self.work(3))))
        return found

    def range(self, name: str, numbers: list[int]) -> Range:
        body: list[Node] = []
        for _ in range(self.random.randint(1, 4)):
            self.number += 1
            numbers.append(self.number)
            body += [self.operator(self.number), self.work(5)]
        if self.has.syncs and self.random.random() < 0.3:
            body.append(self.sync())
        if self.random.random() < 0.3:
            body = [self.work(2), Range("inner", tuple(body)), self.work(2)]
        return Range(name, tuple(body))

    def operator(self, number: int) -> Op:
        body: list[Node] = [self.work(12)]
        for _ in range(self.random.randint(0, 2)):
            body += [self.launch(self.stream()), self.work(4)]
        if self.has.copies and self.random.random() < 0.4:
            body.append(copy(self.ns(60), blocks=self.random.random() < 0.5))
        return Op(self.random.choice(OPERATORS), tuple(body), number)

    def backward(self, numbers: list[int]) -> list[Node]:
        """The engine's thread runs a node for each operator, the last one first."""
        nodes: list[Node] = []
        for number in reversed(numbers):
            body: list[Node] = [self.work(15), self.launch(7), self.work(3)]
            if self.has.syncs and self.random.random() < 0.2:
                body += [self.sync(), self.work(3)]
            nodes.append(Op(f"{ENGINE}MmBackward0", tuple(body), number))
            if self.random.random() < 0.3:
                nodes.append(self.work(4))
        while isinstance(nodes[-1], Work):
            nodes.pop()
        return [self.work(6), Hand(ENGINE_THREAD, tuple(nodes)), self.work(6)]

    def helper(self) -> list[Node]:
        """Another thread works while this one waits; both wake up within some µs."""
        body = (Op("aten::copy_", (self.work(4), Work(self.ns(400) + 120_000), self.work(4))),)
        return [Hand(HELPER, body), Work(16 * self.random.randint(1, 1_000))]

    def sync(self) -> Sync:
        return Sync(self.random.choice((None, 7)) if not self.has.alone else 7)

    def stream(self) -> int:
        return self.random.choice((7, 9)) if self.has.streams else 7

    def launch(self, stream: int) -> Launch:
        ns = int(self.ns(20) * self.device_scale) // 16 * 16 + 16
        return Launch(self.random.choice(KERNELS), ns, stream)

    def join(self, stream: int) -> Launch:
        return Launch("join", self.ns(20), stream)

    def work(self, us: int) -> Work:
        return Work(self.ns(us))

    def ns(self, us: int) -> int:
        """Up to twice as many µs: a multiple of 16 ns, so that a quarter of a quarter is whole too."""
        return 16 * self.random.randint(1, 125 * us)


def with_workers(program: Program, random: Random) -> Program:
    """Let each batch but the first be ready long after the main thread asks for it."""
    batches = [each for each in program if isinstance(each, Batch)]
    for nth in range(1, len(batches)):
        asked, begun = run(program).asked[nth]
        program = loading(program, nth, asked - begun + 16 * random.randint(640_000, 900_000))
    return program
