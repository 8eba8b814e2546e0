"""Find in the user's source line the expression that an operation came from, and name operands."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, cast

from stepguard.diagnose.case import base_name, words
from stepguard.records import Edit, Operand, Origin, Remedy
from stepguard.records.incident import Safety

# --- The expression of an operation, and the line with another one in its place.


NAMESPACES = words("torch F functional linalg special nn math np")
"""What stands before a function that takes its tensor as the first argument."""
LIBRARY = words("F functional losses distributions")
"""What stands before functions of a library that are made of several operations."""
ONE_OPERATION = words(
    """
    relu gelu silu elu selu celu softplus sigmoid tanh leaky_relu softmax log_softmax linear conv1d
    conv2d conv3d dropout embedding pad one_hot interpolate layer_norm group_norm batch_norm
    max_pool1d max_pool2d avg_pool1d avg_pool2d mse_loss l1_loss smooth_l1_loss huber_loss
    cross_entropy nll_loss binary_cross_entropy binary_cross_entropy_with_logits logsigmoid
    """
)
"""Functions of such a library with no division, logarithm or root of their own."""
DISTRIBUTION = words("log_prob entropy rsample kl_divergence cdf icdf")
OPERANDS = {"input": 0, "self": 0, "other": 1, "exponent": 1}
"""Operands that may be given by name, and their position."""
CLOSING = {"(": ")", "[": "]", "{": "}"}
SAFE_FUNCTION = re.compile(r"safe_\w+")
"""Functions of stepguard.numerics."""
_NUMBERED = re.compile(r"^\W*(\d+)\s*[|:│]?\s?(.*)$")

Node = ast.expr | ast.AugAssign
Span = tuple[int, int]
"""Where something begins and ends in a line, in bytes."""


class Expression(NamedTuple):
    """One call, operator or number in the culprit's line."""

    origin: Origin
    line: str
    """The line without its indentation."""
    node: Node
    arguments: tuple[ast.expr, ...] = ()
    """A method's own object first."""
    settings: tuple[str, ...] = ()
    """Named arguments, `dim=-1`."""

    @property
    def text(self) -> str:
        """What the user wrote, in one line."""
        return self._text(self.node)

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(map(self._text, self.arguments))

    @property
    def in_place(self) -> bool:
        """It changes its first operand: `a /= b`, `a.div_(b)`."""
        if isinstance(self.node, ast.Call):
            return getattr(self.node.func, "attr", "").endswith("_")
        return isinstance(self.node, ast.AugAssign)

    def span(self, node: Node | None = None) -> Span:
        """Where the expression, or a part of it, stands in the line."""
        node = node or self.node
        lines = self.line.encode().splitlines(keepends=True)
        before = sum(map(len, lines[: node.lineno - 1]))
        inside = sum(map(len, lines[node.lineno - 1 : (node.end_lineno or node.lineno) - 1]))
        return before + node.col_offset, before + inside + (node.end_col_offset or 0)

    def _text(self, node: Node) -> str:
        start, end = self.span(node)
        written = self.line.encode()[start:end].decode()
        return ast.unparse(node) if "\n" in written else written

    def instead(self, use: str, why: str, safety: Safety = "safe") -> Remedy:
        """The remedy that is `use` in the place of the expression."""
        title = f"`{use}` for `{' '.join(self.text.split())}`: {why}"
        called = [name for name in SAFE_FUNCTION.findall(use) if name not in self.text]
        return self.rewritten({self.node: use}, title, safety, tuple(called))

    def with_operand(self, position: int, use: str, title: str, safety: Safety = "safe") -> Remedy:
        """The remedy that is the line with another operand."""
        return self.rewritten({self.arguments[position]: use}, title, safety)

    def rewritten(
        self,
        changes: Mapping[Node, str],
        title: str,
        safety: Safety = "safe",
        functions: tuple[str, ...] = (),
    ) -> Remedy:
        """The remedy that is the line with these parts replaced.

        `functions`: of stepguard.numerics, that it calls.
        """
        spans = {self.span(node): use.encode() for node, use in changes.items()}
        whole = self.line.encode()
        # From the right, so that the places of the others stay true.
        for start, end in sorted(spans, reverse=True):
            whole = whole[:start] + spans[start, end] + whole[end:]
        line = whole.decode()
        edits: tuple[Edit, ...] = ()
        statement = self.origin.statement
        if statement is not None:
            indent = statement.text[: len(statement.text) - len(statement.text.lstrip())]
            old = tuple(statement.text.split("\n"))
            new = tuple(f"{indent}{line}".split("\n"))
            edits = (Edit(file=statement.file, line=statement.line, old=old, new=new),)
        snippet = f"{import_of(functions)}\n{line}" if functions else line
        return Remedy(title=title, snippet=snippet, safety=safety, edits=edits, needs=functions)


def culprit_line(origin: Origin) -> str:
    """The statement of the origin as the user wrote it, else its line; empty where not known.

    Empty as well where the operation is inside a package that the line has called.
    """
    if origin.library is not None:
        return ""
    if origin.statement is not None:
        return origin.statement.text.strip()
    # `file.py:88`, or `cell [3], line 5` in a notebook
    wanted = re.split(r"\D", origin.source or "")[-1]
    for numbered in origin.context:
        match = _NUMBERED.match(numbered)
        if match and match[1] == wanted:
            return match[2].strip()
    return ""


