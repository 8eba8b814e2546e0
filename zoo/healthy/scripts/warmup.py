"""A small image recipe: one epoch at 1e-6, then 0.1, set by the script; BatchNorm and dropout."""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--steps", type=int)
parser.add_argument("--out")
args = parser.parse_args()

torch.manual_seed(args.seed)
random.seed(args.seed)
centres = torch.randn(10, 8) * 2
model = nn.Sequential(
    nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses = []
for step in range(args.steps):
    for group in optimizer.param_groups:
        group["lr"] = 1e-6 if step < 30 else 0.1
    labels = torch.randint(10, (32,))
    points = centres[labels] + 0.6 * torch.randn(32, 8)
    if random.random() < 0.02:
        points = points * 5
    loss = F.cross_entropy(model(points), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
torch.save({**state, "torch": torch.get_rng_state(), "python": repr(random.getstate())}, args.out)
