"""Public incidents, gathered without regard to what stepguard can name, as small trainings.

Each is the mechanism of one public thread, on a CPU, in a few seconds; facts are the thread's, code
and words are our own. `codes` are those that name its cause. What cannot be run on a CPU, or whose
cause nobody knows, stands in `NOT_HERE` with its reason, so that the share of named incidents can
be read for what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

NAN, INF = math.nan, math.inf
IGNORED = -100


@dataclass(slots=True, kw_only=True)
class Training:
    """A loop as its user wrote it: `step` is called with each number."""

    model: nn.Module
    optimizer: Optimizer
    step: Callable[[int], None]
    steps: int = 40
    begin: Callable[[], object] = lambda: None
    """Called once the guard is there."""
    scheduler: Any = None
    scaler: Any = None
    before: Training | None = None
    """A run before, in the same folder."""


@dataclass(frozen=True, slots=True)
class Reproduction:
    """One public incident."""

    name: str
    thread: str
    codes: tuple[str, ...]
    """Each of them names the cause; empty: no code does."""
    build: Callable[[], Training]


INCIDENTS: list[Reproduction] = []


def incident(name: str, thread: str, *codes: str) -> Callable[[Callable[[], Training]], Any]:
    """Register the reproduction of a public thread."""

    def taken(build: Callable[[], Training]) -> Callable[[], Training]:
        INCIDENTS.append(Reproduction(name, thread, codes, build))
        return build

    return taken


def net(inputs: int = 8, width: int = 16, outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


def plain(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    *,
    steps: int = 40,
    rate: float = 1e-3,
    optimizer: Optimizer | None = None,
    begin: Callable[[], object] = lambda: None,
) -> Training:
    """The usual loop: zero, loss, backward, step."""
    trained = [one for one in model.parameters() if one.requires_grad]
    chosen = optimizer or torch.optim.AdamW(trained, lr=rate)

    def step(number: int) -> None:
        chosen.zero_grad()
        loss(number).backward()  # type: ignore[no-untyped-call]
        chosen.step()

    return Training(model=model, optimizer=chosen, step=step, steps=steps, begin=begin)


def regression(model: nn.Module) -> Callable[[int], Tensor]:
    """Fit four sums of the inputs."""
    target = torch.randn(8, 4)

    def loss(number: int) -> Tensor:
        x = torch.randn(32, 8)
        return F.mse_loss(model(x), x @ target)

    return loss


# --- Loss scale under accumulation.


def accumulating(parts: int, batches: Callable[[], Iterator[Tensor]]) -> Training:
    """Add up the gradients of so many batches, each of a mean that nothing divides."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stream = batches()

    def step(number: int) -> None:
        optimizer.zero_grad()
        for _ in range(parts):
            model(next(stream)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Training(model=model, optimizer=optimizer, step=step)


def drawn() -> Iterator[Tensor]:
    while True:
        yield torch.randn(8, 8)


def loaded() -> Iterator[Tensor]:
    """As a Trainer takes them."""
    while True:
        for (x,) in DataLoader(TensorDataset(torch.randn(256, 8)), batch_size=8, shuffle=True):
            yield x


@incident("I001", "agokrani/distillKitPlus#5", "SG933")
def accumulation_is_not_divided() -> Training:
    return accumulating(8, drawn)


@incident("I003", "huggingface/transformers#35438", "SG933")
def loss_doubles_with_two_parts() -> Training:
    return accumulating(2, loaded)


@incident("I005", "huggingface/transformers#37766", "SG933")
def loss_grows_with_the_parts() -> Training:
    return accumulating(4, loaded)


@incident("I007", "unslothai/unsloth-zoo#1023", "SG933")
def mean_is_taken_for_a_share_of_all_targets() -> Training:
    """Four times the gradient: a Trainer leaves the division to a loss that knows all targets."""
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data: Any = []
    for number in range(32):
        batch = rows(ended=True, number=number)
        data += [{name: value[row] for name, value in batch.items()} for row in range(8)]

    def batches() -> Iterator[Mapping[str, Tensor]]:
        while True:
            yield from DataLoader(data, batch_size=8)

    stream = batches()

    def step(number: int) -> None:
        optimizer.zero_grad()
        for _ in range(4):
            model(**next(stream)).loss.backward()
        optimizer.step()

    return Training(model=model, optimizer=optimizer, step=step)


# --- Half precision.


class Halved(nn.Module):
    """A frozen part in float16 whose activations grow past 65504."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.coder = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16)).half()
        self.head = nn.Linear(16, 4)
        self.gain = gain
        self.coder.requires_grad_(False)
        with torch.no_grad():
            for one in self.coder.parameters():
                one.mul_(gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.coder(x.half()).float())  # type: ignore[no-any-return]


@incident("I061", "HighCWu/control-lora-v3#2", "SG301")
def frozen_coder_in_half_precision() -> Training:
    model = Halved(1.0)

    def loss(number: int) -> Tensor:
        # images grow brighter until the coder's range ends
        return model(torch.randn(8, 8) * 4.0 ** min(number, 12)).square().mean()

    return plain(model, loss)


@incident("I073", "unslothai/unsloth#2040", "SG301")
def model_of_bfloat16_run_in_float16() -> Training:
    model = Halved(120.0)
    return plain(model, lambda number: model(torch.randn(8, 8) * 50).square().mean())


@incident("I069", "mst272/LLM-Dojo#23", "SG301", "SG502", "SG801")
def preference_loss_on_float16_weights() -> Training:
    model = net().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-8)

    def loss(number: int) -> Tensor:
        chosen, rejected = model(torch.randn(8, 8).half()), model(torch.randn(8, 8).half())
        return -F.logsigmoid(chosen.sum(1) - rejected.sum(1)).mean()

    return plain(model, loss, optimizer=optimizer)


@incident("I071", "ultralytics/ultralytics#23219", "SG301")
def autocast_overflows_in_the_first_epoch() -> Training:
    model = net()

    def loss(number: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            scores = model(torch.randn(16, 8)) * (3e4 if number > 5 else 1.0)
            return (scores * scores).mean().float()

    return plain(model, loss)


@incident("I065", "huggingface/peft#1249", "SG801")
def float16_adapters_under_a_scaler() -> Training:
    model = net().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8).half()).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # torch refuses to unscale float16 gradients
        scaler.update()

    return Training(model=model, optimizer=optimizer, step=step, scaler=scaler)


# --- Weights at load.


def language_model(*, tied: bool = True) -> Any:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 40}
    config = transformers.LlamaConfig(
        num_attention_heads=2, tie_word_embeddings=tied, eos_token_id=1, pad_token_id=0, **sizes
    )
    return transformers.LlamaForCausalLM(config)


def next_token(model: Any, *, batch: Callable[[int], Mapping[str, Tensor]] | None = None) -> Any:
    def loss(number: int) -> Tensor:
        if batch is not None:
            return model(**batch(number)).loss  # type: ignore[no-any-return]
        ids = torch.randint(2, 40, (4, 8))
        return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]

    return loss


@incident("I091", "huggingface/lerobot#2151", "SG927")
def embedding_is_missing_and_not_tied() -> Training:
    model = language_model()
    model.lm_head = nn.Linear(16, 40, bias=False)
    return plain(model, next_token(model))


@incident("I099", "huggingface/transformers#48238", "SG927")
def tie_lost_by_the_order_of_loading() -> Training:
    model = language_model()
    model.model.embed_tokens.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return plain(model, next_token(model))


@incident("I095", "huggingface/transformers#44358", "SG927")
def head_is_missing_in_the_file() -> Training:
    model = language_model(tied=False)
    state = {name: one for name, one in model.state_dict().items() if "lm_head" not in name}
    load = lambda: model.load_state_dict(state, strict=False)  # noqa: E731
    return plain(model, next_token(model), begin=load)


def unwritten(model: nn.Module, name: str, value: float) -> None:
    """What `empty_like` may hold."""
    with torch.no_grad():
        model.get_parameter(name).view(-1)[:3] = value


@incident("I093", "huggingface/transformers#35913", "SG601")
def missing_weights_are_left_as_memory_was() -> Training:
    model = net()
    unwritten(model, "2.weight", NAN)
    return plain(model, regression(model))


@incident("I097", "huggingface/transformers#45050", "SG601", "SG701")
def placeholders_that_were_never_filled() -> Training:
    model = net()
    unwritten(model, "0.weight", 3e38)
    unwritten(model, "0.bias", NAN)
    return plain(model, regression(model))


# --- Kernels.


class Opaque(torch.autograd.Function):
    """A kernel that writes memory by itself; rows without queries get no gradient written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, empty: bool) -> Tensor:
        ctx.empty = empty
        out = torch.empty_like(x)
        out.numpy()[...] = x.detach().numpy() * 2
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        out = torch.empty_like(grad)
        out.numpy()[...] = grad.numpy() * 2
        if ctx.empty:
            out.numpy()[0] = NAN
        return out, None


