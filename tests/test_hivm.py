"""Following a compiler's last IR: counts with real trip counts, on small modules written here."""

from __future__ import annotations

import pytest

from autotune.offline import hivm
from autotune.offline.ascend import chosen, makespan
from autotune.offline.hivm import CannotFollowError, TooLongError

GM = "#hivm.address_space<gm>"
UB = "#hivm.address_space<ub>"
CBUF = "#hivm.address_space<cbuf>"


def module(body: str, *own: str, core: str = "AIV", maps: str = "") -> str:
    """A module with one function; its ``own`` arguments follow the three of the system."""
    count = 3 + len(own)
    names = [f"%arg{i}: {kind}" for i, kind in enumerate(["i64", f"memref<?xi8, {GM}>"] * 2)][:3]
    names += [f"%arg{3 + i}: {kind}" for i, kind in enumerate(own)]
    names += [f"%arg{count + i}: i32" for i in range(3)]  # the grid
    return f"""{maps}
module attributes {{}} {{
  func.func @helper() -> i8 attributes {{hacc.function_kind = #hacc.function_kind<HOST>}} {{
    %c1_i8 = arith.constant 1 : i8
    return %c1_i8 : i8
  }}
  func.func @kernel({", ".join(names)}) attributes {{hacc.entry, hacc.function_kind = #hacc.function_kind<DEVICE>, hivm.func_core_type = #hivm.func_core_type<{core}>}} {{
{body}
    return
  }}
}}
"""  # noqa: E501


ROWS = f"""
    %c0 = arith.constant 0 : index
    %c1_i32 = arith.constant 1 : i32
    %c-2_i32 = arith.constant -2 : i32
    %0 = hivm.hir.get_block_idx -> i64
    %1 = arith.trunci %0 : i64 to i32
    %buffer = hivm.hir.pointer_cast(%c0) : memref<128xf32, {UB}>
    scf.for %arg8 = %1 to %arg4 step %arg5  : i32 {{
      %2 = arith.index_cast %arg8 : i32 to index
      %row = memref.reinterpret_cast %arg3 to offset: [%2], sizes: [128], strides: [1] : memref<?xf32, {GM}> to memref<128xf32, strided<[1], offset: ?>, {GM}>
      hivm.hir.wait_flag[<PIPE_V>, <PIPE_MTE2>, <EVENT_ID0>]
      hivm.hir.load ins(%row : memref<128xf32, strided<[1], offset: ?>, {GM}>) outs(%buffer : memref<128xf32, {UB}>)
      hivm.hir.set_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]
      hivm.hir.vmul ins(%buffer, %buffer : memref<128xf32, {UB}>, memref<128xf32, {UB}>) outs(%buffer : memref<128xf32, {UB}>)
      hivm.hir.store ins(%buffer : memref<128xf32, {UB}>) outs(%row : memref<128xf32, strided<[1], offset: ?>, {GM}>)
    }}
"""  # noqa: E501


def follow(text: str, values: list[object], grid: int = 1, program: int = 0) -> dict[str, int]:
    [function] = hivm.functions(text)
    return function.follow(values, (grid, 1, 1), program).totals()


def test_loops_run_as_often_as_the_arguments_say() -> None:
    text = module(ROWS, f"memref<?xf32, {GM}>", "i32")
    assert [f.name for f in hivm.functions(text)] == ["kernel"]  # the host's are left out
    totals = [follow(text, [None, 10], 4, program) for program in range(4)]
    assert [t["MTE2 ops"] for t in totals] == [3, 3, 2, 2]
    assert sum(t["MTE2 bytes"] for t in totals) == 10 * 128 * 4
    assert totals[0] == {
        "MTE2 bytes": 3 * 512,
        "MTE2 ops": 3,
        "V bytes": 3 * 512,
        "V ops": 3,
        "MTE3 bytes": 3 * 512,
        "MTE3 ops": 3,
        "sync wait_flag": 3,
        "sync set_flag": 3,
    }


