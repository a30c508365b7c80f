import argparse
import queue
import threading
import time
from concurrent.futures import Future

import torch
from torch import nn


class Reranker(nn.Module):
    """Scores the tokens of a query together with a document."""

    def __init__(self, vocabulary=5_000, width=128, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.score = nn.Linear(width, 1)

    def forward(self, tokens):
        return self.score(self.encoder(self.tokens(tokens)).mean(dim=1)).squeeze(1)


class Server:
    """Answers requests in batches: the caller of `serve` runs the model."""

    def __init__(self, model, max_batch, max_wait):
        self.model = model.eval()
        self.max_batch = max_batch
        self.max_wait = max_wait
        self.queue = queue.Queue()
        self.batches = 0

    def submit(self, tokens):
        answer = Future()
        self.queue.put((tokens, answer))
        return answer

    def collect(self):
        batch = [self.queue.get()]
        while len(batch) < self.max_batch:
            try:
                batch.append(self.queue.get(timeout=self.max_wait))
            except queue.Empty:
                break
        return batch

    @torch.inference_mode()
    def serve(self, requests):
        answered = 0
        while answered < requests:
            batch = self.collect()
            scores = self.model(torch.stack([tokens for tokens, _ in batch]))
            for (_, answer), score in zip(batch, scores.tolist()):
                answer.set_result(score)
            answered += len(batch)
            self.batches += 1


class Client(threading.Thread):
    """Sends the next request as soon as the last one is answered."""

    def __init__(self, server, seed, requests):
        super().__init__(daemon=True)
        self.server = server
        self.random = torch.Generator().manual_seed(seed)
        self.requests = requests
        self.scores = []
        self.latencies = []

    def run(self):
        for _ in range(self.requests):
            tokens = torch.randint(5_000, (64,), generator=self.random)
            sent = time.perf_counter()
            self.scores.append(self.server.submit(tokens).result())
            self.latencies.append(time.perf_counter() - sent)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    torch.manual_seed(0)
    server = Server(Reranker(), max_batch=args.clients, max_wait=0.012)
    print("ready")
    for number in range(args.rounds):
        clients = [Client(server, 10 * number + i, args.requests) for i in range(args.clients)]
        for client in clients:
            client.start()
        server.serve(args.clients * args.requests)
        for client in clients:
            client.join()
        mean = sum(sum(client.scores) for client in clients) / (args.clients * args.requests)
        print(f"round {number}: mean score {mean:.4f}")


if __name__ == "__main__":
    main()
