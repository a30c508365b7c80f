"""What a detail window observes of the values of tensors: calls that do needless work, padding, indexed rows."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from instrument.record import observe

Step = Callable[[], object]


@pytest.fixture(autouse=True)
def _all_work_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """These programs are small, and the machine may be busy."""
    monkeypatch.setattr(observe, "_LEAST_SHARE", 0)


def observed(step: Step, steps: int = 2) -> dict[str, Any]:
    """What is observed of some steps, after one that is not."""
    step()
    end = observe.observe()
    try:
        for number in range(steps):
            if number:
                observe.next_step()
            step()
    finally:
        failure = observe._observer.failure
        found = end()
    assert failure is None
    assert torch._C._len_torch_function_stack() == 0
    result: dict[str, Any] = found["observed"]
    return result


def trained(model: nn.Module) -> Callable[[torch.Tensor], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def update(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return update


def causal(length: int) -> torch.Tensor:
    mask = torch.zeros(length, length)
    for row in range(length):
        mask[row, row + 1 :] = float("-inf")
    return mask


def builds_a_mask() -> Step:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    update = trained(layer)
    return lambda: update(layer(torch.randn(4, 24, 16), src_mask=causal(24)).mean())


def normalises_a_graph() -> Step:
    graph, features, layer = torch.rand(200, 200), torch.randn(200, 8), nn.Linear(8, 8)
    update = trained(layer)
    return lambda: update((graph / graph.sum(1, keepdim=True) @ layer(features)).mean())


def joins_the_same() -> Step:
    first, second = torch.randn(5000, 8), torch.randn(5000, 8)
    return lambda: torch.cat([first, second]).sum()


def encodes_the_same() -> Step:
    text, image = nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 32)
    prompts, update = torch.randn(2000, 32), trained(image)
    return lambda: update((image(torch.randn(8, 32)) @ text(prompts).T).mean())


def calls_a_model_twice() -> Step:
    model = nn.Linear(64, 64)
    update = trained(model)

    def step() -> None:
        x = torch.randn(64, 64)
        update(model(x).mean() + model(x).square().mean())

    return step


def appends_by_cat() -> Step:
    seen = [torch.randn(5000, 8)]

    def step() -> None:
        seen[0] = torch.cat([seen[0], torch.randn(8, 8)])

    return step


def joins_all_again() -> Step:
    seen: list[torch.Tensor] = [torch.randn(5000, 8)]

    def step() -> torch.Tensor:
        seen.append(torch.randn(500, 8))
        return torch.cat(seen)

    return step


def changes_a_copy() -> Step:
    bank = [torch.randn(5000, 8)]

    def step() -> None:
        bank[0] = bank[0].index_copy(0, torch.randint(5000, (8,)), torch.randn(8, 8))

    return step


def copies_parameters() -> Step:
    model = nn.Linear(256, 256)
    update = trained(model)

    def step() -> dict[str, Any]:
        update(model(torch.randn(2, 256)).mean())
        return copy.deepcopy(model.state_dict())

    return step


def shuffles_all() -> Step:
    data = torch.randn(100_000, 2)
    return lambda: data[torch.randperm(len(data))[:32]].sum()


@pytest.mark.parametrize(
    ("program", "kind", "function", "place"),
    [
        (builds_a_mask, "each step", "__setitem__", "causal"),
        (normalises_a_graph, "each step", "sum", "normalises_a_graph"),
        (joins_the_same, "each step", "cat", "joins_the_same"),
        (encodes_the_same, "each step", "linear", "encodes_the_same"),
        (calls_a_model_twice, "twice", "linear", "step"),
        (appends_by_cat, "grows", "cat", "step"),
        (joins_all_again, "grows", "cat", "step"),
        (changes_a_copy, "grows", "index_copy", "step"),
        (copies_parameters, "parameters", "__deepcopy__", "step"),
        (shuffles_all, "unused", "randperm", "shuffles_all"),
    ],
)
def test_needless_work(program: Callable[[], Step], kind: str, function: str, place: str) -> None:
    found = next(each for each in observed(program())["repairs"] if each["kind"] == kind)
    assert function in found["functions"]
    assert place in found["source"]
    assert {span[0] for span in found["spans"]} == {0, 1}
    assert min(span[3] for span in found["spans"]) < 0.5


def a_new_batch() -> Step:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    update = trained(model)
    return lambda: update(model(torch.randn(16, 8)).mean())


def one_fixed_batch() -> Step:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(16, 8)
    update = trained(model)
    return lambda: update(model(x).mean())


def infers_one_fixed_batch() -> Step:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(16, 8)
    return lambda: torch.inference_mode()(model)(x)


def fills_a_buffer() -> Step:
    def step() -> torch.Tensor:
        buffer = torch.zeros(200, 200)
        buffer[:8, :8] = torch.randn(8, 8)
        view = torch.zeros(200, 200).view(-1)
        view[:8].add_(torch.randn(8))
        return buffer.sum() + view.sum()

    return step


def draws_by_dropout() -> Step:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64))

    def step() -> torch.Tensor:
        x = torch.randn(64, 64)
        parts = [nn.functional.dropout(x, 0.5).mean() for _ in range(8)]
        parts.append(model(x).mean())
        return torch.stack(parts)

    return step


def recomputes_in_the_backward() -> Step:
    model = nn.Linear(64, 64)
    update = trained(model)
    return lambda: update(checkpoint(model, torch.randn(64, 64), use_reentrant=False).mean())


def averages_in_place() -> Step:
    model = nn.Linear(64, 64)
    average, update = copy.deepcopy(model), trained(model)

    def step() -> None:
        update(model(torch.randn(8, 64)).mean())
        with torch.no_grad():
            torch._foreach_lerp_([*average.parameters()], [*model.parameters()], 0.01)

    return step


def joins_two_inputs() -> Step:
    return lambda: torch.cat([torch.randn(5000, 8), torch.randn(8, 8)]).sum()


def joins_the_same_in_a_loop() -> Step:
    def step() -> list[torch.Tensor]:
        x = torch.randn(5000, 8)
        return [torch.cat([x, torch.randn(1, 8)]) for _ in range(3)]

    return step


def shuffles_and_uses_all() -> Step:
    data = torch.randn(5000, 2)
    return lambda: [data[part].sum() for part in torch.randperm(len(data)).split(1000)]


def two_steps_of_an_optimizer() -> Step:
    model = nn.Linear(64, 64)
    update = trained(model)

    def step() -> None:
        x = torch.randn(64, 64)
        for _ in range(2):  # the parameters differ
            update(model(x).mean())

    return step


def writes_by_numpy() -> Step:
    import numpy as np

    table, draw = torch.zeros(300, 300), np.random.default_rng(0)

    def step() -> torch.Tensor:
        table.numpy()[:] = draw.random((300, 300))
        return (table * 2).sum()

    return step


def other_content_of_memory_that_numpy_has() -> Step:
    import numpy as np

    table, draw = np.zeros((300, 300), np.float32), np.random.default_rng(0)
    shared = torch.from_numpy(table)

    def step() -> torch.Tensor:
        table[:] = draw.random((300, 300))
        return (shared * 2).sum()

    return step


def loads_by_workers() -> Step:
    """What comes from a worker is put together in a new, empty tensor."""

    def step() -> torch.Tensor:
        torch.empty(64, 64)
        return torch.randn(64, 64).sum()

    return step


@pytest.mark.parametrize(
    "program",
    [
        loads_by_workers, a_new_batch, one_fixed_batch, infers_one_fixed_batch, fills_a_buffer,
        draws_by_dropout, recomputes_in_the_backward, averages_in_place, joins_two_inputs, joins_the_same_in_a_loop,
        shuffles_and_uses_all, two_steps_of_an_optimizer, writes_by_numpy,
        other_content_of_memory_that_numpy_has,
    ],
)  # fmt: skip
def test_healthy_programs(program: Callable[[], Step]) -> None:
    found = observed(program())
    assert found["repairs"] == []
    assert found["padding"] == []


ROWS, LENGTH = 8, 64


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of words, and which of them are no padding: at most 40 of each row."""
    lengths = torch.randint(4, 40, (ROWS,))
    lengths[0] = 40
    valid = torch.arange(LENGTH)[None] < lengths[:, None]
    return torch.randint(1, 100, (ROWS, LENGTH)) * valid, valid


