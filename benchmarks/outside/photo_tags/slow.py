"""Multi-task tagging of photo features with DistributedDataParallel (run it with torchrun, or alone)."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Mixer(nn.Module):
    """Mixes tokens, then channels."""

    def __init__(self, tokens, dim):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.token1 = nn.Linear(tokens, tokens)
        self.token2 = nn.Linear(tokens, tokens)
        self.norm2 = nn.LayerNorm(dim)
        self.channel1 = nn.Linear(dim, dim)
        self.channel2 = nn.Linear(dim, dim)

    def forward(self, x):
        y = self.norm1(x).transpose(1, 2)
        x = x + self.token2(F.gelu(self.token1(y))).transpose(1, 2)
        return x + self.channel2(F.gelu(self.channel1(self.norm2(x))))


class Tagger(nn.Module):
    def __init__(self, tags, tokens=16, dim=64, depth=12):
        super().__init__()
        self.embed = nn.Linear(48, dim)
        self.blocks = nn.Sequential(*[Mixer(tokens, dim) for _ in range(depth)])
        self.heads = nn.ModuleList(nn.Linear(dim, 2) for _ in range(tags))

    def forward(self, patches):
        features = self.blocks(self.embed(patches)).mean(1)
        return torch.stack([head(features) for head in self.heads], 1)


def photos(count, tags, seed):
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(count, 16, 48, generator=generator)
    directions = torch.randn(48, tags, generator=generator)
    return patches, (patches.mean(1) @ directions > 0).long()


def setup():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        path = os.path.join(tempfile.mkdtemp(), "store")
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--tags", type=int, default=40)
    args = parser.parse_args()

    rank, world = setup()
    torch.manual_seed(0)
    patches, labels = photos(4096, args.tags, seed=rank)
    model = DistributedDataParallel(Tagger(args.tags), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        losses = []
        for rows in torch.randperm(len(patches)).split(args.batch_size):
            scores = model(patches[rows])
            loss = F.cross_entropy(scores.flatten(0, 1), labels[rows].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        if rank == 0:
            print(f"epoch {epoch}: loss {torch.stack(losses).mean():.4f} on {world} ranks")
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
