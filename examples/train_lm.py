"""Train a small language model on the source code of Python's standard library, and profile it.

    python examples/train_lm.py                        # one window of five steps, as a table
    python examples/train_lm.py profiler=disabled      # the same code, records nothing
    python examples/train_lm.py profiler.active=10 profiler.record_shapes=true
    python examples/train_lm.py '~profiler.sinks.table'           # the trace and nothing else
    python examples/train_lm.py 'profiler/sinks=[table,stacks]' profiler.with_stack=true

The log shows the loss. When the window closes, it shows a table of the ranges marked below. The
recorded window is in `outputs/DATE/TIME/profile/`. Open its `trace.json.gz` in
https://ui.perfetto.dev, or print its tables again with `instrument show FOLDER`.

To profile a training script, add three things: the `@profiled` marks, a `Session`, and a loop over
its `steps`.
"""

import logging
import sysconfig
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler

from instrument import Session, profiled

BYTES = 256  # every byte is a token
log = logging.getLogger(__name__)


@profiled("attention_block")
class Attention(nn.Module):
    """Multi-head self-attention with a causal mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        heads = self.qkv(x).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, context, width))


@profiled("mlp_block")
class MLP(nn.Module):
    """Two linear layers with a hidden layer that is four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


@profiled("transformer_block")
class Block(nn.Module):
    """Attention, then an MLP, each with a layer norm before it and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """A decoder-only transformer that predicts each next byte."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position)))


class StandardLibrary(Dataset[tuple[Tensor, Tensor]]):
    """The source of the standard library: `context` bytes, and for each of them the next byte."""

    def __init__(self, context: int) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        if len(text) <= context:
            raise FileNotFoundError(f"{folder} holds no Python source to learn from.")
        self.context = context
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        piece = self.bytes[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


@profiled
def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of the next bytes in nats per byte; random guesses give ln 256 = 5.55."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@hydra.main(config_path="../conf", config_name="train", version_base=None)
def main(cfg: DictConfig) -> None:
    torch.manual_seed(cfg.seed)
    device = torch.device(cfg.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    text = StandardLibrary(cfg.model.context)
    sampler = RandomSampler(text, num_samples=cfg.training.steps * cfg.training.batch_size)
    loader = DataLoader(text, cfg.training.batch_size, sampler=sampler)

    model = LanguageModel(**cfg.model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.training.learning_rate)
    weights = sum(parameter.numel() for parameter in model.parameters())
    log.info(f"{weights:,} weights learn from {len(text.bytes):,} bytes of Python on {device}")

    with Session(cfg.profiler) as session:
        for step, (inputs, targets) in enumerate(session.steps(loader)):
            with profiled("forward"):
                loss = loss_fn(model(inputs.to(device)), targets.to(device))
            with profiled("backward"):
                loss.backward()
            with profiled("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            if step % cfg.training.log_every == 0 or step == cfg.training.steps - 1:
                log.info(f"step {step:4d}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
