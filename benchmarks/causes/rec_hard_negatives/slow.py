"""Two-tower retrieval with hard negatives from the whole catalogue."""

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    items: int = 6_000
    history: int = 12
    dim: int = 48
    batch: int = 64
    negatives: int = 48
    steps: int = 180
    log_every: int = 30
    temperature: float = 0.1


class Tower(nn.Module):
    def __init__(self, dim_in, dim):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim_in, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        return F.normalize(self.layers(x), dim=-1)


class Retriever(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.items, config.dim)
        self.query_tower = Tower(config.dim, config.dim)
        self.item_tower = Tower(config.dim, config.dim)

    def queries(self, history):
        return self.query_tower(self.embedding(history).mean(dim=1))

    def items(self, ids):
        return self.item_tower(self.embedding(ids))


class Sessions:
    """Users look at items of one topic; the next item is of the same topic."""

    def __init__(self, config, topics=50):
        self.config, self.topics = config, topics
        self.per_topic = config.items // topics

    def sample(self):
        c = self.config
        topic = torch.randint(self.topics, (c.batch, 1))
        ids = topic * self.per_topic + torch.randint(self.per_topic, (c.batch, c.history + 1))
        return ids[:, :-1], ids[:, -1]


@torch.no_grad()
def mine_negatives(model, queries, positives, catalogue, count):
    """The items that score best for each query, without its positive."""
    scores = queries @ catalogue.T
    scores.scatter_(1, positives[:, None], float("-inf"))
    ranking = scores.argsort(dim=1, descending=True)
    return ranking[:, :count]


def main():
    config = Config()
    torch.manual_seed(3)
    model = Retriever(config)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    sessions = Sessions(config)
    all_items = torch.arange(config.items)
    running, began = 0.0, time.perf_counter()

    for step in range(1, config.steps + 1):
        if step % 20 == 1:  # the index is refreshed now and then
            with torch.no_grad():
                catalogue = model.items(all_items)
        history, positives = sessions.sample()
        queries = model.queries(history)
        negatives = mine_negatives(model, queries, positives, catalogue, config.negatives)
        candidates = torch.cat([positives[:, None], negatives], dim=1)
        logits = torch.einsum("bd,bnd->bn", queries, model.items(candidates)) / config.temperature
        loss = F.cross_entropy(logits, torch.zeros(config.batch, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item()
        if step % config.log_every == 0:
            seconds = time.perf_counter() - began
            print(
                f"step {step:4d} loss {running / config.log_every:.4f} {1e3 * seconds / step:.1f} ms/step"
            )
            running = 0.0


if __name__ == "__main__":
    main()