LENGTHS = f"""
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c16_i32 = arith.constant 16 : i32
    %c15_i32 = arith.constant 15 : i32
    %0 = hivm.hir.get_block_idx -> i64
    %1 = arith.index_cast %0 : i64 to index
    %length = memref.reinterpret_cast %arg3 to offset: [%1], sizes: [1], strides: [1] : memref<?xi32, {GM}> to memref<1xi32, strided<[1], offset: ?>, {GM}>
    %2 = memref.load %length[%c0] : memref<1xi32, strided<[1], offset: ?>, {GM}>
    %3 = arith.addi %2, %c15_i32 : i32
    %4 = arith.divsi %3, %c16_i32 : i32
    %5 = arith.index_cast %4 : i32 to index
    %a = hivm.hir.pointer_cast(%c0) : memref<4x16xbf16, {CBUF}>
    %count:2 = scf.for %arg7 = %c0 to %5 step %c1 iter_args(%i = %c0, %b = %a) -> (index, memref<4x16xbf16, {CBUF}>) {{
      %6 = affine.min #map(%arg7)[%5]
      %page = memref.subview %b[0, 0] [%6, 16] [1, 1] : memref<4x16xbf16, {CBUF}> to memref<?x16xbf16, {CBUF}>
      %any = memref.cast %page : memref<?x16xbf16, {CBUF}> to memref<?x?xbf16, {CBUF}>
      hivm.hir.mmadL1 {{b_transpose}} ins(%any, %any, %c1, %6, %c1, %c1 : memref<?x?xbf16, {CBUF}>, memref<?x?xbf16, {CBUF}>, i1, index, index, index) outs(%any : memref<?x?xbf16, {CBUF}>)
      %7 = arith.addi %i, %6 : index
      scf.yield %7, %b : index, memref<4x16xbf16, {CBUF}>
    }} {{multibuffer_unroll_factor = 4 : i32}}
    %8 = arith.cmpi sgt, %count#0, %c1 : index
    scf.if %8 {{
      hivm.hir.pipe_barrier[<PIPE_ALL>]
    }} else {{
      hivm.hir.sync_block_set[<CUBE>, <PIPE_MTE2>, <PIPE_S>] flag = 4
    }}
"""  # noqa: E501
MAP = "#map = affine_map<(d0)[s0] -> (4, (s0 - d0) * 2 + d0 mod 2 - d0 mod 2, s0 ceildiv 1 + 9)>"


def test_lengths_come_from_the_tensor_that_holds_them() -> None:
    """Trip counts, sizes and branches follow from a loaded integer, through maps and yields."""
    text = module(LENGTHS, f"memref<?xi32, {GM}>", core="AIC", maps=MAP)
    [function] = hivm.functions(text)
    assert (function.core, function.pipelined) == ("aic", True)
    lengths = [33, 1, 0]
    totals = [follow(text, [lengths], 3, program) for program in range(3)]
    # 33 tokens are three pages: min(4, (3 - i) * 2) rows each.
    assert totals[0]["M macs bf16"] == 4 + 4 + 2
    assert totals[0]["sync pipe_barrier"] == 1
    assert totals[1]["M macs bf16"] == 2
    assert totals[1]["sync pipe_barrier"] == 1
    assert "M ops" not in totals[2]
    assert totals[2]["sync sync_block_set"] == 1


def test_a_loop_of_unknown_length_is_refused() -> None:
    text = module(LENGTHS, f"memref<?xi32, {GM}>", core="AIC", maps=MAP)
    with pytest.raises(CannotFollowError, match="a loop whose length only the chip knows"):
        follow(text, [None])


def test_a_loop_whose_turns_count_the_same_is_multiplied() -> None:
    text = module(ROWS, f"memref<?xf32, {GM}>", "i32")
    assert follow(text, [None, 10**12])["V bytes"] == 10**12 * 512
    assert follow(text, [None, 0]) == {}