def embeds(**options: Any) -> Callable[[torch.Tensor, torch.Tensor], object]:
    table = nn.Embedding(100, 16, **options)
    return lambda ids, valid: table(ids)


def attends(ids: torch.Tensor, valid: torch.Tensor) -> object:
    x = torch.randn(ROWS, LENGTH, 16)
    return nn.MultiheadAttention(16, 2, batch_first=True)(x, x, x, key_padding_mask=~valid)


def attends_fused(ids: torch.Tensor, valid: torch.Tensor) -> object:
    x = torch.randn(ROWS, 2, LENGTH, 8)
    return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=valid[:, None, None])


def masks_scores(ids: torch.Tensor, valid: torch.Tensor) -> object:
    scores = torch.randn(ROWS, 2, LENGTH, LENGTH)
    return scores.masked_fill(~valid[:, None, None], -1e9).softmax(-1)


def averages_rows(ids: torch.Tensor, valid: torch.Tensor) -> object:
    return (torch.randn(ROWS, LENGTH, 16) * valid[..., None]).sum(1)


@pytest.mark.parametrize(
    "uses", [embeds(padding_idx=0), embeds(), attends, attends_fused, masks_scores, averages_rows]
)
def test_padding(uses: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    valid = torch.zeros(())

    def step() -> None:
        nonlocal valid
        ids, valid = batch()
        uses(ids, valid)

    found = observed(step)["padding"][-1]
    assert (found["rows"], found["length"]) == (ROWS, LENGTH)
    assert found["valid"] == int(valid.sum())
    assert found["to_longest"] == ROWS * 40


def test_a_causal_mask_is_no_padding() -> None:
    mask, x = causal(32) == 0, torch.randn(4, 2, 32, 8)
    masks, attend = mask.expand(4, 1, -1, -1), nn.functional.scaled_dot_product_attention
    assert observed(lambda: attend(x, x, x, attn_mask=masks))["padding"] == []


def test_the_indexed_rows_of_an_embedding() -> None:
    table = nn.Embedding(20_000, 2)
    (found,) = observed(lambda: table(torch.arange(50)))["embeddings"]
    assert (found["indexed"], found["rows"], found["numbers"]) == (50, 20_000, 40_000)


def test_the_program_computes_the_same_with_the_observer() -> None:
    def parameters(steps: Callable[[Step], object]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 2))
        update = trained(model)
        steps(lambda: update(model(torch.randn(4, 8)).mean()))
        return [each.detach() for each in model.parameters()]

    alone = parameters(lambda step: [step() for _ in range(3)])
    for one, other in zip(alone, parameters(observed), strict=True):
        assert torch.equal(one, other)


