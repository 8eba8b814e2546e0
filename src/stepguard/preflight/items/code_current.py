"""`code.current`: which code, versions and operations would run, against those the checkpoint was
made with.
"""

from __future__ import annotations

import platform

import torch

from stepguard import __version__
from stepguard.preflight.answers import Missing, Seen, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item


def _look(seen: Inspection) -> Seen:
    now = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "stepguard": __version__,
    }
    said = [", ".join(f"{name} {version}" for name, version in now.items())]
    try:
        operations = ", ".join(f"{name} ({times})" for name, times in sorted(seen.live.ops.items()))
        said.append(f"the step runs {operations or 'no exponential, logarithm, root or softmax'}")
    except Missing:
        pass
    try:
        then = seen.stored.versions
    except Missing:
        then = {}
    other = [
        f"{name} {then[name]} -> {now[name]}"
        for name in now
        if name in then and str(then[name]) != now[name]
    ]
    if other:
        fix = (
            "Resume with the versions of the checkpoint, or start with a short comparison of the "
            "loss."
        )
        return warned(*said, f"since the checkpoint: {', '.join(other)}", fix=fix)
    return passed(*said)


ITEM = Item(id="code.current", title="code and versions in use", look=_look)
