"""What both training scripts do around their loop: the command line, the processes, Ctrl+C."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

from latentDLM_mmdit.loop import Loop, run
from latentDLM_mmdit.ranks import Ranks, join, leave
from latentDLM_mmdit.settings import Settings, from_command_line

AnyLoop = TypeVar("AnyLoop", bound=Loop)
INTERRUPTED = 130


def train(config: Settings, build_loop: Callable[[Settings, Ranks], AnyLoop]) -> AnyLoop:
    """Meet the other processes, run the loop to its end, part from them whatever happens."""
    ranks = join(config.training.backend, config.training.world_size)
    try:
        loop = build_loop(config, ranks)
        run(loop)
    finally:
        leave(ranks)
    return loop


def call(
    description: str | None,
    config_name: str,
    start: Callable[[Settings], Loop],
    arguments: Sequence[str] | None,
) -> None:
    """Start with what the command line says."""
    config = from_command_line((description or "").partition("\n")[0], config_name, arguments)
    if config is None:
        return
    try:
        start(config)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    # the wrapped model holds the process group, in a cycle; threads of gloo that end after Python
    # abort the process
    gc.collect()
