"""One of the processes that train radiodiff together: it writes down its weights and how many steps it left out.

Run by torchrun in the recipe's folder: radiodiff_ranks.py FOLDER key.sub=value ...
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))

from denoising_diffusion_pytorch.settings import load_config
from train_cond_ldm import start

trainer = start(load_config(Path("configs/radio_train_m.yaml"), sys.argv[2:]))
digest = hashlib.sha256()
for tensor in trainer.model.state_dict().values():
    digest.update(tensor.contiguous().numpy().tobytes())
said = f"{digest.hexdigest()} {len(trainer.guard.incidents)}"
(Path(sys.argv[1]) / f"rank{os.environ['RANK']}").write_text(said, encoding="utf-8")
