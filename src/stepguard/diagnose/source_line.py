"""Find in the user's own source line the expression that an operation came from."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from stepguard.records import Origin

NAMESPACES = frozenset({"torch", "F", "functional", "linalg", "special", "nn", "math", "np"})
"""What stands before a function that takes its tensor as the first argument."""
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

    def rewritten(self, replacement: str) -> str:
        """The line with the expression replaced."""
        line = self.line.encode()
        return (line[: self.start] + replacement.encode() + line[self.end :]).decode()


def culprit_line(origin: Origin) -> str:
    """The source line of the origin as the user wrote it; empty where it is not known."""
    wanted = (origin.source or "").rpartition(":")[2]
    for numbered in origin.context:
        match = _NUMBERED.match(numbered)
        if match and match[1] == wanted:
            return match[2].strip()
    return ""


def find_expression(
    line: str, calls: frozenset[str], operator: type[ast.operator] | None = None
) -> Expression | None:
    """The one call of these names, or use of this operator; None where there is none or several."""
    tree = _parsed(line)
    if tree is None:
        return None
    found = list(_candidates(line, tree, calls, operator))
    return found[0] if len(found) == 1 else None


def _parsed(line: str) -> ast.Module | None:
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
        operands: list[ast.expr] | None = None
        settings: list[str] = []
        if isinstance(node, ast.Call):
            operands = _call_operands(node, calls)
            settings = [ast.unparse(keyword) for keyword in node.keywords]
        elif isinstance(node, ast.BinOp) and operator and isinstance(node.op, operator):
            operands = [node.left, node.right]
        if operands and isinstance(node, ast.expr):
            yield _expression(line, node, operands, settings)


def _expression(
    line: str, node: ast.expr, operands: list[ast.expr], settings: list[str]
) -> Expression:
    start = node.col_offset
    end = node.end_col_offset or start
    return Expression(
        line=line,
        text=line.encode()[start:end].decode(),
        operands=tuple(map(ast.unparse, operands)),
        settings=tuple(settings),
        start=start,
        end=end,
    )


def _call_operands(node: ast.Call, calls: frozenset[str]) -> list[ast.expr] | None:
    """The tensor and what follows it, where this is a call of one of these names."""
    function = node.func
    if isinstance(function, ast.Name):
        return list(node.args) if function.id in calls else None
    if not isinstance(function, ast.Attribute) or function.attr not in calls:
        return None
    owner = function.value
    last = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
    if last in NAMESPACES:
        return list(node.args)
    return [owner, *node.args]
