import argparse
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn


@dataclass
class Transition:
    state: np.ndarray
    action: int
    reward: float
    next_state: np.ndarray
    done: bool
    priority: float


class PrioritizedReplay:
    def __init__(self, alpha=0.6, beta=0.4):
        self.memory = []
        self.alpha = alpha
        self.beta = beta
        self.largest = 1.0

    def __len__(self):
        return len(self.memory)

    def push(self, *transition):
        self.memory.append(Transition(*transition, priority=self.largest))

    def sample(self, size, rng):
        priorities = np.array([item.priority for item in self.memory])
        weights = priorities / priorities.sum()
        picked = rng.choice(len(self.memory), size, p=weights)
        importance = (len(self.memory) * weights[picked]) ** -self.beta
        return picked, [self.memory[i] for i in picked], importance / importance.max()

    def update(self, picked, errors):
        for index, error in zip(picked, errors):
            priority = (float(error) + 1e-3) ** self.alpha
            self.memory[index].priority = priority
            self.largest = max(self.largest, priority)


class Pendulum:
    """A swing with three torques; the agent has to stop it upright."""

    def __init__(self, rng):
        self.rng = rng

    def reset(self):
        self.angle, self.speed, self.ticks = self.rng.uniform(-np.pi, np.pi), 0.0, 0
        return self.observe()

    def observe(self):
        return np.array([np.cos(self.angle), np.sin(self.angle), self.speed / 8], np.float32)

    def step(self, action):
        self.speed += 0.05 * (15 * np.sin(self.angle) + 6 * (action - 1))
        self.speed = float(np.clip(self.speed, -8, 8))
        self.angle += 0.05 * self.speed
        self.ticks += 1
        reward = np.cos(self.angle) - 0.01 * self.speed**2
        return self.observe(), float(reward), self.ticks >= 200


def make_network(width=384):
    return nn.Sequential(
        nn.Linear(3, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 3),
    )


def learn(network, target, optimizer, replay, size, rng):
    picked, batch, importance = replay.sample(size, rng)
    state = torch.from_numpy(np.stack([item.state for item in batch]))
    next_state = torch.from_numpy(np.stack([item.next_state for item in batch]))
    action = torch.tensor([item.action for item in batch])
    reward = torch.tensor([item.reward for item in batch])
    going_on = torch.tensor([0.0 if item.done else 1.0 for item in batch])
    with torch.no_grad():
        goal = reward + 0.98 * going_on * target(next_state).max(dim=1).values
    value = network(state).gather(1, action[:, None]).squeeze(1)
    error = goal - value
    loss = (torch.from_numpy(importance).float() * error**2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    replay.update(picked, error.detach().abs().numpy())
    return loss.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--warmup", type=int, default=60_000)
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    world, replay = Pendulum(rng), PrioritizedReplay()
    network, target = make_network(), make_network()
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-4)
    state, losses = world.reset(), []
    for frame in range(args.warmup + 4 * args.updates):
        explore = frame < args.warmup or rng.random() < 0.1
        if explore:
            action = int(rng.integers(3))
        else:
            with torch.no_grad():
                action = int(network(torch.from_numpy(state)).argmax())
        next_state, reward, done = world.step(action)
        replay.push(state, action, reward, next_state, done)
        state = world.reset() if done else next_state
        if frame < args.warmup or frame % 4:
            continue
        losses.append(learn(network, target, optimizer, replay, args.batch_size, rng))
        if len(losses) % 100 == 0:
            target.load_state_dict(network.state_dict())
            print(f"update {len(losses)}: loss {np.mean(losses[-100:]):.4f} replay {len(replay)}")


if __name__ == "__main__":
    main()