def test_errors_of_the_program_are_its_own() -> None:
    def step() -> None:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.ones(2, 3) @ torch.ones(2, 3)
        with pytest.raises(IndexError):
            torch.ones(2)[5]

    observed(step)


def test_observer_error_does_not_reach_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe.Observer, "_stack", lambda _: 1 / 0)
    end = observe.observe()
    assert torch.ones(3).sum().item() == 3
    assert end() == {}


def test_transformed_and_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def step() -> None:
        torch.func.vmap(lambda x: x.sum())(torch.randn(7, 3))
        torch.func.grad(lambda x: x.square().sum())(torch.randn(3))
        with FakeTensorMode():
            torch.randn(3, 3) @ torch.randn(3, 3)
        torch.ones(3, 3, device="meta") @ torch.ones(3, 3, device="meta")
        torch.eye(4).to_sparse() @ torch.randn(4, 2)

    observed(step)


def test_a_tensor_whose_memory_is_freed_is_not_read() -> None:
    freed = torch.ones(64, 64)
    freed.untyped_storage().resize_(0)
    assert observe._content(freed) is None

    def step() -> None:
        freed.untyped_storage().resize_(64 * 64 * 4)
        freed.fill_(1).sum()
        freed.untyped_storage().resize_(0)
        freed.view(-1).shape  # noqa: B018

    observed(step)


