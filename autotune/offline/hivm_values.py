"""What a translated function of the IR computes with: integers, unknown numbers, memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

MOST_STEPS = 200_000  # of all loops of a program together, those aside that are multiplied


class CannotFollowError(ValueError):
    """The IR has something in it that is not known here."""


class TooLongError(ValueError):
    """A program has so many steps that following it would take minutes."""


@dataclasses.dataclass
class State:
    """How far a program has been followed."""

    steps: int = 0  # turns of loops so far
    kept: dict[Any, Any] = dataclasses.field(default_factory=dict)  # counts of inner loops
    assumed: int = 0  # branches and bounds that were decided without knowing


class _Unknown:
    """A number that only the chip knows. Whatever is computed from it is unknown as well."""

    def _same(self, *others: Any) -> Any:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _same
    __neg__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _same
    __eq__ = __ne__ = _same
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise AssertionError("an unknown number decided something without a note")


UNKNOWN = _Unknown()


def unknown(*values: Any) -> bool:
    """Whether any of ``values`` is."""
    return any(isinstance(value, _Unknown) for value in values)


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, int) else UNKNOWN


def _wrapped(value: Any, bits: int) -> Any:
    """``value`` cut to a signed integer of ``bits``."""
    half = 1 << (bits - 1)
    return UNKNOWN if unknown(value) else (value + half) % (2 * half) - half


def _unsigned(value: Any) -> Any:
    """An operand of an operation that reads it without its sign; ours never have one there."""
    if not unknown(value) and value < 0:
        raise CannotFollowError(f"an unsigned operation on {value}")
    return value


def _quotient(a: Any, b: Any) -> Any:
    """Division that rounds to zero, as C's does."""
    if unknown(a, b) or b == 0:
        return UNKNOWN
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _remainder(a: Any, b: Any) -> Any:
    q = _quotient(a, b)
    return UNKNOWN if unknown(q) else a - q * b


def _least(state: State, *values: Any) -> Any:
    """The smallest; of known and unknown ones the largest it can be, which is an assumption."""
    known = [v for v in values if not unknown(v)]
    if not known:
        return UNKNOWN
    state.assumed += len(known) < len(values)
    return min(known)


def _most(*values: Any) -> Any:
    return UNKNOWN if unknown(*values) else max(values)


def _truth(state: State, condition: Any) -> bool:
    """An unknown condition is taken to hold: what it guards is counted."""
    if unknown(condition):
        state.assumed += 1
        return True
    return bool(condition)


def _choose(condition: Any, a: Any, b: Any) -> Any:
    if not unknown(condition):
        return a if condition else b
    return (None, 0) if isinstance(a, tuple) else UNKNOWN


def _recall(
    state: State, times: list[int], elements: list[Any], first: int, last: int, key: Any
) -> Any:
    """Add what a loop counted when it read the same integers; None says that this was done.

    Otherwise the loop is to be run, and the result to be handed to ``_keep``.
    """
    if unknown(*key):
        return key, None, None, 0, first, last
    known = state.kept.get(key)
    if known is None:
        return key, list(times), elements[first:last], state.assumed, first, last
    block, new_times, new_elements, assumed = known
    for i, n in enumerate(new_times, block):
        times[i] += n
    for i, n in enumerate(new_elements, first):
        elements[i] += n
    state.assumed += assumed
    return None


def _keep(
    state: State, times: list[int], elements: list[Any], block: int, end: int, before: Any
) -> None:
    """Remember what a loop counted since ``_recall`` gave ``before``."""
    key, old_times, old_elements, assumed, first, last = before
    if old_times is None:
        return
    new_times = [times[i] - old_times[i] for i in range(block, end)]
    new_elements = [a - b for a, b in zip(elements[first:last], old_elements, strict=True)]
    state.kept[key] = block, new_times, new_elements, state.assumed - assumed


def _at(base: Any, offset: Any) -> Any:
    return base[0], base[1] + offset


def _load(memory: Any, index: Any) -> Any:
    values, offset = memory
    place = offset + index
    if values is None or unknown(place) or not 0 <= place < len(values):
        return UNKNOWN
    return int(values[place])


def _trips(first: Any, last: Any, step: Any) -> range:
    if unknown(first, last, step):
        raise CannotFollowError("a loop whose length only the chip knows")
    return range(first, last, step)


def _steps(state: State, first: Any, last: Any, step: Any) -> range:
    found = _trips(first, last, step)
    state.steps += len(found)
    if state.steps > MOST_STEPS:
        raise TooLongError(f"a program takes more than {MOST_STEPS} steps of its loops")
    return found


# What the translated text may name.
SCOPE: dict[str, Any] = {
    "UNKNOWN": UNKNOWN,
    "number": _number,
    "wrapped": _wrapped,
    "unsigned": _unsigned,
    "quotient": _quotient,
    "remainder": _remainder,
    "least": _least,
    "most": _most,
    "truth": _truth,
    "load": _load,
    "at": _at,
    "trips": _trips,
    "steps": _steps,
    "choose": _choose,
    "recall": _recall,
    "keep": _keep,
    "ceil": lambda a, b: -(-a // b),
    "product": math.prod,
}
