"""A Jinja environment that bounds the memory and time of any template.

Jinja's own sandbox keeps a template away from the program, but not from doubling a string thirty
times or from looping. Here every operation that can make a value larger than its parts is counted
before it runs: operators, calls, filters, literals, captured output (`gateway.prompt.result_sizes`
says how large a result may be). Operations that cannot be counted are not available. A thread
cannot be killed, so every loop iteration and every macro call checks the clock. All else is as in
transformers' environment. `gateway.prompt.template` uses it.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from jinja2 import Environment, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from gateway.prompt.opaque_text import OpaqueText, concatenate, output_value, trim_opaque
from gateway.prompt.result_sizes import (
    ITEM_SIZE,
    VALUE_MAX,
    estimate_size,
    filter_result,
    format_result,
    method_result,
    percent_result,
)

TOTAL_MAX = 100_000_000
"""Maximum size of all values that one rendering makes, in characters: bounds its memory."""
ITEMS_MAX = VALUE_MAX // ITEM_SIZE
"""Maximum number of items of one list."""
INTEGER_BITS_MAX = 1_024

FILTERS = frozenset(
    (
        "abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e",
        "escape", "filesizeformat", "first", "float", "forceescape", "format", "groupby", "indent",
        "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject",
        "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice",
        "sort", "string", "sum", "title", "tojson", "trim", "truncate", "unique", "upper",
        "urlencode", "wordcount",
    )
)  # fmt: skip
"""Jinja's filters but those without a bound of time or size (`pprint`, `striptags`, `urlize`,
`wordwrap`, `xmlattr`), and `random`, with which no prompt would be found again."""
GLOBALS = ("range", "namespace", "dict", "cycler", "joiner")
STRING_METHODS = frozenset(
    (
        "capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "index",
        "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower",
        "isnumeric", "isprintable", "isspace", "istitle", "isupper", "join", "ljust", "lower",
        "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
        "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
        "swapcase", "title", "upper", "zfill",
    )
)  # fmt: skip
"""The methods of texts; `format` and `format_map` are available too, in Jinja's own safe form."""
NUMBER_METHODS = frozenset(("bit_length", "conjugate", "is_integer"))
_CAPTURES = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)


class _RenderingBudget(threading.local):
    """Size made so far and deadline of the rendering in this thread."""

    total = 0
    ends_s = float("inf")


class GenerationTag(Extension):
    """`{% generation %}` … `{% endgeneration %}`, which mark the text that a training learns: the
    body is rendered in a scope of its own, as in transformers."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the tag and its body. Raises TemplateSyntaxError."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates. Thread-safe; call `begin` before each rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            finalize=self._finalize,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
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
        self.globals = {name: own[name] for name in GLOBALS}

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
        """Compile a template that has its output counted. See `jinja2.Environment.compile`."""
        tree = self.parse(source) if isinstance(source, str) else source
        counting = _CountingTransformer()
        counting.visit(tree)
        self.has_captures = self.has_captures or counting.has_captures
        tree.set_environment(self)
        return super().compile(tree, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Run operators that may give more than both operands."""
        if operator == "+" and type(left) is str and type(right) is str:
            self._spend(len(left) + len(right))
            return left + right
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if numbers:
            bits = _bits(left) * abs(right) if operator == "**" else _bits(left) + _bits(right)
            if bits > INTEGER_BITS_MAX:
                raise SecurityError("the template builds a number that is too large")
        elif operator == "%" and isinstance(left, str):
            self._spend(percent_result(left, right))
        else:
            sizes = [estimate_size(v) for v in (left, right) if not isinstance(v, int)]
            times = [max(0, v) for v in (left, right) if isinstance(v, int)]
            self._spend(sum(sizes) * (times[0] if operator == "*" and times else 1))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Count what `format` makes before Jinja's safe form of it runs."""
        made = super().wrap_str_format(value)
        if made is None:
            return None

        def counted(*args: Any, **kwargs: Any) -> str:
            self._spend(format_result(value.__self__, (args, kwargs)))
            return made(*args, **kwargs)

        return counted

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow only the methods of texts and numbers with results that can be counted."""
        if isinstance(obj, str) and attr not in STRING_METHODS:
            return False
        if isinstance(obj, int | float | complex) and attr not in NUMBER_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a call from the template; count strings before and every result after."""
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            if name == "join" and args and not isinstance(args[0], str):
                args = (list(islice(args[0], ITEMS_MAX)), *args[1:])
            __self._spend(method_result(owner, name, (*args, *kwargs.values())))
        return __self._count_value(super().call(__context, __obj, *args, **kwargs))

    def _counting_filter(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter so that its result is counted, before it runs where it could be large."""
        first = 1 if hasattr(made, "jinja_pass_arg") else 0

        @functools.wraps(made)
        def counted(*args: Any, **kwargs: Any) -> Any:
            before, value, rest = args[:first], args[first], args[first + 1 :]
            is_listed = name == "list" and not isinstance(value, str | Mapping)
            if name == "join" or is_listed:
                value = list(islice(value, ITEMS_MAX))
            if bound := filter_result(name, value, rest, kwargs):
                self._spend(bound)
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


def _bits(number: float) -> int:
    return number.bit_length() if isinstance(number, int) else 0


def _to_json(
    value: object,
    ensure_ascii: object = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: object = False,
) -> str:
    """Return JSON as models saw it in training, with the keywords of transformers' filter: no HTML
    escaping, and keys in their order."""
    return json.dumps(
        value,
        ensure_ascii=bool(ensure_ascii),
        indent=indent,
        separators=separators,
        sort_keys=bool(sort_keys),
    )
