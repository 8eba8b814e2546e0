"""The short form of `make verify-recipes`: it exits with 0 only if detection, origin, cause and recovery are right."""

from __future__ import annotations

from recipe_process import run


def test_latent_dlm_survives_a_schedule_in_bfloat16_and_a_loss_scale_that_overflows() -> None:
    ended = run("latent_dlm", "latent_dlm", "--short", module="recipes.verify")

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "aten.reciprocal in -, noise.py" in ended.stdout
    assert "sample 12" in ended.stdout  # the one whose time is rounded to 1
    assert "aten.mm in model.text_head, mmdit.py" in ended.stdout
    assert "optimizer.eps: group 0: eps=1e-08 is 0 in float16" in ended.stdout


def test_radiodiff_survives_the_logarithm_of_zero_and_refuses_the_reports_precision() -> None:
    ended = run("radiodiff", "radiodiff", "--short", module="recipes.verify")

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "aten.log in unet.embed, cond_unet.py" in ended.stdout
    assert "sample 2" in ended.stdout  # the one whose time is 0
    assert "Configuration is NOT aligned" in ended.stdout


def test_restran_survives_a_resume_with_thirty_times_the_learning_rate() -> None:
    ended = run("restran_mhc", "restran_mhc", "--short", module="recipes.verify")

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "aten.exp in mhc." in ended.stdout
    assert "rewind 1" in ended.stdout
    first, *_, last = (line for line in ended.stdout.splitlines() if "NaN/Inf" in line)
    assert "in mHC WRITE-IN + RESIDUAL" in first  # where the overflow comes out ...
    assert "in MODEL PREDICTIONS" in last  # ... and what it ends in
