"""What is special to fused_qk_norm_rope_append_attn: it is two operations, in one launch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.compiled_for import lines_of
from tkernels import check, device, fused_qk_norm_rope_append, paged_attn, skinny_linear
from tkernels.attention_cases import paged_problem
from tkernels.device import cdiv
from tkernels.ops.fused_qk_norm_rope_append_attn import SPEC, fused_qk_norm_rope_append_attn
from tkernels.registry import Config
from tkernels.testing import assert_close, assert_right, bytes_of, clone_inputs, guarded

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EDGES = (1, 15, 16, 17, 0, 33, 65)  # one, a block less one, a block, a block and one, padding, ...


def config_for(problem: dict[str, Any], **changes: Any) -> Config:
    """The default with ``changes``, those that this device has no key for left out."""
    default = SPEC.default_config(problem, device.current())
    chosen = {**default, **{n: v for n, v in changes.items() if n in default}}
    why = SPEC.why_illegal(chosen, problem, device.current())
    assert why is None, why
    return chosen


def separately(x: dict[str, Any]) -> torch.Tensor:
    """The two operations; writes to the caches of ``x``."""
    names = ("block_table", "context_lens")
    q = fused_qk_norm_rope_append(**{n: v for n, v in x.items() if n not in (*names, "scale")})
    caches = x["k_cache"], x["v_cache"]
    return paged_attn(q, *caches, *(x[n] for n in names), scale=x.get("scale"))


def assert_equals_the_two(x: dict[str, Any], config: Config | None = None) -> None:
    theirs, ours = clone_inputs(x), clone_inputs(x)
    expected = separately(theirs)
    got = fused_qk_norm_rope_append_attn(**ours, config=config)
    assert_close(got, expected, what="out")
    for n in ("k_cache", "v_cache"):
        if device.INTERPRETED:
            assert torch.equal(bytes_of(ours[n]), bytes_of(theirs[n])), n
        else:  # other products and sums may have been merged
            assert_close(ours[n].nan_to_num(7.0), theirs[n].nan_to_num(7.0), what=n)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("heads", ["2/2x64", "4/2x32", "4/1x80", "8/1x16"])
def test_equals_the_two(heads: str, dtype: torch.dtype, dev: torch.device) -> None:
    """All that may not be read is NaN or no block, the new tokens' slots included."""
    problem = paged_problem((33, 0, 1, 16), heads, dtype, max_context=64)
    x = SPEC.make_inputs(problem, dev)
    assert_equals_the_two({**x, "scale": 0.3})
    assert_right(SPEC, x, (fused_qk_norm_rope_append_attn(**(y := clone_inputs(x))), *caches(y)))


