"""The Hopper body of paged_attn_quantized for decode as plain Python: what it reads, and results.

Stood in for is what only moves numbers between lanes, and PTX.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.plain_copies import CopiesMachine, Tile
from tests.plain_gluon import Block, Int, Pointer, _where, block, plain
from tkernels import device, flash_attn_hopper, paged_attn_quantized_hopper
from tkernels.ops import paged_attn_quantized as op
from tkernels.quantized_attention_cases import problem_of
from tkernels.registry import Config, Problem
from tkernels.testing import assert_right, tensors_of

BF16, FP16 = torch.bfloat16, torch.float16
SM90 = device.sm_facts(90)


def _codes(pairs: torch.Tensor) -> tuple[Block, Block]:
    numbers = plain(pairs).contiguous().view(torch.int8).view(*pairs.shape, 2).half()
    return block(numbers[..., 0]), block(numbers[..., 1])


def _decoded(words: torch.Tensor, mantissa: int, factor: float) -> tuple[Block, ...]:
    def number(nibble: int) -> Block:
        code = plain(words).int() >> 4 * nibble & 15
        size = ((code & 7) << (10 - mantissa)).to(torch.int16).view(FP16)
        return block(torch.where(code > 7, -size, size) * factor)

    return number(0), number(2), number(1), number(3)


def _right_operand(x: torch.Tensor, right: None, few: bool) -> Block:
    x = plain(x).half()
    return block(torch.cat((x, torch.zeros_like(x))) if few else x)


def _bits_set(word: Any) -> Any:
    if not isinstance(word, torch.Tensor):
        return Int((word & 0xFFFFFFFF).bit_count())
    return block(sum(plain(word) >> i & 1 for i in range(32)).int())  # type: ignore[union-attr]


def _power(biased: Any) -> Any:
    if not isinstance(biased, torch.Tensor):
        return 2.0 ** (biased - 127)
    return block((plain(biased).int() << 23).view(torch.float32))


def _narrow(condition: Any, a: Any, b: Any) -> Any:
    """where, which makes int32 of plain numbers, as kernels do."""
    result = _where(condition, a, b)
    wide = any(isinstance(x, torch.Tensor) and x.dtype == torch.int64 for x in (a, b))
    of_int64 = isinstance(result, torch.Tensor) and result.dtype == torch.int64
    return result.int() if of_int64 and not wide else result


class _Machine(CopiesMachine):
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        modules = [paged_attn_quantized_hopper, flash_attn_hopper]
        super().__init__(monkeypatch, modules, set())
        vars(self.gl).update(
            where=_narrow, exp2=torch.exp2, log2=torch.log2,
            gather=lambda t, at, axis: block(t.gather(axis, at.long())),
        )  # fmt: skip
        stand_ins = {
            "_codes": _codes, "_decoded": _decoded, "_right_operand": _right_operand,
            "_equal": lambda a, b: block((plain(a) == plain(b)).half()),
            "_bits_set": _bits_set, "_power": _power,
        }  # fmt: skip
        for name, value in stand_ins.items():
            monkeypatch.setattr(paged_attn_quantized_hopper, name, value)
        monkeypatch.setattr(Tile, "slice", lambda t, at, n: Tile(t.data.narrow(0, at, n)))
        monkeypatch.setattr(Pointer, "to", _wider)

    def _wait(self) -> None:
        """A program begins, and nothing that another has asked for is on its way."""
        super()._wait()
        self.asked, self.groups = [], []

    def _load(self, at: Pointer, mask: Any = None, other: Any = None) -> Any:
        if isinstance(mask, bool):
            if not mask:
                return Int(other)
            mask = None
        return super()._load(at, mask, other)


def _wider(at: Pointer, dtype: torch.dtype, bitcast: bool = True) -> Pointer:
    """To the same bytes, as numbers of more of them."""
    size = dtype.itemsize // at.tensor.element_size()
    assert int(at.offset) % size == 0
    flat = at.tensor.as_strided((at.extent(),), (1,))
    return Pointer(flat.view(dtype), at.early, int(at.offset) // size)


def config_of(**changed: Any) -> Config:
    return {
        **op._HOPPER, "BLOCK_N": 32, "SPLITS": 1, "MIN_SHARE": 64, "LONG_FIRST": False,
        "PDL": False, "num_stages": 2, **changed,
    }  # fmt: skip


def run(
    problem: Problem, inputs: dict[str, Any], config: Config, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """What the body gives; what merges parts runs in Triton's interpreter."""
    assert op._why_illegal(config, problem, SM90) is None
    with monkeypatch.context() as patch:
        machine = _Machine(patch)
        bind = op.bind

        def bound(kernel: Any, grid: tuple[int, ...], **kwargs: Any) -> Any:
            ours = kernel is paged_attn_quantized_hopper._paged_attn_quantized_hopper_kernel
            start = machine.bind if ours else bind
            return start(kernel, grid, **{**kwargs, "PDL": ours})

        patch.setattr(op, "bind", bound)
        patch.setattr(op, "resolve", lambda spec, values, config: (dict(config), 1000))
        patch.setattr(op, "_launch_options", lambda cfg: device.rounding_each_step())
        return op.SPEC.launch(**inputs, config=config)