def test_a_function_that_is_compiled_meanwhile() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    end = observe.observe()
    try:
        assert doubled(torch.ones(3)).sum() == 6
    finally:
        end()
    assert doubled(torch.ones(3)).sum() == 6


def test_no_observer_where_functions_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._dynamo.eval_frame.cached_backends", {0: None, 1: None})
    assert observe.observe() is dict


def test_modes_of_the_program_stay() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, _: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return function(*args, **(kwargs or {}))

    end, mode = observe.observe(), Mode()
    with mode:
        end()
        assert torch._C._len_torch_function_stack() == 1
        assert torch._C._get_function_stack_at(0) is mode
        assert observe.observe() is dict
    assert torch._C._len_torch_function_stack() == 0


def test_exception_of_a_signal_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    class LateError(Exception):
        pass

    def late(*_: object) -> None:
        raise LateError

    before = signal.signal(signal.SIGUSR1, late)
    end = observe.observe()
    try:
        interrupted = lambda *_: signal.raise_signal(signal.SIGUSR1)  # noqa: E731
        monkeypatch.setattr(observe.Observer, "_begin", interrupted)
        with pytest.raises(LateError):
            torch.ones(3)
    finally:
        end()
        signal.signal(signal.SIGUSR1, before)


def test_a_failed_observation_keeps_no_tensor_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    end = observe.observe()
    monkeypatch.setattr(observe, "_padding", lambda *_: 1 / 0)
    made = torch.ones(3)
    kept = ref(made)
    assert "ZeroDivisionError" in (observe._observer.failure or "")
    del made
    assert kept() is None
    assert end() == {}


def test_error_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe.Observer, "end", lambda _: 1 / 0)
    assert observe.observe()() == {}
    assert torch._C._len_torch_function_stack() == 0


def test_a_class_of_tensors_sees_only_its_own_calls() -> None:
    seen = list[str]()

    class Tensor(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(function.__name__)
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    tensor = torch.zeros(4).as_subclass(Tensor)

    def step() -> None:
        seen.clear()
        torch.add(tensor, 1)
        assert seen == ["add"]

    observed(step)


def test_attention_in_eval_mode_is_not_observed() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    assert observe.observe() is dict  # torch would not compute it in its fast way
    layer.train()
    observed(lambda: layer(torch.ones(2, 3, 16)))


def test_many_writes_into_a_tensor_take_no_memory_each() -> None:
    filled, end = torch.zeros(1000), observe.observe()
    for at in range(1000):
        filled[at] = at
    observer = observe._observer
    assert sum(len(each.writers) for each in observer.calls) <= 2 * len(observer.calls)
    end()


def test_what_is_written_on_is_needed_unless_all_that_writes_is_repeated() -> None:
    first, numbers = torch.ones(50, 50), iter(range(100))

    def step() -> None:
        changed = first.exp().view(-1)
        changed.mul_(2)
        changed.add_(next(numbers))
        torch.randn(64, 8).sum()

    assert not observed(step)["repairs"]


def test_copies_of_many_tensors_take_notice_of_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    many, taken = {str(each): torch.zeros(2) for each in range(100)}, 0
    value = observe.Observer._value

    def counted(*args: Any) -> Any:
        nonlocal taken
        taken += 1
        return value(*args)

    monkeypatch.setattr(observe.Observer, "_value", counted)
    end = observe.observe()
    copy.deepcopy(many)
    end()
    assert taken < 1000


def test_the_innermost_lines_of_calls_are_those_of_their_stack() -> None:
    end = observe.observe()
    torch.ones(3)
    torch.ones(3)
    first, second = (each.stack for each in observe._observer.calls)  # type: ignore[union-attr]
    end()
    assert first[:-1] == second[:-1]
    assert first[-1].code is second[-1].code
    assert second[-1].number - first[-1].number == 1
