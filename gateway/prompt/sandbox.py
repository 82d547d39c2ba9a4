"""A Jinja environment that bounds the memory and time of any template.

Jinja's own sandbox keeps a template away from the program, but not from doubling a string thirty
times or from looping. Here every operation that can make a value larger than its parts is counted
before it runs: operators, calls, filters, literals, captured output. Operations that cannot be
counted (padding, formatting, most filters) are not available. A thread cannot be killed, so every
loop iteration and every macro call checks the clock. `gateway.prompt.template` uses it.
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

from gateway.prompt.opaque_text import OpaqueText, concatenate, output_value, trim_opaque

VALUE_MAX = 20_000_000
"""Maximum size of one value, in characters; lists and numbers count about as their text."""
TOTAL_MAX = 100_000_000
"""Maximum size of all values that one rendering makes, in characters: bounds its memory."""
ITEM_SIZE = 100
"""Size counted for each item of a new list: an object takes at least that much."""
ITEMS_MAX = VALUE_MAX // ITEM_SIZE
"""Maximum number of items of one list."""
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


class _RenderingBudget(threading.local):
    """Size made so far and deadline of the rendering in this thread."""

    total = 0
    ends_s = float("inf")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates. Thread-safe; call `begin` before each rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            finalize=self._finalize,
            extensions=["jinja2.ext.loopcontrols"],
        )
        self._clock = clock
        self._work = _RenderingBudget()
        self.has_captures = False
        """Whether any template captures its own output."""
        self.filters["tojson"] = _to_json
        filters = {name: self._counting_filter(name, self.filters[name]) for name in FILTERS}
        self.filters = {
            **filters,
            "_literal": self._count_value,
            "_joined": self._concatenate,
            "_captured": self._capture,
            "_check_deadline": self._check_deadline,
        }
        trim = self.filters["trim"]
        self.filters["trim"] = lambda value, *chars: (
            trim_opaque(value) if type(value) is OpaqueText and not chars else trim(value, *chars)
        )
        self.tests = {**self.tests, "string": lambda value: isinstance(value, str | OpaqueText)}
        own = self.globals
        self.globals = {name: own[name] for name in ("range", "namespace", "dict")}

    def begin(self, seconds: float) -> None:
        """Reset this thread's size counter and allow the rendering `seconds` from now."""
        self._work.total = 0
        self._work.ends_s = self._clock() + seconds

    # -- counting -------------------------------------------------------------------------------

    def _spend(self, size: int) -> None:
        self._work.total += size
        if size > VALUE_MAX or self._work.total > TOTAL_MAX:
            raise SecurityError("the template builds a value that is too large")

    # Jinja never constant-folds a filter that takes a context.

    @pass_context
    def _check_deadline(self, _context: object, _value: object) -> None:
        if self._clock() > self._work.ends_s:
            raise TimeoutError

    @pass_context
    def _capture(self, _context: object, text: str) -> str:
        self._spend(len(text))
        return text

    def _count_value(self, value: Any) -> Any:
        """Count a value that was made or written. A generator's items are counted as they come."""
        if not isinstance(value, bool | float | None):
            self._spend(estimate_size(value))
        return value

    def _finalize(self, value: Any) -> Any:
        return output_value(self._count_value(value))

    def _concatenate(self, values: tuple[Any, ...]) -> str | OpaqueText:
        self._spend(sum(map(estimate_size, values)))
        return concatenate(values)

    # -- operations that make values ------------------------------------------------------------

    def compile(self, source: str | nodes.Template, *args: Any, **kwargs: Any) -> Any:
        """Compile a template whose output is counted. See `jinja2.Environment.compile`."""
        tree = self.parse(source) if isinstance(source, str) else source
        counting = _CountingTransformer()
        counting.visit(tree)
        self.has_captures = self.has_captures or counting.has_captures
        tree.set_environment(self)
        return super().compile(tree, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Run operators whose result may be larger than both operands."""
        if operator == "+" and type(left) is str and type(right) is str:
            self._spend(len(left) + len(right))
            return left + right
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" or (operator == "%" and not numbers):
            raise SecurityError(f"operator not available in templates: {operator}")
        if not numbers:
            sizes = [estimate_size(v) for v in (left, right) if not isinstance(v, int)]
            times = [max(0, v) for v in (left, right) if isinstance(v, int)]
            self._spend(sum(sizes) * (times[0] if operator == "*" and times else 1))
        elif _bits(left) + _bits(right) > INTEGER_BITS_MAX:
            raise SecurityError("the template builds a number that is too large")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> None:
        """Disable `format`: its width is an uncounted size. `format` is an ordinary attribute."""
        return

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow only the string methods that neither pad nor format."""
        if isinstance(obj, str) and attr not in STRING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a call from the template; count strings before and every result after."""
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            if name == "join" and args and not isinstance(args[0], str):
                args = (list(islice(args[0], ITEMS_MAX)), *args[1:])
            __self._spend(_string_result(owner, name, args))
        return __self._count_value(super().call(__context, __obj, *args, **kwargs))

    def _counting_filter(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter so that its result is counted, before it runs where it could be large."""
        first = 1 if hasattr(made, "jinja_pass_arg") else 0

        @functools.wraps(made)
        def counted(*args: Any, **kwargs: Any) -> Any:
            before, value, rest = args[:first], args[first], args[first + 1 :]
            if name == "join":
                value = list(islice(value, ITEMS_MAX))
                separator = rest[0] if rest else kwargs.get("d", "")
                self._spend(estimate_size(value) + len(value) * estimate_size(separator))
            elif name == "replace":
                old, new = str(rest[0]), str(rest[1])
                self._spend(_string_result(str(value), "replace", (old, new)))
            elif name == "indent":
                width = rest[0] if rest else kwargs.get("width", 4)
                lines = str(value).count("\n") + 1
                self._spend(estimate_size(value) + lines * _width(width))
            elif name == "list" and not isinstance(value, str | Mapping):
                value = list(islice(value, ITEMS_MAX))
            elif name in ("string", "tojson"):
                self._spend(estimate_size(value))
            return self._count_value(made(*before, value, *rest, **kwargs))

        return counted


class _CountingTransformer(NodeTransformer):
    """Route literals, `~` and captured text through the counting filters; add clock checks."""

    def __init__(self) -> None:
        self._captured = 0
        self.has_captures = False

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Track whether the node is inside a block that captures its output."""
        captures = isinstance(node, _CAPTURES)
        self._captured += captures
        self.has_captures = self.has_captures or captures
        try:
            return super().visit(node, *args, **kwargs)
        finally:
            self._captured -= captures

    def visit_For(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        """Check the clock in each iteration, so that at most one list is walked between two checks,
        and in each macro call, because a macro may call itself twice."""
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filtered("_check_deadline", nodes.Const(None))))
        return node

    visit_Macro = visit_For

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        """Count literal template text inside a capturing block."""
        return _filtered("_captured", nodes.Const(node.data)) if self._captured else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Count `a ~ b`."""
        self.generic_visit(node)
        return _filtered("_joined", nodes.Tuple(node.nodes, "load"))

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        """Count `[a, b]` and `{"a": b}`."""
        self.generic_visit(node)
        return _filtered("_literal", node)

    visit_Dict = visit_List

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Count `a[1:]`, which is a copy."""
        self.generic_visit(node)
        return _filtered("_literal", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """Count `(a, b)`, unless it is an assignment target."""
        self.generic_visit(node)
        return _filtered("_literal", node) if node.ctx == "load" else node


def _filtered(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


def estimate_size(value: Any) -> int:
    """Return the approximate length of a value as text. O(items), and stops above VALUE_MAX.

    A list that holds another list twice counts it twice, because its text contains it twice.
    """
    total, rest = 0, [value]
    while rest and total <= VALUE_MAX:
        item = rest.pop()
        if isinstance(item, str):
            total += len(item)
            continue
        total += ITEM_SIZE
        if isinstance(item, dict):
            rest.extend(item)
            rest.extend(item.values())
        elif isinstance(item, range):
            total += ITEM_SIZE * len(item)
        elif isinstance(item, list | tuple | set | frozenset):
            rest.extend(item)
    return total


def _string_result(text: str, method: str, args: tuple[Any, ...]) -> int:
    """Return an upper bound of the size of a string method's result."""
    match method:
        case "join":
            items = args[0] if args else ()
            return estimate_size(items) + len(items) * len(text)
        case "replace" if len(args) > 1:
            old, new = str(args[0]), str(args[1])
            return len(text) + text.count(old) * len(new)
        case "split" | "rsplit" if args and isinstance(args[0], str) and args[0]:
            return len(text) + ITEM_SIZE * text.count(args[0])
        case "split" | "rsplit" | "splitlines":
            return len(text) * ITEM_SIZE // 2
        case _:
            return len(text)


def _bits(number: float) -> int:
    return number.bit_length() if isinstance(number, int) else 0


def _width(width: object) -> int:
    if isinstance(width, str):
        return len(width)
    return max(0, width) if isinstance(width, int) else VALUE_MAX


def _to_json(value: object, indent: int | None = None) -> str:
    """Return JSON as models saw it in training: no HTML escaping, keys in their order."""
    return json.dumps(value, ensure_ascii=False, indent=min(indent, 8) if indent else None)
