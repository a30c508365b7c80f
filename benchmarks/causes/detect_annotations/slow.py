"""Keypoint-style detection: predict the centre and size of one object per image, from COCO-like annotations."""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


def write_annotations(path, count, size, seed=4):
    rng = random.Random(seed)
    images, annotations = [], []
    for i in range(count):
        w, h = rng.randint(8, 24), rng.randint(8, 24)
        x, y = rng.randint(0, size - w), rng.randint(0, size - h)
        images.append({"id": i, "file_name": f"{i:06d}.npy", "width": size, "height": size})
        outline = [round(rng.uniform(0, size), 2) for _ in range(8)]
        annotations.append(
            {
                "id": i,
                "image_id": i,
                "category_id": i % 3,
                "bbox": [x, y, w, h],
                "segmentation": [outline],
            }
        )
    categories = [{"id": c, "name": f"class{c}"} for c in range(3)]
    path.write_text(
        json.dumps({"images": images, "annotations": annotations, "categories": categories})
    )


class CocoBoxes(Dataset):
    def __init__(self, path, size):
        self.path = path
        self.size = size
        self.count = len(json.loads(path.read_text())["images"])

    def annotation(self, index):
        with self.path.open() as file:
            return json.load(file)["annotations"][index]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        annotation = self.annotation(index)
        x, y, w, h = annotation["bbox"]
        rng = np.random.default_rng(index)
        image = rng.normal(0, 0.3, (3, self.size, self.size)).astype(np.float32)
        image[annotation["category_id"], y : y + h, x : x + w] += 1
        box = torch.tensor([x + w / 2, y + h / 2, w, h]) / self.size
        return torch.from_numpy(image), box, annotation["category_id"]


class BoxNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(6),
            nn.Flatten(),
        )
        self.box = nn.Linear(72 * width, 4)
        self.category = nn.Linear(72 * width, 3)

    def forward(self, images):
        x = self.features(images)
        return self.box(x).sigmoid(), self.category(x)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=480)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "instances_train.json"
        write_annotations(path, args.images, args.size)
        loader = DataLoader(CocoBoxes(path, args.size), args.batch_size, shuffle=True)
        model = BoxNet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for epoch in range(args.epochs):
            started, total = time.time(), 0.0
            for images, boxes, categories in loader:
                predicted, scores = model(images)
                loss = 5 * F.l1_loss(predicted, boxes) + F.cross_entropy(scores, categories)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item()
            print(f"epoch {epoch}: loss {total / len(loader):.4f} in {time.time() - started:.1f} s")


if __name__ == "__main__":
    main()