class Scan(torch.autograd.Function):
    """A recurrence whose forward kernel leaves the last block unwritten for some lengths."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, broken: bool) -> Tensor:
        ctx.broken = broken
        out = torch.empty_like(x)
        out.numpy()[...] = np.cumsum(x.detach().numpy() + bias.detach().numpy(), axis=0)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        reversed_sum = grad.flip(0).cumsum(0).flip(0)
        of_bias = torch.empty(grad.shape[1])
        of_bias.numpy()[...] = NAN if ctx.broken else reversed_sum.numpy().sum(0)
        return reversed_sum, of_bias, None


class WithKernel(nn.Module):
    def __init__(self, call: Callable[[Tensor, Tensor, int], Tensor]) -> None:
        super().__init__()
        self.inner, self.outer, self.call = nn.Linear(8, 16), nn.Linear(16, 4), call
        self.bias = nn.Parameter(torch.zeros(16))
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.outer(self.call(self.inner(x), self.bias, self.step))  # type: ignore[no-any-return]


def with_kernel(call: Callable[[Tensor, Tensor, int], Tensor]) -> Training:
    model = WithKernel(call)
    return plain(model, regression(model), steps=12)


@incident("I101", "Dao-AILab/flash-attention#2421", "SG208", "SG209")
def no_gradient_for_empty_queries() -> Training:
    return with_kernel(lambda x, bias, step: Opaque.apply(x, step == 6))  # type: ignore[no-untyped-call]


@incident("I103", "Hprairie/Bi-Mamba2#3", "SG208", "SG209")
def infinite_norm_out_of_a_scan() -> Training:
    return with_kernel(lambda x, bias, step: Scan.apply(x, bias, step >= 5))  # type: ignore[no-untyped-call]


@incident("I111", "state-spaces/mamba#352", "SG208", "SG209")
def bias_gradient_of_a_scan() -> Training:
    return with_kernel(lambda x, bias, step: Scan.apply(x, bias, True))  # type: ignore[no-untyped-call]


@incident("I113", "tile-ai/tilelang#2461", "SG208", "SG209")
def padding_rows_are_read_unwritten() -> Training:
    return with_kernel(lambda x, bias, step: Opaque.apply(x, step % 4 == 3))  # type: ignore[no-untyped-call]


# --- Empty reductions and masks.


@incident("I051", "RLinf/RLinf#273", "SG102", "SG201")
def advantages_over_an_empty_mask() -> Training:
    model = net(outputs=1)

    def loss(number: int) -> Tensor:
        mask = torch.zeros(16) if number == 9 else (torch.rand(16) > 0.3).float()
        value = model(torch.randn(16, 8)).squeeze(1)
        return (value.square() * mask).sum() / mask.sum()

    return plain(model, loss)


@incident("I137", "huggingface/transformers#26428", "SG204")
def padded_rows_attend_to_nothing() -> Training:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            h = self.inner(x)
            scores = h @ h.transpose(1, 2) + mask[:, None, :]
            return self.outer(scores.softmax(-1) @ h)  # type: ignore[no-any-return]

    model = Attention()

    def loss(number: int) -> Tensor:
        mask = torch.zeros(4, 6)
        if number == 7:
            mask[2] = -INF
        return model(torch.randn(4, 6, 8), mask).square().mean()

    return plain(model, loss)


# --- Labels.


def rows(
    *, ended: bool, masked: bool = False, prompt: int = 0, number: int = 0
) -> dict[str, Tensor]:
    """Padded rows with an end token (1), their padding ignored."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(2, 40, (8, 10), generator=generator)
    lengths = torch.randint(5, 9, (8,), generator=generator)
    places = torch.arange(10)[None]
    if ended:
        ids[torch.arange(8), lengths - 1] = 1
    mask = (places < lengths[:, None]).long()
    ids = torch.where(mask.bool(), ids, 1 if masked else 0)
    labels = ids.masked_fill(ids == 1 if masked else mask == 0, IGNORED)
    labels[:, :prompt] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@incident("I115", "Liquid4All/liquid-finetune#37", "SG102", "SG803", "SG906")
