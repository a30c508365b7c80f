import argparse
import queue
import threading
import time

import torch
from torch import nn


class RemoteStore:
    """Stands for an object store: each request takes one round trip."""

    def __init__(self, latency):
        self.latency = latency
        self.objects = {}

    def put(self, key, value):
        time.sleep(self.latency)
        self.objects[key] = value


class Uploader(threading.Thread):
    """Uploads predicted masks beside the training loop and counts what is there."""

    def __init__(self, store):
        super().__init__(daemon=True)
        self.store = store
        self.waiting = queue.Queue()
        self.lock = threading.Lock()
        self.done = 0
        self.bytes = 0

    def submit(self, key, mask):
        self.waiting.put((key, mask.to(torch.uint8).numpy().tobytes()))

    def run(self):
        while (item := self.waiting.get()) is not None:
            key, value = item
            with self.lock:
                self.store.put(key, value)
                self.done += 1
                self.bytes += len(value)

    def progress(self):
        with self.lock:
            return {"files": self.done, "megabytes": self.bytes / 1e6}

    def close(self):
        self.waiting.put(None)
        self.join()


class UNet(nn.Module):
    def __init__(self, classes=4, width=16):
        super().__init__()
        self.down1 = self.block(1, width)
        self.down2 = self.block(width, 2 * width)
        self.bottom = self.block(2 * width, 2 * width)
        self.up2 = self.block(4 * width, width)
        self.up1 = self.block(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def block(self, inputs, outputs):
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(nn.functional.max_pool2d(a, 2))
        c = self.bottom(nn.functional.max_pool2d(b, 2))
        c = nn.functional.interpolate(c, scale_factor=2)
        b = self.up2(torch.cat([b, c], dim=1))
        b = nn.functional.interpolate(b, scale_factor=2)
        return self.head(self.up1(torch.cat([a, b], dim=1)))


def draw_cells(count, size=32):
    grid = torch.arange(size)
    masks = torch.zeros(count, size, size, dtype=torch.long)
    for kind in (1, 2, 3):
        y, x = torch.randint(size, (2, count, 1, 1))
        near = (grid[None, :, None] - y) ** 2 + (grid[None, None] - x) ** 2 < (2 + 2 * kind) ** 2
        masks[near] = kind
    return (masks / 3 + 0.2 * torch.randn(masks.shape))[:, None], masks


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    uploader = Uploader(RemoteStore(latency=0.03))
    uploader.start()
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(1, args.steps + 1):
        images, masks = draw_cells(args.batch_size)
        scores = model(images)
        loss = nn.functional.cross_entropy(scores, masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        predicted = scores.argmax(dim=1)
        uploader.submit(f"step{step:05d}", predicted[0])
        status = uploader.progress()
        status["accuracy"] = (predicted == masks).float().mean().item()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f} accuracy {status['accuracy']:.3f}")
    uploader.close()
    print(f"uploaded {uploader.done} masks")


if __name__ == "__main__":
    main()
