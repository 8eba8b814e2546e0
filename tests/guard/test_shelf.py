"""Output gradients of a watched model are copied into memory that is used again."""

import pytest
import torch
from torch import nn

import stepguard
from stepguard.engine.shelf import SMALL, Shelf

LARGE = SMALL // 4


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_a_small_gradient_is_held_as_it_is() -> None:
    gradient = torch.randn(10)
    assert Shelf().keep(gradient) is gradient


def test_a_large_gradient_is_copied_bit_for_bit() -> None:
    gradient = torch.randn(LARGE)
    gradient[3] = float("nan")
    copy = Shelf().keep(gradient)
    assert _address(copy) != _address(gradient)
    assert torch.equal(copy.view(torch.int32), gradient.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_a_copy_has_type_and_strides_of_the_gradient(dtype: torch.dtype) -> None:
    gradient = torch.randn(4, 8, 128, 256).to(dtype).contiguous(memory_format=torch.channels_last)
    copy = Shelf().keep(gradient)
    assert (copy.dtype, copy.stride()) == (dtype, gradient.stride())
    assert torch.equal(copy, gradient)


def test_an_expanded_gradient_is_not_blown_up() -> None:
    gradient = torch.ones(()).expand(LARGE)
    assert Shelf().keep(gradient) is gradient


def test_memory_is_lent_again_only_when_nobody_has_the_copy() -> None:
    shelf = Shelf()
    first, second = shelf.keep(torch.full((LARGE,), 1.0)), shelf.keep(torch.full((LARGE,), 2.0))
    place = _address(first)
    assert _address(second) != place
    assert first.eq(1).all()
    del first
    third = shelf.keep(torch.full((LARGE,), 3.0))
    assert _address(third) == place
    assert second.eq(2).all()


def test_shapes_that_change_from_step_to_step_take_no_further_memory() -> None:
    shelf = Shelf()
    places = {_address(shelf.keep(torch.zeros(2 * LARGE - step))) for step in range(20)}
    assert len(places) == 1


def test_what_became_too_small_is_given_up() -> None:
    shelf = Shelf()
    for step in range(5):
        shelf.keep(torch.zeros(LARGE * (step + 1)))
    assert len(shelf._lent) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_watched_loop_keeps_its_memory_from_step_to_step(fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, LARGE // 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    with stepguard.watch(model, optimizer, config=stepguard.GuardConfig(terminal="quiet")) as guard:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
        (capture,) = [hook._hear.__self__ for hook in model._forward_hooks.values()]
        # a fused step's verdict comes one step late, and with it its gradient
        assert 1 <= len(capture._shelf._lent) <= (2 if fused else 1)
    assert not capture._shelf._lent
    assert guard.steps == 6
