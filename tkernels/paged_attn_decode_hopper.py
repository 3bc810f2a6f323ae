"""The body of ``paged_attn`` for decode on Hopper (sm_90): ``variant`` "hopper_decode".

Few warps a program, several programs a core: what a warp waits for, the others cover. Each warp has
keys of its own, and stages of its own in shared memory, so within the loop no number crosses warps;
their results meet once, at the end. Scores are computed turned, keys by query heads: [BLOCK_N,
head_dim] times [head_dim, 8 heads], so the heads that share a KV head fill a tile of 8 where the
portable body pads them to 16, and all that is done to scores, weights and results is half. More
than 8 heads make a tile of 16, more than 16 several tiles.

Keys and values come as whole rows, pages apart (``cp.async``). Rows out of sight arrive as zeros:
their scores are masked, but 0 * NaN would be NaN. The entries of the block table are asked for a
step ahead, the first ones together with the length: which blocks a program has first depends on it
only if the sequence is too short for all SPLITS. With LONG_FIRST all lengths come first, and tell
which sequence a program has (``paged_attn_order``); where most of SPLITS may be empty, programs are
fewer, and go on to other places of that order while these have work.

It is written in Gluon, where layouts say which warp has which keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tkernels import device
from tkernels import flash_attn_hopper as flash
from tkernels.device import Device, cdiv
from tkernels.flash_attn_hopper import _capped
from tkernels.paged_attn_order import _program_at
from tkernels.paged_attn_quantized_hopper import (
    _let_next_kernel_start,
    _wait_for_earlier_kernels,
)
from tkernels.registry import Config, Problem

if TYPE_CHECKING:
    from tkernels import _triton as ampere
    from tkernels import _triton as gl
    from tkernels import _triton as gluon
else:
    gl, gluon = flash.gl, flash.gluon
    ampere = device.triton_part("triton.experimental.gluon.language.nvidia.ampere")

# Its name in newer tritons, and in 3.6.
_copy = ampere.async_copy
_load_async = getattr(_copy, "async_load", None) or _copy.async_copy_global_to_shared
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # newer tritons: barrier
_commit, _wait = _copy.commit_group, _copy.wait_group

# Where a maximum starts, as in the portable body.
_LOWEST = gl.constexpr(-2.0e38)
_LOG2E, _LN2 = gl.constexpr(1.4426950408889634), gl.constexpr(0.6931471805599453)

# Waves of programs, of as many as a chip holds at once: the least that are started where some go on
# to other places, and how many places' worth there must be for that to pay.
_LEAST_WAVES, _MANY_WAVES = 4, 16

# fmt: off


@gluon.jit
def _exp2(x):
    """2^x in one instruction; what is below 2^-126 is 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _right_operand(x, right: gl.constexpr):
    """A result [W, M, R], in 16 bits, as the right operand of the next product.

    Each lane hands its numbers of 8 x 8 to where the turned matrix has them; turned once more, in
    name only, they are where a right operand has them.
    """
    w: gl.constexpr = x.shape[0]
    m: gl.constexpr = x.shape[1]
    r: gl.constexpr = x.shape[2]
    turned = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True,
        pack=2)
    blocks = gl.permute(gl.reshape(turned, [w, m // 8, 8, r // 8, 8]), [0, 1, 4, 3, 2])
    return gl.convert_layout(gl.reshape(blocks, [w, m, r]), right, assert_trivial=True)


@gluon.jit
def _queries(
    q_ptr, head0, n_heads, stride_qh, W: gl.constexpr, R: gl.constexpr, D: gl.constexpr,
    right: gl.constexpr,
):
    """q^T [W, D, R] of heads head0 .. head0 + n_heads, the same for each warp; others are 0."""
    w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, right)))
    d = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(2, right)))
    r = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(1, right)))
    rows = (head0 + r).to(gl.int64) * (stride_qh * 8)
    at = (w * 0)[:, None, None] + d[None, :, None] + rows[None, None, :]
    ok = (w >= 0)[:, None, None] & (d >= 0)[None, :, None] & (r < n_heads)[None, None, :]
    return gl.load(q_ptr + at, mask=ok, other=0.0)


