"""Sentiment of reviews: parse trees are sampled from a grammar and summed bottom-up."""

import argparse
import gc
import random
import time

import torch
from torch import nn
from torch.nn import functional as F


class Node:
    __slots__ = ("children", "parent", "word")

    def __init__(self, word, parent=None):
        self.word = word
        self.parent = parent
        self.children = []
        if parent is not None:
            parent.children.append(self)


class Lexicon:
    """Words, each with its senses and the words that it is related to."""

    def __init__(self, words, rng):
        self.entries = [
            {"word": i, "senses": [{"gloss": [i, s], "score": rng.gauss(0, 1)} for s in range(5)]}
            for i in range(words)
        ]
        for entry in self.entries:
            entry["related"] = [self.entries[rng.randrange(words)] for _ in range(3)]

    def score(self, word):
        return sum(sense["score"] for sense in self.entries[word]["senses"])

    def related(self, word, rng):
        return rng.choice(self.entries[word]["related"])["word"]


def grow(lexicon, rng, size):
    """A tree of `size` words; a child is often a word related to its parent's."""
    root = Node(rng.randrange(len(lexicon.entries)))
    nodes = [root]
    while len(nodes) < size:
        parent = nodes[int(len(nodes) * rng.random())]
        word = lexicon.related(parent.word, rng)
        nodes.append(Node(word, parent))
    return nodes


def encode(trees):
    """Words, tree of each word, depth of each word, as tensors."""
    words, owners, depths = [], [], []
    for owner, nodes in enumerate(trees):
        depth = {}
        for node in nodes:
            depth[node] = depth[node.parent] + 1 if node.parent else 0
            words.append(node.word)
            owners.append(owner)
            depths.append(min(depth[node], 15))
    return torch.tensor(words), torch.tensor(owners), torch.tensor(depths)


class TreeSum(nn.Module):
    def __init__(self, words, dim=64):
        super().__init__()
        self.embed = nn.EmbeddingBag(words, dim, mode="sum")
        self.decay = nn.Parameter(torch.linspace(1, 0.2, 16))
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 2))

    def forward(self, words, offsets, depths):
        return self.head(self.embed(words, offsets, per_sample_weights=self.decay[depths]))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--tree-size", type=int, default=40)
    parser.add_argument("--words", type=int, default=100_000)
    args = parser.parse_args()

    torch.manual_seed(0)
    rng = random.Random(0)
    lexicon = Lexicon(args.words, rng)
    model = TreeSum(args.words)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    started = time.time()
    for step in range(1, args.steps + 1):
        trees = [grow(lexicon, rng, args.tree_size) for _ in range(args.batch_size)]
        labels = [sum(lexicon.score(n.word) for n in nodes) > 0 for nodes in trees]
        words, owners, depths = encode(trees)
        offsets = torch.searchsorted(owners, torch.arange(args.batch_size))
        loss = F.cross_entropy(model(words, offsets, depths), torch.tensor(labels).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            trees = None  # nodes refer to their parents
            gc.collect()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
