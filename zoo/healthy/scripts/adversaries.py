"""A GAN in one module with an optimizer for each half, an EMA of the generator and a rate that is
lowered by hand.
"""

import argparse
import copy
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
net = nn.ModuleDict(
    {
        "generator": nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)),
        "critic": nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)),
    }
)
average = copy.deepcopy(net["generator"])
for_critic, for_generator = (
    torch.optim.Adam(net[name].parameters(), lr=2e-3, betas=(0.5, 0.999))
    for name in ("critic", "generator")
)
losses = []
for step in range(args.steps):
    if step == 100:
        for_critic.param_groups[0]["lr"] = 1e-3
    real = torch.randn(32, 2) * 0.3 + torch.tensor([2.0, 2.0]) * torch.sign(torch.randn(32, 1))
    fake = net["generator"](torch.randn(32, 4))
    loss = F.softplus(-net["critic"](real)).mean() + F.softplus(net["critic"](fake.detach())).mean()
    for_critic.zero_grad()
    loss.backward()
    for_critic.step()
    losses.append(loss.item())
    loss = F.softplus(-net["critic"](fake)).mean()
    for_generator.zero_grad()
    loss.backward()
    for_generator.step()
    losses.append(loss.item())
    with torch.no_grad():
        for slow, fast in zip(average.parameters(), net["generator"].parameters(), strict=True):
            slow.lerp_(fast, 0.01)
optimizers = [for_critic.state_dict(), for_generator.state_dict()]
state = {
    "model": net.state_dict(),
    "average": average.state_dict(),
    "optimizers": optimizers,
    "losses": losses,
}
torch.save({**state, "torch": torch.get_rng_state(), "python": repr(random.getstate())}, args.out)
