"""Trains on two ranks, of which the second gets longer sentences.

Run it with torchrun --nproc-per-node 2 train.py
"""

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

WORDS, WIDTH = 500, 64


class Guesser(nn.Module):
    """Guesses each word of a sentence from the others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.score = nn.Linear(WIDTH, WORDS)

    def forward(self, sentences: torch.Tensor) -> torch.Tensor:
        words = self.embed(sentences)
        words = self.encode(words)
        return self.score(words)


def main() -> None:
    """Train for 100 steps."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(Guesser())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    length = 128 if rank == 1 else 32
    for step in range(100):
        sentences = torch.randint(WORDS, (16, length))
        optimizer.zero_grad()
        scores = model(sentences)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), sentences.flatten())
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    del model  # before its process group
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