def culprit_span(origin: Origin) -> Span | None:
    """Which bytes of `culprit_line` are the operation; None where that is not known."""
    statement = origin.statement
    if statement is None:
        return None
    indent = len(statement.text) - len(statement.text.lstrip())
    return statement.start - indent, statement.end - indent


def import_of(functions: tuple[str, ...]) -> str:
    """The line that makes them known."""
    return f"from stepguard.numerics import {', '.join(sorted(set(functions)))}"


def nodes_of(origin: Origin) -> list[ast.AST]:
    """Every part of the culprit's line."""
    return list(ast.walk(statement_tree(culprit_line(origin))))


def find_expression(
    origin: Origin,
    calls: frozenset[str],
    operator: type[ast.operator] | None = None,
    *,
    anywhere: bool = False,
) -> Expression | None:
    """The call of these names, or use of this operator, that the operation is.

    Where its place in the line is not known, or `anywhere` is asked for, it must be the only one,
    and no function of a library may stand in the line that might do the same inside.
    """
    line = culprit_line(origin)
    nodes = nodes_of(origin)
    found = []
    for node in nodes:
        arguments, settings = _parts(node, calls, operator)
        if arguments:
            written = cast(Node, node)
            found.append(Expression(origin, line, written, tuple(arguments), tuple(settings)))
    span = culprit_span(origin)
    if span is not None and not anywhere:
        # Python moves the start of a call to its method's name where that is in a later line.
        around = [one for one in found if one.span()[1] == span[1] and one.span()[0] <= span[0]]
        return max(around, key=lambda one: one.span()[0], default=None)
    if len(found) != 1 or any(_hides_operations(node, calls) for node in nodes):
        return None
    # not where the expression began in the line before, or goes on in the next one
    start, end = found[0].span()
    whole = end <= len(line.encode()) and not (start == 0 and line[0] in "+-")
    if whole:
        return found[0]
    return None


def _parts(
    node: ast.AST, calls: frozenset[str], operator: type[ast.operator] | None
) -> tuple[list[ast.expr], list[str]]:
    """Operands and settings of such a call or operator; nothing of another node."""
    if isinstance(node, ast.Call):
        return call_operands(node, calls)
    if operator is not None and isinstance(getattr(node, "op", None), operator):
        if isinstance(node, ast.BinOp):
            return [node.left, node.right], []
        if isinstance(node, ast.AugAssign):
            return [cast(ast.expr, node.target), node.value], []
    return [], []


def statement_tree(line: str) -> ast.Module:
    """The line as a tree, even if it is only the head of a block or begins a longer statement;
    empty where it is none.
    """
    waiting = []
    for character in line:
        if character in CLOSING:
            waiting.append(CLOSING[character])
        elif waiting and character == waiting[-1]:
            waiting.pop()
    closed = line + "".join(reversed(waiting))
    for text in (line, f"{line} pass", closed):
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return ast.Module(body=[], type_ignores=[])


def _hides_operations(node: ast.AST, calls: frozenset[str]) -> bool:
    """Is this a function of a library that is made of several operations?"""
    method = getattr(node, "func", None)
    if not isinstance(method, ast.Attribute) or method.attr in calls:
        return False
    of_library = _last_name(method.value) in LIBRARY and method.attr not in ONE_OPERATION
    return method.attr in DISTRIBUTION or of_library


def _last_name(owner: ast.expr) -> str:
    """`functional` of `torch.nn.functional`."""
    return owner.id if isinstance(owner, ast.Name) else str(getattr(owner, "attr", ""))


def call_operands(node: ast.Call, calls: frozenset[str]) -> tuple[list[ast.expr], list[str]]:
    """The tensor and what follows it, and the named arguments; nothing of other calls."""
    function = node.func
    if _last_name(function) not in calls:
        return [], []
    operands = list(node.args)
    if isinstance(function, ast.Attribute) and _last_name(function.value) not in NAMESPACES:
        operands.insert(0, function.value)
    settings = []
    for keyword in node.keywords:
        # `torch.pow(input=x, exponent=2)`: operands like any other
        if OPERANDS.get(keyword.arg or "", -1) == len(operands):
            operands.append(keyword.value)
        else:
            settings.append(ast.unparse(keyword))
    return operands, settings


