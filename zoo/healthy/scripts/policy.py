"""REINFORCE on a chain of ten places, with a learning rate of its own making and no baseline."""

import argparse
import random

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--steps", type=int)
parser.add_argument("--out")
args = parser.parse_args()

torch.manual_seed(args.seed)
random.seed(args.seed)
policy = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
places = torch.zeros(16, dtype=torch.long)
losses = []
for _step in range(args.steps):
    logs, rewards = [], []
    for _ in range(5):
        chosen = torch.distributions.Categorical(logits=policy(torch.eye(10)[places]))
        action = chosen.sample()
        places = (places + 2 * action - 1).clamp(min=0)
        rewards.append(torch.where(places >= 9, 10.0, -0.1))
        places = torch.where(places >= 9, 0, places)
        logs.append(chosen.log_prob(action))
    coming, loss = torch.zeros(16), torch.zeros(())
    for log, reward in zip(reversed(logs), reversed(rewards), strict=True):
        coming = reward + 0.95 * coming
        loss = loss - (log * coming).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 5.0)
    optimizer.step()
    losses.append(loss.item())
state = {
    "model": policy.state_dict(),
    "optimizer": optimizer.state_dict(),
    "losses": losses,
    "places": places,
}
torch.save({**state, "torch": torch.get_rng_state(), "python": repr(random.getstate())}, args.out)
