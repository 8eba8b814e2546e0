"""The commands of the recipes' READMEs and of the source reports, in a fresh copy of the recipe's
folder: at a short length, and as they are typed with STEPGUARD_FULL=1. The demo, and `make
verify-recipes`.

At full length no setting is changed to make a command short. One long run of each recipe goes to
its end; others are stopped by Ctrl+C once they are seen to train, and the line that resumes them is
next.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from examples import demo
from examples.denoiser import LEVELS, Denoiser, batches, loss_of, quality
from omegaconf import OmegaConf
from recipes.common.expect import Expectation, problems
from recipes.common.outcome import Mode, Outcome, first_bad
from scripts import picture

import stepguard
from recipe_process import RECIPES, ROOT, TINY, run
from stepguard.records import Decision, Finding, Incident, Origin, Reading, Verdict

SITECUSTOMIZE = """
import os
from pathlib import Path

if "CPU_HAS_BF16" in os.environ:
    import torch

    def answer():
        Path(os.environ["BF16_ASKED"]).touch()
        return os.environ["CPU_HAS_BF16"] == "yes"

    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        setattr(torch.cpu, name, answer)
"""
"""A machine with or without bf16: what torch answers about the processor, and a file that exists
afterwards if somebody asked. Where nobody did, the answer cannot matter.
"""
MINUTES = 30
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Typed:
    """A command and how it ends. `until`: Ctrl+C once its output matches."""

    line: str
    says: str = ""
    code: int | None = 0
    until: str = ""
    has_bf16: bool = True
    """What the processor answers; a machine without is for full length."""
    short: str | None = ""
    """What makes it short; None: another test runs it so."""
    short_says: str | None = None
    """Where the short form has other words."""
    short_code: int | None = 0
    short_until: str = ""


LATENT = f"{TINY['latent_dlm']} data.folder=tiny"
RADIO = TINY["radiodiff"]
BAD = f"{LATENT} training.train_batch_size=64 training.seed=4"
"""A time is rounded to 1 within six steps."""
STABLE = (
    "torchrun --nnodes=1 --nproc_per_node=2 latentDLM_mmdit/train_mmdit_stable.py --config-name "
    "mmdit_stable "
)
TRAINS = r"step 50/600 loss \d"
PLOT = """python -c "
import json
losses = []
with open('training_log.jsonl') as f:
    for line in f:
        losses.append(json.loads(line)['loss'])
