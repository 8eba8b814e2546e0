"""The joint diffusion: every setting has an effect, both versions lose the same, nothing is made to
look finite.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_latent_dlm import places, quiet, settings
from stepguard.check.settings import unread

# --- configurations
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mmdit", "mmdit_stable"])
def test_every_key_is_read(
    folder: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from latentDLM_mmdit import train_mmdit, train_mmdit_stable

    start = (train_mmdit if name == "mmdit" else train_mmdit_stable).start
    left: set[str] | None = None
    for kind in ("unconditional", "sequential", "random"):
        config = settings(*places(tmp_path), f"loss.loss_type={kind}", name=name)
        start(config)
        found = set(unread(config))
        left = found if left is None else left & found

    assert left == set()
    assert "eval at step 3: eval_loss " in capsys.readouterr().out


def test_an_unknown_key_and_an_unknown_word_are_refused(folder: Path) -> None:
    with pytest.raises(Exception, match="learning_rate"):
        settings("optimizer.learning_rate=1")
    with pytest.raises(
        SystemExit, match=r"loss\.loss_type='t2i' is not known; use one of unconditional, l2t"
    ):
        settings("loss.loss_type=t2i")


def test_the_configurations_hold_what_the_report_says(folder: Path) -> None:
    from latentDLM_mmdit.settings import load_config

    stable, original = load_config("mmdit_stable"), load_config("mmdit")

    assert (stable.optimizer.lr, stable.optimizer.grad_clip_norm) == (5e-5, 0.5)
    assert (original.optimizer.lr, original.optimizer.grad_clip_norm) == (1e-4, 1.0)
    assert (stable.training.warmup_steps, stable.training.dtype) == (2000, "bf16")
    assert stable.training.gradient_accumulation_steps == 2
    assert (
        stable.loss.loss_scale,
        stable.loss.text_loss_weight,
        stable.loss.latent_loss_weight,
    ) == (1.0, 1.0, 0.1)
    assert (stable.loss.eps, stable.loss.text_loss_max, stable.loss.latent_loss_max) == (
        1e-8,
        100.0,
        10.0,
    )


@pytest.mark.parametrize(
    "change",
    [
        "training.warmup_share=0.0",
        "training.dtype=fp32",
        "training.gradient_accumulation_steps=1",
        "loss.text_loss_weight=0.5",
        "loss.latent_loss_weight=1.0",
        "loss.normalize_latents=True",
        "optimizer.lr=3e-5",
        "optimizer.grad_clip_norm=0.3",
    ],
)
def test_each_setting_of_the_report_changes_what_is_trained(folder: Path, change: str) -> None:
    def trained(*changed: str) -> Any:
        loop = quiet("training.num_train_steps=20", *changed)
        batches = loop.batches()
        for _ in range(2):
            loop.one_step([next(batches) for _ in range(loop.session.parts)])
        loop.close()
        return torch.nn.utils.parameters_to_vector(loop.session.trainer.parameters())

    assert not trained().equal(trained(change))


def test_a_warm_up_of_2000_steps_is_2000_steps_long(folder: Path) -> None:
    session = quiet("training.num_train_steps=30000").session

    assert session.warmup == 2000
    assert session.rate_factor(999) == pytest.approx(0.5, rel=0.01)


def test_clipping_is_1_where_it_is_unset_and_off_at_0(folder: Path) -> None:
    from latentDLM_mmdit.guarded import clip_norm

    found = [
        clip_norm(quiet(change).session)
        for change in (
            "optimizer.grad_clip_norm=null",
            "optimizer.grad_clip_norm=0",
            "optimizer.grad_clip_value=0.3",
        )
    ]

    assert found == [1.0, None, 0.3]


def test_a_run_ends_with_the_epochs_or_the_steps_whichever_comes_first(folder: Path) -> None:
    assert quiet("training.num_train_steps=100").session.total_steps == 100
    one = quiet("training.num_train_steps=100", "training.num_epochs=1").session

    assert one.total_steps == one.batches.per_epoch // 2 < 100


def test_a_short_run_leaves_its_warm_up(folder: Path) -> None:
    session = quiet("training.num_train_steps=100").session

    assert session.warmup == 10
    assert max(session.rate_factor(step) for step in range(100)) > 0.9


# --- losses
# --------------------------------------------------------------------------------------------------


def trainers(*overrides: str) -> tuple[Any, Any, Any]:
    """The original and the stable losses over the same network, and a batch."""
    from latentDLM_mmdit.improved_trainer import ImprovedTrainer

    session = quiet("training.precision=pure", "training.dtype=fp32", *overrides).session
    stable = session.trainer
    return (
        ImprovedTrainer(stable.model, stable.noise, stable.terms, stable.mask_id),
        stable,
        session.batches.at(0),
    )


@pytest.mark.parametrize("weighting", ["none", "mdlm"])
def test_both_versions_have_the_same_loss_on_healthy_data(folder: Path, weighting: str) -> None:
    original, stable, batch = trainers(f"loss.weighting={weighting}")
    a, b = original(batch), stable(batch)

    assert a.keys() == b.keys() == {"text_loss", "latent_loss"}
    for name in a:
        torch.testing.assert_close(a[name], b[name])


def test_an_infinite_logit_under_the_mask_poisons_only_the_original(folder: Path) -> None:
    original, stable, batch = trainers()
    noised = stable.noised(batch, "unconditional")
    logits = torch.zeros(*batch["input_ids"].shape, 12)
    hidden = ~(noised.masked & batch["attention_mask"])
    logits[hidden.nonzero()[0, 0], hidden.nonzero()[0, 1]] = float("inf")

    assert math.isnan(float(original.text_loss(logits, batch, noised)))
    assert math.isfinite(float(stable.text_loss(logits, batch, noised)))


def test_the_reports_clamp_ends_the_gradient_and_a_soft_limit_does_not(folder: Path) -> None:
    gradients = []
    for limit in ("clamp", "soft"):
        _, stable, _ = trainers(f"loss.limit={limit}")
        prediction = torch.full((2, 4), 100.0, requires_grad=True)
        stable.latent_loss(prediction, torch.zeros(2, 4)).backward()
        gradients.append(float(prediction.grad.abs().sum()))

    assert gradients[0] == 0.0
    assert gradients[1] > 0.0


def test_a_time_above_0_998_is_1_in_bfloat16_and_only_there_is_the_schedule_lost(
    folder: Path,
) -> None:
    from latentDLM_mmdit.noise import masking

    t = torch.tensor([0.5, 0.9985])
    cast, _ = masking(t, eps=1e-4, dtype=torch.bfloat16)
    wide, share = masking(t, eps=1e-4, dtype=None)

    assert torch.isfinite(cast).tolist() == [True, False]
    torch.testing.assert_close(wide, 1.0 / t, rtol=1e-3, atol=0.0)  # the ELBO weight is 1 / t
    torch.testing.assert_close(share, (1.0 - 1e-4) * t)


def test_each_loss_type_trains_its_own_modality(folder: Path) -> None:
    _, stable, _ = trainers("training.freeze_unused=true")
    for kind, losses, frozen in (
        ("l2t", {"text_loss"}, "latent_head"),
        ("t2l", {"latent_loss"}, "text_head"),
        ("unconditional", {"text_loss", "latent_loss"}, None),
    ):
        session = quiet(f"loss.loss_type={kind}").session
        found = stable(session.batches.at(0))
        held = {
            name.split(".")[0] for name, p in stable.model.named_parameters() if not p.requires_grad
        }

        assert set(found) == losses
        assert (frozen in held) if frozen else not held


def test_ranks_share_the_loss_type_and_no_sample(folder: Path) -> None:
    from latentDLM_mmdit.pairs import Batches, loss_types

    session = quiet("loss.loss_type=random").session
    types = loss_types(session.config)
    ranks = [Batches(session.pairs, 4, seed=0, types=types, ranks=(rank, 2)) for rank in range(2)]
    kinds = {tuple(r.at(i)["loss_type"] for i in range(20)) for r in ranks}
    seen = [
        torch.cat([r.at(i)["latent"] for i in range(r.per_epoch)])[:, 0].tolist() for r in ranks
    ]

    assert len(kinds) == 1
    assert len(set(*kinds)) == 3
    assert not set(seen[0]) & set(seen[1])


@pytest.mark.parametrize(
    "change",
    [
        "model.num_residual_streams=2",
        "model.latent_parameterization=v",
        "model.latent_beta_schedule=linear",
        "model.latent_beta_schedule=sigmoid",
        "model.dropout=0.1",
        "optimizer.use_fused=true",
    ],
)
def test_options_of_the_model_train(folder: Path, change: str) -> None:
    plain, changed = quiet(), quiet(change)
    plain.train(bar=False)
    changed.train(bar=False)

    assert all(map(math.isfinite, changed.history.losses))
    assert changed.history.losses != plain.history.losses or "fused" in change
