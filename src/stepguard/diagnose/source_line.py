"""Find in the user's own source line the expression that an operation came from."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stepguard.diagnose.case import base_name, words
from stepguard.records import Edit, Operand, Origin, Remedy
from stepguard.records.incident import Safety

# --- Find in the user's own source line the expression that an operation came from.


NAMESPACES = frozenset({"torch", "F", "functional", "linalg", "special", "nn", "math", "np"})
"""What stands before a function that takes its tensor as the first argument."""
LIBRARY = frozenset({"F", "functional", "losses", "distributions"})
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
_NUMBERED = re.compile(r"^\W*(\d+)\s*[|:│]?\s?(.*)$")


@dataclass(frozen=True, slots=True)
class Expression:
    """One call or operator in a line."""

    line: str
    """The line without its indentation."""
    text: str
    operands: tuple[str, ...]
    """A method's own object first."""
    settings: tuple[str, ...]
    """Named arguments, `dim=-1`."""
    start: int
    end: int
    """Where it stands in the line, in bytes."""
    spans: tuple[tuple[int, int], ...]
    """Where each operand stands, likewise."""
    by_operator: bool
    """Written with a sign, as in `a / b`."""
    in_place: bool = False
    """It changes its first operand: `a /= b`, `a.div_(b)`."""

    def rewritten(self, replacement: str) -> str:
        """The line with the expression replaced."""
        return _replaced(self.line, (self.start, self.end), replacement)

    def with_operands(self, replacements: Mapping[int, str]) -> str:
        """The line with these operands replaced, by their position."""
        line = self.line
        # From the right, so that the places of the others stay true.
        for position in sorted(replacements, key=lambda index: self.spans[index], reverse=True):
            line = _replaced(line, self.spans[position], replacements[position])
        return line


def _replaced(line: str, span: tuple[int, int], text: str) -> str:
    whole = line.encode()
    return (whole[: span[0]] + text.encode() + whole[span[1] :]).decode()


class _SafeRoots(ast.NodeTransformer):
    """Writes another root for every square root and standard deviation of tensors."""

    def __init__(self, root: str) -> None:
        self.found = False
        self._root = root

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        # a root of numbers has no gradient
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if owner is not None and _last_name(owner) in ("math", "np"):
            return node
        found = call_operands(node, frozenset({"sqrt"}))
        if found is not None and len(found[0]) == 1:
            return self._safe(found[0][0])
        if isinstance(node.func, ast.Attribute) and node.func.attr == "std":
            node.func.attr = "var"
            return self._safe(node)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        half = isinstance(node.right, ast.Constant) and node.right.value == 0.5
        return self._safe(node.left) if half and isinstance(node.op, ast.Pow) else node

    def _safe(self, operand: ast.expr) -> ast.expr:
        self.found = True
        return ast.parse(self._root.format(bracketed(ast.unparse(operand))), mode="eval").body


def with_roots(text: str, root: str) -> str:
    """The expression with `root` for its roots, `{}` being the argument; empty without any."""
    roots = _SafeRoots(root)
    tree = roots.visit(ast.parse(text, mode="eval"))
    return ast.unparse(tree) if roots.found else ""


def call_of(text: str, calls: frozenset[str]) -> tuple[str, ...]:
    """The operands of an expression that is a call of one of these names; else none."""
    node = ast.parse(text, mode="eval").body
    found = call_operands(node, calls) if isinstance(node, ast.Call) else None
    if found is None:
        return ()
    operands, settings = found
    return (*map(ast.unparse, operands), *settings)


