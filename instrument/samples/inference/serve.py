"""Answers requests in batches; the batcher waits for more requests than there are clients."""

import queue
import threading

import torch
from torch import nn

CLIENTS, REQUESTS, LARGEST_BATCH, LONGEST_WAIT_S = 8, 150, 16, 0.01


class Scorer(nn.Module):
    """Scores a text of 64 tokens."""

    def __init__(self, tokens: int = 2000, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.score = nn.Linear(width, 1)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        return self.score(self.encode(self.embed(texts)).mean(dim=1)).squeeze(1)


class Request:
    """A text, and later its score."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text, self.score, self.done = text, 0.0, threading.Event()


def batch_of(waiting: queue.Queue) -> list[Request]:
    """Wait for the first request, and then for others that can be answered with it."""
    batch = [waiting.get()]
    while len(batch) < LARGEST_BATCH:
        try:
            batch.append(waiting.get(timeout=LONGEST_WAIT_S))
        except queue.Empty:
            break
    return batch


def client(waiting: queue.Queue, seed: int) -> None:
    """Send the next request as soon as the last one is answered."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(REQUESTS):
        request = Request(torch.randint(2000, (64,), generator=random))
        waiting.put(request)
        request.done.wait()


@torch.inference_mode()
def serve(model: nn.Module, waiting: queue.Queue, requests: int) -> None:
    """Answer so many requests."""
    while requests > 0:
        batch = batch_of(waiting)
        scores = model(torch.stack([request.text for request in batch]))
        for request, score in zip(batch, scores.tolist()):
            request.score = score
            request.done.set()
        requests -= len(batch)


def main() -> None:
    """Serve all requests of all clients."""
    torch.manual_seed(0)
    waiting: queue.Queue = queue.Queue()
    threads = [threading.Thread(target=client, args=(waiting, seed)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    serve(Scorer().eval(), waiting, CLIENTS * REQUESTS)
    for thread in threads:
        thread.join()
    print(f"answered {CLIENTS * REQUESTS} requests")


if __name__ == "__main__":
    main()
