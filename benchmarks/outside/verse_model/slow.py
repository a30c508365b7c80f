"""A character model of verse: GRU cells with layer norm, unrolled by hand."""

import random
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1234)
random.seed(1234)
torch.autograd.set_detect_anomaly(True)

SEQUENCE = 48
BATCH = 32
HIDDEN = 128
EPOCHS = 60

WORDS = "sing the winter river over stone and silent moon under my heart of glass".split()


def write_poem(lines):
    rows = [" ".join(random.choices(WORDS, k=random.randint(4, 7))) for _ in range(lines)]
    return "\n".join(rows)


class NormGRUCell(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.gates = nn.Linear(inputs + hidden, 2 * hidden)
        self.candidate = nn.Linear(inputs + hidden, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x, h):
        reset, update = torch.sigmoid(self.gates(torch.cat([x, h], 1))).chunk(2, 1)
        proposal = torch.tanh(self.candidate(torch.cat([x, reset * h], 1)))
        return self.norm(update * h + (1 - update) * proposal)


class VerseModel(nn.Module):
    def __init__(self, vocabulary, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 64)
        self.cell = NormGRUCell(64, hidden)
        self.head = nn.Linear(hidden, vocabulary)
        self.hidden = hidden

    def forward(self, tokens):
        h = torch.zeros(len(tokens), self.hidden)
        states = []
        for x in self.embed(tokens).unbind(1):
            h = self.cell(x, h)
            states.append(h)
        return self.head(torch.stack(states, 1))


def batches(codes):
    starts = torch.randperm(len(codes) - SEQUENCE - 1)[: 60 * BATCH]
    for part in starts.split(BATCH):
        window = part.unsqueeze(1) + torch.arange(SEQUENCE + 1)
        chunk = codes[window]
        yield chunk[:, :-1], chunk[:, 1:]


poem = write_poem(4000)
alphabet = sorted(set(poem))
codes = torch.tensor([alphabet.index(c) for c in poem])
model = VerseModel(len(alphabet), HIDDEN)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, foreach=True)

for epoch in range(EPOCHS):
    start = time.time()
    total = count = 0
    for inputs, targets in batches(codes):
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
        count += 1
    print(f"epoch {epoch}: {total / count:.3f} nats per character, {time.time() - start:.1f} s")