TAILS = f"""
    %c0 = arith.constant 0 : index
    %c1_i32 = arith.constant 1 : i32
    %c3_i32 = arith.constant 3 : i32
    %c0_i32 = arith.constant 0 : i32
    %c8_i32 = arith.constant 8 : i32
    %c8 = arith.constant 8 : index
    %buffer = hivm.hir.pointer_cast(%c0) : memref<8xf32, {UB}>
    scf.for %row = %c0_i32 to %arg3 step %c1_i32  : i32 {{
      %0 = arith.remsi %row, %c3_i32 : i32
      %1 = arith.muli %0, %c8_i32 : i32
      scf.for %i = %c0_i32 to %1 step %c3_i32  : i32 {{
        %2 = arith.subi %1, %i : i32
        %3 = arith.index_cast %2 : i32 to index
        %4 = affine.min #map()[%3]
        %part = memref.subview %buffer[0] [%4] [1] : memref<8xf32, {UB}> to memref<?xf32, strided<[1]>, {UB}>
        hivm.hir.store ins(%part : memref<?xf32, strided<[1]>, {UB}>) outs(%part : memref<?xf32, strided<[1]>, {UB}>)
        scf.for %j = %c0_i32 to %c8_i32 step %c1_i32  : i32 {{
          hivm.hir.pipe_barrier[<PIPE_V>]
        }}
      }}
      scf.for %i = %c0_i32 to %0 step %c1_i32  : i32 {{
        %2 = arith.cmpi eq, %i, %c1_i32 : i32
        scf.if %2 {{
          hivm.hir.set_flag[<PIPE_V>, <PIPE_S>, <EVENT_ID0>]
        }}
      }}
    }}
"""  # noqa: E501


@pytest.mark.parametrize("rows", [0, 1, 3, 100])
def test_what_is_not_run_again_counts_as_if_it_were(rows: int) -> None:
    """Inner loops that read the same integers; names (%i, %2) that blocks side by side share."""
    text = module(TAILS, "i32", maps="#map = affine_map<()[s0] -> (4, s0)>")
    stored = stores = flags = 0
    for row in range(rows):
        length = row % 3 * 8
        for i in range(0, length, 3):
            stores += 1
            stored += min(4, length - i)
        flags += sum(i == 1 for i in range(row % 3))
    expected = {
        "MTE3 bytes": stored * 4,
        "MTE3 ops": stores,
        "sync pipe_barrier": 8 * stores,
        "sync set_flag": flags,
    }
    assert follow(text, [rows]) == {name: n for name, n in expected.items() if n}


def carrying(inner: str, after: str = "") -> str:
    """Rows 0 to %arg3; in each, three turns that carry %n, from the row's number modulo 3 on."""
    return f"""
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c3 = arith.constant 3 : index
    %buffer = hivm.hir.pointer_cast(%c0) : memref<9xf32, {UB}>
    %last = arith.index_cast %arg3 : i32 to index
    scf.for %row = %c0 to %last step %c1 {{
      %start = arith.remsi %row, %c3 : index
      %end = scf.for %i = %c0 to %c3 step %c1 iter_args(%n = %start) -> (index) {{
{inner}
        %next = arith.addi %n, %c1 : index
        scf.yield %next : index
      }}
{after}
    }}
"""


def store(size: str) -> str:
    part = f"memref<?xf32, strided<[1]>, {UB}>"
    return f"""
      %part = memref.subview %buffer[0] [{size}] [1] : memref<9xf32, {UB}> to {part}
      hivm.hir.store ins(%part : {part}) outs(%part : {part})
"""


def test_memory_by_another_type_is_the_same_memory() -> None:
    floats, numbers = (f"memref<?x{kind}, strided<[1]>, {UB}>" for kind in ("f32", "i32"))
    text = module(
        f"""
    %c0 = arith.constant 0 : index
    %buffer = hivm.hir.pointer_cast(%c0) : memref<9xf32, {UB}>
    %n = arith.index_cast %arg3 : i32 to index
    %part = memref.subview %buffer[0] [%n] [1] : memref<9xf32, {UB}> to {floats}
    %bits = hivm.hir.bitcast %part : {floats} -> {numbers}
    hivm.hir.store ins(%bits : {numbers}) outs(%bits : {numbers})
""",
        "i32",
    )
    assert follow(text, [5]) == {"MTE3 bytes": 20, "MTE3 ops": 1}


