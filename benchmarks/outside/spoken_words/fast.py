"""Keyword spotting on log-spectrograms of short recordings."""

import argparse
import time
import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

RATE = 8000


def record(word, speaker):
    """One second of a word: three formants that glide, as 16-bit samples."""
    rng = np.random.default_rng([word, speaker])
    t = np.arange(RATE) / RATE
    wave = np.zeros(RATE)
    for k in range(3):
        start, stop = 200 + 90 * word + 400 * k, 300 + 60 * word + 500 * k
        phase = 2 * np.pi * (start * t + (stop - start) * t**2 / 2)
        wave += np.sin(phase + rng.uniform(0, 6)) / (k + 1)
    wave *= np.exp(-(((t - rng.uniform(0.3, 0.7)) / 0.25) ** 2))
    return (8000 * wave).astype(np.int16)


class Store:
    """Recordings in an object store, which answers after some milliseconds."""

    def __init__(self, items, latency=0.002):
        self.latency = latency
        self.objects = {item: zlib.compress(record(*item).tobytes()) for item in items}

    def get(self, item):
        time.sleep(self.latency)
        return zlib.decompress(self.objects[item])


class SpokenWords(Dataset):
    def __init__(self, words, speakers, noise=0.05):
        self.items = [(w, s) for w in range(words) for s in range(speakers)]
        self.store = Store(self.items)
        self.window = np.hanning(256).astype(np.float32)
        self.noise = noise

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        samples = np.frombuffer(self.store.get(self.items[index]), np.int16)
        wave = samples.astype(np.float32) / 32768
        shift = np.random.randint(-800, 800)
        wave = np.roll(wave, shift)
        wave = wave + self.noise * np.random.randn(len(wave)).astype(np.float32)
        frames = np.lib.stride_tricks.sliding_window_view(wave, 256)[::64] * self.window
        spectrum = np.abs(np.fft.rfft(frames, axis=1))
        features = np.log(spectrum[:, 1:65] + 1e-3).astype(np.float32)
        features = (features - features.mean()) / (features.std() + 1e-6)
        return torch.from_numpy(features.T.copy()), self.items[index][0]


class WordNet(nn.Module):
    def __init__(self, words, width=96):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(64, width, 5, padding=2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, padding=2, stride=2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
        )
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, x):
        out, _ = self.gru(self.conv(x).transpose(1, 2))
        return self.head(out[:, -1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--words", type=int, default=12)
    parser.add_argument("--speakers", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()

    torch.manual_seed(0)
    np.random.seed(0)
    data = SpokenWords(args.words, args.speakers)
    loader = DataLoader(
        data,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        persistent_workers=True,
    )
    model = WordNet(args.words)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        begin = time.time()
        correct = seen = 0
        for features, words in loader:
            scores = model(features)
            loss = criterion(scores, words)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correct += int((scores.argmax(1) == words).sum())
            seen += len(words)
        print(f"epoch {epoch}: accuracy {correct / seen:.3f} in {time.time() - begin:.1f} s")


if __name__ == "__main__":
    main()