import matplotlib.pyplot as plt
plt.plot(losses)
plt.yscale('log')
plt.savefig('loss_curve.png')
" && test -s loss_curve.png"""
LATENT_DLM = (
    Typed(
        STABLE + "training.num_train_steps=100 logging.log_freq=10",
        says="weights of 2 processes are equal bit for bit",
        short=LATENT,
    ),
    Typed('tail -n 999 train_logs/latest.log | grep -E "loss|NaN|ERROR"', says="loss"),
    Typed(PLOT),
    Typed(
        "python -c \"import torch; ckpt = torch.load('outputs/mmdit-stable/latest/checkpoint.pt'); "
        "print('NaN in model:', any(torch.isnan(p).any() for p in ckpt['model'].values()))\"",
        says="NaN in model: False",
    ),
    Typed(
        "python latentDLM_mmdit/train_mmdit.py training.num_train_steps=100",
        says="100 steps in",
        short=LATENT,
        short_says="6 steps in",
    ),
    Typed("stepguard live outputs/mmdit-stable --steps 1000", says="healthy"),
    Typed("stepguard compare outputs/mmdit outputs/mmdit-stable", says="losses judged before"),
    Typed("stepguard verify outputs/mmdit/latest/checkpoint.pt", says="good"),
    Typed("stepguard plot outputs/mmdit-stable", says="loss_curve.png"),
    Typed(
        STABLE + "logging.run_name=mmdit-qwen-32d-l2t-stable training.train_batch_size=4 "
        "optimizer.lr=5e-5 optimizer.grad_clip_norm=0.5",
        code=None,
        until=TRAINS,
        short=None,  # test_latent_dlm.py, with a bad sample
    ),
    Typed(
        "torchrun --nnodes=1 --nproc_per_node=2 launch_stable_training.py --config-name "
        "mmdit_stable",
        code=None,
        until=TRAINS,
        short=LATENT,
    ),
    Typed(
        "bash train_qwen_english_l2t_stable.sh",
        says="version stable: latentDLM_mmdit/train_mmdit_stable.py",
        code=None,
        until=TRAINS,
        short=None,  # test_latent_dlm.py
    ),
    Typed(
        "TRAIN_VERSION=original bash train_qwen_english_l2t_stable.sh",
        says="version original: latentDLM_mmdit/train_mmdit.py",
        code=None,
        until=TRAINS,
        short=None,  # test_latent_dlm.py
    ),
    Typed(
        "python latentDLM_mmdit/train_mmdit_stable.py optimizer.lr=1e-3 model.schedule_dtype=model",
        says="ERROR: Invalid loss at step ",
        code=INTERRUPTED,
        until=r"(?s)ERROR: Invalid loss at step .*step \d+/600 loss \d",
        short=BAD,
    ),
    Typed(
        "python latentDLM_mmdit/train_mmdit_stable.py training.resume=last_good "
        "training.num_train_steps=900",
        says="going on after ",
        code=INTERRUPTED,
        until=r"step \d+/900 loss \d",
        short=f"{BAD} training.num_train_steps=9",
    ),
    Typed(
        "stepguard check latentDLM_mmdit.train_mmdit_stable:build --config "
        "configs/mmdit_stable.yaml",
    ),
)
RADIODIFF = (
    Typed(
        "accelerate launch train_cond_ldm.py --cfg configs/radio_train_m.yaml",
        says="300 steps in",
        short=RADIO,
        short_says="6 steps in",
    ),
    Typed(
        "python train_cond_ldm.py --cfg configs/radio_train_m.yaml trainer.enable_resume=True "
        "trainer.resume_milestone=2",
        says="model-2.pt: step 200; changed: ",
        short=f"{RADIO} trainer.resume_milestone=1",
        short_says="model-1.pt: step 3; changed: ",
    ),
    Typed(
        "python train_cond_ldm.py --cfg configs/radio_train_m.yaml trainer.train_num_steps=100 "
        "model.eps=0",
        says="SG202",
        short=f"{RADIO} model.timesteps=20",
    ),
    Typed(
        "stepguard check train_cond_ldm:build --config configs/radio_report.yaml",
        says="SG801",
        code=5,
        short_code=5,
    ),
)
SFT = (
    Typed(
        "python homework/sft.py",
        says="stopped by Ctrl+C; resume=last goes on",
        code=INTERRUPTED,
        until=r"'grad_norm': \d",
        short="args.max_steps=1000",
        short_code=INTERRUPTED,
        short_until=r"'grad_norm': \d",
    ),
    Typed(
        "python homework/sft.py resume=last",
        says="ok accuracy 0.",
        short="args.max_steps=12",
        short_says="accuracy",
        short_code=None,  # the verdict on so small a model
    ),
    Typed(
        "python homework/sft.py guard.mode=original model.torch_dtype=float16 "
        "lora.autocast_adapter_dtype=False args.optim=adamw_torch",
        says="NOT saved: ",
        code=INTERRUPTED,
        until="'loss': nan, 'grad_norm': nan",
        short="args.max_steps=4",
        short_says="'loss': nan, 'grad_norm': nan",
        short_code=None,
    ),
    Typed(
        "python homework/sft.py data.max_length=40",
        says="SG102",
        code=5,
        short="args.max_steps=4",
        short_code=5,
    ),
    Typed("stepguard check homework.sft:build --config configs/train.yaml"),
    Typed(
        "python homework/sft.py",
        says="Mixed precision: no",
        code=INTERRUPTED,
        until=r"'grad_norm': \d",
        has_bf16=False,
        short=None,  # test_sft.py asks both kinds of processor
    ),
)
ONE_EPOCH = "--epochs 1 --batch-size 2"
RESTRAN = (
    Typed(
        "python train.py --model restran_mhc --mhc-n 2 --lr 0.0001",
        says="stopped by Ctrl+C; saved restran_mhc_last.pth",
        code=INTERRUPTED,
        until=r"Ep 2/30: .* [1-9]\d*/40 \[",
        short="--epochs 3 --batch-size 2",
        short_code=INTERRUPTED,
        short_until=r"Ep 1/3: .* [1-9]\d*/40 \[",
    ),
    Typed(
        "python train.py --resume results/restran_mhc_last.pth",
        says="1200 steps, loss ",
        short="--epochs 3 --batch-size 2",
        short_says="120 steps, loss ",
    ),
    Typed(
        "stepguard live results/run --stage '0-199: fall>1, incidents=0, alpha<0.1' "
        "--stage '200-1199: incidents=0, val_acc>0.5'",
        says="healthy",
        short_says="incidents",
        short_code=None,
    ),
    Typed("python diagnose_nan.py", says="the newest complete and finite one"),
    Typed("stepguard verify results --lr 1e-4"),
    Typed("stepguard quarantine results"),
    Typed("mkdir -p results/corrupted_backup && mv results/*.pth results/corrupted_backup/"),
    Typed(
        "python diagnose_nan.py",
        says="2 moved to corrupted_backup: not looked at",
        short_says="moved to corrupted_backup: not looked at",
    ),
    Typed(
        "python train.py",
        code=INTERRUPTED,
        until=r"Ep 1/30: .* [1-9]\d*/40 \[",
        short=ONE_EPOCH,
        short_says="40 steps, loss ",
    ),
    Typed(
        "python train.py --data real",
        code=INTERRUPTED,
        until=r"Ep 1/30: .* [1-9]\d*/40 \[",
        short=ONE_EPOCH,
        short_says="40 steps, loss ",
    ),
)
COMMANDS = {
    "latent_dlm": LATENT_DLM,
    "radiodiff": RADIODIFF,
    "restran_mhc": RESTRAN,
    "sft": SFT,
}
ELSEWHERE = (
    r"pip |cd |make |export |tail -f ",  # around a command
    r"python -m recipes\.verify",  # below
    r"python (real_glosses|real_maps)\.py",  # needs files that `make recipes-real` brings
    r"python .*(data\.source=real|data\.name=real|configs/real\.yaml)",
)


