"""Values made inside functions that no tracer can look into: does the guard name the right one?

    python -m benchmarks opaque [--only NAME ...]

Every scene is a small model with one function whose kernel writes memory by itself, as Triton, CUDA
and C++ kernels do, deep inside it. It goes wrong in the forward or in the backward, from the third
step on. Scored under `guard.step`, `watch` and `stepguard run`: phase, module and name of the
function, and that no cause is called certain. Healthy twins must raise no alarm.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import stepguard
from benchmarks.parts import runner
from stepguard.run.guarded_script import AutomaticGuards

DRIVERS = ("step", "watch", "run")
WIDTH, STEPS, FIRST_BAD = 6, 3, 2
PLACE = "blocks.1.core"
armed = {"forward": False, "backward": False}
"""Which kernels go wrong at the present step."""


def kernel(way: str, *tensors: Any, out: Tensor | None = None, bad: float = float("nan")) -> Tensor:
    """Write twice the sum of the tensors into fresh memory, unseen by torch."""
    first = tensors[0].detach()
    made = torch.empty_like(first) if out is None else out
    numbers = made.detach().numpy()
    numbers[...] = 2 * sum(np.broadcast_to(t.detach().numpy(), first.shape) for t in tensors)
    if armed[way]:
        numbers[1] = bad
    return made


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return kernel("forward", x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return kernel("backward", grad)


class Overflow(Scale):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return kernel("forward", x, bad=float("inf"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return kernel("backward", grad, bad=float("inf"))


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
        ctx.save_for_backward(q, k, v)
        lse = torch.empty(len(q))
        lse.numpy()[...] = 0.0
        ctx.mark_non_differentiable(lse)
        return kernel("forward", q, k, v), lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        grads = (kernel("backward", grad), torch.zeros_like(grad), torch.zeros_like(grad))
        return *grads, None, None


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        return kernel("forward", x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # only the gradient of the weight is bad: nobody reads it again before the optimizer
        of_weight = torch.empty(grad.shape[1])
        of_weight.numpy()[...] = np.nan if armed["backward"] else grad.numpy().sum(0)
        return 2 * grad, of_weight, None


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor | None, sizes: list[int], mode: str) -> Any:
        last = torch.empty(x.shape[1])
        last.numpy()[...] = x.detach().numpy()[-1]
        return kernel("forward", x), last

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_last: Tensor) -> Any:
        return kernel("backward", grad), None, None, None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return kernel("forward", x, out=x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return kernel("backward", grad, out=grad.clone())


class Once(Scale):
    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return kernel("backward", grad)


class Setup(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, factor: float = 2.0) -> Tensor:  # type: ignore[override]
        return kernel("forward", x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return kernel("backward", grad), None


class FromNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(kernel("forward", x).numpy().copy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.from_numpy(kernel("backward", grad).numpy().copy())


class Zeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return kernel("forward", x, out=torch.zeros_like(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return kernel("backward", grad, out=torch.zeros_like(grad))


class Mixed(torch.autograd.Function):
    """Visible operations around the kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (kernel("forward", x * 1.0) * 0.5).relu_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return kernel("backward", grad.contiguous()) * 0.5


class Outer(torch.autograd.Function):
    """Calls another custom function; that one is at fault."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Scale.apply(x) + 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return kernel("backward", grad)


class Half(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return kernel("forward", x.float()).to(x.dtype)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return kernel("backward", grad.float()).to(grad.dtype)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return kernel("forward", (x @ weight.T + bias).contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return kernel("backward", grad @ weight), grad.T @ x, grad.sum(0)


class Mask(torch.autograd.Function):
    """Healthy: -inf where attention must not look, as kernels of position biases write it."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        out = torch.empty_like(scores)
        above = np.triu(np.full(scores.shape, -np.inf, np.float32), 1)
        out.numpy()[...] = scores.detach().numpy() + above
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@torch.library.custom_op("sg_bench::fused_scale", mutates_args=())
def fused_scale(x: Tensor, factor: float) -> Tensor:
    return kernel("forward", x)


@torch.library.custom_op("sg_bench::fused_scale_backward", mutates_args=())
def fused_scale_backward(grad: Tensor) -> Tensor:
    return kernel("backward", grad)


@torch.library.custom_op("sg_bench::div", mutates_args=())
def named_like_an_operation(x: Tensor) -> Tensor:
    return kernel("forward", x)


@torch.library.custom_op("sg_bench::fill", mutates_args=("out",))
def fill(x: Tensor, out: Tensor) -> None:
    kernel("forward", x, out=out)


