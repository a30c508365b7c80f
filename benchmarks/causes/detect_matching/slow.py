"""Train a one-stage detector of rectangles: anchors are matched to boxes, then classified and regressed."""

import time

import torch
import torch.nn.functional as F
from torch import nn


def make_batch(count, size=64, most=4):
    """Images with bright rectangles, and their boxes (x1, y1, x2, y2) and classes."""
    images = 0.2 * torch.randn(count, 1, size, size)
    targets = []
    for image in images:
        boxes, classes = [], []
        for _ in range(int(torch.randint(2, most + 1, (1,)))):
            w, h = torch.randint(10, 25, (2,)).tolist()
            x, y = torch.randint(0, size - 25, (2,)).tolist()
            image[0, y : y + h, x : x + w] += 1.0
            boxes.append([x, y, x + w, y + h])
            classes.append(int(w > h) + 1)
        targets.append((torch.tensor(boxes, dtype=torch.float), torch.tensor(classes)))
    return images, targets


def make_anchors(size=64, stride=16, scales=(12, 20)):
    centres = torch.arange(stride // 2, size, stride).float()
    y, x = torch.meshgrid(centres, centres, indexing="ij")
    rows = [torch.stack([x - s / 2, y - s / 2, x + s / 2, y + s / 2], dim=-1) for s in scales]
    return torch.stack(rows, dim=2).reshape(-1, 4)


def iou(a, b):
    """Intersection over union of boxes, broadcast."""
    low = torch.maximum(a[..., :2], b[..., :2])
    high = torch.minimum(a[..., 2:], b[..., 2:])
    inner = (high - low).clamp(min=0).prod(dim=-1)
    areas = [(box[..., 2:] - box[..., :2]).prod(dim=-1) for box in (a, b)]
    return inner / (areas[0] + areas[1] - inner)


def match(anchors, boxes, classes, threshold=0.3):
    """For each anchor its class (0: background) and the index of its box."""
    labels = torch.zeros(len(anchors), dtype=torch.long)
    index = torch.zeros(len(anchors), dtype=torch.long)
    for i, anchor in enumerate(anchors):
        best = threshold
        for j, box in enumerate(boxes):
            overlap = iou(anchor, box)
            if overlap > best:
                best, index[i], labels[i] = overlap, j, classes[j]
    return labels, index


def encode(anchors, boxes):
    size = anchors[:, 2:] - anchors[:, :2]
    shift = (boxes[:, :2] + boxes[:, 2:] - anchors[:, :2] - anchors[:, 2:]) / 2 / size
    return torch.cat([shift, ((boxes[:, 2:] - boxes[:, :2]) / size).log()], dim=1)


class Detector(nn.Module):
    def __init__(self, width=32, per_cell=2, classes=3):
        super().__init__()
        layers, channels = [], 1
        for i in range(4):
            layers += [nn.Conv2d(channels, width * (i + 1), 3, stride=2, padding=1), nn.ReLU()]
            channels = width * (i + 1)
        self.backbone = nn.Sequential(*layers)
        self.classify = nn.Conv2d(channels, per_cell * classes, 3, padding=1)
        self.regress = nn.Conv2d(channels, per_cell * 4, 3, padding=1)
        self.classes = classes

    def forward(self, x):
        x = self.backbone(x)
        scores = self.classify(x).permute(0, 2, 3, 1).reshape(len(x), -1, self.classes)
        return scores, self.regress(x).permute(0, 2, 3, 1).reshape(len(x), -1, 4)


def main(steps=80, batch_size=8, log_every=20):
    torch.manual_seed(0)
    images, targets = make_batch(128)
    anchors = make_anchors()
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    running, began = 0.0, time.time()
    for step in range(1, steps + 1):
        picks = torch.randint(0, len(images), (batch_size,))
        matched = [match(anchors, *targets[i]) for i in picks.tolist()]
        labels = torch.stack([labels for labels, _ in matched])
        boxes = torch.stack(
            [targets[i][0][index] for i, (_, index) in zip(picks.tolist(), matched)]
        )
        scores, offsets = model(images[picks])
        positive = labels > 0
        wanted = encode(anchors.expand(batch_size, -1, -1)[positive], boxes[positive])
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        loss = loss + F.smooth_l1_loss(offsets[positive], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item()
        if step % log_every == 0:
            print(f"step {step:3d} loss {running / log_every:.4f} ({time.time() - began:.1f} s)")
            running = 0.0


if __name__ == "__main__":
    main()