def documented(recipe: str) -> set[str]:
    """The commands in the README's blocks, without comments and line breaks."""
    text = (RECIPES / recipe / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    found = set()
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            command = re.sub(r"\s{2,}#.*", "", line)
            found.add(" ".join(command.split()))
    return {line for line in found if line and not re.match("|".join(ELSEWHERE), line)}


@pytest.mark.parametrize("recipe", COMMANDS)
def test_every_command_of_the_readme_is_run(recipe: str) -> None:
    assert documented(recipe) <= {command.line for command in COMMANDS[recipe]}


IMPORTED = {"sft": ("transformers.trainer", "peft"), "radiodiff": ("accelerate",)}


@pytest.mark.documented
@pytest.mark.parametrize("recipe", COMMANDS)
def test_the_documented_commands_run_at_a_short_length(recipe: str, tmp_path: Path) -> None:
    folder = fresh(recipe, tmp_path)
    if recipe == "sft":  # `stepguard check` takes its settings from the file only
        file = folder / "configs" / "train.yaml"
        small = OmegaConf.from_dotlist(TINY["sft"].split())
        OmegaConf.save(OmegaConf.merge(OmegaConf.load(file), small), file)
    for command in COMMANDS[recipe]:
        if command.short is None:
            continue
        says = command.says if command.short_says is None else command.short_says
        short = Typed(
            f"{command.line} {command.short}".strip(),
            says,
            command.short_code,
            command.short_until,
        )
        first, *rest = shlex.split(short.line)
        forks = first in ("python", "stepguard", "torchrun") and "&&" not in short.line
        if not forks or short.until:
            run_typed(folder, short)
            continue
        words = ["-m", "stepguard", *rest] if first == "stepguard" else rest
        ranks = 2 if first == "torchrun" else 0
        words = words[2:] if ranks else words  # --nnodes, --nproc_per_node
        done = run(folder, *words, ranks=ranks, imports=IMPORTED.get(recipe, ()))
        said = done.stdout + done.stderr
        assert short.code in (None, done.returncode), f"{short.line}\n{said[-4000:]}"
        assert short.says in " ".join(said.split()), f"{short.line}\n{said[-4000:]}"


@pytest.mark.full
@pytest.mark.timeout(60 * MINUTES)
@pytest.mark.parametrize("recipe", COMMANDS)
def test_the_documented_commands_run_as_typed(recipe: str, tmp_path: Path) -> None:
    folder = fresh(recipe, tmp_path)
    for command in COMMANDS[recipe]:
        run_typed(folder, command)

    # who never asked cannot be told otherwise by another machine; who does runs on both kinds
    asks = (folder.parent / "asked").exists()
    assert asks == (not all(command.has_bf16 for command in COMMANDS[recipe]))


def fresh(recipe: str, tmp_path: Path) -> Path:
    """The folder without what earlier runs left in it."""
    copy = tmp_path / recipe
    left = ("results", "outputs", "train_logs", "training_log.jsonl", "__pycache__")
    shutil.copytree(RECIPES / recipe, copy, ignore=shutil.ignore_patterns(*left))
    return copy


def run_typed(folder: Path, command: Typed) -> None:
    """Run it and see that it ends as it should."""
    machine = folder.parent / "machine"
    machine.mkdir(exist_ok=True)
    (machine / "sitecustomize.py").write_text(SITECUSTOMIZE)
    variables = {
        "PYTHONPATH": f"{machine}{os.pathsep}{ROOT / 'src'}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "CPU_HAS_BF16": "yes" if command.has_bf16 else "no",
        "BF16_ASKED": str(folder.parent / "asked"),
        "PET_STANDALONE": "1",  # torchrun: two tests at a time must not meet at its usual port
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        "COLUMNS": "150",
    }
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # inherited where a shell started pytest in the background; programs would ignore Ctrl+C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        ["bash", "-c", command.line],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    said, interrupted = "", False
    try:
        while chunk := os.read(process.stdout.fileno(), 1 << 16):
            said += chunk.decode(errors="replace")
            if command.until and not interrupted and re.search(command.until, said):
                os.killpg(process.pid, signal.SIGINT)
                interrupted = True
        process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
    assert interrupted == bool(command.until), f"{command.line}\n{said[-4000:]}"
    assert command.code in (None, process.returncode), f"{command.line}\n{said[-4000:]}"
    assert command.says in " ".join(said.split()), f"{command.line}\n{said[-4000:]}"


# --- `python -m recipes.verify`: 0 only if detection, origin, cause and recovery are right
# --------------------------------------------------------------------------------------------------


def rows_of(table: str) -> dict[str, dict[str, str]]:
    """A table of `recipes.verify` by mode and heading."""
    heading, *lines = (line for line in table.splitlines() if line[:1] in "┃│" and line)
    names = [cell.strip() for cell in heading.strip("┃").split("┃")]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows if row[0]}