def bracketed(text: str) -> str:
    """The expression as it can stand before a point or beside an operator."""
    tree = ast.parse(text, mode="eval").body
    single = isinstance(tree, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    return text if single else f"({text})"


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


def rewriting(
    origin: Origin,
    line: str,
    title: str,
    *,
    functions: tuple[str, ...] = (),
    safety: Safety = "safe",
) -> Remedy:
    """The remedy that is this line in the place of the culprit's."""
    edits: tuple[Edit, ...] = ()
    statement = origin.statement
    if statement is not None:
        indent = statement.text[: len(statement.text) - len(statement.text.lstrip())]
        old = tuple(statement.text.split("\n"))
        new = tuple(f"{indent}{line}".split("\n"))
        edits = (Edit(file=statement.file, line=statement.line, old=old, new=new),)
    snippet = f"{import_of(functions)}\n{line}" if functions else line
    return Remedy(title=title, snippet=snippet, safety=safety, edits=edits, needs=functions)


def import_of(functions: tuple[str, ...]) -> str:
    """The line that makes them known."""
    return f"from stepguard.numerics import {', '.join(sorted(set(functions)))}"


def culprit_span(origin: Origin) -> tuple[int, int] | None:
    """Which bytes of `culprit_line` are the operation; None where that is not known."""
    statement = origin.statement
    if statement is None:
        return None
    indent = len(statement.text) - len(statement.text.lstrip())
    return statement.start - indent, statement.end - indent


def find_expression(
    line: str,
    calls: frozenset[str],
    operator: type[ast.operator] | None = None,
    span: tuple[int, int] | None = None,
) -> Expression | None:
    """The call of these names, or use of this operator, that is at `span`.

    Without a span it must be the only one, and no function of a library may stand in the line that
    might do the same inside.
    """
    tree = statement_tree(line)
    if tree is None:
        return None
    found = list(_candidates(line, tree, calls, operator))
    if span is not None:
        # Python moves the start of a call to its method's name where that is in a later line.
        around = [one for one in found if one.end == span[1] and one.start <= span[0]]
        return max(around, key=lambda one: one.start, default=None)
    if _hides_operations(tree, calls) or len(found) != 1 or not _whole(found[0]):
        return None
    return found[0]


def _whole(found: Expression) -> bool:
    """False where the expression began in the line before, or goes on in the next one."""
    began_before = found.start == 0 and found.line[0] in "+-"
    return not began_before and found.end <= len(found.line.encode())


def is_number(text: str) -> bool:
    """`1.5`, `-2` or `1 / 2.4`: written out in figures."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        return False
    figures = (ast.Expression, ast.Constant, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop)
    return all(isinstance(node, figures) for node in ast.walk(tree))


def replace_number(line: str, value: float, text: str) -> tuple[str, str] | None:
    """A number as it is written, and the line with another; None where it is not there once."""
    tree = statement_tree(line)
    if tree is None:
        return None
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value == value:
            found.append(node)
    if len(found) != 1:
        return None
    return _text(line, found[0]), _replaced(line, _span(line, found[0]), text)


def _hides_operations(tree: ast.Module, calls: frozenset[str]) -> bool:
    """Does the line call a function of a library that is made of several operations?"""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        if name in calls:
            continue
        if name in DISTRIBUTION:
            return True
        if _last_name(node.func.value) in LIBRARY and name not in ONE_OPERATION:
            return True
    return False


def _last_name(owner: ast.expr) -> str:
    """`functional` of `torch.nn.functional`."""
    if isinstance(owner, ast.Name):
        return owner.id
    return str(getattr(owner, "attr", ""))


def statement_tree(line: str) -> ast.Module | None:
    """The line as a tree, even if it is only the head of a block or begins a longer statement."""
    for text in (line, f"{line} pass", line + _missing_brackets(line)):
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None


def _missing_brackets(line: str) -> str:
    """What would close the brackets of a statement that goes on in the next line."""
    waiting: list[str] = []
    for character in line:
        if character in CLOSING:
            waiting.append(CLOSING[character])
        elif waiting and character == waiting[-1]:
            waiting.pop()
    return "".join(reversed(waiting))


def _candidates(
    line: str, tree: ast.Module, calls: frozenset[str], operator: type[ast.operator] | None
) -> Iterator[Expression]:
    for node in ast.walk(tree):
        found: tuple[list[ast.expr], list[str]] | None = None
        if isinstance(node, ast.Call):
            found = call_operands(node, calls)
        elif isinstance(node, ast.BinOp) and operator and isinstance(node.op, operator):
            found = [node.left, node.right], []
        elif isinstance(node, ast.AugAssign) and operator and isinstance(node.op, operator):
            found = [node.target, node.value], []
        if found is not None and found[0]:
            assert isinstance(node, ast.expr | ast.AugAssign)
            yield expression_at(line, node, *found)


def expression_at(
    line: str,
    node: ast.expr | ast.AugAssign,
    operands: Sequence[ast.expr] = (),
    settings: Sequence[str] = (),
) -> Expression:
    """The expression of this node of the line's tree."""
    start, end = _span(line, node)
    return Expression(
        line=line,
        text=_text(line, node),
        operands=tuple(_text(line, operand) for operand in operands),
        settings=tuple(settings),
        start=start,
        end=end,
        spans=tuple(_span(line, operand) for operand in operands),
        by_operator=not isinstance(node, ast.Call),
        in_place=_in_place(node),
    )


def _in_place(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", "").endswith("_")
    return isinstance(node, ast.AugAssign)


def _span(line: str, node: ast.expr | ast.AugAssign) -> tuple[int, int]:
    before = [0]
    for one in line.encode().split(b"\n"):
        before.append(before[-1] + len(one) + 1)
    last = node.end_lineno or node.lineno
    return before[node.lineno - 1] + node.col_offset, before[last - 1] + (node.end_col_offset or 0)


def _text(line: str, node: ast.expr | ast.AugAssign) -> str:
    """What the user wrote, in one line, brackets around it left out."""
    start, end = _span(line, node)
    written = line.encode()[start:end].decode()
    return ast.unparse(node) if "\n" in written else written


def call_operands(node: ast.Call, calls: frozenset[str]) -> tuple[list[ast.expr], list[str]] | None:
    """The tensor and what follows it, and the named arguments; None for other calls."""
    function = node.func
    operands = list(node.args)
    if isinstance(function, ast.Name):
        if function.id not in calls:
            return None
    elif not isinstance(function, ast.Attribute) or function.attr not in calls:
        return None
    elif _last_name(function.value) not in NAMESPACES:
        operands.insert(0, function.value)
    settings = []
    for keyword in node.keywords:
        # `torch.pow(input=x, exponent=2)`: operands like any other
        if OPERANDS.get(keyword.arg or "", -1) == len(operands):
            operands.append(keyword.value)
        else:
            settings.append(ast.unparse(keyword))
    return operands, settings


# --- Call operands what the user calls them: by their expression in the source line, or by their
# part.


LONGEST = 40
"""Characters of an expression; a longer one tells no more than its part does."""
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
}
COMMUTES = frozenset({"add", "mul"})
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
    "atanh": "atanh arctanh",
    "asin": "asin arcsin",
    "atan2": "atan2 arctan2",
}
PARTS: dict[str, dict[str, str]] = {
    "div": {"self": "the dividend", "other": "the divisor"},
    "true_divide": {"self": "the dividend", "other": "the divisor"},
    "floor_divide": {"self": "the dividend", "other": "the divisor"},
    "remainder": {"self": "the dividend", "other": "the divisor"},
    "reciprocal": {"self": "the divisor"},
    "addcdiv": {"tensor1": "the dividend", "tensor2": "the divisor", "self": "the sum so far"},
    "addcmul": {"tensor1": "the first factor", "tensor2": "the second factor"},
    "mul": {"self": "the first factor", "other": "the second factor"},
    "add": {"self": "the first term", "other": "the second term"},
    "sub": {"self": "the first term", "other": "the second term"},
    "rsub": {"self": "the second term", "other": "the first term"},
    "pow": {"self": "the base", "exponent": "the exponent"},
    "mm": {"self": "the left matrix", "mat2": "the right matrix"},
    "bmm": {"self": "the left matrix", "mat2": "the right matrix"},
    "addmm": {"self": "what is added", "mat1": "the left matrix", "mat2": "the right matrix"},
    "baddbmm": {"self": "what is added", "batch1": "the left matrix", "batch2": "the right matrix"},
}
ANYWHERE = {
    "other": "the second argument",
    "mat2": "the second argument",
    "grad_output": "the incoming gradient",
    "grad_out": "the incoming gradient",
}
_LISTED = re.compile(r"^(\w+)\[(\d+)\]$")