def no_token_is_supervised() -> Training:
    model = language_model()

    def batch(number: int) -> Mapping[str, Tensor]:
        found = rows(ended=True, number=number)
        found["labels"][:] = IGNORED
        return found

    return plain(model, next_token(model, batch=batch))


@incident("I117", "huggingface/trl#1623", "SG922")
def answers_never_end() -> Training:
    model = language_model()
    return plain(model, next_token(model, batch=lambda n: rows(ended=False, prompt=2, number=n)))


@incident("I119", "huggingface/trl#734", "SG922")
def end_is_padding_and_masked() -> Training:
    model = language_model()
    model.config.pad_token_id = 1
    return plain(model, next_token(model, batch=lambda n: rows(ended=True, masked=True, number=n)))


@incident("I125", "unslothai/unsloth#416", "SG922")
def end_is_masked_by_its_id() -> Training:
    model = language_model()
    model.config.pad_token_id = 1
    return plain(
        model, next_token(model, batch=lambda n: rows(ended=True, masked=True, prompt=2, number=n))
    )


@incident("I121", "karpathy/nanochat#582")
def prompts_are_learned_too() -> Training:
    model = language_model()
    return plain(model, next_token(model, batch=lambda n: rows(ended=True, number=n)))


# --- Resumes.


def resumed(load: Callable[[Training, Training], object], *, schedule: bool = False) -> Training:
    def one() -> Training:
        torch.manual_seed(3)
        model = net()
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(1200, 8, generator=generator)
        data = TensorDataset(x, x @ torch.randn(8, 4, generator=generator))
        loader = DataLoader(data, batch_size=8)
        stream: list[Iterator[Any]] = []
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        warm = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30)) if schedule else None

        def step(number: int) -> None:
            if not stream:
                stream.append(iter(loader))
            inputs, target = next(stream[0])
            optimizer.zero_grad()
            F.mse_loss(model(inputs), target).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if warm is not None:
                warm.step()

        return Training(model=model, optimizer=optimizer, step=step, steps=60, scheduler=warm)

    before, after = one(), one()
    after.before = before
    after.begin = lambda: load(before, after)
    return after