@pytest.mark.full
def test_latent_dlm_survives_a_schedule_in_bfloat16_and_a_loss_scale_that_overflows() -> None:
    ended = run("latent_dlm", "latent_dlm", "--short", module="recipes.verify")

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "aten.reciprocal in -, noise.py" in ended.stdout
    assert "sample 1 " in ended.stdout  # the one whose time is rounded to 1
    assert "aten.mm in model.text_head, mmdit.py" in ended.stdout
    assert "optimizer.eps: group 0: eps=1e-08 is 0 in float16" in ended.stdout


@pytest.mark.documented
def test_radiodiff_survives_the_logarithm_of_zero_and_refuses_the_reports_precision() -> None:
    ended = run("radiodiff", "radiodiff", "--short", module="recipes.verify")

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "aten.log in unet.embed, cond_unet.py" in ended.stdout
    assert "sample 2" in ended.stdout  # the one whose time is 0
    assert "Configuration is NOT aligned" in ended.stdout
    rows = rows_of(ended.stdout.partition("┏")[2])
    # the fix saves none
    assert rows["seedfix"]["bad tensors"] == rows["unguarded"]["bad tensors"] == "60 of 61"
    assert rows["guarded"]["bad tensors"] == "0 of 61"


@pytest.mark.full
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


@pytest.mark.full
def test_the_short_form_of_verify_survives_adams_eps_and_finds_the_cut_answers() -> None:
    ended = run("sft", "sft", "--short", module="recipes.verify", imports=IMPORTED["sft"])

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "aten.addcdiv_" in ended.stdout
    assert "fail labels.empty" in ended.stdout


# --- what counts as a recipe that works, judged from literal outcomes
# --------------------------------------------------------------------------------------------------


EXPECTED = Expectation(
    metric="NMSE", ops=("aten.log",), causes=("SG202",), relative=0.1, source="unet.py"
)


