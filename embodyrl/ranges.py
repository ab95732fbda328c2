"""What the values of a config may be, declared beside its fields.

    lr: Positive = 1e-4
    keep: Annotated[str, Choice("success", "all")] = "success"
    gamma: Annotated[float, Range(0, 1, open_low=True)] = 0.99

The aliases below are for what occurs often. ``check_values`` compares the values with them, wherever
a config is composed or something is built of one. A subclass that gives a field another default
keeps its range. A plug-in's field without a range takes any value of its type.
"""

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Protocol, Union, get_args, get_origin, get_type_hints

from embodyrl.errors import UserError, did_you_mean

LARGEST = 10**9
"""More things than any config asks for; a sentence does not name this bound unless it is passed."""


class Rule(Protocol):
    """What a value must be."""

    @property
    def words(self) -> str:
        """What it must be, as the end of "it must be ..."."""
        ...

    def holds(self, value: Any) -> bool:
        """Whether a value is so."""
        ...


@dataclass(frozen=True)
class Range:
    """A finite number from ``low`` to ``high``.

    Attributes:
        low: the smallest.
        high: the largest.
        open_low: ``low`` itself is left out.
        open_high: so is ``high``.
        also: further values, which have a meaning of their own, such as 0 for none.
    """

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    also: tuple[float, ...] = ()

    def holds(self, value: Any) -> bool:
        """See ``Rule``."""
        if value in self.also:
            return True
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return math.isfinite(value) and above and below

    @property
    def words(self) -> str:
        """See ``Rule``."""
        if self.low == self.high:
            return _number(self.low)
        # A large upper bound is not named: nobody asks for so many.
        parts = []
        high = math.inf if self.high == LARGEST else self.high
        if not self.open_low and not self.open_high and math.isfinite(self.low + high):
            parts.append(f"from {_number(self.low)} to {_number(self.high)}")
        else:
            if math.isfinite(self.low):
                parts.append(f"{'above' if self.open_low else 'at least'} {_number(self.low)}")
            if math.isfinite(high):
                parts.append(f"{'below' if self.open_high else 'at most'} {_number(self.high)}")
        text = " and ".join(parts) or "a finite number"
        return ", or ".join([*map(_number, self.also), text])


@dataclass(frozen=True, init=False)
class Choice:
    """One of a few texts."""

    valid: tuple[str, ...]

    def __init__(self, *valid: str) -> None:
        object.__setattr__(self, "valid", valid)

    def holds(self, value: Any) -> bool:
        """See ``Rule``."""
        return value in self.valid

    @property
    def words(self) -> str:
        """See ``Rule``."""
        return _listed(self.valid)


@dataclass(frozen=True)
class DeviceName:
    """The name of a device that PyTorch has: ``cpu``, ``cuda``, or ``cuda:1`` for the second GPU.

    Attributes:
        auto: ``auto``, the GPU if there is one, will do too.
    """

    auto: bool = True

    def holds(self, value: Any) -> bool:
        """See ``Rule``."""
        return bool(re.fullmatch(r"cpu|mps|cuda(:\d{1,3})?", value)) or (
            self.auto and value == "auto"
        )

    @property
    def words(self) -> str:
        """See ``Rule``."""
        return _listed([*(["auto"] if self.auto else []), "cpu", "cuda", "cuda:N (GPU N, from 0)"])


@dataclass(frozen=True)
class Several:
    """Marks a text that holds several names: a config may give them as a list, too."""


Names = Annotated[str, Several()]
"""Names separated by commas; ``names_in`` takes them apart."""
Seed = Annotated[int, Range(0, 2**31 - 1)]
"""Of random numbers: what NumPy, PyTorch and every simulator take."""
Count = Annotated[int, Range(1, LARGEST)]
"""A number of things, at least one."""
CountOrZero = Annotated[int, Range(0, LARGEST)]
"""A number of things; 0 is none, or has a meaning of its own."""
Processes = Annotated[int, Range(1, 1024)]
"""Processes side by side."""
Threads = Annotated[int, Range(0, 1024)]
"""Threads of a process; 0 leaves the number to the program."""
Pixels = Annotated[int, Range(8, 4096)]
"""Edge of a picture."""
Positive = Annotated[float, Range(0, open_low=True)]
"""Above 0."""
NotNegative = Annotated[float, Range(0)]
"""At least 0."""
Share = Annotated[float, Range(0, 1)]
"""A part of a whole."""
Discount = Annotated[float, Range(0, 1, open_low=True)]
"""A factor above 0, of which 1 is the largest."""
Device = Annotated[str, DeviceName()]
"""Where a program computes."""