def drawn(rng: random.Random) -> tuple[Problem, Config]:
    mode = rng.choice(("int8", "int8_fp4", "int8_static", "int8_static_fp4", "int8_static_fp4"))
    kv_heads, dim = rng.choice((1, 2)), 128 if "fp4" in mode else rng.choice((64, 128))
    problem = problem_of(
        [rng.choice((0, 1, 17, 63, 64, 130, 200)) for _ in range(rng.choice((1, 2)))],
        f"{kv_heads * rng.randint(1, 8)}/{kv_heads}x{dim}",
        rng.choice((BF16, FP16)),
        mode,
        mantissa_bits=rng.choice((0, 1, 2)),
        outliers=rng.choice((0.0, 0.04, 0.3, 1.0)),
        block_size=rng.choice((16, 32, 64, 128)),
        window=rng.choice((None, None, 1, 16, 40, 500)),
        softcap=rng.choice((None, None, 5.0)),
        sinks=rng.random() < 0.4,
        lse=rng.random() < 0.5 and "static" not in mode,
    )
    return problem, config_of(
        BLOCK_N=rng.choice((32, 64)),
        num_stages=rng.choice((2, 3)),
        SPLITS=rng.choice((1, 1, 3)),
        MIN_SHARE=rng.choice((16, 64)),
    )


@pytest.mark.parametrize("seed", range(12))
def test_random_problems_and_configs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is out of sight is NaN, a slot past the pool, or no block at all."""
    rng = random.Random(seed)
    for _ in range(3):
        problem, config = drawn(rng)
        inputs = op.SPEC.make_inputs(problem, torch.device("cpu"))
        try:
            assert_right(op.SPEC, inputs, tensors_of(run(problem, inputs, config, monkeypatch)))
        except AssertionError as error:
            raise AssertionError(f"{problem} with {config}: {error}") from None


@pytest.mark.parametrize("mode", ["int8_static", "int8_static_fp4"])
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_static_scales_over_three_decades(
    size: float, side: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of((70, 33), "8/2x128", BF16, mode, outliers=0.1)
    inputs = op.SPEC.make_inputs(problem, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    spread = 10.0 ** (3 * torch.rand(2, 128, generator=generator) - 3)
    inputs[f"{side}_scale"] = spread / 16 * size
    if side == "k":
        inputs["q"] = (inputs["q"].float() / size).to(BF16)
    assert_right(op.SPEC, inputs, tensors_of(run(problem, inputs, config_of(), monkeypatch)))


@pytest.mark.parametrize("mantissa", [0, 1, 2])
@pytest.mark.parametrize("side", ["k", "v"])
def test_residuals_of_what_static_scales_clip(
    side: str, mantissa: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers up to 2^12 times beyond what a scale was made for."""
    problem = problem_of((130, 33), "8/2x128", BF16, "int8_static_fp4", mantissa_bits=mantissa)
    inputs = op.SPEC.make_inputs(problem, torch.device("cpu"))
    units = inputs[f"{side}_residual_scale"]
    generator = torch.Generator().manual_seed(2)
    beyond = torch.rand(units.shape[:2], generator=generator) < 0.2
    units[beyond] = torch.randint(124, 140, units[beyond].shape, generator=generator).to(
        torch.uint8
    )
    if side == "k":  # so that it takes more than one key to make a result
        inputs["k_scale"] = inputs["k_scale"] * 2.0 ** (-10 if mantissa else -13)
    assert_right(op.SPEC, inputs, tensors_of(run(problem, inputs, config_of(), monkeypatch)))


def test_a_unit_is_2_to_the_12_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is larger, whatever wrote it, counts as that and spoils nothing."""
    problem = problem_of((40,), "4/1x128", BF16, "int8_static_fp4", mantissa_bits=0, outliers=1.0)
    inputs = op.SPEC.make_inputs(problem, torch.device("cpu"))
    got = []
    for most in (139, 254):
        for side in ("k", "v"):
            inputs[f"{side}_residual_scale"][:, ::4] = most
        got.append(run(problem, inputs, config_of(), monkeypatch))
    assert bool(got[0].isfinite().all())
    assert torch.equal(*got)
