"""Every rule, in the order of its code. A new cause is one new file here."""

from stepguard.diagnose.rule import Rule
from stepguard.diagnose.rules import (
    sg101,
    sg102,
    sg103,
    sg104,
    sg201,
    sg202,
    sg203,
    sg204,
    sg205,
    sg206,
    sg207,
    sg301,
    sg302,
    sg401,
    sg402,
    sg403,
    sg501,
    sg502,
    sg503,
    sg504,
    sg505,
    sg506,
    sg601,
    sg602,
    sg603,
    sg701,
    sg702,
    sg703,
    sg801,
    sg802,
    sg803,
)

_FILES = (
    *(sg101, sg102, sg103, sg104, sg201, sg202, sg203, sg204, sg205, sg206, sg207, sg301, sg302),
    *(sg401, sg402, sg403, sg501, sg502, sg503, sg504, sg505, sg506, sg601, sg602, sg603),
    *(sg701, sg702, sg703, sg801, sg802, sg803),
)

RULES: tuple[Rule, ...] = tuple(file.RULE for file in _FILES)