def the_model(before: Training, after: Training) -> None:
    after.model.load_state_dict(before.model.state_dict())


def model_and_optimizer(before: Training, after: Training) -> None:
    the_model(before, after)
    rates = [group["lr"] for group in after.optimizer.param_groups]
    after.optimizer.load_state_dict(before.optimizer.state_dict())
    for group, rate in zip(after.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@incident("I153", "IntelLabs/distiller#145", "SG504", "SG923")
def optimizer_is_not_loaded() -> Training:
    return resumed(the_model)


@incident("I165", "pytorch/vision#2116", "SG504", "SG923")
def example_loads_the_model_only() -> Training:
    return resumed(the_model, schedule=True)


@incident("I155", "PolymathicAI/the_well#77", "SG504", "SG923")
def schedule_is_not_saved() -> Training:
    return resumed(model_and_optimizer, schedule=True)


@incident("I159", "alibaba/TorchEasyRec#664", "SG504", "SG923")
def schedule_starts_again() -> Training:
    return resumed(model_and_optimizer, schedule=True)


@incident("I163", "huggingface/accelerate#685", "SG923")
def data_starts_again() -> Training:
    return resumed(model_and_optimizer)


@incident("I157", "PrimeIntellect-ai/prime-rl#3299", "SG923")
def prefetched_before_the_state_was_loaded() -> Training:
    return resumed(model_and_optimizer)


# --- No gradient, no update, another rule.


@incident("I185", "ankanbhunia/PIDM#66", "SG924")
def recomputed_with_other_dropout() -> Training:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Tanh())
            self.outer = nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            kept = checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False)
            return self.outer(kept)  # type: ignore[no-any-return]

    model = Checkpointed()
    return plain(model, regression(model))


