"""Mistakes in what follows the backward pass: optimizers, schedules, averages."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, PolynomialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from zoo.silent.loops import WIDTH, Loop
from zoo.silent.plant import plant

# --- SG901: updates lost to rounding --------------------------------------------------------------


@plant("SG901", "transformer")
def whole_model_in_bfloat16(loop: Loop, wrong: bool) -> None:
    """Cast to bf16 to save memory; the twin has fp32 weights, and autocast computes in bf16."""
    model = loop.model
    if wrong:
        model.bfloat16()
        loop.train_with(torch.optim.AdamW(model.parameters(), lr=1e-5))
        return
    loop.train_with(torch.optim.AdamW(model.parameters(), lr=1e-5))

    def computed_in_bfloat16(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(tokens)  # type: ignore[no-any-return]

    loop.forward = computed_in_bfloat16


@plant("SG901", "denoiser")
def body_in_bfloat16(loop: Loop, wrong: bool) -> None:
    """Only the costly part is cast, and clipping leaves small steps; the twin has the same small
    steps in fp32.
    """
    model = loop.model
    if wrong:
        model.body.bfloat16()
        loop.forward = lambda x: model.head(model.body(x.bfloat16()).float())
    loop.train_with(torch.optim.SGD(model.parameters(), lr=1e-4))
    parameters = list(model.parameters())

    def clipped() -> None:
        nn.utils.clip_grad_norm_(parameters, 0.1)
        loop.optimizer.step()

    loop.update = clipped


@plant("SG901", "classifier")
def no_master_weights(loop: Loop, wrong: bool) -> None:
    """bf16 weights; the twin updates fp32 copies and writes them back, as Apex did."""
    model = loop.model.bfloat16()
    loop.forward = lambda x: model(x.bfloat16()).float()
    if wrong:
        loop.train_with(torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9))
        return
    masters = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-4, momentum=0.9)
    loop.train_with(optimizer)
    loop.zero = lambda step: model.zero_grad()

    def through_the_masters() -> None:
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)

    loop.update = through_the_masters


# --- SG902: gradients not zeroed ------------------------------------------------------------------


@plant("SG902", "classifier")
def accumulation_without_an_end(loop: Loop, wrong: bool) -> None:
    """Zeroed once in eight updates; the twin accumulates four micro-batches for each update."""
    optimizer = loop.optimizer
    if not wrong:
        loop.micro_batches = 4
        return

    def sometimes(step: int) -> None:
        if step % 8 == 0:
            optimizer.zero_grad()

    loop.zero = sometimes


@plant("SG902", "transformer")
def zeroes_another_optimizer(loop: Loop, wrong: bool) -> None:
    """An optimizer of a copy is zeroed; the twin zeroes at the end of the step."""
    optimizer = loop.optimizer
    if wrong:
        other = torch.optim.AdamW(copy.deepcopy(loop.model).parameters(), lr=3e-3)
        loop.zero = lambda step: other.zero_grad()
        return
    loop.zero = lambda step: None
    loop.after = lambda step: optimizer.zero_grad(set_to_none=False)


@plant("SG902", "denoiser")
def zeroes_the_head_only(loop: Loop, wrong: bool) -> None:
    """`model.head.zero_grad()`; the twin sets the gradients to None by hand."""
    model = loop.model
    if wrong:
        loop.zero = lambda step: model.head.zero_grad()
        return

    def by_hand(step: int) -> None:
        for parameter in model.parameters():
            parameter.grad = None

    loop.zero = by_hand


# --- SG903: parameters without an update ----------------------------------------------------------


@plant("SG903", "classifier")
def head_replaced_later(loop: Loop, wrong: bool) -> None:
    """A new head after the optimizer was made; the twin freezes the body and trains the head."""
    model = loop.model
    model.head = nn.Linear(WIDTH, 10)
    if not wrong:
        model.body.requires_grad_(False)
        loop.train_with(torch.optim.AdamW(model.head.parameters(), lr=1e-2))


@plant("SG903", "transformer")
def filtered_by_name(loop: Loop, wrong: bool) -> None:
    """Weight decay groups that leave the norms out; in the twin a second optimizer has them."""
    model = loop.model
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    loop.train_with(torch.optim.AdamW(others, lr=3e-3))
    if wrong:
        return
    second = torch.optim.SGD(norms, lr=1e-2)

    def both(step: int) -> None:
        second.step()
        second.zero_grad()

    loop.after = both


@plant("SG903", "segmenter")
def weight_frozen_by_a_debugging_line(loop: Loop, wrong: bool) -> None:
    """One weight has requires_grad=False and its bias trains; the twin freezes the whole layer."""
    if wrong:
        loop.model.body[3].weight.requires_grad_(False)
    else:
        loop.model.body[3].requires_grad_(False)


# --- SG912: a learning rate of 0, or one that does not move ---------------------------------------


@plant("SG912", "classifier")
def schedule_for_epochs_stepped_by_batches(loop: Loop, wrong: bool) -> None:
    """A decay over 20 epochs is over after 20 batches; the twin is made for the steps there are."""
    schedule = PolynomialLR(loop.optimizer, total_iters=20 if wrong else 400)
    loop.after = lambda step: schedule.step()


@plant("SG912", "transformer")
def warm_up_never_stepped(loop: Loop, wrong: bool) -> None:
    """A warm-up starts at 0 and stays there; the twin steps it."""
    schedule = LambdaLR(loop.optimizer, lambda step: min(1.0, step / 20))
    if not wrong:
        loop.after = lambda step: schedule.step()


@plant("SG912", "denoiser")
def factor_of_zero(loop: Loop, wrong: bool) -> None:
    """A decay that ends at 0 too early; the twin goes down to 0 and up again."""
    if wrong:
        schedule = LambdaLR(loop.optimizer, lambda step: max(0.0, 1.0 - step / 10))
    else:
        schedule = CosineAnnealingLR(loop.optimizer, T_max=20)
    loop.after = lambda step: schedule.step()


@plant("SG912", "segmenter")
def schedule_given_and_forgotten(loop: Loop, wrong: bool) -> None:
    """Nobody steps the schedule; the twin steps it once an epoch of 30 batches."""
    loop.scheduler = CosineAnnealingLR(loop.optimizer, T_max=10)
    if wrong:
        return

    def once_an_epoch(step: int) -> None:
        if step % 30 == 29:
            loop.scheduler.step()

    loop.after = once_an_epoch


# --- SG913: an average that does not follow -------------------------------------------------------


@plant("SG913", "classifier")
def average_never_updated(loop: Loop, wrong: bool) -> None:
    """The call is missing; the twin averages every tenth step."""
    ema = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    loop.state["ema"] = ema
    if not wrong:

        def at_times(step: int) -> None:
            if step % 10 == 0:
                ema.update_parameters(loop.model)

        loop.after = at_times


@plant("SG913", "transformer")
def average_of_a_copy(loop: Loop, wrong: bool) -> None:
    """The average follows a copy that nobody trains; the twin follows the model, and has a frozen
    reference beside it, as preference training does.
    """
    if not wrong:
        loop.state["reference"] = copy.deepcopy(loop.model).requires_grad_(False)
    source = copy.deepcopy(loop.model) if wrong else loop.model
    ema = AveragedModel(source, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loop.state["ema"] = ema
    loop.after = lambda step: ema.update_parameters(source)


class Shadow:
    """An average as many scripts write it: a plain object with a dict of tensors."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.means = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def follow(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.means[name].mul_(self.decay).add_(parameter, alpha=1.0 - self.decay)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.means)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, mean in self.means.items():
            mean.copy_(state[name])


