"""What bodies for few rows on Hopper (sm_90) share: Gluon, copies, pieces of operands, registers.

Rows are few where weights are what is read, and reading them all the time there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tkernels import device
from tkernels import paged_attn_quantized_hopper as paged
from tkernels.device import Device, cdiv, next_power_of_2

if TYPE_CHECKING:
    from tkernels import _triton as ampere
    from tkernels import _triton as gl
    from tkernels import _triton as gluon
else:
    gl, gluon, ampere = paged.gl, paged.gluon, paged.ampere

_load_async, _commit, _wait = paged._load_async, paged._commit, paged._wait

MOST_COLUMNS = 1 << 30  # of x: they are counted in 32 bits, and a little beyond

# fmt: off


@gluon.jit
def _pieces(x, P: gl.constexpr):
    """The P pieces [W, M, C / P] of x [W, M, C], side by side; no number changes its lane."""
    if P == 1:
        pieces = gl.tuple([x])
    else:
        w: gl.constexpr = x.shape[0]
        m: gl.constexpr = x.shape[1]
        c: gl.constexpr = x.shape[2]
        first, second = gl.split(gl.permute(gl.reshape(x, [w, m, 2, c // 2]), [0, 1, 3, 2]))
        first = gl.convert_layout(first, x.type.layout, assert_trivial=True)
        second = gl.convert_layout(second, x.type.layout, assert_trivial=True)
        pieces = _pieces(first, P // 2) + _pieces(second, P // 2)
    return pieces


# fmt: on


def most_registers(warps: int, per_core: int) -> int:
    """Registers of a thread where a core shall hold ``per_core`` programs (0: one)."""
    return min(255, 65536 // (32 * warps * max(1, per_core)) // 8 * 8)


def register_options(warps: int, max_programs: int) -> dict[str, int]:
    """Launch keyword for ``most_registers``, from the programs that a chip shall hold at most."""
    dev = device.current()
    if max_programs == dev.max_programs:
        return {}
    return {"maxnreg": most_registers(warps, max_programs // dev.num_cores)}


def piece_to_add(m: int, n: int, dev: Device) -> tuple[int, int]:
    """Columns that a program has which adds parts of a split K, and its warps."""
    piece = max(128, min(1024, next_power_of_2(n)))
    while piece > 256 and m * cdiv(n, piece) < 4 * dev.num_cores:
        piece //= 2
    return piece, piece // 128