def check_values(section: str, cls: type, values: Mapping[str, Any]) -> None:
    """Checks the values of a config against what its dataclass declares.

    Args:
        section: of the config, for messages.
        cls: the dataclass.
        values: of its fields.

    Raises:
        UserError: a value that may not be; the message names the key, the value and the range.
    """
    for key, hint in field_types(cls).items():
        if key in values:
            _check(f"{section}.{key}", values[key], hint)


def check_config(section: str, config: Any) -> None:
    """``check_values`` of a config that was built directly, in Python."""
    check_values(section, type(config), vars(config))


def names_in(text: str) -> tuple[str, ...]:
    """The names that a setting of the type ``Names`` holds, in its order.

    Raises:
        UserError: one of them is empty, or stands there twice.
    """
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not name:
            raise UserError(
                f"{text!r} has an empty name. Separate names by single commas, as in a,b."
            )
        if names.count(name) > 1:
            raise UserError(f"{text!r} names {name} twice. Name each one once.")
    return names


def join_names(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with text in place of the lists that fields of the type ``Names`` were given."""
    hints = field_types(cls)
    return {
        key: ",".join(value)
        if isinstance(value, list) and _is_names(hints.get(key), value)
        else value
        for key, value in given.items()
    }


def _is_names(hint: Any, value: list[Any]) -> bool:
    """Whether a field takes several names, and these are some."""
    named = get_origin(hint) is Annotated and Several() in get_args(hint)
    return named and bool(value) and all(isinstance(name, str) for name in value)


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Field of a dataclass -> its type with the range; a base class's range holds in subclasses."""
    # The nearest class that declares a range for a field has the say.
    own = get_type_hints(cls, include_extras=True)
    found = {}
    for field in fields(cls):
        inherited = [
            hint
            for base in cls.__mro__[:-1]
            if (hint := get_type_hints(base, include_extras=True).get(field.name)) is not None
            and rules(hint)
        ]
        found[field.name] = inherited[0] if inherited else own[field.name]
    return found


def rules(hint: Any) -> list[Rule]:
    """All that a type demands of a value or of its elements."""
    found = []
    for inner in get_args(hint):
        if isinstance(inner, Range | Choice | DeviceName):
            found.append(inner)
        else:
            found += rules(inner)
    return found


def _check(where: str, value: Any, hint: Any) -> None:
    """Compares a value, and what it holds, with a type."""
    if value is None:
        return
    # A range stands at the value itself, at its elements, or at one of several types.
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Annotated:
        for rule in rules(Annotated[object, *arguments[1:]]):
            if not rule.holds(value):
                raise UserError(_refusal(where, value, rule))
        _check(where, value, arguments[0])
    elif origin in (Union, types.UnionType):
        for inner in arguments:
            _check(where, value, inner)
    elif origin is tuple and isinstance(value, list | tuple):
        inner = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        for number, (item, kind) in enumerate(zip(value, inner, strict=False)):
            _check(f"{where}[{number}]", item, kind)


def _refusal(where: str, value: Any, rule: Rule) -> str:
    # Numbers that are far too large get the largest in words, texts the nearest valid one.
    number = not isinstance(value, str)
    finite = not number or math.isfinite(value)
    passed = isinstance(rule, Range) and number and finite and float(value) > rule.high == LARGEST
    words = f"at most {_number(LARGEST)}" if passed else rule.words
    text = f"{where} is {value!r}, but it must be {words}"
    if not finite:
        return f"{text}, and finite."
    if isinstance(rule, Choice) and "Did you mean" in (hint := did_you_mean(value, rule.valid)):
        return f"{text}. {hint}"
    return f"{text}."


def _number(value: float) -> str:
    return f"{value:,}" if abs(value) >= 10_000 else f"{value:g}"


def _listed(names: Any) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def require_finite(options: Mapping[str, Any]) -> None:
    """Refuses numbers of a command line that are none: "nan" and "inf" are floats to a parser.

    Args:
        options: name of each option -> its value.

    Raises:
        UserError: naming the option.
    """
    for name, value in options.items():
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(n, float) and not math.isfinite(n) for n in numbers):
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be a finite number.")