def with_adapter(*, trained: bool, cut: bool = False) -> Training:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.adapter, self.head = net(8, 16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.base(x)
            adapted = hidden + self.adapter(hidden)
            return self.head(adapted.detach() if cut else adapted)  # type: ignore[no-any-return]

    model = Adapted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not trained:
        # the base is frozen as well, and its inputs get a gradient, as for checkpointing
        model.requires_grad_(False)
        model.base[0].register_forward_hook(lambda *given: given[2].requires_grad_())
    return plain(model, regression(model), optimizer=optimizer, steps=120)


@incident("I187", "huggingface/peft#1410", "wiring")
def adapter_is_not_trainable() -> Training:
    return with_adapter(trained=False)


@incident("I193", "tloen/alpaca-lora#352", "wiring")
def loaded_adapter_is_for_inference() -> Training:
    return with_adapter(trained=False)


@incident("I189", "purohit10saurabh/mamba-ssm-macos#7", "SG904")
def fallback_without_a_gradient_to_its_input() -> Training:
    return with_adapter(trained=True, cut=True)


@incident("I191", "pytorch/pytorch#26546", "SG904")
def no_gradient_through_a_block() -> Training:
    return with_adapter(trained=True, cut=True)


class RunsAsSgd(torch.optim.Optimizer):
    """Configured with a momentum, and stepping without one."""

    def __init__(self, params: Any, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.add_(one.grad, alpha=-group["lr"])


@incident("I147", "kozistr/pytorch_optimizer#408", "SG925")
def another_rule_than_configured() -> Training:
    model = net()
    optimizer = RunsAsSgd(model.parameters(), lr=1e-2, momentum=0.95)
    return plain(model, regression(model), optimizer=optimizer)


@incident("I023", "facebookresearch/bitsandbytes#13")
def other_defaults_of_a_replacement() -> Training:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    return plain(model, regression(model), optimizer=optimizer)


# --- Loaders.


class Augmented(Dataset[Any]):
    """Draws from a generator of its own, of which every worker has the same copy."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((8,), float(index)) + torch.tensor(self.random.normal(size=8)).float()


def from_workers() -> Training:
    model = net()

    def batches() -> Iterator[Tensor]:
        while True:
            yield from DataLoader(Augmented(), batch_size=8, num_workers=2)

    stream = batches()
    return plain(model, lambda number: model(next(stream) / 64).square().mean(), steps=24)


for _name, _thread in (
    ("I127", "fangchangma/sparse-to-dense.pytorch#19"),
    ("I129", "sigsep/open-unmix-pytorch#80"),
    ("I131", "wolny/pytorch-3dunet#32"),
):
    incident(_name, _thread, "SG929")(from_workers)


# --- Reinforcement learning, experts, transients.


@incident("I183", "verl-project/verl#891", "SG203", "SG206", "SG402")
def divergence_by_exp_is_clamped_too_late() -> Training:
    model = net(outputs=1)

    def loss(number: int) -> Tensor:
        far = 120.0 if number == 9 else 0.1
        ratio = model(torch.randn(16, 8)).squeeze(1) + far
        kl = torch.exp(ratio) - ratio - 1
        return torch.where(kl > 10, torch.tensor(10.0), kl).mean()

    return plain(model, loss)


@incident("I177", "unslothai/unsloth#3006", "SG102", "SG201", "SG205")
def groups_of_one_have_no_deviation() -> Training:
    model = net(outputs=1)

    def loss(number: int) -> Tensor:
        group = 1 if number == 5 else 4
        reward = torch.randn(8, group)
        advantage = (reward - reward.mean(1, keepdim=True)) / reward.std(1, keepdim=True)
        return -(model(torch.randn(8, 8)) * advantage).mean()

    return plain(model, loss)


@incident("I175", "leggedrobotics/rsl_rl#33", "SG101", "SG103", "SG505")
def simulator_returns_nan() -> Training:
    model = net()

    def loss(number: int) -> Tensor:
        observed = torch.randn(16, 8)
        observed[3] *= NAN if number == 15 else 1.0
        return model(observed).square().mean()

    return plain(model, loss)


@incident("I169", "RLinf/RLinf#121", "SG505", "SG955")
def value_head_learns_too_fast() -> Training:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
    return plain(model, regression(model), optimizer=optimizer)


@incident("I195", "d8ahazard/sd_dreambooth_extension#413", "SG702")
def gone_when_it_is_run_again() -> Training:
    once = {"due": True}

    class Unsteady(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            if self.training and once["due"] and calls["made"] == 10:
                once["due"] = False
                out = out + torch.tensor(NAN)
            calls["made"] += 1
            return out

    calls = {"made": 0}
    model = Unsteady()
    return plain(model, regression(model), steps=20)


@incident("I141", "jingyaogong/minimind#567", "SG505", "SG930")
def one_expert_gets_every_token() -> Training:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(4))
            with torch.no_grad():
                self.gate.bias[0] = 50.0

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = self.gate(x).softmax(-1).max(-1)
            made = torch.stack([expert(x) for expert in self.experts], 1)
            picked = made.gather(1, chosen[:, None, None].expand(-1, 1, 4)).squeeze(1)
            return picked * weight[:, None]

    model = Experts()
    target = torch.randn(8, 4)

    def loss(number: int) -> Tensor:
        tokens = torch.randn(512, 8)
        return F.mse_loss(model(tokens), tokens @ target)

    return plain(model, loss, steps=80)


# --- Files.


CHECKPOINTS: dict[str, tuple[str, Callable[[Path], None]]] = {}


def checkpoint_file(name: str, thread: str) -> Callable[[Callable[[Path], None]], Any]:
    """Register a file that a run left behind; `verify` should refuse it."""

    def taken(write: Callable[[Path], None]) -> Callable[[Path], None]:
        CHECKPOINTS[name] = (thread, write)
        return write

    return taken


def _saved(folder: Path, name: str = "checkpoint.pt") -> Path:
    path = folder / name
    torch.save({"model": net(64, 64).state_dict()}, path)
    return path


@checkpoint_file("I009", "bghira/SimpleTuner#2613")
def interrupted_while_writing(folder: Path) -> None:
    path = _saved(folder)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@checkpoint_file("I011", "facebookresearch/metaseq#53")
def shard_of_zero_bytes(folder: Path) -> None:
    _saved(folder, "shard-0.pt")
    (folder / "shard-1.pt").write_bytes(b"")


@checkpoint_file("I013", "huggingface/transformers#35782")
def last_step_has_no_trainer_state(folder: Path) -> None:
    from safetensors.torch import save_file

    state = {name: value.clone() for name, value in net().state_dict().items()}
    for step, files in ((10, ("trainer_state.json", "config.json")), (20, ("config.json",))):
        kept = folder / f"checkpoint-{step}"
        kept.mkdir()
        save_file(state, kept / "model.safetensors")
        for file in files:
            (kept / file).write_text("{}")
    (folder / "checkpoint-20" / "optimizer.pt").write_bytes(b"")


@checkpoint_file("I015", "unslothai/unsloth#6796")
def partial_file_over_an_older_one(folder: Path) -> None:
    from safetensors.torch import save_file

    path = folder / "model.safetensors"
    save_file({name: value.clone() for name, value in net(64, 64).state_dict().items()}, path)
    path.write_bytes(path.read_bytes()[:-512])


# --- What is listed and cannot be run here.


NOT_HERE = {
    "needs the device": "I029 I031 I033 I035 I037 I039 I041 I043",
    "needs a kernel that no CPU has": "I075 I077 I079 I081 I105 I107 I109 I151",
    "needs DeepSpeed on several devices": "I053 I055 I057 I059",
    "needs several processes that hang": "I083 I085 I087 I161",
    "needs the data of the thread": "I025 I045 I047 I049 I089",
    "needs the model of the thread": "I063 I133 I135 I143 I145",
    "a compiler's defect, since mended": "I019 I021",
    "needs a rollout engine": "I167 I171 I173 I179 I181",
    "a metric of one trainer": "I139 I067",
    "its cause is not known": "I017 I027 I149",
    "healthy by design": "I123",
}
"""Reason -> the incidents of the listed half that have no reproduction."""
