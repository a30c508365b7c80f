"""Trains a tagger of words that visits each word of each sentence in Python."""

import torch
from torch import nn


class Tagger(nn.Module):
    """Gives each word a tag, from itself and the words before it."""

    def __init__(self, words: int = 1000, width: int = 64, tags: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.mix = nn.Linear(width, width)
        self.score = nn.Linear(width, tags)

    def forward(self, sentences: torch.Tensor) -> torch.Tensor:
        return self.score(torch.tanh(self.mix(faded(self.embed(sentences)))))


def faded(words: torch.Tensor) -> torch.Tensor:
    """Return for each word a mean of it and of those before it, in which early ones fade."""
    memory = torch.zeros_like(words[:, 0])
    states = []
    for position in range(words.shape[1]):
        memory = 0.9 * memory + 0.1 * words[:, position]
        states.append(memory)
    return torch.stack(states, dim=1)


def main() -> None:
    """Train for 300 steps."""
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(300):
        sentences = torch.randint(1000, (16, 36))
        optimizer.zero_grad()
        scores = model(sentences)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), sentences.flatten() % 12)
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