def name_operands(origin: Origin) -> Origin:
    """The origin whose operands carry a label, where torch's own name says nothing."""
    own = _own_expressions(origin)
    inputs = tuple(_labelled(operand, origin, own) for operand in origin.inputs)
    return replace(origin, inputs=inputs)


def expression_of(origin: Origin) -> Expression | None:
    """The expression of a forward operation in its source line, where it is there once."""
    operation = _operation(origin)
    return named_expression(origin, operation, OPERATORS.get(operation))


def named_expression(
    origin: Origin, operation: str, operator: type[ast.operator] | None = None
) -> Expression | None:
    """The call of this operation, or the use of its operator, in the culprit's line."""
    names = ALIASES.get(operation, operation).split()
    # In place, a method has the same name and an underscore.
    calls = frozenset(names) | {f"{name}_" for name in names}
    return find_expression(culprit_line(origin), calls, operator, culprit_span(origin))


def _labelled(operand: Operand, origin: Origin, own: dict[str, str]) -> Operand:
    if operand.label:
        return operand
    label = own.get(operand.name) or _part(operand.name, origin)
    return replace(operand, label=label)


def _part(name: str, origin: Origin) -> str:
    """`the divisor`; empty where torch's name is the one that users write (`dim`, `eps`)."""
    listed = _LISTED.match(name)
    if listed:
        # foreach operators take lists of tensors
        part = _part(listed[1], origin)
        return f"{part} of tensor {listed[2]}" if part else ""
    known = PARTS.get(_operation(origin), {})
    if name in known:
        return known[name]
    if name == "self":
        several = any(operand.name in ANYWHERE for operand in origin.inputs)
        return "the first argument" if several else "the argument"
    return ANYWHERE.get(name, "")


