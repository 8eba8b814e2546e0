"""The short form of `make verify-recipes`: it exits with 0 only if detection, origin, cause and
recovery are right.
"""

from __future__ import annotations

from recipe_process import run


def rows_of(table: str) -> dict[str, dict[str, str]]:
    """A table of `recipes.verify` by mode and heading."""
    heading, *lines = (line for line in table.splitlines() if line[:1] in "┃│" and line)
    names = [cell.strip() for cell in heading.strip("┃").split("┃")]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows if row[0]}


def test_latent_dlm_survives_a_schedule_in_bfloat16_and_a_loss_scale_that_overflows() -> None:
    ended = run("latent_dlm", "latent_dlm", "--short", module="recipes.verify")

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "aten.reciprocal in -, noise.py" in ended.stdout
    assert "sample 1 " in ended.stdout  # the one whose time is rounded to 1
    assert "aten.mm in model.text_head, mmdit.py" in ended.stdout
    assert "optimizer.eps: group 0: eps=1e-08 is 0 in float16" in ended.stdout


def test_radiodiff_survives_the_logarithm_of_zero_and_refuses_the_reports_precision() -> None:
    ended = run("radiodiff", "radiodiff", "--short", module="recipes.verify")

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "aten.log in unet.embed, cond_unet.py" in ended.stdout
    assert "sample 2" in ended.stdout  # the one whose time is 0
    assert "Configuration is NOT aligned" in ended.stdout
    rows = rows_of(ended.stdout.partition("┏")[2])
    assert (
        rows["seedfix"]["bad tensors"] == rows["unguarded"]["bad tensors"] == "60 of 61"
    )  # the fix saves none
    assert rows["guarded"]["bad tensors"] == "0 of 61"


def test_restran_survives_a_resume_with_thirty_times_the_learning_rate() -> None:
    ended = run("restran_mhc", "restran_mhc", "--short", module="recipes.verify")

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "aten.exp in mhc." in ended.stdout
    quick, young = (rows_of(part) for part in ended.stdout.split("┏")[1:])
    assert quick["guarded"]["done"] == "rewind 1"
    assert (
        young["guarded"]["done"] == "skip 1, rewind 1"
    )  # the second in a row has the weights verified
    # what was learned before the jump is there again, and more; under the report's clamps it is not
    assert (
        float(quick["guarded"]["validation loss"])
        < 1.1 * float(quick["healthy"]["validation loss"])
        < 2.0
    )
    assert float(quick["seedfix"]["validation loss"]) > 3.0
    assert quick["unguarded"]["distance"] == young["unguarded"]["distance"] == "lost"
    first, *_, last = (line for line in ended.stdout.splitlines() if "NaN/Inf" in line)
    assert "in mHC WRITE-IN + RESIDUAL" in first  # where the overflow comes out ...
    assert "in MODEL PREDICTIONS" in last  # ... and what it ends in
