"""Which names a pickle may refer to, by words only."""

from __future__ import annotations

import pytest

from stepguard.verification.pickle_globals import trust
from stepguard.verification.pickle_values import Global


def named(text: str) -> Global:
    module, _, name = text.rpartition(":")
    return Global(module, name)


@pytest.mark.parametrize(
    ("name", "referred", "called"),
    [
        ("collections:OrderedDict", "needed", "needed"),
        ("torch:bfloat16", "needed", "needed"),
        ("torch.cuda:HalfStorage", "needed", "needed"),
        ("numpy.dtypes:Float32DType", "needed", "needed"),
        ("torch.nn.modules.linear:Linear", "needed", "needed"),
        ("__torch__.model:Net", "needed", "needed"),
        ("builtins:set", "needed", "needed"),
        ("builtins:eval", "hostile", "hostile"),
        ("os:system", "hostile", "hostile"),
        ("torch.nn.functional:gelu", "unknown", "hostile"),
        ("torch.hub:load", "hostile", "hostile"),
        ("torch.nn.modules.linear:torch.os.system", "hostile", "hostile"),
        ("mine.model:Settings", "unknown", "calls"),
        ("mine.model:run", "unknown", "hostile"),
        ("collections:OrderedDict.__init__.__globals__", "hostile", "hostile"),
        ("copyreg:extension 7", "hostile", "hostile"),
    ],
)
def test_name_is_judged_by_what_loading_it_would_do(name: str, referred: str, called: str) -> None:
    assert trust(named(name)) == referred
    assert trust(named(name), called=True) == called