def _operation(origin: Origin) -> str:
    return base_name(origin.op).removeprefix("_foreach_").partition(".")[0].rstrip("_")


def _own_expressions(origin: Origin) -> dict[str, str]:
    """What the user wrote for each argument; empty where the line does not say it beyond doubt."""
    if origin.phase == "backward" or origin.node:
        # The operands of a slope stand in no line.
        return {}
    if any(":" in operand.name for operand in origin.inputs):
        # A stored tensor stands for itself: these are not all arguments, in their order.
        return {}
    found = expression_of(origin)
    if found is None:
        return {}
    sides = _sides(_operation(origin), found, origin.inputs)
    own = {}
    for operand, text in zip(origin.inputs, sides, strict=False):
        if len(text) <= LONGEST and not is_number(text):
            own[operand.name] = text
    return own


def _sides(operation: str, found: Expression, inputs: tuple[Operand, ...]) -> tuple[str, ...]:
    """The expressions in the order in which torch takes them; empty where that is not certain."""
    given = found.operands
    if found.by_operator and operation in ("rsub", "reciprocal"):
        given = tuple(reversed(given))
    if not found.by_operator and operation == "reciprocal":
        return given[:1]
    if _fits(given, inputs, strict=operation in COMMUTES):
        return given
    swapped = tuple(reversed(given))
    if operation in COMMUTES and _fits(swapped, inputs, strict=True):
        return swapped
    return ()


def _fits(given: tuple[str, ...], inputs: tuple[Operand, ...], *, strict: bool) -> bool:
    """Is a number in the line a number in the operation, and a tensor a tensor?

    `strict`: a Python number must be written as one, since a name could be on either side.
    """
    for text, operand in zip(given, inputs, strict=False):
        number = operand.dtype in ("float", "int", "bool") and not operand.shape
        if is_number(text) and not number:
            return False
        if number and strict and not is_number(text):
            return False
    return True
