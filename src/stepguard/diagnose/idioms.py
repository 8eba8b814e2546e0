"""Formulas that torch has a stable function for: `log(1 + exp(x))` is `softplus(x)`.

A formula is written as Python with `X` for any expression; it is recognised in every spelling of
its calls (`x.exp()`, `torch.exp(x)`) and in either order of a sum.
"""

from __future__ import annotations

import ast

from stepguard.diagnose.case import words
from stepguard.diagnose.source_line import (
    Expression,
    Span,
    bracketed,
    call_operands,
    statement_tree,
)

SOFTPLUS = "torch.nn.functional.softplus({X})"
FORMULAS = (
    ("log(1 + exp(X))", SOFTPLUS),
    ("log1p(exp(X))", SOFTPLUS),
    ("log(sigmoid(X))", "torch.nn.functional.logsigmoid({X})"),
    ("log(1 - sigmoid(X))", "torch.nn.functional.logsigmoid(-{bX})"),
    ("log(softmax(X, *D))", "torch.nn.functional.log_softmax({X}, {D})"),
    ("log(sum(exp(X), *D))", "torch.logsumexp({X}, {D})"),
    ("exp(X) / sum(exp(X), *D)", "torch.softmax({X}, {axis})"),
    ("1 / (1 + exp(-X))", "torch.sigmoid({X})"),
    ("1 / (1 + exp(X))", "torch.sigmoid(-{bX})"),
    ("exp(X) / (1 + exp(X))", "torch.sigmoid({X})"),
    ("(exp(X) - exp(-X)) / (exp(X) + exp(-X))", "torch.tanh({X})"),
    (
        "log(cosh(X))",
        "({X} + torch.nn.functional.softplus(-2.0 * {bX}) - 0.6931471805599453)",
    ),
)
"""What is written, and what to write instead. `*D`: the further arguments, `axis` without keepdim,
`bX` in brackets where it needs them.
"""
PATTERNS = tuple((ast.parse(text, mode="eval").body, use) for text, use in FORMULAS)
ROOTS = {"sqrt(X)": "{bX}", "X ** 0.5": "{bX}", "std(X, *D)": "{bX}.var({D})"}
"""Roots, and what they are taken of."""
ROOT_PATTERNS = tuple((ast.parse(text, mode="eval").body, use) for text, use in ROOTS.items())
KEPT = ("keepdim=True", "True")


def stable_form(line: str, span: Span | None) -> tuple[Expression, str] | None:
    """The formula around the operation at `span`, and what to write instead; None without any."""
    if span is None:
        return None
    for node in ast.walk(statement_tree(line)):
        if not isinstance(node, ast.expr):
            continue
        found = Expression(line, node)
        start, end = found.span()
        if not start <= span[0] <= span[1] <= end:
            continue
        for pattern, use in PATTERNS:
            bound: dict[str, str] = {}
            if _matches(pattern, node, bound) and (text := _written(use, bound)):
                return found, text
    return None


def with_roots(text: str, root: str) -> str:
    """The expression with `root` for its roots, `{}` being the argument; empty without any."""
    roots = _Roots(root)
    tree = roots.visit(ast.parse(text, mode="eval"))
    return ast.unparse(tree) if roots.found else ""


class _Roots(ast.NodeTransformer):
    """Writes another root for every square root and standard deviation of tensors."""

    def __init__(self, root: str) -> None:
        self.found = False
        self._root = root

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        # a root of numbers has no gradient
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("math.", "np.")):
            return node
        for pattern, use in ROOT_PATTERNS:
            bound: dict[str, str] = {}
            if _matches(pattern, node, bound):
                self.found = True
                given = ", ".join(filter(None, bound.get("D", "").split("\0")))
                argument = use.format(bX=bracketed(bound["X"]), D=given)
                return ast.parse(self._root.format(argument), mode="eval").body
        return node


def _written(use: str, bound: dict[str, str]) -> str:
    """The replacement; empty where the arguments do not fit it."""
    x = bound["X"]
    given = [part for part in bound.get("D", "").split("\0") if part]
    axis = [part for part in given if part not in KEPT]
    if "{D}" in use and not axis:
        return ""
    if "{axis}" in use and (len(axis) != 1 or len(given) != 2):
        return ""
    return use.format(X=x, bX=bracketed(x), D=", ".join(given), axis="".join(axis))


def _matches(pattern: ast.AST, node: ast.AST, bound: dict[str, str]) -> bool:
    if isinstance(pattern, ast.Name):
        text = ast.unparse(node)
        return bound.setdefault(pattern.id, text) == text
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Constant):
        return bool(pattern.value == getattr(node, "value", None))
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call):
        found = call_operands(node, words(ast.unparse(pattern.func)))
        if found is None or not found[0]:
            return False
        operands, settings = found
        first, *rest = pattern.args
        further = [*map(ast.unparse, operands[1:]), *settings]
        if further and not rest:
            return False
        if rest:
            bound["D"] = "\0".join(further)
        return _matches(first, operands[0], bound)
    parts = list(ast.iter_child_nodes(pattern))
    orders = [list(ast.iter_child_nodes(node))]
    if isinstance(getattr(pattern, "op", None), ast.Add):
        # sums match in either order
        orders.append(orders[0][::-1])
    for order in orders:
        trial = dict(bound)
        if all(_matches(part, other, trial) for part, other in zip(parts, order, strict=True)):
            bound.update(trial)
            return True
    return False