def incident(step: int = 3, op: str = "aten.log", code: str = "SG202") -> Incident:
    return Incident(
        id="one",
        step=step,
        verdict=Verdict(kind="nonfinite_loss", severity="incident", summary="loss is nan"),
        reading=Reading(step=step, loss=float("nan")),
        origin=Origin(step=step, phase="forward", op=op, source="somewhere/unet.py:7"),
        findings=(Finding(code=code, title="title", evidence=("numbers",), certainty="certain"),),
        decision=Decision(action="skip"),
    )


def outcomes(**changed: Outcome) -> dict[Mode, Outcome]:
    fine = Outcome(mode="healthy", losses=(1.0, 0.5), first_bad=None, metric=0.05, tensors=4)
    dead = replace(fine, mode="unguarded", first_bad=3, metric=float("nan"), bad_parameters=4)
    guarded = replace(fine, mode="guarded", first_bad=3, metric=0.052, incidents=(incident(),))
    found: dict[Mode, Outcome] = {"healthy": fine, "unguarded": dead, "guarded": guarded}
    return {mode: changed.get(mode, outcome) for mode, outcome in found.items()}


def test_a_run_that_is_found_named_and_survived_has_no_problem() -> None:
    assert problems(EXPECTED, outcomes()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"incidents": (incident(step=4),)}, "first bad step 3, detected at 4"),
        ({"incidents": (incident(op="aten.sin"),)}, "origin aten.sin, expected one of aten.log"),
        ({"incidents": (incident(code="SG203"),)}, "cause SG203, expected one of SG202"),
        ({"incidents": ()}, "guarded, no incident was recorded"),
        ({"bad_buffers": 1}, "guarded, 0 parameters and 1 buffers are bad"),
        ({"metric": 0.056}, "NMSE is 0.056 guarded and 0.05 healthy"),
        ({"metric": float("nan")}, "NMSE is nan guarded and 0.05 healthy"),
    ],
)
def test_every_shortcoming_of_the_guarded_run_is_said(change: dict[str, object], said: str) -> None:
    guarded = replace(outcomes()["guarded"], **change)

    assert said in problems(EXPECTED, outcomes(guarded=guarded))


def test_an_unguarded_run_that_lives_proves_nothing() -> None:
    alive = replace(outcomes()["unguarded"], bad_parameters=0)

    assert problems(EXPECTED, outcomes(unguarded=alive)) == [
        "the unguarded run ended without a bad tensor, so nothing was survived"
    ]


def test_a_ruin_may_be_seen_before_anything_is_non_finite_but_not_after() -> None:
    early = replace(EXPECTED, early=True)
    guarded = replace(outcomes()["guarded"], first_bad=None)

    assert (
        problems(
            early, outcomes(guarded=replace(guarded, incidents=(incident(step=2, op="aten.mul"),)))
        )
        == []
    )
    assert problems(early, outcomes(guarded=replace(guarded, incidents=(incident(step=5),)))) == [
        "first bad step 3, detected at 5"
    ]


def test_the_first_bad_step_is_the_first_loss_or_norm_that_is_not_finite() -> None:
    assert first_bad([1.0, 1.0], [1.0, 1.0]) is None
    assert first_bad([1.0, math.nan], [1.0, math.nan]) == 1
    assert first_bad([1.0, 1.0, math.nan], [math.inf, 1.0, 1.0]) == 0


# --- the demo
# --------------------------------------------------------------------------------------------------

STEPS = 90
FIRST_BAD = 57


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[demo.Outcome], Path]:
    """The demo, run once; what it printed and returned."""
    folder = tmp_path_factory.mktemp("demo") / "demo_run"
    seen: list[demo.Outcome] = []
    patch = pytest.MonkeyPatch()
    # a module's fixture comes before the one of conftest.py that gives locating more time
    patch.setattr("stepguard.locate.replay.FLOOR", 3.0)
    train = demo.train
    patch.setattr(demo, "train", lambda *args: seen.append(train(*args)) or seen[-1])
    try:
        code = demo.main(["--steps", str(STEPS), "--run-dir", str(folder)])
    finally:
        patch.undo()
    return code, seen, folder


