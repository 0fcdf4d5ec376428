"""The sandbox that chat templates run in: what it bounds is the work and the size of what a template makes.

A template is a program that came with the weights. All that it does costs units of work: a turn of a loop, a call, an
operator, and 32 characters or one element of whatever it makes. A render has WORK of them, and no text is longer than
LONGEST. What could be larger than what it is made from (repetition, powers, formatting, padding, replacing, joining) is
judged before it is made. A clock is not read: the same template ends at the same place everywhere.
"""

import contextvars
import functools
import re
from collections.abc import Callable, Iterator, Mapping, MappingView
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

WORK = 1 << 21  # of one render; a conversation of 10,000 messages takes a tenth
LONGEST = 1 << 23  # characters; a million tokens have half as many
_PER_UNIT = 32  # characters
_BITS = 4096  # of a whole number
_WIDTH = 10_000  # of padding, in a format or as an argument
_INDENT = 64
# Methods and filters that chat templates do without, and whose cost does not follow from the length of what they give.
_NEVER = frozenset({"translate", "to_bytes", "from_bytes", "fromkeys", "encode", "maketrans", "striptags", "unescape"})
_NO_FILTERS = ("urlize", "xmlattr", "striptags", "pprint", "wordwrap", "wordcount")
_BACKWARDS = frozenset({"rfind", "rindex", "rsplit", "rpartition"})  # Python searches so in quadratic time
_WIDE_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_WIDE_FILTERS = frozenset({"center", "indent", "batch", "slice", "round"})
_ALL_AT_ONCE = frozenset({"join", "sum", "list", "sort", "unique", "tojson", "string", "length", "count"})
_PEEKING = frozenset({"first", "last", "default", "d", "attr", "random", "items"})  # filters that leave most unread
# A search takes as many steps as the text is long, for no place of it is looked at from several others. The name of a
# field, %(name)s, may hold anything: where there are names, each parenthesis that closes counts as the end of one.
_WIDE_FIELD = {
    "%": re.compile(r"%[-+ #0-9.]*?(\*|[0-9]{5})"),
    "%(": re.compile(r"[%)][-+ #0-9.]*?(\*|[0-9]{5})"),
    "{": re.compile(r"\{[^{}:]*:[^{}]*?(\{|[0-9]{5})"),
}
_CONTAINERS = (list, tuple, set, frozenset, Mapping, MappingView, jinja2.utils.Namespace)
_left: contextvars.ContextVar[list[int]] = contextvars.ContextVar("work that a render has left")


class TemplateTooCostly(jinja2.TemplateError):
    """A template makes more than a prompt can need."""