@gluon.jit
def _pages(
    pos, w, table_ptr, last_column, BLOCK_SIZE: gl.constexpr, N: gl.constexpr,
    AT_ONCE: gl.constexpr,
):
    """Table entries [W] of the keys pos + w * N .. of each warp, one page after the other.

    AT_ONCE: the compiler must not put the loads off until it is known that they are needed.
    """
    pages = gl.tuple([])
    for i in gl.static_range(N // BLOCK_SIZE if N > BLOCK_SIZE else 1):
        # Past a sequence's columns the table may say anything, and it ends somewhere.
        column = gl.minimum((pos + w * N) // BLOCK_SIZE + i, last_column)
        pages = pages + gl.tuple([gl.load(table_ptr + column, volatile=AT_ONCE)])
    return pages


@gluon.jit
def _first_pages(
    pos, stride, w, table_ptr, last_column, BLOCK_SIZE: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, AT_ONCE: gl.constexpr,
):
    """Those of the first STAGES steps."""
    pages = gl.tuple([])
    for i in gl.static_range(STAGES):
        pages = pages + _pages(
            pos + i * stride, w, table_ptr, last_column, BLOCK_SIZE, N, AT_ONCE)
    return pages


@gluon.jit
def _fetch(
    stage, pos, pages, low, high, k_at, v_at, stride_kb, stride_vb, k_s, v_s,
    K_TOKEN: gl.constexpr, V_TOKEN: gl.constexpr, SAME: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    HAS_WINDOW: gl.constexpr, lines: gl.constexpr,
):
    """Start to bring the keys pos + w * N .. of each warp and their values, whole rows at once."""
    W: gl.constexpr = k_s.shape[1]
    N: gl.constexpr = k_s.shape[2]
    D: gl.constexpr = k_s.shape[3]
    ROWS: gl.constexpr = 256 // D  # of an instruction
    w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, lines)))
    n = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, lines)))
    d = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, lines)))
    at = pos + w * N
    k_page, v_page = _page_at(at, pages[0], high, stride_kb, stride_vb, SAME)
    if N < BLOCK_SIZE:
        k_page += at % BLOCK_SIZE * K_TOKEN
        v_page += at % BLOCK_SIZE * V_TOKEN
    k_cells, v_cells = k_page[:, None], v_page[:, None]
    for i in gl.static_range(1, N // BLOCK_SIZE if N > BLOCK_SIZE else 1):
        k_page, v_page = _page_at(
            at + i * BLOCK_SIZE, pages[i], high, stride_kb, stride_vb, SAME)
        mine = (n // BLOCK_SIZE == i).to(gl.int64)[None, :]
        k_cells = k_cells * (1 - mine) + k_page[:, None] * mine
        v_cells = v_cells * (1 - mine) + v_page[:, None] * mine
    # What a lane adds, then what an instruction does, which it has room for as a constant.
    row, step = n % ROWS, n % BLOCK_SIZE // ROWS * ROWS
    k_from = k_at + k_cells[:, :, None] + (row * K_TOKEN)[None, :, None] + d[None, None, :]
    v_from = v_at + v_cells[:, :, None] + (row * V_TOKEN)[None, :, None] + d[None, None, :]
    k_from += (step * K_TOKEN)[None, :, None]
    v_from += (step * V_TOKEN)[None, :, None]
    seen = n[None, :] < (high - at)[:, None]
    if HAS_WINDOW:
        seen = seen & (n[None, :] >= (low - at)[:, None])
    seen = seen[:, :, None] & (d >= 0)[None, None, :]
    _load_async(k_s.index(stage), k_from, mask=seen)
    _load_async(v_s.index(stage), v_from, mask=seen)


@gluon.jit
def _page_at(pos, page, high, stride_kb, stride_vb, SAME: gl.constexpr):
    """Where pages of K and of V begin, in elements."""
    # A page that is wholly out of sight may have any number.
    page = gl.where(pos < high, page, 0).to(gl.int64)
    k_page = page * stride_kb * 8
    v_page = k_page
    if not SAME:
        v_page = page * stride_vb * 8
    return k_page, v_page


@gluon.jit(do_not_specialize=["n_parts", "window", "last_column"])
def _paged_attn_decode_hopper_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, sinks_ptr, out_ptr, lse_ptr, part_ptr,
    stride_qt, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,  # in units of 16 bytes
    stride_tb, stride_ot, stride_oh, n_parts, window, last_column, score_scale, cap,
    N_HEADS: gl.constexpr, N_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, K_TOKEN: gl.constexpr, V_TOKEN: gl.constexpr,
    SAME_STRIDES: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr, HAS_SOFTCAP: gl.constexpr, R: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, W: gl.constexpr, SPLITS: gl.constexpr, MIN_SHARE: gl.constexpr,
    LONG_FIRST: gl.constexpr, ROUNDS: gl.constexpr, PDL: gl.constexpr,
):
    # LONG_FIRST: 0, or E of _program_at. ROUNDS: programs may be fewer than places.
    if PDL:
        _let_next_kernel_start()
    PACK: gl.constexpr = N_HEADS // N_KV_HEADS
    TILES: gl.constexpr = (PACK + R - 1) // R  # of the heads of a KV head
    PER_SPLIT: gl.constexpr = TILES * N_KV_HEADS
    # Neighbours read neighbouring heads of the same tokens.
    tile = gl.program_id(0)
    kv_head = tile // TILES % N_KV_HEADS
    within = tile % TILES * R  # first of the heads of the KV head
    k_at = k_ptr + kv_head.to(gl.int64) * stride_kh * 8
    v_at = v_ptr + kv_head.to(gl.int64) * stride_vh * 8
    place = tile // PER_SPLIT
    if PDL:
        _wait_for_earlier_kernels()
    if ROUNDS:
        batch = n_parts // (N_HEADS * SPLITS)
        total = batch * SPLITS  # until the lengths are there
        while place < total:
            seq, split, context_len, total = _program_at(
                place, lens_ptr, batch, window, LONG_FIRST, BLOCK_SIZE, SPLITS, MIN_SHARE,
                HAS_WINDOW)
            _attend(
                seq, split, context_len, kv_head, within, k_at, v_at, q_ptr, table_ptr, sinks_ptr,
                out_ptr, lse_ptr, part_ptr, stride_qt, stride_qh, stride_kb, stride_vb, stride_tb,
                stride_ot, stride_oh, n_parts, window, last_column, score_scale, cap,
                N_HEADS, N_KV_HEADS, HEAD_DIM, BLOCK_SIZE, K_TOKEN, V_TOKEN, SAME_STRIDES,
                HAS_WINDOW, HAS_SINKS, HAS_LSE, HAS_SOFTCAP, R, N, STAGES, W, SPLITS, MIN_SHARE,
                LONG_FIRST, ROUNDS)
            _barrier()  # all warps are through with shared memory
            place += gl.num_programs(0) // PER_SPLIT
    else:
        if LONG_FIRST > 0:
            seq, split, context_len, _ = _program_at(
                place, lens_ptr, gl.num_programs(0) // (PER_SPLIT * SPLITS), window,
                LONG_FIRST, BLOCK_SIZE, SPLITS, MIN_SHARE, HAS_WINDOW)
        else:
            split = place % SPLITS
            seq = tile // (PER_SPLIT * SPLITS)
            context_len = gl.load(lens_ptr + seq)
        _attend(
            seq, split, context_len, kv_head, within, k_at, v_at, q_ptr, table_ptr, sinks_ptr,
            out_ptr, lse_ptr, part_ptr, stride_qt, stride_qh, stride_kb, stride_vb, stride_tb,
            stride_ot, stride_oh, n_parts, window, last_column, score_scale, cap,
            N_HEADS, N_KV_HEADS, HEAD_DIM, BLOCK_SIZE, K_TOKEN, V_TOKEN, SAME_STRIDES,
            HAS_WINDOW, HAS_SINKS, HAS_LSE, HAS_SOFTCAP, R, N, STAGES, W, SPLITS, MIN_SHARE,
            LONG_FIRST, ROUNDS)


@gluon.jit
def _attend(
    seq, split, context_len, kv_head, within, k_at, v_at, q_ptr, table_ptr, sinks_ptr, out_ptr,
    lse_ptr, part_ptr, stride_qt, stride_qh, stride_kb, stride_vb, stride_tb, stride_ot, stride_oh,
    n_parts, window, last_column, score_scale, cap,
    N_HEADS: gl.constexpr, N_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, K_TOKEN: gl.constexpr, V_TOKEN: gl.constexpr,
    SAME_STRIDES: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr, HAS_SOFTCAP: gl.constexpr, R: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, W: gl.constexpr, SPLITS: gl.constexpr, MIN_SHARE: gl.constexpr,
    LONG_FIRST: gl.constexpr, ROUNDS: gl.constexpr,
):
    """One split of one sequence, for the heads from ``within`` on of a KV head."""
    D: gl.constexpr = HEAD_DIM
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    PACK: gl.constexpr = N_HEADS // N_KV_HEADS
    G: gl.constexpr = W * N  # keys of a step
    PIECES: gl.constexpr = N // BLOCK_SIZE if N > BLOCK_SIZE else 1  # pages of a warp's keys
    LANES: gl.constexpr = D // 8  # that fetch a row, 16 bytes each
    scores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, scores, 2)
    lines: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // LANES, LANES], [W, 1, 1], [2, 1, 0])
    stored: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    heads_line: gl.constexpr = gl.SliceLayout(1, scores)
    warps_line: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, lines))

    head0 = kv_head * PACK + within
    k_s = gl.allocate_shared_memory(DTYPE, [STAGES, W, N, D], stored)
    v_s = gl.allocate_shared_memory(DTYPE, [STAGES, W, N, D], stored)
    w = gl.arange(0, W, warps_line)
    token = seq.to(gl.int64)
    table_ptr += token * stride_tb
    low, base = context_len * 0, context_len * 0
    if HAS_WINDOW:
        low = gl.maximum(context_len - window, 0)
        base = low // BLOCK_SIZE * BLOCK_SIZE
    elif LONG_FIRST == 0:  # as if all SPLITS had a share
        ahead = _first_pages(
            split * G, SPLITS * G, w, table_ptr, last_column, BLOCK_SIZE, N, STAGES, True)
    q = _queries(q_ptr + token * stride_qt * 8, head0, PACK - within, stride_qh, W, R, D, right)
    shares = (context_len - base + MIN_SHARE - 1) // MIN_SHARE
    used = gl.minimum(gl.maximum(shares, 1), SPLITS)
    if split < used:
        # Steps of G keys: first, first + used ..
        first = split
        end = (gl.maximum(context_len - base, 0) + G - 1) // G
        if HAS_WINDOW:
            first += (gl.maximum((low - base) // G - split, 0) + used - 1) // used * used
        steps = gl.maximum(end - first + used - 1, 0) // used
        pos, stride = base + first * G, used * G
        if HAS_WINDOW or LONG_FIRST > 0:
            ahead = _first_pages(
                pos, stride, w, table_ptr, last_column, BLOCK_SIZE, N, STAGES, not HAS_WINDOW)
        elif SPLITS > 1:  # noqa: SIM102 (what is known at compile time stands alone)
            if used < SPLITS:
                ahead = _first_pages(
                    pos, stride, w, table_ptr, last_column, BLOCK_SIZE, N, STAGES, False)
        for i in gl.static_range(STAGES - 1):
            if i < steps:
                pages = gl.tuple([])
                for j in gl.static_range(PIECES):
                    pages = pages + gl.tuple([ahead[i * PIECES + j]])
                _fetch(i, pos + i * stride, pages, low, context_len, k_at, v_at, stride_kb,
                       stride_vb, k_s, v_s, K_TOKEN, V_TOKEN, SAME_STRIDES, BLOCK_SIZE, HAS_WINDOW,
                       lines)
            _commit()
        pages = gl.tuple([])
        for j in gl.static_range(PIECES):
            pages = pages + gl.tuple([ahead[(STAGES - 1) * PIECES + j]])

        zero = gl.full([W, N, R], 0.0, gl.float32, scores)
        acc = gl.full([W, D, R], 0.0, gl.float32, scores)
        top = gl.full([W, R], _LOWEST, gl.float32, heads_line)
        total = gl.full([W, R], 0.0, gl.float32, heads_line)
        of_warps = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, scores)))
        n = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, scores)))
        n = (of_warps * N)[:, None] + n[None, :]
        stage, before = steps * 0, steps * 0 + (STAGES - 1)
        for i in range(steps):
            if i + STAGES - 1 < steps:
                _fetch(before, pos + (STAGES - 1) * stride, pages, low,
                       context_len, k_at, v_at, stride_kb, stride_vb, k_s, v_s, K_TOKEN, V_TOKEN,
                       SAME_STRIDES, BLOCK_SIZE, HAS_WINDOW, lines)
            _commit()
            pages = _pages(pos + STAGES * stride, w, table_ptr, last_column, BLOCK_SIZE, N, False)
            _wait(STAGES - 1)

            s = ampere.mma_v2(k_s.index(stage).load(left), q, zero) * score_scale
            if HAS_SOFTCAP:
                s = _capped(s, 1.0) * cap
            seen = n < context_len - pos
            if HAS_WINDOW:
                seen = seen & (n >= low - pos)
            s = gl.where(seen[:, :, None], s, float("-inf"))
            new_top = gl.maximum(top, gl.max(s, 1))
            p = _exp2(s - new_top[:, None, :])
            shrink = _exp2(top - new_top)
            total = total * shrink + gl.sum(p, 1)
            top = new_top
            weights = _right_operand(p.to(DTYPE), right)
            v = v_s.index(stage).permute([0, 2, 1]).load(left)
            acc = ampere.mma_v2(v, weights, acc * shrink[:, None, :])
            pos += stride
            before = stage
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)

        # The warps' results, and a sink.
        r = gl.arange(0, R, gl.SliceLayout(0, heads_line))
        row_ok = r < PACK - within
        whole: gl.constexpr = SPLITS == 1
        all_top = gl.max(top, 0)
        if HAS_SINKS and whole:
            sink = gl.load(sinks_ptr + head0 + r, mask=row_ok, other=0.0).to(gl.float32) * _LOG2E
            all_top = gl.maximum(all_top, sink)
        shrink = _exp2(top - all_top[None, :])
        total = gl.sum(total * shrink, 0)
        if HAS_SINKS and whole:
            total += _exp2(sink - all_top)
        nothing = total == 0.0
        total = gl.where(nothing, 1.0, total)
        lse = gl.where(nothing, float("-inf"), (all_top + gl.log2(total)) * _LN2)
        results = token * N_HEADS + head0 + r
        if whole:
            if HAS_LSE:
                gl.store(lse_ptr + results, lse, mask=row_ok)
        else:
            part_lse_ptr = part_ptr + n_parts.to(gl.int64) * D
            gl.store(part_lse_ptr + results * SPLITS + split, lse, mask=row_ok)
        shrink = shrink * (1.0 / total)[None, :]
        acc = acc * shrink[:, None, :]
        rows: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [W, 1], [1, 0])
        if ROUNDS and W <= 2:
            # A sum across warps has an address for each number, and in a loop over splits they are
            # all kept through the loop over keys. In one thread more than two have another order.
            of_rows: gl.constexpr = gl.BlockedLayout(
                [W, 1, 4], [1, 128 // D, D // 4], [1, W, 1], [2, 1, 0])
            out = gl.sum(gl.convert_layout(gl.permute(acc, [0, 2, 1]), of_rows), 0)
            out = gl.convert_layout(out, rows)
        else:
            out = gl.convert_layout(gl.permute(gl.sum(acc, 0), [1, 0]), rows)
        r = gl.arange(0, R, gl.SliceLayout(1, rows))
        d = gl.arange(0, D, gl.SliceLayout(0, rows))
        out_ok = (r < PACK - within)[:, None] & (d >= 0)[None, :]
        if whole:
            at = out_ptr + token * stride_ot + ((head0 + r).to(gl.int64) * stride_oh)[:, None]
            gl.store(at + d[None, :], out.to(out_ptr.dtype.element_ty), mask=out_ok)
        else:
            part = (token * N_HEADS + head0 + r) * SPLITS + split
            gl.store(part_ptr + part[:, None] * D + d[None, :], out, mask=out_ok)


# fmt: on

# ---- host --------------------------------------------------------------------------------------


def why_unfit(problem: Problem, dev: Device) -> str | None:
    """Reason why this body cannot serve such a problem, whatever the config; None: it can."""
    p = problem
    if dev.arch != "sm90":
        return f"variant hopper_decode needs an sm90 device, got {dev.arch}"
    if not device.is_there(gl):
        return "variant hopper_decode needs a triton that has Gluon (3.6 or newer), got none"
    if p["varlen"]:
        return "variant hopper_decode has one query a sequence, without cu_seqlens_q"
    if p["dtype"] not in (torch.bfloat16, torch.float16):
        return f"variant hopper_decode needs bfloat16 or float16, got {p['dtype']}"
    if p["head_dim"] not in (64, 128):
        return f"variant hopper_decode has head_dim 64 or 128, got {p['head_dim']}"
    if not p["aligned"]:
        return "variant hopper_decode needs strides of q and the caches that divide by 16 bytes"
    if p["max_blocks"] < 1:
        return "variant hopper_decode needs a block_table with columns, got none"
    return None


def why_illegal(config: Config, head_dim: int, dev: Device) -> str | None:
    """Reason why a config of this body cannot be launched; None: it can."""
    n, stages, warps = config["BLOCK_N"], config["num_stages"], config["num_warps"]
    if n not in (16, 32, 64):
        return f"variant hopper_decode has BLOCK_N 16, 32 or 64, got {n}"
    if warps not in (1, 2, 4, 8):
        return f"variant hopper_decode has num_warps 1, 2, 4 or 8, got {warps}"
    if stages < 2:
        return f"variant hopper_decode needs num_stages of 2 or more, got {stages}"
    if (used := stages * warps * n * head_dim * 4 + 1024) > dev.local_mem_bytes:
        return f"tiles take {used} bytes of shared memory, more than {dev.local_mem_bytes}"
    return None


def heads_of_tile(group: int) -> int:
    """Query heads of one program, of the ``group`` that share a KV head."""
    return 8 if group <= 8 else 16


def tiles_of(batch: int, n_heads: int, n_kv_heads: int) -> int:
    """Programs without splits."""
    group = n_heads // n_kv_heads
    return batch * n_kv_heads * cdiv(group, heads_of_tile(group))


def places_to_start(
    batch: int, splits: int, tiles: int, config: Config, head_dim: int, dev: Device
) -> int:
    """How many of the ``batch`` * ``splits`` places in order have programs of their own.

    ``tiles``: programs of a place. A program goes on to other places while there is work there.
    Programs without work take a place on a core for a microsecond: with many sequences, and tables
    for many more tokens than there are, they would be most. Then these are whole waves of programs,
    enough for one split of each sequence, and for those that start late to even out what the
    earlier ones leave. (Of 256 sequences of 100 to 2048 tokens, tables for 40960, an H200 takes
    265.5 us so, and 281 with a program a place; with fewer places than here 0.4 to 2% more.)
    """
    wave = dev.num_cores * _programs_of_a_core(config, head_dim, dev)
    if batch * splits * tiles < _MANY_WAVES * wave:
        return batch * splits
    waves = max(_LEAST_WAVES, cdiv(batch * tiles, wave))
    return min(batch * splits, waves * wave // tiles)


def _programs_of_a_core(config: Config, head_dim: int, dev: Device) -> int:
    """By shared memory, of which each takes 1 KB more than it uses."""
    used: int = config["num_stages"] * config["num_warps"] * config["BLOCK_N"] * head_dim * 4
    return max(1, (dev.local_mem_bytes + 1024) // (used + 1024))


def register_options(config: Config, n_heads: int, head_dim: int, dev: Device) -> dict[str, int]:
    """Launch keyword for the registers of a program that goes on to other places.

    What it keeps between them must not take the place of a program. Below the least, threads spill
    more than the 16 bytes that a tile of 16 heads of 128 does outside of its loop over keys.
    """
    threads: int = 32 * config["num_warps"] * _programs_of_a_core(config, head_dim, dev)
    left = 65536 // threads // 8 * 8
    return {} if left >= 255 else {"maxnreg": max(left, 128 if n_heads * head_dim <= 1024 else 168)}