def test_unguarded_dies_and_guarded_survives(shown: tuple[int, list[demo.Outcome], Path]) -> None:
    code, (unguarded, guarded, repaired), _ = shown
    assert code == 0
    assert (unguarded.alive, guarded.alive, repaired.alive) == (False, True, True)
    assert unguarded.first_bad == guarded.first_bad == FIRST_BAD and repaired.first_bad is None
    assert unguarded.nan_tensors >= unguarded.tensors - 1 and math.isnan(unguarded.decibels)
    assert (unguarded.committed, unguarded.skipped) == (FIRST_BAD, 0)
    assert (guarded.committed, guarded.skipped, guarded.left_out) == (STEPS, 0, 2)
    assert guarded.nan_tensors == 0
    assert guarded.decibels == pytest.approx(repaired.decibels, abs=2.0)


def test_guard_names_line_sample_and_cause(shown: tuple[int, list[demo.Outcome], Path]) -> None:
    guarded = shown[1][1]
    level = list(batches(STEPS, demo.SEED))[FIRST_BAD]["level"]
    first = guarded.incidents[0]
    assert first.step == FIRST_BAD and first.origin is not None
    assert first.origin.op == "aten.log" and first.origin.module == "level"
    assert first.origin.samples == tuple((level == 0).nonzero().flatten().tolist())
    assert first.findings[0].code == "SG202"


def test_recorded_step_can_be_replayed(shown: tuple[int, list[demo.Outcome], Path]) -> None:
    guarded, folder = shown[1][1], shown[2]
    again = stepguard.replay(folder / str(guarded.incidents[0].capsule), build=demo.rebuild)
    assert again.origin is not None and again.origin.reproduced and again.origin.op == "aten.log"


def test_earlier_demo_is_replaced_and_nothing_else_is_touched(tmp_path: Path) -> None:
    ours, theirs, file = tmp_path / "ours", tmp_path / "theirs", tmp_path / "file"
    assert demo.fresh_folder(ours) is None
    (ours / "journal.jsonl").write_text("old")
    assert demo.fresh_folder(ours) is None
    assert [p.name for p in ours.iterdir()] == [demo.MARKER]
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("years of work")
    file.write_text("x")
    for other in (theirs, file):
        assert "--run-dir" in str(demo.fresh_folder(other))
    assert (theirs / "thesis.tex").read_text() == "years of work" and file.read_text() == "x"


def test_foreign_folder_ends_the_demo_before_any_training(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    assert demo.main(["--steps", "1", "--run-dir", str(tmp_path)]) == 2


def test_guarded_run_that_dies_gives_a_failure_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "quality", lambda model: math.nan)
    assert demo.main(["--steps", "2", "--run-dir", str(tmp_path / "run")]) == 1


def test_failure_comes_from_the_data_and_nowhere_else() -> None:
    torch.manual_seed(0)
    model = Denoiser()
    seen = [
        (bool((b["level"] == 0).any()), bool(torch.isfinite(loss_of(model, b))))
        for b in batches(100, demo.SEED)
    ]
    assert all(zero != finite for zero, finite in seen) and any(zero for zero, _ in seen)
    assert math.isfinite(quality(model)) and LEVELS == 1000


def test_commands_of_the_demo_can_be_typed_outside_of_its_venv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    guarded = demo.Outcome("guarded", 5, 59, 0, 1, 0, 25, 0.1, 0.1, 20.0)
    command, *_ = demo.next_commands(guarded, Path("demo_run"))
    assert command == "stepguard report demo_run"
    monkeypatch.setenv("PATH", "")
    command, *_ = demo.next_commands(guarded, Path("demo_run"))
    program, _, rest = command.partition(" ")
    assert rest == "report demo_run"
    assert Path(program).resolve() == (Path(sys.executable).parent / "stepguard").resolve()


@pytest.mark.full
def test_picture_is_whole_and_needs_no_network() -> None:
    svg = picture.picture(steps=60)
    ElementTree.fromstring(svg)
    assert re.findall(r"https?://[^\"' )]+", svg) == ["http://www.w3.org/2000/svg"]
    assert "@font-face" not in svg and "@import" not in svg
    words = re.sub(r"<[^>]+>", "", svg).replace("\xa0", " ").replace("&#160;", " ")
    for shown in (
        "step 57",
        "torch.log(level)",
        "SG202",
        "examples/denoiser.py",
        "stepguard report demo_run",
    ):
        assert shown in words


def test_picture_in_the_docs_needs_no_network() -> None:
    svg = picture.PICTURE.read_text(encoding="utf-8")
    ElementTree.fromstring(svg)
    assert re.findall(r"https?://[^\"' )]+", svg) == ["http://www.w3.org/2000/svg"]
