"""Click prediction: embeddings of users and items, and a small network on top."""

import argparse
import logging
import time

import torch
from torch import nn

logging.basicConfig(level=logging.INFO, format="%(message)s")
log = logging.getLogger("clicks")


class Clicks:
    def __init__(self, rows, users, items):
        generator = torch.Generator().manual_seed(7)
        self.users = torch.randint(0, users, (rows,), generator=generator)
        self.items = (torch.rand(rows, generator=generator) ** 3 * items).long()
        self.context = torch.randn(rows, 8, generator=generator)
        score = self.context[:, 0] + (self.users % 5 == self.items % 5).float() - 0.5
        self.clicked = (score > 0).float()

    def batches(self, size):
        for index in torch.randperm(len(self.users)).split(size):
            yield self.users[index], self.items[index], self.context[index], self.clicked[index]


class ClickModel(nn.Module):
    def __init__(self, users, items, dim=32):
        super().__init__()
        self.user_embedding = nn.Embedding(users, dim)
        self.item_embedding = nn.Embedding(items, dim)
        nn.init.normal_(self.user_embedding.weight, std=0.1)
        nn.init.normal_(self.item_embedding.weight, std=0.1)
        self.network = nn.Sequential(
            nn.Linear(2 * dim + 8, 384),
            nn.ReLU(),
            nn.Linear(384, 192),
            nn.ReLU(),
            nn.Linear(192, 1),
        )

    def forward(self, users, items, context):
        features = [self.user_embedding(users), self.item_embedding(items), context]
        return self.network(torch.cat(features, dim=1)).squeeze(1)


def evaluate(model, batch):
    model.eval()
    with torch.no_grad():
        users, items, context, clicked = batch
        predicted = model(users, items, context) > 0
    model.train()
    return (predicted == clicked.bool()).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=300_000)
    parser.add_argument("--items", type=int, default=50_000)
    parser.add_argument("--rows", type=int, default=76_800)
    parser.add_argument("--batch-size", type=int, default=768)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = Clicks(args.rows, args.users, args.items)
    held_out = next(data.batches(2000))
    model = ClickModel(args.users, args.items)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

    for epoch in range(1, args.epochs + 1):
        start, total = time.time(), 0.0
        for users, items, context, clicked in data.batches(args.batch_size):
            optimizer.zero_grad()
            loss = criterion(model(users, items, context), clicked)
            loss.backward()
            optimizer.step()
            total += loss.item()
        accuracy = evaluate(model, held_out)
        log.info(
            "epoch %d loss %.4f accuracy %.3f (%.1f s)",
            epoch,
            args.batch_size * total / args.rows,
            accuracy,
            time.time() - start,
        )


if __name__ == "__main__":
    main()
