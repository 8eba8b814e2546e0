"""The commands of the recipes' READMEs and of the source reports, as they are typed, in a fresh
copy of the recipe's folder.

No setting is changed to make a command short. One long run of each recipe goes to its end; others
are stopped by Ctrl+C once they are seen to train, and the line that resumes them is next.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipe_process import RECIPES, ROOT

MACHINE = Path(__file__).with_name("machine")
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
    """What the processor answers."""


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
    ),
    Typed('tail -n 999 train_logs/latest.log | grep -E "loss|NaN|ERROR"', says="loss"),
    Typed(PLOT),
    Typed(
        "python -c \"import torch; ckpt = torch.load('outputs/mmdit-stable/latest/checkpoint.pt'); "
        "print('NaN in model:', any(torch.isnan(p).any() for p in ckpt['model'].values()))\"",
        says="NaN in model: False",
    ),
    Typed(
        "python latentDLM_mmdit/train_mmdit.py training.num_train_steps=100", says="100 steps in"
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
    ),
    Typed(
        "torchrun --nnodes=1 --nproc_per_node=2 launch_stable_training.py --config-name "
        "mmdit_stable",
        code=None,
        until=TRAINS,
    ),
    Typed(
        "bash train_qwen_english_l2t_stable.sh",
        says="version stable: latentDLM_mmdit/train_mmdit_stable.py",
        code=None,
        until=TRAINS,
    ),
    Typed(
        "TRAIN_VERSION=original bash train_qwen_english_l2t_stable.sh",
        says="version original: latentDLM_mmdit/train_mmdit.py",
        code=None,
        until=TRAINS,
    ),
    Typed(
        "python latentDLM_mmdit/train_mmdit_stable.py optimizer.lr=1e-3 model.schedule_dtype=model",
        says="ERROR: Invalid loss at step ",
        code=INTERRUPTED,
        until=r"(?s)ERROR: Invalid loss at step .*step \d+/600 loss \d",
    ),
    Typed(
        "python latentDLM_mmdit/train_mmdit_stable.py training.resume=last_good "
        "training.num_train_steps=900",
        says="going on after ",
        code=INTERRUPTED,
        until=r"step \d+/900 loss \d",
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
    ),
    Typed(
        "python train_cond_ldm.py --cfg configs/radio_train_m.yaml trainer.enable_resume=True "
        "trainer.resume_milestone=2",
        says="model-2.pt: step 200; changed: ",
    ),
    Typed(
        "python train_cond_ldm.py --cfg configs/radio_train_m.yaml trainer.train_num_steps=100 "
        "model.eps=0",
        says="SG202",
    ),
    Typed(
        "stepguard check train_cond_ldm:build --config configs/radio_report.yaml",
        says="SG801",
        code=5,
    ),
)
SFT = (
    Typed(
        "python homework/sft.py",
        says="stopped by Ctrl+C; resume=last goes on",
        code=INTERRUPTED,
        until=r"'grad_norm': \d",
    ),
    Typed("python homework/sft.py resume=last", says="ok accuracy 0."),
    Typed(
        "python homework/sft.py guard.mode=original model.torch_dtype=float16 "
        "lora.autocast_adapter_dtype=False args.optim=adamw_torch",
        says="NOT saved: ",
        code=INTERRUPTED,
        until="'loss': nan, 'grad_norm': nan",
    ),
    Typed("python homework/sft.py data.max_length=40", says="SG102", code=5),
    Typed("stepguard check homework.sft:build --config configs/train.yaml"),
    Typed(
        "python homework/sft.py",
        says="Mixed precision: no",
        code=INTERRUPTED,
        until=r"'grad_norm': \d",
        has_bf16=False,
    ),
)
RESTRAN = (
    Typed(
        "python train.py --model restran_mhc --mhc-n 2 --lr 0.0001",
        says="stopped by Ctrl+C; saved restran_mhc_last.pth",
        code=INTERRUPTED,
        until=r"Ep 2/30: .* [1-9]\d*/40 \[",
    ),
    Typed("python train.py --resume results/restran_mhc_last.pth", says="1200 steps, loss "),
    Typed(
        "stepguard live results/run --stage '0-199: fall>1, incidents=0, alpha<0.1' "
        "--stage '200-1199: incidents=0, val_acc>0.5'",
        says="healthy",
    ),
    Typed("python diagnose_nan.py", says="the newest one that is whole"),
    Typed("stepguard verify results --lr 1e-4"),
    Typed("stepguard quarantine results"),
    Typed("mkdir -p results/corrupted_backup && mv results/*.pth results/corrupted_backup/"),
    Typed("python diagnose_nan.py", says="2 moved to corrupted_backup: not looked at"),
    Typed("python train.py", code=INTERRUPTED, until=r"Ep 1/30: .* [1-9]\d*/40 \["),
    Typed("python train.py --data real", code=INTERRUPTED, until=r"Ep 1/30: .* [1-9]\d*/40 \["),
)
COMMANDS = {
    "latent_dlm": LATENT_DLM,
    "radiodiff": RADIODIFF,
    "restran_mhc": RESTRAN,
    "sft": SFT,
}
ELSEWHERE = (
    r"pip |cd |make |export |tail -f ",  # around a command
    r"python -m recipes\.verify",  # test_short.py, test_sft.py
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


@pytest.mark.slow
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
    variables = {
        "PYTHONPATH": f"{MACHINE}{os.pathsep}{ROOT / 'src'}",
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
