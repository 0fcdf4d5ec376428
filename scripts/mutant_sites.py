"""The faults that can be made in the functions of a file, and the code of the file with one of them."""

import ast
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from scripts.mutant_forks import ROOT

_PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
_PAIRS += [(ast.And, ast.Or), (ast.Add, ast.Sub)]
_OTHER = dict(_PAIRS) | {second: first for first, second in _PAIRS}
_BOUNDS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_ORDERED = ("isinstance", "getattr", "setattr", "max", "min")  # other arguments first: nonsense, or no other value
_DROPPED = ast.Expr | ast.AugAssign | ast.Break | ast.Continue | ast.Raise
_STATEMENTS = ast.stmt | ast.excepthandler | ast.match_case
_SHOWN = 90  # characters of the text in a name


class Site(NamedTuple):
    """One fault. name: says the function, its text and the fault. lines: the fault is executed where one of them is."""

    name: str
    file: str
    lines: range
    number: int  # among those of its file


_Fault = tuple[str, range, Callable[[], object]]


def sites_of(path: Path) -> list[Site]:
    """Every fault that can be made in a file. What is only asserted, or said in an error, is left as it is."""
    file, seen, found = str(path.relative_to(ROOT)), Counter[str](), list[Site]()
    for number, (name, lines, _) in enumerate(_faults(ast.parse(path.read_text()), "", False)):
        seen[name] += 1
        again = f" #{seen[name]}" if seen[name] > 1 else ""
        found.append(Site(f"{file.removeprefix('ferrum_jax/')} {name}{again}", file, lines, number))
    return found


def code_with(site: Site) -> types.CodeType:
    """The code of the file with the fault."""
    path = ROOT / site.file
    tree = ast.parse(path.read_text())
    [*_faults(tree, "", False)][site.number][2]()
    return compile(ast.fix_missing_locations(tree), str(path), "exec")


def _faults(node: ast.AST, where: str, is_function: bool) -> Iterator[_Fault]:
    """Sites in the statements of a node, in the order of the text."""
    for _, value in ast.iter_fields(node):
        for place, child in enumerate(value if isinstance(value, list) else []):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _faults(child, f"{where}.{child.name}".lstrip("."), not isinstance(child, ast.ClassDef))
            elif isinstance(child, ast.excepthandler | ast.match_case):
                yield from _faults(child, where, is_function)
            elif isinstance(child, ast.stmt) and not isinstance(child, ast.Assert):
                for fault in _of_statement(value, place, child) if is_function else ():
                    yield f"{where}: {fault[0]}", *fault[1:]
                yield from _faults(child, where, is_function)


def _of_statement(body: list[ast.stmt], place: int, statement: ast.stmt) -> Iterator[_Fault]:
    """Sites in a statement, without the statements in it."""

    def fault(node: ast.AST, what: str, make: Callable[[], object]) -> _Fault:
        last = node.end_lineno if isinstance(node, ast.expr) else statement.lineno
        return (
            f"{what}: {' '.join(ast.unparse(node).split())[:_SHOWN]}",
            range(statement.lineno, (last or statement.lineno) + 1),
            make,
        )

    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant | ast.Yield | ast.YieldFrom)
    is_stored = isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute | ast.Subscript)
    if (isinstance(statement, _DROPPED) and not is_text) or is_stored:
        dropped = ast.copy_location(ast.Pass(), statement)
        yield fault(statement, "dropped", lambda: body.__setitem__(place, dropped))
    waiting: list[ast.AST] = [] if isinstance(statement, ast.Raise) or is_text else [statement]
    while waiting:
        node = waiting.pop(0)
        for part, what, make in _of_node(node):
            yield fault(part, what, make)
        if isinstance(node, ast.AnnAssign):
            waiting += [node.value] if node.value else []
        elif not isinstance(node, ast.JoinedStr):
            waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, _STATEMENTS)]


def _of_node(node: ast.AST) -> Iterator[tuple[ast.expr, str, Callable[[], object]]]:
    """(expression, what is wrong with it, what makes it so) of an expression, or of a statement with a condition."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        test = node.test
        if not (isinstance(test, ast.Compare) and type(test.ops[0]) not in _BOUNDS):
            yield test, "negated", lambda: setattr(node, "test", _not(test))
    elif isinstance(node, ast.comprehension):
        for place, test in enumerate(node.ifs):
            yield test, "negated", lambda p=place, t=test: node.ifs.__setitem__(p, _not(t))
    elif isinstance(node, ast.Compare):
        for place, op in enumerate(node.ops):
            other = _OTHER[type(op)]
            yield node, f"{other.__name__} {place}", lambda p=place, o=other: node.ops.__setitem__(p, o())
    elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in _OTHER:
        if not (isinstance(node, ast.BinOp) and isinstance(node.left, ast.JoinedStr)):
            yield node, _OTHER[type(node.op)].__name__, lambda: setattr(node, "op", _OTHER[type(node.op)]())
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        changed = not node.value if isinstance(node.value, bool) else node.value + 1
        yield node, f"{changed} for", lambda: setattr(node, "value", changed)
    elif isinstance(node, ast.Call) and len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args):
        if isinstance(node.func, ast.Name) and node.func.id in _ORDERED:
            return
        yield node, "swapped", lambda: node.args.__setitem__(slice(2), node.args[1::-1])


def _not(test: ast.expr) -> ast.expr:
    return ast.copy_location(ast.UnaryOp(ast.Not(), test), test)
