"""Trains a small classifier on images that the training process itself decodes and augments."""

import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE = 96


class Images(Dataset):
    """Compressed images, each of which is decoded and augmented when it is asked for."""

    def __init__(self, count: int = 256) -> None:
        random = np.random.default_rng(0)
        images = random.integers(0, 64, (count, 3, SIZE, SIZE), np.uint8)
        self.files = [zlib.compress(image.tobytes()) for image in images]
        self.labels = random.integers(0, 10, count)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = decode(self.files[index])
        return torch.from_numpy(augment(image)), int(self.labels[index])


def decode(file: bytes) -> np.ndarray:
    """Return the pixels of a compressed image."""
    return np.frombuffer(zlib.decompress(file), np.uint8).reshape(3, SIZE, SIZE)


def augment(image: np.ndarray) -> np.ndarray:
    """Shift and mirror an image, and give it another contrast."""
    shift = np.random.randint(-8, 9, 2)
    pixels = np.roll(image, shift, (1, 2))[:, :, :: np.random.choice([1, -1])] / 255
    pixels = (pixels - pixels.mean()) / (pixels.std() + 0.01) * np.random.uniform(0.8, 1.2)
    return pixels.astype(np.float32)


def main() -> None:
    """Train for 30 epochs."""
    torch.manual_seed(0)
    loader = DataLoader(Images(), batch_size=32, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(30):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        if epoch % 10 == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
