"""Finds uses of private names of dependencies in source text: imports, overrides, inherited state.

A private name begins with one underscore. Access by attribute (`thing._name`) cannot be told apart
from our own classes' by syntax: `reached_into` lists it, and tests/test_architecture.py says which
uses are of our own classes. It imports the dependencies whose classes are derived from.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache

OWN = frozenset(("gateway", "engine", "kernels", "tenancy", "tests"))

IMPORTERS = ("import_module", "importorskip", "find_spec", "__import__")
ACCESSORS = ("getattr", "setattr")


SEARCHED = (
    *(ast.Attribute, ast.Call, ast.ClassDef, ast.Import, ast.ImportFrom),
    *(ast.FunctionDef, ast.AsyncFunctionDef),
)


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """The nodes of the kinds in `SEARCHED`. Each tree is walked once, a second for all."""
    return tuple(node for node in ast.walk(tree) if isinstance(node, SEARCHED))


def is_private(name: str) -> bool:
    """Does a name begin with one underscore? `_` alone and `__init__` do not count."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def imported(tree: ast.Module) -> Iterator[str]:
    """Private modules and names that are imported from outside, by statement or by call."""
    for node in nodes(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _last_name(node.func) in IMPORTERS:
            names = [str(one.value) for one in node.args[:1] if isinstance(one, ast.Constant)]
        for name in names:
            root, *rest = name.split(".")
            if root not in OWN and root != "__future__" and any(map(is_private, [root, *rest])):
                yield name


def inherited(tree: ast.Module) -> Iterator[str]:
    """Private names in classes that derive from a dependency's: those that the base has too, and
    those that the class uses but does not define."""
    origins = _origins(tree)
    classes = {node.name: node for node in nodes(tree) if isinstance(node, ast.ClassDef)}
    for node in classes.values():
        bases = [base for base in (_resolved(one, origins) for one in node.bases) if base]
        if bases:
            used, defined = _used(node), _defined(node)
            taken = {name for name in used | defined for one in bases if hasattr(one, name)}
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id in classes:
                    defined |= _defined(classes[base.id])
            for name in sorted(taken | (used - defined)):
                yield f"{node.name}.{name}"


def reached_into(tree: ast.Module) -> Iterator[str]:
    """Private attributes of anything but `self` and `cls`, also where named by a string. `os._exit`
    is documented as public."""
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            is_own = ast.unparse(node.value) in ("self", "cls", "super()")
            if not is_own and ast.unparse(node) != "os._exit":
                yield node.attr
        elif isinstance(node, ast.Call) and _last_name(node.func) in ACCESSORS:
            for one in node.args[:2]:
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    yield from filter(is_private, one.value.split("."))


def _last_name(function: ast.expr) -> str:
    """The last name of what is called: `b` of `a.b(…)`."""
    return getattr(function, "attr", "") or getattr(function, "id", "")


def _origins(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Names that imports bind: (module, name in it), the latter empty for a module."""
    found = {}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                found[bound] = (alias.name if alias.asname else bound, "")
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = (node.module, alias.name)
    return found


def _resolved(base: ast.expr, origins: dict[str, tuple[str, str]]) -> object | None:
    """A base class from outside; None for one of ours, or of the language."""
    if isinstance(base, ast.Subscript):
        base = base.value
    first, *rest = ast.unparse(base).split(".")
    if first not in origins or origins[first][0].split(".")[0] in OWN:
        return None
    module, name = origins[first]
    found: object = importlib.import_module(module)
    for part in [name, *rest] if name else rest:
        if not hasattr(found, part):
            found = importlib.import_module(f"{module}.{part}")
        else:
            found = getattr(found, part)
    return found


def _used(node: ast.ClassDef) -> set[str]:
    return {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute)
        and is_private(one.attr)
        and ast.unparse(one.value) in ("self", "cls", "super()", f"super({node.name}, self)")
    }


def _defined(node: ast.ClassDef) -> set[str]:
    """Methods, class attributes, and attributes that a method sets."""
    found = {
        one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute | ast.Name) and isinstance(one.ctx, ast.Store):
            found.add(one.attr if isinstance(one, ast.Attribute) else one.id)
    return set(filter(is_private, found))
