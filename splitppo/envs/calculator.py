"""The tool `calculator`: evaluates arithmetic and nothing else of Python."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

LONGEST = 1000  # characters of an expression for the calculator
BITS = 4096  # of its largest number

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression.

    Args:
        expression: numbers, brackets and the operators + - * / // % **, for example "(3 + 4) * 5".

    Returns:
        The result.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has more than {LONGEST} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    value = _value(tree.body)
    # a quotient without a remainder as people write it
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            first = _value(left)
            second = _value(right)
            # before the power is worked out
            if isinstance(op, ast.Pow) and math.log2(abs(first) + 1) * abs(second) > BITS:
                raise ValueError(f"the power has more than {BITS} bits")
            value = _OPERATORS[type(op)](first, second)
        case _:
            raise ValueError(f"{ast.unparse(node)[:80]!r} is no arithmetic; use + - * / // % **")
    if isinstance(value, complex) or abs(value) >= 1 << BITS:
        raise ValueError("the result is no real number, or too large")
    return value
