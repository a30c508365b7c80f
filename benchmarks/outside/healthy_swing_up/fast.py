"""REINFORCE with a baseline: swing many pendulums up, simulated together with NumPy."""

import argparse
import time

import numpy as np
import torch
from torch import nn


class Pendulums:
    def __init__(self, count, seed):
        self.rng = np.random.default_rng(seed)
        self.count = count

    def reset(self):
        self.angle = self.rng.uniform(-np.pi, np.pi, self.count)
        self.speed = self.rng.uniform(-1, 1, self.count)
        return self.observe()

    def observe(self):
        observed = [np.cos(self.angle), np.sin(self.angle), self.speed / 8]
        return np.stack(observed, 1).astype(np.float32)

    def step(self, torque):
        cost = ((self.angle + np.pi) % (2 * np.pi) - np.pi) ** 2 + 0.1 * self.speed**2
        for _ in range(10):
            pull = 15 * np.sin(self.angle) + 3 * torque
            self.speed = np.clip(self.speed + 0.005 * pull, -8, 8)
            self.angle = self.angle + 0.005 * self.speed
        return self.observe(), -cost.astype(np.float32)


def rollout(env, policy, horizon):
    seen, taken, rewards = [], [], []
    observed = env.reset()
    for _ in range(horizon):
        with torch.no_grad():
            mean = policy(torch.from_numpy(observed)).squeeze(1).numpy()
        torque = mean + 0.5 * env.rng.normal(size=env.count).astype(np.float32)
        seen.append(observed)
        taken.append(torque.astype(np.float32))
        observed, reward = env.step(np.clip(torque, -2, 2))
        rewards.append(reward)
    returns = np.cumsum(np.array(rewards)[::-1], 0)[::-1].copy()
    return np.array(seen), np.array(taken), returns


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--pendulums", type=int, default=512)
    parser.add_argument("--horizon", type=int, default=64)
    args = parser.parse_args()

    torch.manual_seed(0)
    env = Pendulums(args.pendulums, seed=0)
    policy = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3, fused=True)
    started = time.time()
    for update in range(args.updates):
        seen, taken, returns = (torch.from_numpy(x) for x in rollout(env, policy, args.horizon))
        gain = returns - returns.mean(1, keepdim=True)
        gain = gain / gain.std()
        error = taken - policy(seen).squeeze(2)
        loss = (gain * error.square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 50 == 0:
            print(f"{update}: return {returns[0].mean():.1f} ({time.time() - started:.0f} s)")


if __name__ == "__main__":
    main()
