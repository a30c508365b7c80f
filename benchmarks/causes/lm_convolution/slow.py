"""Character-level language model of gated long convolutions, trained on generated text."""

import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

WORDS = "the a small green quick brown old fox dog tree runs sleeps jumps over under near house river and then".split()


class CharDataset(Dataset):
    def __init__(self, n_words=12000, block=512, seed=1):
        rng = np.random.default_rng(seed)
        text = " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), n_words))
        chars = sorted(set(text))
        lookup = {c: i for i, c in enumerate(chars)}
        self.vocab = len(chars)
        self.data = torch.tensor([lookup[c] for c in text])
        self.block = block

    def __len__(self):
        return (len(self.data) - 1) // self.block

    def __getitem__(self, i):
        chunk = self.data[i * self.block : (i + 1) * self.block + 1]
        return chunk[:-1], chunk[1:]


class LongConv(nn.Module):
    """A causal convolution as long as the sequence, with a decaying kernel for each channel."""

    def __init__(self, dim, block):
        super().__init__()
        self.kernel = nn.Parameter(0.1 * torch.randn(dim, block))
        self.rate = nn.Parameter(torch.linspace(-4, 0, dim)[:, None])
        fade = np.minimum(np.arange(1, block + 1) / 16, 1.0)  # the first characters count less
        self.register_buffer("fade", torch.from_numpy(fade))

    def forward(self, u):
        n = u.shape[-1]
        decay = torch.exp(-self.rate.exp() * torch.arange(n))
        k = torch.fft.rfft(self.kernel * decay, n=2 * n)
        u_f = torch.fft.rfft(u * self.fade, n=2 * n)
        y = torch.fft.irfft(u_f * k, n=2 * n)[..., :n]
        return y.float()


class Mixer(nn.Module):
    def __init__(self, dim, block):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.inner = nn.Linear(dim, 2 * dim)
        self.conv = LongConv(dim, block)
        self.outer = nn.Linear(dim, dim)

    def forward(self, x):
        u, gate = self.inner(self.norm(x)).chunk(2, dim=-1)
        y = self.conv(u.transpose(1, 2)).transpose(1, 2)
        return x + self.outer(y * torch.sigmoid(gate))


class CharModel(nn.Module):
    def __init__(self, vocab, dim=64, depth=3, block=512):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mixers = nn.Sequential(*[Mixer(dim, block) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, idx):
        return self.head(self.norm(self.mixers(self.embed(idx))))


def train(epochs=4, batch_size=6):
    torch.manual_seed(1337)
    dataset = CharDataset()
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)
    model = CharModel(dataset.vocab)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(loader)} batches")
    for epoch in range(epochs):
        t0, losses = time.time(), []
        for x, y in loader:
            logits = model(x)
            loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), y.reshape(-1))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {np.mean(losses):.3f}, {time.time() - t0:.1f}s")


if __name__ == "__main__":
    train()
