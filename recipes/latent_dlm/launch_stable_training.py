"""Start the stable version; every argument goes to it.

torchrun --nnodes=1 --nproc_per_node=2 launch_stable_training.py --config-name mmdit_stable
"""

from __future__ import annotations

from latentDLM_mmdit.train_mmdit_stable import main

if __name__ == "__main__":
    main()