def test_what_a_loop_carries_counts() -> None:
    """The turns read no number of theirs, and still are not alike; rows 0 and 3 are."""
    text = module(carrying(store("%n")), "i32")
    stored = sum(row % 3 + turn for row in range(7) for turn in range(3))
    assert follow(text, [7]) == {"MTE3 bytes": stored * 4, "MTE3 ops": 21}


def test_what_a_loop_gives_back_counts() -> None:
    text = module(carrying("hivm.hir.pipe_barrier[<PIPE_V>]", store("%end")), "i32")
    stored = sum(row % 3 + 3 for row in range(7))
    expected = {"MTE3 bytes": stored * 4, "MTE3 ops": 7, "sync pipe_barrier": 21}
    assert follow(text, [7]) == expected


def test_what_a_loop_reads_from_memory_counts() -> None:
    """Each row has sizes of its own in memory, and nothing else tells the rows apart."""
    row = f"memref<3xi32, strided<[1], offset: ?>, {GM}>"
    inner = f"""
        %sizes = memref.reinterpret_cast %arg4 to offset: [%row], sizes: [3], strides: [1] : memref<?xi32, {GM}> to {row}
        %0 = memref.load %sizes[%i] : {row}
        %1 = arith.index_cast %0 : i32 to index
"""  # noqa: E501
    text = module(carrying(inner + store("%1")), "i32", f"memref<?xi32, {GM}>")
    sizes = [1, 4, 2, 8, 5, 7, 0]
    stored = sum(sizes[row + turn] for row in range(5) for turn in range(3))
    found = follow(text, [5, sizes])
    assert (found["MTE3 bytes"], found["MTE3 ops"]) == (stored * 4, 15)


def test_endless_programs_are_given_up() -> None:
    text = module(TAILS, "i32", maps="#map = affine_map<()[s0] -> (4, s0)>")
    with pytest.raises(TooLongError, match="more than 200000 steps"):
        follow(text, [10**9])


UNKNOWN = f"""
    %c0 = arith.constant 0 : index
    %c-1_i32 = arith.constant -1 : i32
    %c5_i32 = arith.constant 5 : i32
    %slot = memref.reinterpret_cast %arg3 to offset: [%c0], sizes: [1], strides: [1] : memref<?xi32, {GM}> to memref<1xi32, strided<[1], offset: ?>, {GM}>
    %0 = memref.load %slot[%c0] : memref<1xi32, strided<[1], offset: ?>, {GM}>
    %1 = arith.cmpi eq, %0, %c-1_i32 : i32
    %2 = arith.select %1, %c-1_i32, %c5_i32 : i32
    scf.if %1 {{
      hivm.hir.pipe_barrier[<PIPE_V>]
    }} else {{
      hivm.hir.set_flag[<PIPE_V>, <PIPE_S>, <EVENT_ID0>]
    }}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("values", "counted", "assumed"),
    [([-1], "sync pipe_barrier", 0), ([7], "sync set_flag", 0), (None, "sync pipe_barrier", 1)],
)
def test_decisions_without_knowing_are_noted(
    values: list[int] | None, counted: str, assumed: int
) -> None:
    """An unknown number is equal to nothing for certain, and different from nothing either."""
    [function] = hivm.functions(module(UNKNOWN, f"memref<?xi32, {GM}>"))
    work = function.follow([values], (1, 1, 1), 0)
    assert work.totals() == {counted: 1, "S accesses": 1, "S ops": 1}
    assert work.assumed == assumed


def test_a_bound_that_stands_for_an_unknown_size_is_noted() -> None:
    body = f"""
    %c0 = arith.constant 0 : index
    %buffer = hivm.hir.pointer_cast(%c0) : memref<8xf32, {UB}>
    %slot = memref.reinterpret_cast %arg3 to offset: [%c0], sizes: [1], strides: [1] : memref<?xi32, {GM}> to memref<1xi32, strided<[1], offset: ?>, {GM}>
    %0 = memref.load %slot[%c0] : memref<1xi32, strided<[1], offset: ?>, {GM}>
    %1 = arith.index_cast %0 : i32 to index
    %2 = affine.min #map()[%1]
    %part = memref.subview %buffer[0] [%2] [1] : memref<8xf32, {UB}> to memref<?xf32, strided<[1]>, {UB}>
    hivm.hir.store ins(%part : memref<?xf32, strided<[1]>, {UB}>) outs(%part : memref<?xf32, strided<[1]>, {UB}>)
