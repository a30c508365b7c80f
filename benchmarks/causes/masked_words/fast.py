import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

PAD, MASK, FIRST = 0, 1, 2


class Lines(Dataset):
    """Lines of text as token ids, from a chain in which few words follow each word."""

    def __init__(self, count, length, vocabulary):
        rng = np.random.default_rng(0)
        follows = rng.integers(FIRST, vocabulary, (vocabulary, 4))
        words = rng.integers(FIRST, vocabulary, count)
        columns = []
        for _ in range(length):
            columns.append(words)
            words = follows[words, rng.integers(4, size=count)]
        self.lines = torch.from_numpy(np.stack(columns, axis=1))

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return self.lines[index]


class MaskWords:
    """Hides a share of the words: 80 % become [MASK], 10 % another word, 10 % stay."""

    def __init__(self, vocabulary, share=0.15, seed=0):
        self.vocabulary = vocabulary
        self.share = share
        self.rng = np.random.default_rng(seed)

    def __call__(self, lines):
        tokens = torch.stack(lines)
        labels = torch.full_like(tokens, -100)
        chance = self.rng.random(tokens.shape)
        action = self.rng.random(tokens.shape)
        other = self.rng.integers(FIRST, self.vocabulary, tokens.shape)
        chance, action, other = map(torch.from_numpy, (chance, action, other))
        hidden = (tokens != PAD) & (chance < self.share)
        labels[hidden] = tokens[hidden]
        replaced = hidden & (action >= 0.8) & (action < 0.9)
        tokens[replaced] = other[replaced]
        tokens[hidden & (action < 0.8)] = MASK
        return tokens, labels


class MaskedModel(nn.Module):
    def __init__(self, vocabulary, length, width=64, layers=1):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.words.weight, std=0.05)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens, hidden):
        x = self.norm(self.encoder(self.words(tokens) + self.positions))
        return x[hidden] @ self.words.weight.T


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=1_000)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = Lines(1_280, args.length, args.vocabulary)
    loader = DataLoader(data, args.batch_size, shuffle=True, collate_fn=MaskWords(args.vocabulary))
    model = MaskedModel(args.vocabulary, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        total = 0.0
        for tokens, labels in loader:
            hidden = labels != -100
            loss = nn.functional.cross_entropy(model(tokens, hidden), labels[hidden])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(loader):.4f}")


if __name__ == "__main__":
    main()