def caches(x: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return x["k_cache"], x["v_cache"]


def test_heads_of_128(dev: torch.device) -> None:
    assert_equals_the_two(SPEC.make_inputs(paged_problem((40,), "2/1x128", BF16), dev))


@pytest.mark.parametrize(("splits", "block_n"), [(1, 16), (2, 32), (3, 16), (8, 16), (2, 64)])
def test_splits_and_blocks(splits: int, block_n: int, dev: torch.device) -> None:
    """More splits than blocks leave some empty; the new key is any one's."""
    problem = paged_problem((*EDGES, 130), "2/1x16", BF16, block_size=32)
    x = SPEC.make_inputs(problem, dev)
    chosen = config_for(problem, SPLITS=splits, MIN_SHARE=16, BLOCK_N=block_n)
    assert_equals_the_two(x, chosen)


def test_programs_that_have_several_tiles(dev: torch.device) -> None:
    problem = paged_problem((40, 0, 17), "4/2x16", BF16)
    chosen = config_for(problem, SPLITS=2, MIN_SHARE=16, BLOCK_N=16, programs_per_core=1)
    assert_equals_the_two(SPEC.make_inputs(problem, dev), chosen)


def test_padding_gives_zeros_and_stores_nothing(dev: torch.device) -> None:
    x = SPEC.make_inputs(paged_problem((0, 20, 0), "2/1x16", BF16), dev)
    x["slot_mapping"][0] = 3  # of a sequence without tokens: not stored
    before = bytes_of(x["k_cache"]).clone()
    used = int(x["slot_mapping"][1])
    guards = {n: guarded(x[n]) for n in ("k_cache", "v_cache")}
    out = fused_qk_norm_rope_append_attn(**{**x, **{n: g.tensor for n, g in guards.items()}})
    assert bool((out[[0, 2]] == 0).all())
    assert bool(out[1].isfinite().all())
    for n, g in guards.items():
        g.check(n)
    rows = bytes_of(guards["k_cache"].tensor).view(-1, 16 * 2)
    others = [slot for slot in range(len(rows)) if slot != used]
    assert torch.equal(rows[others], before.view(-1, 16 * 2)[others])
    assert not torch.equal(rows[used], before.view(-1, 16 * 2)[used])


def test_a_token_without_a_slot_sees_itself_and_is_not_stored(dev: torch.device) -> None:
    x = SPEC.make_inputs(paged_problem((20,), "2/1x16", FP32), dev)
    stored, kept = clone_inputs(x), clone_inputs(x)
    kept["slot_mapping"].fill_(-1)
    expected = fused_qk_norm_rope_append_attn(**stored)
    assert torch.equal(fused_qk_norm_rope_append_attn(**kept), expected)
    for ours, before in zip(caches(kept), caches(x), strict=True):
        assert torch.equal(bytes_of(ours), bytes_of(before))


def test_the_rest_of_the_batch_does_not_matter(dev: torch.device) -> None:
    problem = paged_problem((70, 3, 0, 40), "4/2x16", BF16)
    x = SPEC.make_inputs(problem, dev)
    chosen = config_for(problem, SPLITS=3, MIN_SHARE=16, BLOCK_N=16)
    whole = fused_qk_norm_rope_append_attn(**clone_inputs(x), config=chosen)
    again = fused_qk_norm_rope_append_attn(**clone_inputs(x), config=chosen)
    assert torch.equal(whole, again)
    rows = ("qkv", "positions", "slot_mapping", "block_table", "context_lens")
    for b in range(4):
        alone = clone_inputs({**x, **{n: x[n][b : b + 1] for n in rows}})
        assert torch.equal(fused_qk_norm_rope_append_attn(**alone, config=chosen)[0], whole[b])


def test_steps_one_after_another(dev: torch.device) -> None:
    """Each reads what those before it stored."""
    x = SPEC.make_inputs(paged_problem((30,), "2/1x16", FP32, max_context=48), dev)
    x["block_table"] = x["block_table"].clamp(max=len(x["k_cache"]) - 1)
    x["block_table"][0, :3] = torch.tensor([2, 0, 1])
    theirs = clone_inputs(x)
    for position in range(29, 35):
        for one in (x, theirs):
            one["positions"].fill_(position)
            one["context_lens"].fill_(position + 1)
            page = int(one["block_table"][0, position // 16])
            one["slot_mapping"].fill_(page * 16 + position % 16)
        assert_close(fused_qk_norm_rope_append_attn(**x), separately(theirs), what=str(position))


def test_strides(dev: torch.device) -> None:
    """Head-major pools, rows of a wider projection, a result with gaps."""
    x = SPEC.make_inputs(paged_problem((20, 33), "4/2x16", FP32), dev)
    theirs = clone_inputs(x)
    for n in ("k_cache", "v_cache"):
        x[n] = x[n].transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((4, x["qkv"].shape[1] + 5), torch.nan, device=dev)
    x["qkv"] = wide[::2, : x["qkv"].shape[1]].copy_(x["qkv"])
    table = torch.full((2, 9), 2**31 - 1, dtype=torch.int32, device=dev)
    x["block_table"] = table[:, :3].copy_(x["block_table"])
    out = torch.zeros(4, 2, 20, device=dev).transpose(0, 1)[..., 2:18]
    assert fused_qk_norm_rope_append_attn(**x, out=out) is out
    assert_close(out, separately(theirs), what="out")
    for ours, expected in zip(caches(x), caches(theirs), strict=True):
        assert_close(ours.nan_to_num(7.0), expected.nan_to_num(7.0), what="cache")


def test_pool_past_two_to_the_31(dev: torch.device) -> None:
    """Numbers and strides fit 32 bits, their products do not. Few pages are ever touched."""
    if dev.type != "cpu":
        pytest.skip("memory of this size is really allocated on a device")
    x, far = SPEC.make_inputs(paged_problem((20, 17), "2/1x16", FP16), dev), 2**30
    theirs = clone_inputs(x)
    memory = torch.empty(len(x["k_cache"]) * far, dtype=FP16)
    for place, n in enumerate(("k_cache", "v_cache")):
        view = memory.as_strided(x[n].shape, (far, 64, 16, 1), 2048 * place)
        x[n] = view.copy_(x[n])
    assert_close(fused_qk_norm_rope_append_attn(**x), separately(theirs), what="out")
    for n in ("k_cache", "v_cache"):
        assert torch.equal(bytes_of(x[n]), bytes_of(theirs[n]))


@pytest.mark.parametrize("spoilt", ["q", "k", "v"])
def test_nan_in_the_new_token_spreads(spoilt: str, dev: torch.device) -> None:
    """To its own sequence alone, whether it has other keys or none."""
    x = SPEC.make_inputs(paged_problem((20, 1, 20), "2/1x16", BF16), dev)
    first = {"q": 0, "k": 32, "v": 48}[spoilt]
    x["qkv"][:2, first : first + (32 if spoilt == "q" else 16)] = torch.nan
    out = fused_qk_norm_rope_append_attn(**x)
    assert bool(out[:2].isnan().all())
    assert bool(out[2].isfinite().all())


@pytest.mark.gpu
@pytest.mark.skipif(
    device.current().arch != "sm90", reason="needs an sm90 GPU; this machine has none"
)
@pytest.mark.parametrize("splits", [1, 6])
def test_a_chain_is_what_it_is_one_by_one(splits: int, dev: torch.device) -> None:
    chain_equals_steps(splits, dev)


def chain_equals_steps(splits: int, dev: torch.device) -> None:
    """Each projection reads what attention before it wrote, and the other way round, NaN until
    then; no bit depends on which kernel waits."""
    problem = paged_problem((384, 1), "16/8x128", BF16)
    x = SPEC.make_inputs(problem, dev)
    weight = (torch.randn(x["qkv"].shape[1], 16 * 128, device=dev) / 45).to(BF16)

    def chain(pdl: bool) -> torch.Tensor:
        chosen = config_for(problem, SPLITS=splits, PDL=pdl)
        layers = [clone_inputs(x) for _ in range(6)]
        rows = torch.full((7, 2, 16, 128), torch.nan, dtype=BF16, device=dev)
        rows[0] = 1
        for layer in layers:
            layer["qkv"].fill_(torch.nan)
        for i, layer in enumerate(layers):
            skinny_linear(rows[i].flatten(1), weight, out=layer["qkv"])
            fused_qk_norm_rope_append_attn(**layer, out=rows[i + 1], config=chosen)
        return rows

    expected = chain(False)
    assert bool(expected.isfinite().all())
    for _ in range(5):
        assert torch.equal(chain(True), expected)


# ---- arguments and facts ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"cos_sin_cache": torch.zeros(9, 8)},
            r"cos_sin_cache must have shape \[max_pos, head_dim",
        ),
        ({"num_heads": 3, "num_kv_heads": 2}, "qkv must have shape"),
        ({"context_lens": torch.ones(3).int()}, r"context_lens must have shape \[batch=2\], got"),
        ({"block_table": torch.zeros(3, 2).int()}, r"block_table must have shape \[batch=2, max_b"),
        ({"k_cache": torch.zeros(4, 8, 1, 16).to(BF16)}, "k_cache must have a block_size that is"),
        ({"scale": 0.0}, "scale must be a number > 0, got 0.0"),
        ({"eps": 0}, "eps must be a number > 0, got 0"),
        ({"out": torch.zeros(2, 2, 8).to(BF16)}, "out must "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused(change: dict[str, Any], words: str, dev: torch.device) -> None:
    x = SPEC.make_inputs(paged_problem((5, 20), "2/1x16", BF16), dev)
    moved = {n: v.to(dev) if isinstance(v, torch.Tensor) else v for n, v in change.items()}
    if "k_cache" in moved:
        moved["v_cache"] = moved["k_cache"].clone()
    with pytest.raises((TypeError, ValueError), match=f"^{SPEC.name}: {words}"):
        fused_qk_norm_rope_append_attn(**{**x, **moved})


def test_groups_must_be_whole(dev: torch.device) -> None:
    x = SPEC.make_inputs(paged_problem((5,), "2/2x16", BF16), dev)
    x |= {"num_heads": 3, "qkv": torch.zeros(1, 7 * 16, dtype=BF16, device=dev)}
    with pytest.raises(ValueError, match=r"num_heads must be a multiple of num_kv_heads=2, got 3$"):
        fused_qk_norm_rope_append_attn(**x)


def test_values_are_checked_in_debug(monkeypatch: pytest.MonkeyPatch, dev: torch.device) -> None:
    monkeypatch.setattr(check, "DEBUG", True)
    x = SPEC.make_inputs(paged_problem((5, 20, 0), "2/1x16", BF16), dev)
    fused_qk_norm_rope_append_attn(**clone_inputs(x))
    slots = x["slot_mapping"].clone()
    slots[1] += 1
    pages = x["block_table"].clone()
    pages[1, 0] = -1
    for change, words in (
        ({"slot_mapping": slots}, f"slot_mapping must hold .*, {int(slots[1]) - 1} at 1, got"),
        ({"slot_mapping": slots + 10**6}, "slot_mapping must hold slots < "),
        ({"block_table": pages}, "block_table must hold blocks from 0 to"),
        ({"positions": x["positions"] + 1000}, r"positions must be in \[0, max_pos"),
    ):
        with pytest.raises(ValueError, match=f"^{SPEC.name}: {words}"):
            fused_qk_norm_rope_append_attn(**{**x, **change})


def test_no_table_and_no_tokens(dev: torch.device) -> None:
    x = SPEC.make_inputs(paged_problem((0, 0), "2/1x16", BF16), dev)
    x["block_table"] = x["block_table"][:, :0]
    for n in ("k_cache", "v_cache"):
        x[n] = x[n][:0]
    assert bool((fused_qk_norm_rope_append_attn(**x) == 0).all())


def test_short_tables_have_a_block_a_program() -> None:
    """The share of a program follows from shapes; few keys a program as long as there are few."""
    h100, a100 = device.sm_facts(90), device.sm_facts(80)
    for batch, context in itertools.product((1, 64), (64, 384, 4096, 40960)):
        problem = SPEC.shape(batch=batch, context=context) if SPEC.shape else {}
        config = SPEC.default_config(problem, h100)
        assert config["PDL"]
        assert not SPEC.default_config(problem, a100)["PDL"]
        assert SPEC.why_illegal(config, problem, a100) == "PDL needs sm90 or later, got sm80"
        if batch == 1:
            assert config["SPLITS"] == min(32, cdiv(context, 64))
            assert (config["BLOCK_N"], config["MIN_SHARE"]) == (64, 64)


# In a process of its own: here Triton is an interpreter, there it must compile.
CHILD = r"""
import re
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import offline
from tkernels.ops.fused_qk_norm_rope_append_attn import SPEC

problem = SPEC.shape(batch=1, context=384, num_heads=16)
with FakeTensorMode(), offline.record_launches() as launches:
    SPEC.launch(**SPEC.make_inputs(problem, torch.device("cpu")))
compiled = offline.compiled_cuda(launches[0], 90)
resources = offline.compile_cuda(launches[0], 90)
print(resources.spill_bytes)
events = r"griddepcontrol\.\w+|ld\.global\.v4|ld\.global|st\.global|mma"
print(*re.findall(events, compiled.asm["ptx"]))
"""


def test_what_comes_before_the_wait() -> None:
    """Sixteen loads of 16 bytes a thread, of 64 keys and values; and no store."""
    spilled, events = lines_of(CHILD)[-2:]
    assert spilled == "0"
    found = events.split()
    wait = found.index("griddepcontrol.wait")
    before, behind = found[:wait], found[wait + 1 :]
    assert before[0] == "griddepcontrol.launch_dependents"
    assert before.count("ld.global.v4") >= 16
    assert {"st.global", "mma"}.isdisjoint(before)
    assert behind.count("ld.global.v4") == 4  # two halves of q and of the new k
    assert {"st.global", "mma"} <= set(behind)
