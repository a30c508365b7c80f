"""Distil a wide image classifier into a narrow one."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, channels_in, channels_out):
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, x):
        return F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)


class ConvNet(nn.Module):
    def __init__(self, width, classes=10):
        super().__init__()
        self.blocks = nn.Sequential(
            Block(3, width), Block(width, 2 * width), Block(2 * width, 4 * width)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x):
        return self.head(self.blocks(x).mean(dim=(2, 3)))


class DistillationLoss(nn.Module):
    def __init__(self, temperature=4.0, alpha=0.7):
        super().__init__()
        self.temperature = temperature
        self.alpha = alpha

    def forward(self, student_logits, teacher_logits, labels):
        t = self.temperature
        soft = F.kl_div(
            F.log_softmax(student_logits / t, dim=1),
            F.softmax(teacher_logits / t, dim=1),
            reduction="batchmean",
        )
        hard = F.cross_entropy(student_logits, labels)
        return self.alpha * t * t * soft + (1 - self.alpha) * hard


def make_data(count, classes=10):
    labels = torch.randint(0, classes, (count,))
    patterns = torch.randn(classes, 3, 32, 32)
    images = patterns[labels] + 1.5 * torch.randn(count, 3, 32, 32)
    return TensorDataset(images, labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    torch.manual_seed(0)
    loader = DataLoader(make_data(960), batch_size=args.batch_size, shuffle=True)
    teacher = ConvNet(width=32).eval()
    student = ConvNet(width=16)
    criterion = DistillationLoss()
    optimizer = torch.optim.SGD(student.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        started, total, correct = time.time(), 0.0, 0
        student.train()
        for images, labels in loader:
            with torch.no_grad():
                teacher_logits = teacher(images)
            student_logits = student(images)
            loss = criterion(student_logits, teacher_logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
            correct += (student_logits.argmax(dim=1) == labels).sum().item()
        count = len(loader.dataset)
        print(
            f"epoch {epoch}: loss {total / count:.4f} accuracy {correct / count:.3f} ({time.time() - started:.1f} s)"
        )


if __name__ == "__main__":
    main()
