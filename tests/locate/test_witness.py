"""A kernel that failed is run again by other paths: what they give, and what is concluded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from locate.guarded import code, evidence, first_incident, noise
from locate.loop import Loop
from stepguard import Incident, register_reference
from stepguard.locate import witness
from stepguard.records import Remedy, Witness

WIDTH = 3
bad = {"on": False}
"""Whether the kernels below go wrong in the present step."""


def wrong_at(step: int = 1) -> Callable[[int], Tensor]:
    """Batches; from this step on the kernels go wrong."""

    def batch(index: int) -> Tensor:
        bad["on"] = index >= step
        return noise(index, 4, WIDTH)

    return batch


@pytest.fixture(autouse=True)
def _healthy_afterwards() -> Iterator[None]:
    before = dict(witness.REFERENCES)
    yield
    bad["on"] = False
    witness.REFERENCES.clear()
    witness.REFERENCES.update(before)


def spoiled(values: Any) -> Any:
    """What a kernel gives that forgets its last row."""
    values = np.array(values)
    if bad["on"]:
        values[-1] = np.nan
    return values


def hidden(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


class Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(spoiled(2 * hidden(x)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(2 * hidden(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.from_numpy(spoiled(2 * hidden(grad)))


class Length(torch.autograd.Function):
    """The length of rows; its slope does not exist at a row of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.linalg.norm(hidden(x), axis=1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x = hidden(ctx.saved_tensors[0])
        with np.errstate(invalid="ignore"):
            slope = x / np.linalg.norm(x, axis=1, keepdims=True)
        return torch.from_numpy(hidden(grad)[:, None] * slope)


class Exponential(torch.autograd.Function):
    """A softmax that does not subtract the maximum, so exp overflows in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with np.errstate(over="ignore", invalid="ignore"):
            powers = np.exp(hidden(x) * (60 if bad["on"] else 1))
            return torch.from_numpy(powers / powers.sum(1, keepdims=True))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Strided(torch.autograd.Function):
    """Reads its input as if it were contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        values = 2 * hidden(x)
        if not x.is_contiguous():
            values[-1] = np.nan
        return torch.from_numpy(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Overwrites(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        hidden(x)[...] = spoiled(2 * hidden(x))
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Net(nn.Module):
    def __init__(self, kernel: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(self.inner(x))


def incident_of(kernel: Callable[[Tensor], Tensor], steps: int = 2) -> Incident:
    torch.manual_seed(0)
    net = Net(kernel)
    return first_incident(net, lambda x: net(x).square().mean(), wrong_at(), steps)


def asked(incident: Incident) -> dict[str, Witness]:
    assert incident.origin is not None
    return {one.path: one for one in incident.origin.evidence.witnesses}


def found(incident: Incident) -> list[tuple[str, str]]:
    return [(one.code, one.certainty) for one in incident.findings]


def tried(incident: Incident) -> list[Remedy]:
    return [one for one in incident.findings[0].remedies if one.tried]


def test_a_registered_reference_that_is_finite_makes_the_kernel_guilty() -> None:
    register_reference(Forward, lambda x: 2 * x)
    incident = incident_of(lambda x: Forward.apply(x))
    assert found(incident)[0] == ("SG209", "certain")
    assert "only `Forward` gives NaN here: the reference" in evidence(incident)
    reference = asked(incident)["reference"]
    assert reference.finite and reference.agrees and reference.value is not None


def test_a_reference_answers_for_the_backward_as_well() -> None:
    register_reference(Backward, lambda x: 2 * x)
    incident = incident_of(lambda x: Backward.apply(x))
    assert incident.origin is not None and incident.origin.phase == "backward"
    assert found(incident)[0] == ("SG209", "certain")


def test_a_reference_that_fails_too_clears_the_kernel() -> None:
    register_reference(Forward, lambda x: Forward.apply(x) * 1.0)
    incident = incident_of(lambda x: Forward.apply(x))
    assert found(incident) == [("SG208", "possible")]
    assert "the kernel is cleared" in evidence(incident)


def test_a_reference_that_computes_something_else_proves_nothing() -> None:
    register_reference(Forward, lambda x: 5 - x)
    incident = incident_of(lambda x: Forward.apply(x))
    assert asked(incident)["reference"].agrees is False
    assert found(incident) == [("SG208", "likely")]


def test_a_reference_that_raises_is_not_a_verdict() -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("no such device")

    register_reference(Forward, broken)
    incident = incident_of(lambda x: Forward.apply(x))
    assert asked(incident)["reference"].why_not == "RuntimeError: no such device"
    assert found(incident) == [("SG208", "likely")]


def test_without_any_other_path_the_finding_says_so() -> None:
    incident = incident_of(lambda x: Forward.apply(x))
    assert code(incident) == "SG208"
    assert asked(incident)["reference"].finite is None
    assert "register_reference" in asked(incident)["reference"].why_not


def test_a_kernel_that_overwrites_its_input_is_given_it_again() -> None:
    register_reference(Overwrites, lambda x: 2 * x)
    incident = incident_of(lambda x: Overwrites.apply(x * 1.0))
    assert found(incident)[0] == ("SG209", "certain")


def test_an_operator_of_torch_library_has_its_reference_by_name() -> None:
    @torch.library.custom_op("sg_witness::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return torch.from_numpy(spoiled(2 * hidden(x)))

    double.register_autograd(lambda ctx, grad: 2 * grad, setup_context=lambda *_, **__: None)
    register_reference("sg_witness::double", lambda x: 2 * x)
    assert found(incident_of(double))[0] == ("SG209", "certain")


def test_the_slope_of_the_own_forward_speaks_against_a_backward() -> None:
    incident = incident_of(lambda x: Backward.apply(x))
    slope = asked(incident)["slope"]
    assert slope.finite and slope.agrees
    assert found(incident) == [("SG208", "likely"), ("SG209", "likely")]


def test_a_point_without_a_slope_does_not_speak_against_the_backward() -> None:
    torch.manual_seed(0)
    net = Net(lambda x: Length.apply(x * torch.tensor([[1.0], [1.0], [1.0], [0.0]])))
    loss = lambda x: net(x).square().mean() + net(x).sum()  # noqa: E731
    incident = first_incident(net, loss, wrong_at(), 1)
    assert asked(incident)["slope"].finite is False
    assert "SG209" not in [finding.code for finding in incident.findings]


def test_an_overflow_inside_shows_in_a_wider_dtype() -> None:
    incident = incident_of(lambda x: Exponential.apply(x * 4))
    assert ("SG209", "likely") in found(incident)
    assert asked(incident)["wider"].finite


def test_a_kernel_that_ignores_strides_is_finite_on_contiguous_copies() -> None:
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, WIDTH)
    loss = lambda x: Strided.apply(net(x).t()).square().mean()  # noqa: E731
    incident = first_incident(net, loss, wrong_at(), 1)
    assert asked(incident)["contiguous"].finite
    assert ("SG209", "likely") in found(incident)


@contextmanager
def overridden(name: str, kernel: Callable[..., Any]) -> Iterator[None]:
    """Another CPU kernel for one of torch's operations."""
    library = torch.library.Library("aten", "IMPL")
    library.impl(name, kernel, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def flash(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    out = scores.softmax(-1) @ v
    if bad["on"]:
        out[..., -1, :] = float("nan")
    return out, scores.logsumexp(-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).view(1, 1, len(x), 8)
        return functional.scaled_dot_product_attention(heads, heads, heads)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_attention_that_only_the_fused_kernel_gets_wrong_runs_with_the_math_backend() -> None:
    torch.manual_seed(0)
    net = Attention()
    with overridden("_scaled_dot_product_flash_attention_for_cpu", flash):
        incident = first_incident(net, lambda x: net(x).square().mean(), wrong_at())
    assert found(incident)[0] == ("SG209", "certain")
    assert "math gives" in evidence(incident)
    fix = tried(incident)[0]
    assert fix.proven and "SDPBackend.MATH" in fix.snippet
    assert incident.origin is not None and incident.origin.phase == "forward"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_attention_whose_inputs_are_to_blame_is_no_fault_of_the_kernel() -> None:
    torch.manual_seed(0)
    net = Attention()

    def huge(step: int) -> Tensor:
        batch = noise(step, 4, WIDTH)
        batch[0] *= 1e25 if step else 1.0
        return batch

    incident = first_incident(net, lambda x: net(x).square().mean(), huge)
    assert incident.origin is not None
    assert "scaled_dot_product" in (incident.origin.op or "")
    assert asked(incident)["math"].finite is False
    assert "SG209" not in [finding.code for finding in incident.findings]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_norm_that_its_decomposition_gets_right_is_a_fault_of_the_kernel() -> None:
    def norm(x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Tensor, ...]:
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
        out = (x - mean) * (var + eps).rsqrt() * weight + bias
        if bad["on"]:
            out[-1] = float("nan")
        return out, mean, (var + eps).rsqrt()

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8))
    with overridden("native_layer_norm", norm):
        incident = first_incident(net, lambda x: net(x).square().mean(), wrong_at())
    assert found(incident)[0] == ("SG209", "certain")
    assert asked(incident)["composite"].agrees


def test_an_ordinary_fault_is_not_asked_of_witnesses() -> None:
    torch.manual_seed(0)
    net = Net(lambda x: (x - x.detach().clamp_min(99.0)).log())
    incident = first_incident(net, lambda x: net(x).square().mean(), wrong_at(), 1)
    assert asked(incident) == {}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_fused_update_is_made_again_by_the_loop_over_parameters() -> None:
    def fused(params: Any, grads: Any, *_: Any, lr: float, **__: Any) -> None:
        for parameter, gradient in zip(params, grads, strict=True):
            parameter.sub_(gradient, alpha=lr)
        if bad["on"]:
            params[0].view(-1)[0] = float("nan")

    torch.manual_seed(0)
    net = nn.Linear(WIDTH, 1)
    loop = Loop(net, torch.optim.SGD(net.parameters(), 0.1, fused=True), lambda x: net(x).mean())
    batches = wrong_at()
    with overridden("_fused_sgd_", fused):
        assert loop.step(0, [batches(0)]) is None
        origin = loop.step(1, [batches(1)])
    assert origin is not None and origin.phase == "optimizer"
    (loop_over,) = origin.evidence.witnesses
    assert loop_over.path == "unfused" and loop_over.finite and loop_over.agrees is not False


@pytest.mark.parametrize("kernel", [42, "no_namespace"])
def test_only_kernels_have_references(kernel: Any) -> None:
    with pytest.raises(TypeError, match="must be an autograd function or an operator"):
        register_reference(kernel, torch.relu)


def test_a_reference_is_a_function() -> None:
    with pytest.raises(TypeError, match="not a function"):
        register_reference(Forward, 3)  # type: ignore[arg-type]
