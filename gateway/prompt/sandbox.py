"""A Jinja in which nothing large can be built and nothing runs for long, whatever a template does.

Jinja's own sandbox keeps a template from reaching the program; it does not keep it from doubling
a string thirty times, or from looping. Here everything that can make a value larger than its parts
is counted before it is made: operators, calls, filters, literals, output that is captured. What
cannot be counted (padding, formatting, most filters) does not exist. A thread cannot be killed, so
every turn of a loop and every macro looks at the clock. `gateway.prompt.template` uses it.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from gateway.prompt.opaque_text import Opaque, joined, trimmed, written

VALUE_MAX = 20_000_000
"""Characters of one value; a list or a number counts as about what it would be as text."""
TOTAL_MAX = 100_000_000
"""Characters of all values that one rendering makes, and so a bound on its memory."""
ITEM = 100
"""What an item of a new list counts: an object is at least that large."""
ITEMS_MAX = VALUE_MAX // ITEM
INTEGER_BITS_MAX = 1_024

FILTERS = frozenset(
    (
        "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "indent",
        "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min",
        "reject", "rejectattr", "replace", "reverse", "safe", "select", "selectattr", "sort",
        "string", "title", "tojson", "trim", "truncate", "unique", "upper",
    )
)  # fmt: skip
STRING_METHODS = frozenset(
    (
        "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit",
        "islower", "isnumeric", "isspace", "isupper", "join", "lower", "lstrip", "partition",
        "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit",
        "rstrip", "split", "splitlines", "startswith", "strip", "title", "upper",
    )
)  # fmt: skip
_CAPTURES = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)


class _Work(threading.local):
    """What the rendering in this thread has made so far."""

    total = 0
    ends_s = float("inf")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates. Thread-safe; `begin` each rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            finalize=self._written,
            extensions=["jinja2.ext.loopcontrols"],
        )
        self._clock = clock
        self._work = _Work()
        self.has_captures = False
        """Does a template take what it has written as text again?"""
        self.filters["tojson"] = _to_json
        filters = {name: self._counted(name, self.filters[name]) for name in FILTERS}
        self.filters = {
            **filters,
            "_literal": self._checked,
            "_joined": self._concatenate,
            "_captured": self._capture,
            "_turn": self._turn,
        }
        trim = self.filters["trim"]
        self.filters["trim"] = lambda value, *chars: (
            trimmed(value) if type(value) is Opaque and not chars else trim(value, *chars)
        )
        self.tests = {**self.tests, "string": lambda value: isinstance(value, str | Opaque)}
        own = self.globals
        self.globals = {name: own[name] for name in ("range", "namespace", "dict")}

    def begin(self, seconds: float) -> None:
        """Nothing has been made yet in this thread, and it has this long."""
        self._work.total = 0
        self._work.ends_s = self._clock() + seconds

    # -- counting -------------------------------------------------------------------------------

    def _spend(self, size: int) -> None:
        self._work.total += size
        if size > VALUE_MAX or self._work.total > TOTAL_MAX:
            raise SecurityError("the template builds something too large")

    # What takes a context is never computed when the template is compiled.

    @pass_context
    def _turn(self, _context: object, _value: object) -> None:
        if self._clock() > self._work.ends_s:
            raise TimeoutError

    @pass_context
    def _capture(self, _context: object, text: str) -> str:
        self._spend(len(text))
        return text

    def _checked(self, value: Any) -> Any:
        """A value that was made or is written. A generator's items are counted as they come."""
        if not isinstance(value, bool | float | None):
            self._spend(weight(value))
        return value

    def _written(self, value: Any) -> Any:
        return written(self._checked(value))

    def _concatenate(self, values: tuple[Any, ...]) -> str | Opaque:
        self._spend(sum(map(weight, values)))
        return joined(values)

    # -- what makes values ----------------------------------------------------------------------

    def compile(self, source: str | nodes.Template, *args: Any, **kwargs: Any) -> Any:
        """A template's code, with what it makes counted. See `jinja2.Environment.compile`."""
        tree = self.parse(source) if isinstance(source, str) else source
        counting = _Counting()
        counting.visit(tree)
        self.has_captures = self.has_captures or counting.has_captures
        tree.set_environment(self)
        return super().compile(tree, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Operators whose result may be larger than both operands."""
        if operator == "+" and type(left) is str and type(right) is str:
            self._spend(len(left) + len(right))
            return left + right
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" or (operator == "%" and not numbers):
            raise SecurityError(f"the operator {operator} is not for templates")
        if not numbers:
            sizes = [weight(v) for v in (left, right) if not isinstance(v, int)]
            times = [max(0, v) for v in (left, right) if isinstance(v, int)]
            self._spend(sum(sizes) * (times[0] if operator == "*" and times else 1))
        elif _bits(left) + _bits(right) > INTEGER_BITS_MAX:
            raise SecurityError("the template builds a number that is too large")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> None:
        """No `format`: a width is a size that nobody counted. It is an attribute like others."""
        return

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Of text, the methods that neither pad nor format."""
        if isinstance(obj, str) and attr not in STRING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call from the template: counted before where it could be large, and after."""
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            if name == "join" and args and not isinstance(args[0], str):
                args = (list(islice(args[0], ITEMS_MAX)), *args[1:])
            __self._spend(_string_result(owner, name, args))
        return __self._checked(super().call(__context, __obj, *args, **kwargs))

    def _counted(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose result is counted; before it is made where it could be large."""
        first = 1 if hasattr(made, "jinja_pass_arg") else 0

        @functools.wraps(made)
        def counted(*args: Any, **kwargs: Any) -> Any:
            before, value, rest = args[:first], args[first], args[first + 1 :]
            if name == "join":
                value = list(islice(value, ITEMS_MAX))
                separator = rest[0] if rest else kwargs.get("d", "")
                self._spend(weight(value) + len(value) * weight(separator))
            elif name == "replace":
                old, new = str(rest[0]), str(rest[1])
                self._spend(_string_result(str(value), "replace", (old, new)))
            elif name == "indent":
                width = rest[0] if rest else kwargs.get("width", 4)
                lines = str(value).count("\n") + 1
                self._spend(weight(value) + lines * _width(width))
            elif name == "list" and not isinstance(value, str | Mapping):
                value = list(islice(value, ITEMS_MAX))
            elif name in ("string", "tojson"):
                self._spend(weight(value))
            return self._checked(made(*before, value, *rest, **kwargs))

        return counted


class _Counting(NodeTransformer):
    """Sends literals, `~` and captured text through the counting filters; winds the clock."""

    def __init__(self) -> None:
        self._captured = 0
        self.has_captures = False

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Text inside what captures its output would be counted by nobody else."""
        captures = isinstance(node, _CAPTURES)
        self._captured += captures
        self.has_captures = self.has_captures or captures
        try:
            return super().visit(node, *args, **kwargs)
        finally:
            self._captured -= captures

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Each turn looks at the clock; between two turns no more than one list is walked."""
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_through("_turn", nodes.Const(None))))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        """A macro may call itself twice."""
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_through("_turn", nodes.Const(None))))
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        """Text that stands in the template."""
        return _through("_captured", nodes.Const(node.data)) if self._captured else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`a ~ b`."""
        self.generic_visit(node)
        return _through("_joined", nodes.Tuple(node.nodes, "load"))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        """`[a, b]`."""
        self.generic_visit(node)
        return _through("_literal", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        """`{"a": b}`."""
        self.generic_visit(node)
        return _through("_literal", node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """`a[1:]` is a copy."""
        self.generic_visit(node)
        return _through("_literal", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """`(a, b)`, unless it is assigned to."""
        self.generic_visit(node)
        return _through("_literal", node) if node.ctx == "load" else node


def _through(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


def weight(value: Any) -> int:
    """About how long a value would be as text. O(its items), and no further than is too much.

    A list that holds another one twice weighs it twice: written out, it is there twice.
    """
    total, rest = 0, [value]
    while rest and total <= VALUE_MAX:
        item = rest.pop()
        if isinstance(item, str):
            total += len(item)
            continue
        total += ITEM
        if isinstance(item, dict):
            rest.extend(item)
            rest.extend(item.values())
        elif isinstance(item, range):
            total += ITEM * len(item)
        elif isinstance(item, list | tuple | set | frozenset):
            rest.extend(item)
    return total


def _string_result(text: str, method: str, args: tuple[Any, ...]) -> int:
    """An upper bound of what a method of `text` makes."""
    match method:
        case "join":
            items = args[0] if args else ()
            return weight(items) + len(items) * len(text)
        case "replace" if len(args) > 1:
            old, new = str(args[0]), str(args[1])
            return len(text) + text.count(old) * len(new)
        case "split" | "rsplit" if args and isinstance(args[0], str) and args[0]:
            return len(text) + ITEM * text.count(args[0])
        case "split" | "rsplit" | "splitlines":
            return len(text) * ITEM // 2
        case _:
            return len(text)


def _bits(number: float) -> int:
    return number.bit_length() if isinstance(number, int) else 0


def _width(width: object) -> int:
    if isinstance(width, str):
        return len(width)
    return max(0, width) if isinstance(width, int) else VALUE_MAX


def _to_json(value: object, indent: int | None = None) -> str:
    """JSON as models have seen it: no escaping for HTML, keys in their order."""
    return json.dumps(value, ensure_ascii=False, indent=min(indent, 8) if indent else None)
