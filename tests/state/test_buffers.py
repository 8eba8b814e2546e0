"""A vetoed step leaves every buffer bit-identical, and remembering stays cheap."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stepguard.state.buffers import BufferKeeper, keeps_statistics
from stepguard.state.python_state import SMALL

BIG = SMALL + 1


class Table(nn.Module):
    """A module with one buffer."""

    def __init__(self, values: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("table", values)


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def _identical(module: nn.Module, state: dict[str, Tensor]) -> bool:
    """Bit for bit, so that NaN equals itself and -0.0 is not 0.0."""
    now = dict(module.named_buffers())
    return now.keys() == state.keys() and all(
        _bits(now[name]) == _bits(value) for name, value in state.items()
    )


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def test_skipped_step_leaves_batchnorm_untouched() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.BatchNorm1d(12))
    model(torch.randn(4, 2, 2, 2))
    keeper = BufferKeeper([model])
    keeper.remember()
    before = _state(model)
    model(torch.full((4, 2, 2, 2), float("nan")))
    assert model[1].running_mean.isnan().all()
    keeper.restore()
    assert _identical(model, before)


def test_batchnorm_is_untouched_at_every_later_step_too() -> None:
    model = nn.BatchNorm1d(3)
    keeper = BufferKeeper([model])
    for step in range(5):
        model(torch.randn(8, 3) + step)
        keeper.remember()
        before = _state(model)
        model(torch.full((8, 3), float("inf")))
        keeper.restore()
        assert _identical(model, before)


def _fill(module: Table) -> None:
    module.table.fill_(7.0)


def _reassign(module: Table) -> None:
    module.table = module.table * 3


def _drop(module: Table) -> None:
    module.table = None


@pytest.mark.parametrize("change", [_fill, _reassign, _drop])
@pytest.mark.parametrize("size", [1, SMALL, BIG])
def test_buffer_comes_back_as_the_same_tensor_with_the_same_values(
    change: Callable[[Table], None], size: int
) -> None:
    module = Table(torch.ones(size))
    tensor = module.table
    keeper = BufferKeeper([module])
    for value in (1.0, 2.0):
        tensor.fill_(value)
        keeper.remember()
        change(module)
        keeper.restore()
        assert module.table is tensor
        assert bool((tensor == value).all())


def test_small_buffer_written_behind_the_version_counter_comes_back() -> None:
    module = Table(torch.ones(4))
    keeper = BufferKeeper([module])
    keeper.remember()
    module.table.data.fill_(5.0)
    keeper.remember()
    module.table.data.fill_(9.0)
    keeper.restore()
    assert module.table.tolist() == [5.0] * 4


def test_large_buffer_written_behind_the_version_counter_is_never_thrown_back_by_steps() -> None:
    module = Table(torch.zeros(BIG))
    keeper = BufferKeeper([module])
    for step in range(1, 4):
        keeper.remember()
        module.table.data.fill_(float(step))  # an EMA codebook, for instance
    keeper.restore()
    assert bool((module.table == 3.0).all())


def test_large_untouched_buffer_is_not_copied_again() -> None:
    module = Table(torch.ones(BIG))
    keeper = BufferKeeper([module])
    keeper.remember()
    (saved,) = keeper._copies.values()
    saved.saved.fill_(123.0)  # would be overwritten by a copy
    keeper.remember()
    assert bool((saved.saved == 123.0).all())
    module.table.add_(1.0)
    keeper.remember()
    assert bool((saved.saved == 2.0).all())


def test_buffer_that_was_none_is_none_again() -> None:
    module = Table(None)
    keeper = BufferKeeper([module])
    keeper.remember()
    module.table = torch.full((3,), float("nan"))
    keeper.restore()
    assert module.table is None


def test_buffer_created_in_an_earlier_step_is_protected_from_then_on() -> None:
    module = Table(None)
    keeper = BufferKeeper([module])
    keeper.remember()
    module.table = torch.ones(3)
    keeper.remember()
    module.table.fill_(float("nan"))
    keeper.restore()
    assert module.table.tolist() == [1.0] * 3


def test_tensor_shared_by_two_modules_is_back_in_both() -> None:
    shared = torch.ones(2)
    model = nn.ModuleList([Table(shared), Table(shared)])
    keeper = BufferKeeper([model])
    keeper.remember()
    model[0].table = torch.zeros(2)
    model[1].table = torch.zeros(2)
    shared.fill_(9.0)
    keeper.restore()
    assert model[0].table is shared and model[1].table is shared
    assert shared.tolist() == [1.0, 1.0]


def test_expanded_buffer_does_not_hinder_the_others() -> None:
    model = nn.ModuleList([Table(torch.arange(3.0).expand(5, 3)), Table(torch.ones(2))])
    keeper = BufferKeeper([model])
    keeper.remember()
    keeper.remember()
    model[1].table.fill_(4.0)
    keeper.restore()
    assert model[1].table.tolist() == [1.0, 1.0]
    assert model[0].table[4].tolist() == [0.0, 1.0, 2.0]


def test_non_finite_sentinel_in_a_buffer_survives() -> None:
    module = Table(torch.tensor([float("-inf"), float("nan"), 1.0]))
    keeper = BufferKeeper([module])
    keeper.remember()
    before = _state(module)
    module.table.zero_()
    keeper.restore()
    assert _identical(module, before)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float64]
)
def test_buffer_of_any_type_comes_back(dtype: torch.dtype) -> None:
    module = Table(torch.ones(3, dtype=dtype))
    keeper = BufferKeeper([module])
    keeper.remember()
    keeper.remember()
    module.table.zero_()
    keeper.restore()
    assert module.table.tolist() == torch.ones(3, dtype=dtype).tolist()


def test_module_converted_between_steps_is_remembered_anew() -> None:
    model = nn.BatchNorm1d(2)
    keeper = BufferKeeper([model])
    keeper.remember()
    model.double()
    keeper.remember()
    model(torch.randn(4, 2, dtype=torch.float64))
    keeper.restore()
    assert model.running_mean.dtype == torch.float64
    assert model.running_mean.tolist() == [0.0, 0.0]


def test_module_added_between_steps_is_remembered() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    keeper = BufferKeeper([model])
    keeper.remember()
    model.append(nn.BatchNorm1d(2))
    keeper.remember()
    model(torch.randn(4, 2))
    keeper.restore()
    assert model[1].num_batches_tracked.item() == 0


def test_several_roots_are_kept() -> None:
    model, criterion = nn.BatchNorm1d(2), Table(torch.ones(2))
    keeper = BufferKeeper([model, criterion])
    keeper.remember()
    model(torch.randn(4, 2))
    criterion.table.zero_()
    keeper.restore()
    assert model.num_batches_tracked.item() == 0
    assert criterion.table.tolist() == [1.0, 1.0]


def test_restoring_leaves_no_gradient_history() -> None:
    module = Table(torch.ones(2))
    keeper = BufferKeeper([module])
    keeper.remember()
    weight = torch.ones(2, requires_grad=True)
    module.table = module.table * weight
    keeper.restore()
    assert not module.table.requires_grad and module.table.grad_fn is None


def test_keeping_changes_nothing_in_a_copy_of_the_model() -> None:
    model = nn.BatchNorm1d(2)
    keeper = BufferKeeper([model])
    keeper.remember()
    twin = copy.deepcopy(model)
    twin(torch.randn(4, 2))
    keeper.restore()
    assert twin.num_batches_tracked.item() == 1


def test_only_tracking_norm_layers_keep_statistics() -> None:
    assert keeps_statistics(nn.BatchNorm1d(2))
    assert not keeps_statistics(nn.BatchNorm1d(2, track_running_stats=False))
    assert not keeps_statistics(nn.LayerNorm(2))
    assert not keeps_statistics(nn.InstanceNorm1d(2))
    assert keeps_statistics(nn.InstanceNorm1d(2, track_running_stats=True))
