"""Warps of a program that go their own ways, on Hopper (sm_90).

A chip starts programs one after the other (1.2 ns each: CONTRIBUTING, measured facts), so few
programs of several warps start sooner than many of one. But a branch is a program's: all of its
warps take it where one has to, and wait for each other to find out.

Here each warp has a tile of its own. Tensors are as large as one warp's places, which the compiler
takes for copies in all warps, and ``warp`` for a number that they share; so what is reduced stays
inside a warp, and a branch is a warp's. What the compiler has one of the copies do, to store and to
count, must be said lane by lane: that is what the other functions are for. Lanes that have the same
number store it several times. Nothing may go from lane to lane through shared memory but ahead of
the first branch, and then only what all warps have alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tkernels import few_rows_hopper as few

if TYPE_CHECKING:
    from tkernels import _triton as gl
    from tkernels import _triton as gluon
else:
    gl, gluon = few.gl, few.gluon

# fmt: off


@gluon.jit
def warp():
    """Which warp of its program this is."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 $0, t, 5; }", "=r", [], dtype=gl.int32,
        is_pure=True, pack=1)


@gluon.jit
def of_other(x, lane):
    """The int32 that another lane has; all lanes of a warp ask."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", [x, lane], dtype=gl.int32,
        is_pure=False, pack=1)


@gluon.jit
def first_bit(x):
    """Which bit of an int32 is the first that is 1."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; brev.b32 t, $1; clz.b32 $0, t; }", "=r,r", [x], dtype=gl.int32,
        is_pure=True, pack=1)


@gluon.jit
def put(to, x, mask, KIND: gl.constexpr):
    """Store the last bits of x, of 32: "b8", "b16" or "b32"."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global." + KIND + " [$1], $2; "
        "mov.b32 $0, 0; }",
        "=r,l,r,r", [to.to(gl.int64), x, mask.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def put_16_bytes(to, a, b, c, d, mask):
    """Store four int32, where an address divides by 16."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $6, 0; @p st.global.v4.b32 [$1], {$2, $3, $4, $5}; "
        "mov.b32 $0, 0; }",
        "=r,l,r,r,r,r,r", [to.to(gl.int64), a, b, c, d, mask.to(gl.int32)], dtype=gl.int32,
        is_pure=False, pack=1)


@gluon.jit
def take_32_bytes(at, mask):
    """Eight int32, where an address divides by 16; something where ``mask`` is not."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $9, 0; @p ld.global.v4.b32 {$0, $1, $2, $3}, [$8]; "
        "@p ld.global.v4.b32 {$4, $5, $6, $7}, [$8 + 16]; }",
        "=r,=r,=r,=r,=r,=r,=r,=r,l,r", [at.to(gl.int64), mask.to(gl.int32)],
        dtype=(
            gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False, pack=1)


@gluon.jit
def take_short(at, mask):
    """An int16 as an int32; -1 where ``mask`` is not."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, -1; @p ld.global.s16 $0, [$1]; }",
        "=r,l,r", [at.to(gl.int64), mask.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_one(count, mask):
    """Less one of each int32 at ``count``; what it was.

    ptxas adds for a whole warp, and waits for the sum at once, where it knows that all addresses of
    one are the same: they should depend on the lane for those that are masked off.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p atom.relaxed.gpu.global.add.u32 $0, [$1], -1; }",
        "=r,l,r", [count.to(gl.int64), mask.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def add_one(count, mask):
    """One more of each int32 at ``count``."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p red.relaxed.gpu.global.add.u32 [$1], 1; "
        "mov.b32 $0, 0; }",
        "=r,l,r", [count.to(gl.int64), mask.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1)


# fmt: on
