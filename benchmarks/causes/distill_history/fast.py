"""Distil a large text classifier into a small one and report how often they agree."""

import time

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 50


class TextClassifier(nn.Module):
    def __init__(self, vocabulary, width, layers):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocabulary, width)
        blocks = []
        for _ in range(layers):
            blocks += [nn.Linear(width, width), nn.ReLU()]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


class Agreement:
    """Top-1 agreement, top-5 agreement and divergence of student and teacher."""

    def __init__(self):
        self.count = 0
        self.sums = torch.zeros(3)

    def update(self, student_logits, teacher_logits):
        student, teacher = student_logits.detach(), teacher_logits.detach()
        choice = teacher.argmax(dim=1)
        top1 = (student.argmax(dim=1) == choice).float().sum()
        top5 = (student.topk(5, dim=1).indices == choice[:, None]).any(dim=1).float().sum()
        divergence = F.kl_div(
            F.log_softmax(student, dim=1),
            F.log_softmax(teacher, dim=1),
            log_target=True,
            reduction="sum",
        )
        self.sums += torch.stack([top1, top5, divergence])
        self.count += len(student)

    def compute(self):
        return (self.sums / self.count).tolist()


def documents(vocabulary, batch, length):
    """Tokens around a random topic."""
    topic = torch.randint(0, CLASSES, (batch, 1))
    return (topic * 37 + torch.randint(0, 60, (batch, length))) % vocabulary


def main(epochs=2, steps=60, batch=256, vocabulary=2000, temperature=2.0):
    torch.manual_seed(2)
    teacher = TextClassifier(vocabulary, 384, 4).eval().requires_grad_(False)
    nn.init.normal_(teacher.head.weight, std=4.0)
    student = TextClassifier(vocabulary, 192, 2)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3, fused=True)
    agreement = Agreement()
    for epoch in range(epochs):
        began, total = time.time(), 0.0
        for _ in range(steps):
            tokens = documents(vocabulary, batch, 64)
            teacher_logits = teacher(tokens)
            student_logits = student(tokens)
            loss = F.kl_div(
                F.log_softmax(student_logits / temperature, dim=1),
                F.log_softmax(teacher_logits / temperature, dim=1),
                log_target=True,
                reduction="batchmean",
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), 5.0)
            optimizer.step()
            total += loss.item()
            agreement.update(student_logits, teacher_logits)
            top1, top5, divergence = agreement.compute()
        print(
            f"epoch {epoch}: loss {total / steps:.4f}, so far top-1 {top1:.4f}, top-5 {top5:.4f}, "
            f"divergence {divergence:.4f} ({time.time() - began:.1f} s)"
        )


if __name__ == "__main__":
    main()