fused_scale.register_autograd(
    lambda ctx, grad: (fused_scale_backward(grad), None), setup_context=lambda *_, **__: None
)
named_like_an_operation.register_autograd(
    lambda ctx, grad: kernel("backward", grad), setup_context=lambda *_, **__: None
)


def launch(x: Tensor) -> Tensor:
    """A kernel without an autograd function, as inference kernels are called."""
    return kernel("forward", x)


def copied(x: Tensor) -> Tensor:
    made = kernel("forward", x)
    out = torch.empty_like(x)
    ctypes.memmove(out.data_ptr(), made.data_ptr(), made.nbytes)
    return out


def through(x: Tensor, made: Tensor) -> Tensor:
    """Straight through: the value of the kernel, the gradient of the input."""
    return x + (made - x).detach()


Core = Callable[["Opaque", Tensor], Tensor]


class Opaque(nn.Module):
    """The module that calls the function."""

    def __init__(self, call: Core) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.matrix = nn.Parameter(torch.eye(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.workspace = [torch.zeros(4, WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


class Returns(Opaque):
    """A module that is the kernel: nothing in its forward is an operation."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(kernel("forward", x).numpy().copy())


class Block(nn.Module):
    def __init__(self, core: nn.Module | None, again: str) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.core = core if core is not None else nn.Tanh()
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(x))
        if isinstance(self.core, Returns):
            return through(x, self.core(x))
        if self.again:
            made: Tensor = checkpoint(self.core, x, use_reentrant=self.again == "reentrant")
            return made
        return self.core(x)


class Net(nn.Module):
    def __init__(self, core: nn.Module, again: str = "") -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(None, ""), Block(core, again), Block(None, ""))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x))
        return out


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One function, and the pass in which it goes wrong; None: it never does."""

    name: str
    way: str | None
    op: str
    """Empty where memory outlives the step: then a replay cannot tell who wrote it."""
    call: Core
    again: str = ""
    autocast: bool = False
    returns: bool = False


def _masked(self: Opaque, x: Tensor) -> Tensor:
    return Mask.apply(x @ x.T).softmax(-1) @ x


def _filled(self: Opaque, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    fill(x.detach(), out)
    return through(x, out)


def _workspace(self: Opaque, x: Tensor) -> Tensor:
    return through(x, kernel("forward", x, out=self.workspace[0]))


early = Scale.apply
BOTH: dict[str, tuple[str, Core]] = {
    "scale": ("Scale", lambda self, x: Scale.apply(x)),
    "taken_early": ("Scale", lambda self, x: early(x)),
    "infinite": ("Overflow", lambda self, x: Overflow.apply(x).tanh() * 0 + Overflow.apply(x)),
    "attention": ("Attention", lambda self, x: Attention.apply(x, x, x, True, 0.3)[0]),
    "norm": ("Norm", lambda self, x: Norm.apply(x, self.weight, 1e-6)),
    "scan": ("Scan", lambda self, x: Scan.apply(x, None, [2, 2], "fast")[0]),
    "in_place": ("InPlace", lambda self, x: InPlace.apply(x * 1.0)),
    "once": ("Once", lambda self, x: Once.apply(x)),
    "setup_context": ("Setup", lambda self, x: Setup.apply(x)),
    "from_numpy": ("FromNumpy", lambda self, x: FromNumpy.apply(x)),
    "zeros": ("Zeros", lambda self, x: Zeros.apply(x)),
    "mixed": ("Mixed", lambda self, x: Mixed.apply(x)),
    "product": ("Product", lambda self, x: Product.apply(x, self.matrix, self.bias)),
    "operator": ("sg_bench.fused_scale", lambda self, x: fused_scale(x, 2.0)),
    "operator_named_div": ("sg_bench.div", lambda self, x: named_like_an_operation(x)),
    "twice": ("Scale", lambda self, x: Scale.apply(x) + Scale.apply(x.tanh())),
}
FORWARD: dict[str, tuple[str, Core]] = {
    "nested": ("Scale", lambda self, x: Outer.apply(x)),
    "launched": ("kernel", lambda self, x: through(x, launch(x))),
    "copied": ("copied", lambda self, x: through(x, copied(x))),
    "filled": ("sg_bench.fill", _filled),
    "workspace": ("", _workspace),
}


def scenes() -> Iterator[Scene]:
    for name, (op, call) in BOTH.items():
        for way in ("forward", "backward"):
            said = op
            if name == "operator" and way == "backward":
                said = "sg_bench.fused_scale_backward"
            yield Scene(name=f"{name}_{way}", way=way, op=said, call=call)
    for name, (op, call) in FORWARD.items():
        yield Scene(name=name, way="forward", op=op, call=call)
    yield Scene(name="outer", way="backward", op="Outer", call=lambda self, x: Outer.apply(x))
    yield Scene(
        name="module", way="forward", op="Returns.forward", call=FORWARD["copied"][1], returns=True
    )
    for way in ("forward", "backward"):
        for again in ("recomputed", "reentrant"):
            op, call = BOTH["attention"]
            yield Scene(name=f"{again}_{way}", way=way, op=op, call=call, again=again)
        yield Scene(
            name=f"half_{way}",
            way=way,
            op="Half",
            call=lambda self, x: Half.apply(x),
            autocast=True,
        )
    yield Scene(name="healthy_scale", way=None, op="", call=BOTH["scale"][1])
    yield Scene(name="healthy_mask", way=None, op="", call=_masked)
    yield Scene(name="healthy_mask_recomputed", way=None, op="", call=_masked, again="recomputed")


def incidents_of(scene: Scene, driver: str) -> list[stepguard.Incident]:
    """Train a few steps under one driver."""
    torch.manual_seed(0)
    core = (Returns if scene.returns else Opaque)(scene.call)
    model = Net(core, scene.again)

    def loss_fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=scene.autocast):
            out = model(x)
        return (out.float() - x.sum(1, keepdim=True)).square().mean()

    return driven(driver, model, loss_fn, (torch.randn(4, WIDTH) for _ in _armed(scene)))


def driven(
    driver: str,
    model: nn.Module,
    loss_fn: Callable[[Tensor], Tensor],
    batches: Iterable[Tensor],
) -> list[stepguard.Incident]:
    """Train on these batches as users of this driver do."""
    config = stepguard.GuardConfig(terminal="quiet")

    def loop(optimizer: torch.optim.Optimizer) -> None:
        for batch in batches:
            optimizer.zero_grad()
            loss_fn(batch).backward()
            optimizer.step()

    if driver == "run":
        with AutomaticGuards(config, lambda text: None) as automatic:
            loop(torch.optim.AdamW(model.parameters(), 1e-3))
            return [one for guard in automatic.guards for one in guard.incidents]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if driver == "watch":
        with stepguard.watch(model, optimizer, config=config) as guard:
            loop(optimizer)
            return list(guard.incidents)
    with stepguard.Guard(model, optimizer, config=config) as guard:
        for batch in batches:
            guard.step(loss_fn, batch)
        return list(guard.incidents)


def _armed(scene: Scene) -> Iterator[int]:
    try:
        for step in range(STEPS):
            if scene.way is not None:
                armed[scene.way] = step >= FIRST_BAD
            yield step
    finally:
        armed.update(forward=False, backward=False)


def wrong(scene: Scene, incidents: list[stepguard.Incident]) -> str:
    """What is wrong with the answer; empty where it is right."""
    if scene.way is None:
        return f"{len(incidents)} alarms" if incidents else ""
    if not incidents or incidents[0].step != FIRST_BAD:
        return "not detected"
    origin, findings = incidents[0].origin, incidents[0].findings
    if origin is None:
        return "no origin"
    said = f"{origin!r} {[(f.code, f.certainty) for f in findings]}"
    if origin.module != PLACE or (scene.op and origin.phase != scene.way):
        return f"wrong place: {said}"
    if scene.op and origin.op != scene.op:
        return f"wrong name: {said}"
    if scene.op and (not findings or findings[0].code != "SG208"):
        return f"wrong cause: {said}"
    if any(finding.certainty == "certain" for finding in findings):
        return f"certain: {said}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    run = runner.begin("opaque", __doc__, arguments, {"--only": runner.NAMES})
    args, console = run.options, run.console
    right = dict.fromkeys(DRIVERS, 0)
    named = args.only or [""]
    chosen = [scene for scene in scenes() if any(part in scene.name for part in named)]
    if not chosen:
        return run.refuse("--only", " ".join(named), [scene.name for scene in scenes()])
    for scene in chosen:
        for driver in DRIVERS:
            fault = wrong(scene, incidents_of(scene, driver))
            right[driver] += not fault
            if fault:
                console.print(f"{scene.name} under {driver}: {fault}", markup=False)
    table = Table(title="opaque functions", box=None)
    table.add_column("driver")
    table.add_column("right", justify="right")
    for driver, number in right.items():
        table.add_row(driver, f"{number} of {len(chosen)}")
    console.print(table)
    return 0 if all(number == len(chosen) for number in right.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
