"""What a function does, as a text that is the same under every version of Python.

Byte code is not: it changes with each minor version. The syntax tree does not, once comments,
positions, docstrings, annotations and what the parser writes differently are left out.
"""

from __future__ import annotations
import __future__

import ast
import functools
import linecache
import types
import weakref
from collections.abc import Iterator

Functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUTURE = functools.reduce(
    int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)
LEFT_OUT = {"annotation", "ctx", "kind", "returns", "type_comment", "type_params"}


def syntax_of(function: types.FunctionType) -> tuple[str, frozenset[str]] | None:
    """The text of a function, without its decorators and defaults, and the names in it.

    None if there is no source, or another one than the function was compiled from.
    """
    code = function.__code__
    if code not in _found:
        source = "".join(linecache.getlines(code.co_filename, function.__globals__))
        compiled, nodes = _functions(source, code.co_flags & FUTURE)
        # elsewhere the file may have been edited since
        found = {_of_code(x, nodes) for x in compiled if _content(x) == _content(code)}
        _found[code] = found.pop() if len(found) == 1 else None
    return _found[code]


_found: weakref.WeakKeyDictionary[types.CodeType, tuple[str, frozenset[str]] | None]
_found = weakref.WeakKeyDictionary()
"""Of each function, from when it was asked for first: files change while a process runs."""


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and all within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested(constant)


def _content(code: types.CodeType) -> tuple:
    """A code object but for where it is."""
    constants = [_content(x) if isinstance(x, types.CodeType) else repr(x) for x in code.co_consts]
    names = code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, code.co_flags, code.co_exceptiontable, names, tuple(constants)


@functools.lru_cache(maxsize=64)
def _functions(source: str, flags: int) -> tuple[list[types.CodeType], list[Functions]]:
    """Of a file: compiled, and as nodes of its tree."""
    try:
        tree = ast.parse(source)
        code = compile(tree, "source", "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return [], []
    return list(nested(code)), [x for x in ast.walk(tree) if isinstance(x, Functions)]


def _of_code(code: types.CodeType, nodes: list[Functions]) -> tuple[str, frozenset[str]] | None:
    """Text and names of the node that a code object was compiled from."""
    fitting = sorted((node for node in nodes if _is_of(node, code)), key=_size)
    # of nested functions on one line the smallest is it; without columns nobody knows
    if not fitting or (len(fitting) > 1 and not _positions(code)):
        return None
    names = (x.id for x in ast.walk(fitting[0]) if isinstance(x, ast.Name))
    return _of_function(fitting[0]), frozenset(names)


def _is_of(node: Functions, code: types.CodeType) -> bool:
    if isinstance(node, ast.Lambda):
        body = node.body
        start, end = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
        if any(p[:2] < start or p[2:] > end for p in _positions(code)):
            return False
        return ("<lambda>", node.lineno) == (code.co_name, code.co_firstlineno)
    first = min(x.lineno for x in (node, *node.decorator_list))
    return (node.name, first) == (code.co_name, code.co_firstlineno)


def _positions(code: types.CodeType) -> list[tuple[int, int, int, int]]:
    """Lines and columns of instructions: where they begin and end."""
    found = [(a, c, b, d) for a, b, c, d in code.co_positions() if None not in (a, b, c, d)]
    return [p for p in found if p[:2] != p[2:]]  # type: ignore[misc]


def _size(node: Functions) -> tuple[int, int]:
    lines = (node.end_lineno or 0) - node.lineno
    return lines, (node.end_col_offset or 0) - node.col_offset


def _of_function(node: Functions) -> str:
    arguments = node.args
    bare = ast.arguments(
        arguments.posonlyargs, arguments.args, arguments.vararg, arguments.kwonlyargs, [],
        arguments.kwarg, [],
    )  # fmt: skip
    body = node.body if isinstance(node, ast.Lambda) else _without_docstring(node.body)
    return f"{type(node).__name__} {_text(bare)} {_text(body)}"


def _text(value: object) -> str:
    """A tree in the words of one version."""
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    parts = []
    for name, x in ast.iter_fields(value):
        if name == "values" and isinstance(value, ast.JoinedStr):
            x = _joined(x)
        elif name == "body" and isinstance(value, (Functions, ast.ClassDef)):
            x = x if isinstance(x, ast.AST) else _without_docstring(x)
        if name not in LEFT_OUT and x is not None and x != []:
            parts.append(f"{name}={_text(x)}")
    return f"{type(value).__name__}({', '.join(parts)})"


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0].value if isinstance(body[0], ast.Expr) else None
    is_text = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return body[1:] if is_text else body


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """Parts of an f-string, with texts that follow each other as one."""
    found: list[ast.expr] = []
    for x in values:
        if isinstance(x, ast.Constant) and found and isinstance(found[-1], ast.Constant):
            found[-1] = ast.Constant(str(found[-1].value) + str(x.value))
        elif not (isinstance(x, ast.Constant) and x.value == ""):
            found.append(x)
    return found