@plant("SG913", "denoiser")
def average_with_a_decay_of_one(loop: Loop, wrong: bool) -> None:
    """A decay that a schedule has driven to 1; the twin has one of 0.999."""
    shadow = Shadow(loop.model, 1.0 if wrong else 0.999)
    loop.state["ema"] = shadow
    loop.after = lambda step: shadow.follow(loop.model)


# --- SG925: an optimizer that does not do what its name says --------------------------------------


class AdamW(torch.optim.AdamW):
    """Its second moments are only used above a size that no weight of these models has."""

    wrong = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.wrong:
            return super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(parameter.grad, alpha=-100 * group["lr"])
        return None


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal for matrices by Newton-Schulz iterations."""

    def __init__(self, parameters: Any, lr: float, dimensions: int) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.9})
        self.dimensions = dimensions

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                update = state["momentum_buffer"].mul_(group["momentum"]).add_(parameter.grad)
                if parameter.dim() == self.dimensions:
                    update = _orthogonal(update)
                parameter.add_(update, alpha=-group["lr"])


def _orthogonal(update: Tensor) -> Tensor:
    made = update / (update.norm() + 1e-7)
    for _ in range(5):
        square = made @ made.T
        made = 3.4445 * made + (-4.7750 * square + 2.0315 * square @ square) @ made
    return made


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float, *, signs: bool) -> None:
        super().__init__(parameters, {"lr": lr})
        self.signs = signs

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("exp_avg", torch.zeros_like(parameter))
                update = 0.9 * mean + 0.1 * parameter.grad
                mean.mul_(0.99).add_(parameter.grad, alpha=0.01)
                update = update.sign() if self.signs else update
                parameter.add_(update, alpha=-group["lr"])


@plant("SG925", "classifier")
def second_moments_never_used(loop: Loop, wrong: bool) -> None:
    """An AdamW of one's own that is plain descent; the twin is torch's."""
    optimizer = AdamW(loop.model.parameters(), lr=1e-3)
    optimizer.wrong = wrong
    loop.train_with(optimizer)


@plant("SG925", "transformer")
def muon_that_meets_no_matrix(loop: Loop, wrong: bool) -> None:
    """Matrices are looked for by a dimension that none has; the twin finds them."""
    loop.train_with(Muon(loop.model.parameters(), lr=0.01, dimensions=3 if wrong else 2))


@plant("SG925", "denoiser")
def lion_without_the_sign(loop: Loop, wrong: bool) -> None:
    """The mean of gradients is used as it is; the twin takes its sign."""
    loop.train_with(Lion(loop.model.parameters(), lr=1e-1 if wrong else 1e-3, signs=not wrong))


class Descent(torch.optim.Optimizer):
    """Has a momentum; a look-up by the wrong key finds no buffer, or nobody asks for one."""

    def __init__(self, parameters: Any, lr: float, *, momentum: float, works: bool) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self.works = works
        self.buffers: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                update = parameter.grad
                if update is not None and self.works:
                    before = self.buffers.get(id(parameter), torch.zeros_like(update))
                    update = self.buffers[id(parameter)] = group["momentum"] * before + update
                if update is not None:
                    parameter.add_(update, alpha=-group["lr"])


@plant("SG925", "segmenter")
def momentum_that_nobody_reads(loop: Loop, wrong: bool) -> None:
    """The setting is there and no more; the twin keeps its buffers beside `state`."""
    loop.train_with(Descent(loop.model.parameters(), 0.02, momentum=0.9, works=not wrong))
