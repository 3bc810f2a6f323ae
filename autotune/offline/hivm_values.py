"""What a translated function of the IR computes with: integers, unknown numbers, memory."""

from __future__ import annotations

import math
from typing import Any

MOST_STEPS = 200_000  # of all loops of a program together


class CannotFollowError(ValueError):
    """The IR has something in it that is not known here."""


class TooLongError(ValueError):
    """A program has so many steps that following it would take minutes (and running it, too)."""


class _Unknown:
    """A number that only the chip knows. Whatever is computed from it is unknown as well."""

    def _same(self, *others: Any) -> _Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _same
    __neg__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _same

    def __bool__(self) -> bool:
        return True


UNKNOWN = _Unknown()


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, int) else UNKNOWN


def _quotient(a: Any, b: Any) -> Any:
    """Division that rounds to zero, as C's does."""
    if isinstance(a, _Unknown) or isinstance(b, _Unknown) or b == 0:
        return UNKNOWN
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _remainder(a: Any, b: Any) -> Any:
    q = _quotient(a, b)
    return UNKNOWN if isinstance(q, _Unknown) else a - q * b


def _least(*values: Any) -> Any:
    known = [v for v in values if not isinstance(v, _Unknown)]
    return min(known) if known else UNKNOWN


def _most(*values: Any) -> Any:
    known = [v for v in values if not isinstance(v, _Unknown)]
    return max(known) if known else UNKNOWN


def _at(size: Any, base: Any, offset: Any) -> Any:
    return size, base[1], base[2] + offset


def _load(memory: Any, index: Any) -> Any:
    _, values, offset = memory
    place = offset + index
    if values is None or isinstance(place, _Unknown) or not 0 <= place < len(values):
        return UNKNOWN
    return int(values[place])


def _steps(first: Any, last: Any, step: Any, left: list[int]) -> range:
    if any(isinstance(v, _Unknown) for v in (first, last, step)):
        raise CannotFollowError("a loop whose length only the chip knows")
    found = range(first, last, step)
    left[0] -= len(found)
    if left[0] < 0:
        raise TooLongError(f"a program takes more than {MOST_STEPS} steps of its loops")
    return found


# What the translated text may name.
SCOPE: dict[str, Any] = {
    "UNKNOWN": UNKNOWN,
    "number": _number,
    "quotient": _quotient,
    "remainder": _remainder,
    "least": _least,
    "most": _most,
    "load": _load,
    "at": _at,
    "steps": _steps,
    "choose": lambda condition, a, b: a if condition else b,
    "ceil": lambda a, b: -(-a // b),
    "product": math.prod,
}
