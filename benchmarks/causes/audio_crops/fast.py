import argparse
import tempfile
import wave
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

RATE = 16_000


def write_recordings(folder, count, seconds):
    """Synthetic recordings: each speaker hums at another pitch."""
    rng = np.random.default_rng(0)
    time = np.arange(seconds * RATE, dtype=np.float32) / RATE
    for speaker in range(count):
        tone = np.sin(2 * np.pi * (90 + 25 * speaker) * time)
        tone += 0.3 * rng.standard_normal(len(time), dtype=np.float32)
        with wave.open(str(folder / f"speaker{speaker:02d}.wav"), "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(RATE)
            out.writeframes((tone * 8000).astype("<i2").tobytes())


class SpeakerCrops(Dataset):
    def __init__(self, folder, crop, length):
        self.paths = sorted(folder.glob("*.wav"))
        self.crop = crop
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        speaker = int(rng.integers(len(self.paths)))
        with wave.open(str(self.paths[speaker])) as recording:
            start = int(rng.integers(recording.getnframes() - self.crop))
            recording.setpos(start)
            frames = recording.readframes(self.crop)
        samples = np.frombuffer(frames, "<i2").astype(np.float32) / 32768
        return torch.from_numpy(samples), speaker


class SpeakerNet(nn.Module):
    def __init__(self, speakers, width=64):
        super().__init__()
        self.register_buffer("window", torch.hann_window(400))
        self.body = nn.Sequential(
            nn.Conv1d(201, width, 5, padding=2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, padding=2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
        )
        self.head = nn.Linear(width, speakers)

    def forward(self, audio):
        spectrum = torch.stft(audio, 400, 160, window=self.window, return_complex=True)
        features = self.body(torch.log1p(spectrum.abs()))
        return self.head(features.mean(dim=2))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_recordings(folder, count=12, seconds=45)
        data = SpeakerCrops(folder, crop=RATE, length=400)
        loader = DataLoader(data, args.batch_size, shuffle=True)
        model = SpeakerNet(speakers=12)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        for epoch in range(args.epochs):
            total = correct = 0
            for audio, speaker in loader:
                scores = model(audio)
                loss = nn.functional.cross_entropy(scores, speaker)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(speaker)
                correct += (scores.argmax(1) == speaker).sum().item()
            print(f"epoch {epoch}: loss {total / len(data):.3f} accuracy {correct / len(data):.2f}")


if __name__ == "__main__":
    main()