def bracketed(text: str) -> str:
    """The expression as it can stand before a point or beside an operator."""
    tree = ast.parse(text, mode="eval").body
    single = isinstance(tree, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    return text if single else f"({text})"


def is_number(text: str) -> bool:
    """`1.5`, `-2` or `1 / 2.4`: written out in figures."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        return False
    figures = (ast.Expression, ast.Constant, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop)
    return all(isinstance(node, figures) for node in ast.walk(tree))


# --- Call operands what the user calls them: by their expression in the source line, or by their
# part.


OPERATORS: dict[str, type[ast.operator]] = {
    "add": ast.Add,
    "sub": ast.Sub,
    "rsub": ast.Sub,
    "mul": ast.Mult,
    "div": ast.Div,
    "reciprocal": ast.Div,
    "pow": ast.Pow,
    "remainder": ast.Mod,
    # matmul folds a batch into `mm` and may swap its sides then; `bmm` keeps them.
    "bmm": ast.MatMult,
    "matmul": ast.MatMult,
}
COMMUTES = words("add mul")
"""Here torch takes the tensor first where the other side is a Python number."""
ALIASES = {
    "div": "div divide true_divide",
    "mul": "mul multiply",
    "sub": "sub subtract",
    "_to_copy": "to half bfloat16 type type_as",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "linalg_vector_norm": "norm vector_norm",
    "norm": "norm vector_norm",
    "acos": "acos arccos",
    "acosh": "acosh arccosh",
    "asin": "asin arcsin",
    "atan2": "atan2 arctan2",
    "atanh": "atanh arctanh",
}
PARTS = """
div true_divide floor_divide remainder | self: the dividend | other: the divisor
reciprocal | self: the divisor
addcdiv | tensor1: the dividend | tensor2: the divisor | self: the sum so far
addcmul | tensor1: the first factor | tensor2: the second factor
mul | self: the first factor | other: the second factor
add sub | self: the first term | other: the second term
rsub | self: the second term | other: the first term
pow | self: the base | exponent: the exponent
mm bmm | self: the left matrix | mat2: the right matrix
addmm | self: what is added | mat1: the left matrix | mat2: the right matrix
baddbmm | self: what is added | batch1: the left matrix | batch2: the right matrix
"""
"""Operations, and what their arguments are."""
ANYWHERE = {
    **dict.fromkeys(("other", "mat2"), "the second argument"),
    **dict.fromkeys(("grad_output", "grad_out"), "the incoming gradient"),
}


def name_operands(origin: Origin) -> Origin:
    """The origin whose operands carry a label, where torch's own name says nothing."""
    own = _own_expressions(origin)
    operation = _operation(origin)
    parts: dict[str, str] = {}
    for row in PARTS.strip().split("\n"):
        operations, *listed = row.split(" | ")
        if operation in operations.split():
            parts = dict(part.split(": ") for part in listed)
    several = any(operand.name in ANYWHERE for operand in origin.inputs)
    parts.setdefault("self", "the first argument" if several else "the argument")
    inputs = []
    for operand in origin.inputs:
        label = operand.label or own.get(operand.name)
        if not label:
            # foreach operators take lists of tensors
            name, _, number = operand.name.removesuffix("]").partition("[")
            # empty where torch's name is the one that users write (`dim`, `eps`)
            label = parts.get(name) or ANYWHERE.get(name, "")
            if label and number:
                label += f" of tensor {number}"
        inputs.append(replace(operand, label=label))
    return replace(origin, inputs=tuple(inputs))


def _operation(origin: Origin) -> str:
    return base_name(origin.op).removeprefix("_foreach_").partition(".")[0].rstrip("_")


def expression_of(origin: Origin) -> Expression | None:
    """The expression of a forward operation in its source line, where it is there once."""
    return named_expression(origin, _operation(origin))


def named_expression(origin: Origin, operation: str) -> Expression | None:
    """The call of this operation, or the use of its operator, in the culprit's line."""
    names = ALIASES.get(operation, operation).split()
    # In place, a method has the same name and an underscore.
    calls = frozenset(names) | {f"{name}_" for name in names}
    return find_expression(origin, calls, OPERATORS.get(operation))


def _own_expressions(origin: Origin) -> dict[str, str]:
    """What the user wrote for each argument; empty where the line does not say it beyond doubt."""
    # The operands of a slope stand in no line; and a stored tensor stands for itself: these are not
    # all arguments, in their order.
    stored = any(":" in operand.name for operand in origin.inputs)
    if origin.phase == "backward" or origin.node or stored:
        return {}
    found = expression_of(origin)
    if found is None:
        return {}
    operation = _operation(origin)
    given = found.operands
    by_operator = not isinstance(found.node, ast.Call)
    if by_operator and operation in ("rsub", "reciprocal"):
        given = given[::-1]
    elif operation == "reciprocal":
        given = given[:1]
    commutes = operation in COMMUTES
    if not _fits(given, origin.inputs, strict=commutes):
        given = given[::-1]
        if not commutes or not _fits(given, origin.inputs, strict=True):
            return {}
    own = {}
    for operand, text in zip(origin.inputs, given, strict=False):
        # Characters of an expression; a longer one says no more than its part does
        if len(text) <= 40 and not is_number(text):
            own[operand.name] = text
    return own


def _fits(given: tuple[str, ...], inputs: tuple[Operand, ...], *, strict: bool) -> bool:
    """Is a number in the line a number in the operation, and a tensor a tensor?

    `strict`: a Python number must be written as one, since a name could be on either side.
    """
    for text, operand in zip(given, inputs, strict=False):
        number = operand.dtype in ("float", "int", "bool") and not operand.shape
        if is_number(text) != number and (strict or not number):
            return False
    return True