def bounded(render: Callable[[], str]) -> str:
    """Calls `render` with WORK of its own. Raises TemplateTooCostly."""
    token = _left.set([WORK])
    try:
        return render()
    finally:
        _left.reset(token)


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja's sandbox, with bounds."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_charged, **options)
        self.code_generator_class = _Generator
        self.concat = _concat
        del self.globals["lipsum"]
        for name in _NO_FILTERS:
            del self.filters[name]
        self.filters = {name: _bounded_filter(name, function) for name, function in self.filters.items()}

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = _bounded_filter(name, function)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _NEVER and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def formatted(*args: Any, **named: Any) -> str:
            _check_format(value.__self__, "{", (args, named))
            return wrapped(*args, **named)

        return formatted

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        spend(1)
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str | bytes):
            _check_format(left, "%", right)
        elif operator == "+":
            _check_length(_length(left) + _length(right))
        return _charged(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # names that no argument has
        spend(1)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes):
            _check_method(owner, name, args, kwargs)
            args = tuple(_listed(arg) if name == "join" else arg for arg in args)
        return _charged(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        found = super().getitem(obj, argument)
        return _charged(found) if isinstance(argument, slice) else found

    # -- what the code of a template calls ---------------------------------------------------------------

    def turn(self) -> None:
        """A block of statements begins: a turn of a loop, a macro's body."""
        spend(1)

    def joined(self, parts: tuple[Any, ...]) -> str:
        """The operator ~."""
        return _concat([str(_charged(part)) for part in parts])

    def made(self, value: Any) -> Any:
        """A list, tuple or dict that a template has written down, or what it compares with."""
        return _charged(value)


class _Generator(jinja2.compiler.CodeGenerator):
    """The code of templates, with calls of the environment where work is done."""

    def blockvisit(self, nodes: Any, frame: Any) -> None:
        self.writeline("environment.turn()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Any) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Operand(self, node: jinja2.nodes.Operand, frame: Any) -> None:
        self.write(f" {jinja2.compiler.operators[node.op]} environment.made(")
        self.visit(node.expr, frame)
        self.write(")")

    def visit_List(self, node: jinja2.nodes.List, frame: Any) -> None:
        self._made(super().visit_List, node, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: Any) -> None:
        self._made(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: Any) -> None:
        if node.ctx == "load":
            self._made(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _made(self, visit: Callable[[Any, Any], None], node: Any, frame: Any) -> None:
        self.write("environment.made(")
        visit(node, frame)
        self.write(")")


def spend(units: int) -> None:
    """Raises TemplateTooCostly where a render has too little work left. What is compiled alone spends nothing."""
    left = _left.get(None)
    if left is not None:
        left[0] -= units
        if left[0] < 0:
            raise TemplateTooCostly(
                f"it does more than a chat needs: more than {WORK:,} turns of loops, calls and pieces of text"
            )


def _charged(value: Any) -> Any:
    """The value, whose size has been paid for; what is nested in it counts as often as it is reached."""
    if isinstance(value, str | bytes):
        _check_length(len(value))
        spend(1 + len(value) // _PER_UNIT)
    elif isinstance(value, _CONTAINERS):
        for each in _leaves(value):
            spend(1 + (len(each) // _PER_UNIT if isinstance(each, str | bytes) else 0))
    elif isinstance(value, int) and value.bit_length() > _BITS:
        raise TemplateTooCostly(f"a whole number has {value.bit_length()} bits; {_BITS} are allowed")
    return value


def _leaves(value: Any) -> Iterator[Any]:
    """All that is reached from a container, itself and its keys too."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        yield found
        waiting.extend(_inside(found))


def _inside(value: Any) -> list[Any]:
    """The values in a container; nothing for any other value."""
    if isinstance(value, jinja2.utils.Namespace):
        value = value._Namespace__attrs  # its text is theirs
    if isinstance(value, Mapping):
        spend(2 * len(value))
        return [*value.keys(), *value.values()]
    if isinstance(value, _CONTAINERS):
        spend(len(value))  # type: ignore[arg-type]
        return list(value)  # type: ignore[arg-type]
    return []


def _concat(parts: Any) -> str:
    """The texts as one, as `"".join`."""
    found, length = [], 0
    for part in parts:
        length += len(part)
        _check_length(length)
        found.append(part)
    spend(1 + len(found) + length // _PER_UNIT)
    return "".join(found)


def _listed(value: Any) -> Any:
    """The elements of what is iterated over, so that they can be counted."""
    return value if isinstance(value, str | Mapping | list | tuple) else _charged(list(value))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _check_length(length: int) -> None:
    if length > LONGEST:
        raise TemplateTooCostly(f"it makes a text or list of {length:,} elements; {LONGEST:,} are allowed")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _BITS:
            raise TemplateTooCostly(f"a product has more than {_BITS} bits")
        return
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
            _check_length(len(sequence) * max(count, 0))


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * max(exponent, 0) > _BITS:
        raise TemplateTooCostly(f"a power has more than {_BITS} bits")


def _check_format(form: str | bytes, mark: str, values: Any) -> None:
    """Raises TemplateTooCostly for wide fields, and where all values in all fields would be too long."""
    text = form.decode("latin1") if isinstance(form, bytes) else str(form)
    if _WIDE_FIELD["%(" if mark == "%" and "%(" in text else mark].search(text):
        raise TemplateTooCostly(f"a format has a width that is {_WIDTH} or more, or is a value itself")
    widths = sum(int(digits) for digits in re.findall(r"[0-9]+", text) if len(digits) < 5)
    _check_length(len(text) + widths + text.count(mark) * sum(map(_spelled, _leaves([values]))))


def _spelled(value: Any) -> int:
    """About how many characters a value's text has, without what is nested in it."""
    if isinstance(value, str | bytes):
        return len(value) + 4
    return 24 + (value.bit_length() // 3 if isinstance(value, int) else 0)


def _check_method(owner: str | bytes, name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raises TemplateTooCostly where a method of a text would give one that is too long."""
    values = (*args, *named.values())
    spend(len(owner) // _PER_UNIT)
    if name in _BACKWARDS:
        spend(len(owner) * max([0, *map(_length, values)]) // 1024)
    if name in _WIDE_METHODS:
        _check_width(values)
        if name == "expandtabs":
            _check_length(len(owner) * (1 + max([8, *(value for value in values if isinstance(value, int))])))
    elif name == "replace":
        _check_replace(owner, *values[:2])
    elif name == "join":
        _check_join(owner, values)


def _check_width(values: Any) -> None:
    for value in values:
        if (isinstance(value, int) and abs(value) > _WIDTH) or (isinstance(value, str | bytes) and len(value) > _WIDTH):
            raise TemplateTooCostly(f"a width, number or filling is beyond {_WIDTH}")


def _check_replace(text: Any, old: Any = None, new: Any = None) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        spend(1 + len(text) // _PER_UNIT)
        _check_length(len(text) + text.count(old) * max(len(new) - len(old), 0))


def _check_join(separator: Any, values: Any) -> None:
    for value in values:
        if isinstance(value, str | list | tuple | Mapping):
            _check_length(len(value) * len(separator))


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, charged for what it gives. With a context jinja does not run it while it compiles."""
    passes = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @jinja2.pass_context
    @functools.wraps(function)
    def bounded(context: Any, value: Any, *args: Any, **named: Any) -> Any:
        spend(1 + _read_by(name, value))
        _check_filter(name, value, args, named)
        before = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        if name in _ALL_AT_ONCE:
            value = _charged(_listed(value) if isinstance(value, Iterator) else value)
        return _charged(function(*([before[passes]] if passes else []), value, *args, **named))

    return bounded


def _read_by(name: str, value: Any) -> int:
    """Units for what a filter reads, which may be much more than what it gives."""
    if isinstance(value, str | bytes):
        return len(value) // (4 if name == "title" else _PER_UNIT)
    return 0 if name in _PEEKING or not isinstance(value, list | tuple | Mapping) else len(value)


def _check_filter(name: str, value: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    values = (*args, *named.values())
    if name in _WIDE_FILTERS:
        _check_width(values)
    if name == "indent" and isinstance(value, str):
        width = max([4, *(n if isinstance(n, int) else len(n) for n in values if isinstance(n, int | str))])
        _check_length(len(value) + (value.count("\n") + 1) * width)
    elif name == "replace":
        _check_replace(str(value), *values[:2])
    elif name == "join":
        _check_join(values[0] if values and isinstance(values[0], str) else "", [value])
    elif name == "format":
        _check_format(str(value), "%", values)
    elif name == "tojson" and any(isinstance(given, int | str) and given for given in values):
        _check_indented(value, values)
    elif name == "sum" and any(isinstance(given, list | tuple) for given in values):
        raise TemplateTooCostly("sum adds numbers here, and no lists")


def _check_indented(value: Any, values: Any) -> None:
    """Raises TemplateTooCostly where JSON with an indent would be too long: each line begins with that of its depth."""
    width = max(given if isinstance(given, int) else len(given) for given in values if isinstance(given, int | str))
    if width > _INDENT:
        raise TemplateTooCostly(f"an indent is {width} wide; {_INDENT} is allowed")
    level, depth, length = [value], 0, 0
    while level:
        depth += 1
        length += len(level) * depth * width
        _check_length(length)
        level = [inner for each in level for inner in _inside(each)]
