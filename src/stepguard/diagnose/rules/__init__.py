"""Every rule, in the order of its code. A new cause is a function in the module of its hundred
(sg600 goes up to SG8xx) and a page sgNNN.md.
"""

from stepguard.diagnose.rule import Rule
from stepguard.diagnose.rules import (
    sg100,
    sg200,
    sg300,
    sg400,
    sg500,
    sg600,
    sg900,
    sg950,
)

_MODULES = (sg100, sg200, sg300, sg400, sg500, sg600, sg900, sg950)
_FOUND = [one for module in _MODULES for one in vars(module).values() if isinstance(one, Rule)]
RULES: tuple[Rule, ...] = tuple(sorted(_FOUND, key=lambda rule: rule.code))