"""  # noqa: E501
    kind = f"memref<?xi32, {GM}>"
    [least] = hivm.functions(module(body, kind, maps="#map = affine_map<()[s0] -> (6, s0)>"))
    for values, size, assumed in [([2], 2, 0), (None, 6, 1)]:
        work = least.follow([values], (1, 1, 1), 0)
        assert (work.totals()["MTE3 bytes"], work.assumed) == (size * 4, assumed)
    plain = body.replace("affine.min", "affine.apply")
    [exact] = hivm.functions(module(plain, kind, maps="#map = affine_map<()[s0] -> (s0)>"))
    with pytest.raises(CannotFollowError, match="a store of a size that only the chip knows"):
        exact.follow([None], (1, 1, 1), 0)


def test_integers_wrap_as_their_type_does() -> None:
    body = """
    %c0_i8 = arith.constant 0 : i8
    %c1_i8 = arith.constant 1 : i8
    %0 = arith.trunci %arg3 : i32 to i8
    scf.for %i = %c0_i8 to %0 step %c1_i8  : i8 {
      hivm.hir.pipe_barrier[<PIPE_V>]
    }
"""
    text = module(body, "i32")
    assert follow(text, [256 + 5]) == {"sync pipe_barrier": 5}
    assert follow(text, [128]) == {}  # -128


def test_programs_go_to_the_core_that_is_free_first() -> None:
    assert makespan([3.0, 1.0, 1.0, 1.0], 4, 2) == 3.0  # in waves it would be 3 + 1
    assert makespan([1.0], 1, 40) == 1.0
    assert makespan([1.0, 5.0], 4, 4) == 5.0  # two that stand for two each
    assert chosen(3, 10**6) == [0, 1, 2]
    for steps, count in [(0, 160), (10, 160), (2_000, 50), (10**6, 3)]:  # 100,000 in all
        many = chosen(65535, steps)
        assert (many[0], many[-1], len(set(many))) == (0, 65534, count)


def test_misfits_are_named() -> None:
    text = module(ROWS, f"memref<?xf32, {GM}>", "i32")
    with pytest.raises(CannotFollowError, match="kernel takes 8 arguments, got 7"):
        follow(text, [None])
    with pytest.raises(CannotFollowError, match=r"unknown operation strange\.op"):
        hivm.functions(module("    %0 = strange.op %arg0 : i64"))
    with pytest.raises(CannotFollowError, match="expected a device function"):
        hivm.functions("module {}")


def test_division_rounds_to_zero() -> None:
    body = """
    %c2_i32 = arith.constant 2 : i32
    %c0_i32 = arith.constant 0 : i32
    %c1_i32 = arith.constant 1 : i32
    %0 = arith.divsi %arg3, %c2_i32 : i32
    %1 = arith.remsi %arg3, %c2_i32 : i32
    %2 = arith.subi %c0_i32, %0 : i32
    %3 = arith.subi %c0_i32, %1 : i32
    scf.for %i = %c0_i32 to %2 step %c1_i32  : i32 {
      hivm.hir.pipe_barrier[<PIPE_V>]
    }
    scf.for %i = %c0_i32 to %3 step %c1_i32  : i32 {
      hivm.hir.set_flag[<PIPE_V>, <PIPE_S>, <EVENT_ID0>]
    }
"""
    totals = follow(module(body, "i32"), [-7])
    assert totals == {"sync pipe_barrier": 3, "sync set_flag": 1}
