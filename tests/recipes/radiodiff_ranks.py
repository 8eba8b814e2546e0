"""One of the processes that train radiodiff together: it writes down its weights and how many steps
it left out.

Run by torchrun in the recipe's folder: radiodiff_ranks.py FOLDER key.sub=value ...
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))
sys.path.insert(1, str(Path(__file__).parents[1]))

from denoising_diffusion_pytorch.settings import load_config
from process_group import threads
from train_cond_ldm import start

trainer = start(load_config(Path("configs/radio_train_m.yaml"), sys.argv[2:]))
digest = hashlib.sha256()
for tensor in trainer.model.state_dict().values():
    digest.update(tensor.contiguous().numpy().tobytes())
said = f"{digest.hexdigest()} {len(trainer.guard.incidents)}"
(Path(sys.argv[1]) / f"rank{os.environ['RANK']}").write_text(said, encoding="utf-8")
del trainer, tensor  # with the model goes the process group, whose threads must not outlive Python
gc.collect()
assert not threads()
