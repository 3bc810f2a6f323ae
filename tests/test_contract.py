"""Every registered kernel answers bad arguments with one sentence, and empty ones with nothing.

Table-driven: each tensor argument of each kernel (results given as arguments included) is spoilt in
each way below, one at a time. The few combinations that are legitimate are listed in ACCEPTED.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tkernels
from tkernels import device
from tkernels.registry import KernelSpec, all_kernels, get
from tkernels.testing import clone_inputs, tensors_of

SPECS = list(all_kernels().values())
each_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


def _meta(t: torch.Tensor) -> torch.Tensor:
    return t.to("meta")


def _float64(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.float64)


def _other_kind(t: torch.Tensor) -> torch.Tensor:
    """Integers where floats are wanted, and floats where integers are."""
    return t.to(torch.int32 if t.dtype.is_floating_point else torch.float32)


def _small_integer(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.int16)


def _complex(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.complex64)


def _more_dims(t: torch.Tensor) -> torch.Tensor:
    return t[None]


def _fewer_dims(t: torch.Tensor) -> torch.Tensor:
    return t[0]


def _scalar(t: torch.Tensor) -> torch.Tensor:
    return t.flatten()[0]


def _strided_last(t: torch.Tensor) -> torch.Tensor:
    """The same values, two elements apart."""
    return torch.stack([t, t], dim=-1)[..., 0]


def _shorter(t: torch.Tensor) -> torch.Tensor:
    return t[:-1]


def _longer(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t, t[:1]])


def _narrower(t: torch.Tensor) -> torch.Tensor:
    return t[..., :-1].contiguous()


def _wider(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t, t[..., :1]], dim=-1)


def _text(t: torch.Tensor) -> str:
    return "a tensor"


def _nested_list(t: torch.Tensor) -> list[Any]:
    return list(t.flatten()[:2].tolist())


def _number(t: torch.Tensor) -> float:
    return 1.0


def _nothing(t: torch.Tensor) -> None:
    return None


def _repeated(t: torch.Tensor) -> torch.Tensor:
    """All entries of the first dimension in the same memory."""
    return t[:1].expand_as(t)


# The message must name the spoilt argument itself...
PRECISE: list[Callable[[torch.Tensor], Any]] = [
    _meta,
    _float64,
    _other_kind,
    _small_integer,
    _complex,
    _strided_last,
    _text,
    _nested_list,
    _number,
    _nothing,
]
# ...or, where two arguments do not fit each other, one of them.
MISFITS: list[Callable[[torch.Tensor], Any]] = [
    _more_dims,
    _fewer_dims,
    _scalar,
    _shorter,
    _longer,
    _narrower,
    _wider,
]
WRITTEN_ONLY: list[Callable[[torch.Tensor], Any]] = [_repeated]

_ANY_ROWS = "the leading dimensions are free, and nothing else has to follow them"
_ANY_ROW_COUNT = {(_more_dims, _ANY_ROWS), (_fewer_dims, _ANY_ROWS), (_shorter, _ANY_ROWS)} | {
    (_longer, _ANY_ROWS)
}
_TABLE = "a table of more or fewer positions is a table"
_COLUMNS = "columns past a sequence's blocks are not read, however many there are"
_ANY_HEADS = "k may have any number of heads"
_ANY_STRIDES = "one number a head: other libraries lay it out [n_heads, T]"

_SMALL = "slots are 16-bit numbers"
_SIZES = "caches and pools may have any size"
_OTHER_SIZES = {(w, _SIZES) for w in (_shorter, _longer, _narrower, _wider)}

_OPTIONAL = {(_nothing, "it may be left out")}
_ANY_ROWS_OF_X = "x may have any number of rows"
_ANY_TOKENS = "there may be any number of tokens"
_SIZES_OF_X = "a row may have any number of activations"
_MORE_WORDS = "a mask may have words for more slots"
_WORDS = "a mask may have any number of words; rows whose group has none run low"

# kernel -> argument -> {(way of spoiling it, why the result is legitimate)}
ACCEPTED: dict[str, dict[str, set[tuple[Callable[[torch.Tensor], Any], str]]]] = {
    "append_quantized_kv": {
        "k_slots": {(_small_integer, _SMALL)},
        "v_slots": {(_small_integer, _SMALL)},
    },
    "masked_gemm": {
        **dict.fromkeys(("high_weight", "bias", "row_group"), _OPTIONAL),
        "mask": {(way, _WORDS) for way in (_shorter, _longer, _narrower, _wider)},
    },
    "merge_attn_states": {
        name: {(_strided_last, _ANY_STRIDES)} for name in ("lse_a", "lse_b", "lse_out")
    },
    "moe_combine": {"y": _OTHER_SIZES, "positions": _OTHER_SIZES},
    "moe_dispatch": {"topk_ids": _OTHER_SIZES},
    "moe_route": {
        "router_logits": {(way, _ANY_TOKENS) for way in (_shorter, _longer)},
        "bias": _OPTIONAL,
    },
    "paged_attn": {"block_table": {(_narrower, _COLUMNS), (_wider, _COLUMNS)}},
    "paged_attn_quantized": {
        "block_table": {(_narrower, _COLUMNS), (_wider, _COLUMNS)},
        "k_slots": {(_small_integer, _SMALL)},
        "v_slots": {(_small_integer, _SMALL)},
    },
    "quantize_per_token": {"x": _OTHER_SIZES},
    "release_residual_slots": {
        "slots": {(_small_integer, _SMALL), *_OTHER_SIZES},
        "free_slots": {(_narrower, _SIZES), (_wider, _SIZES)},
        "blocks": _OTHER_SIZES,
    },
    "rms_norm": {"x": _ANY_ROW_COUNT},
    "silu_and_mul": {"x": _ANY_ROW_COUNT},
    "w4a16_gemm": {"x": {(_shorter, _ANY_ROWS_OF_X), (_longer, _ANY_ROWS_OF_X)}, "bias": _OPTIONAL},
    "w8a16_gemm": {"x": {(_shorter, _ANY_ROWS_OF_X), (_longer, _ANY_ROWS_OF_X)}, "bias": _OPTIONAL},
    "skinny_linear": dict.fromkeys(("bias", "norm_weight", "residual"), _OPTIONAL),
    "silu_and_mul_quantized": {"x": {(way, _SIZES) for way in (_shorter, _longer)}},
    "watch_activations": {
        "x": {(_narrower, _SIZES_OF_X), (_wider, _SIZES_OF_X)},
        "mask": {(way, _MORE_WORDS) for way in (_shorter, _longer, _narrower, _wider)},
    },
    "rope": {"cos_sin_cache": {(_shorter, _TABLE), (_longer, _TABLE)}},
    "fused_qk_norm_rope": {"cos_sin_cache": {(_shorter, _TABLE), (_longer, _TABLE)}},
    "fused_qk_norm_rope_append": {"cos_sin_cache": {(_shorter, _TABLE), (_longer, _TABLE)}},
    "fused_qk_norm_rope_append_attn": {
        "cos_sin_cache": {(_shorter, _TABLE), (_longer, _TABLE)},
        "block_table": {(_narrower, _COLUMNS), (_wider, _COLUMNS)},
    },
}


def inputs_of(spec: KernelSpec, dev: torch.device) -> dict[str, Any]:
    """Inputs of the first smoke case, and a tensor for each result."""
    case = next(c for c in spec.cases if "smoke" in c.tags)
    inputs = spec.make_inputs(case.problem, dev)
    results = tensors_of(spec.reference(**clone_inputs(inputs)))
    return {**inputs, **dict(zip(spec.outputs, map(torch.empty_like, results), strict=False))}


def tensor_names(spec: KernelSpec) -> list[str]:
    """Tensor arguments in the order of the signature."""
    given = inputs_of(spec, device.tensor_device())
    return [n for n in inspect.signature(spec.launch).parameters if _is_tensor(given.get(n))]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _label(value: Any) -> str:
    return value.name if isinstance(value, KernelSpec) else getattr(value, "__name__", str(value))


def _accepted(spec: KernelSpec, name: str, spoil: Any) -> bool:
    return spoil in {way for way, _ in ACCEPTED.get(spec.name, {}).get(name, ())} or (
        spoil is _nothing and name in spec.outputs
    )


def _spoilt(ways: list[Callable[[torch.Tensor], Any]], *, accepted: bool = False) -> list[Any]:
    return [
        pytest.param(spec, name, spoil, id=f"{spec.name}-{name}-{_label(spoil).strip('_')}")
        for spec in SPECS
        for name in tensor_names(spec)
        for spoil in ways
        if _accepted(spec, name, spoil) is accepted
        and (spoil is not _repeated or name in (*spec.outputs, *spec.mutates))
    ]


def refusal(spec: KernelSpec, inputs: dict[str, Any]) -> str:
    """The message with which the call is refused; anything written by then fails the test."""
    kept = {n: v.clone() for n, v in inputs.items() if _is_tensor(v) and v.device.type != "meta"}
    # DID NOT RAISE? If the combination is one that this op is meant to take, add it to ACCEPTED.
    with pytest.raises((ValueError, TypeError)) as caught:
        spec.launch(**inputs)
    for name, before in kept.items():
        assert torch.equal(_bytes(inputs[name]), _bytes(before)), f"{name} was written"
    message = str(caught.value)
    assert message.startswith(f"{spec.name}: "), message
    assert " got " in message, message
    assert "\n" not in message, message
    assert not message.endswith("."), message
    return message


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """Bit patterns, which are equal to themselves even where they stand for NaN."""
    return t.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.thin(2)
@pytest.mark.parametrize(("spec", "name", "spoil"), _spoilt(PRECISE + WRITTEN_ONLY))
def test_spoilt_argument_is_named(
    spec: KernelSpec, name: str, spoil: Callable[[torch.Tensor], Any], dev: torch.device
) -> None:
    inputs = inputs_of(spec, dev)
    inputs[name] = spoil(inputs[name])
    assert re.match(rf"{spec.name}: {name} must ", refusal(spec, inputs))
    if name not in spec.outputs:  # nor does the kernel trip over it when it makes the results
        inputs = {n: v for n, v in inputs.items() if n not in spec.outputs}
        assert re.match(rf"{spec.name}: {name} must ", refusal(spec, inputs))


@pytest.mark.thin(2)
@pytest.mark.parametrize(("spec", "name", "spoil"), _spoilt(MISFITS))
def test_misfit_is_named(
    spec: KernelSpec, name: str, spoil: Callable[[torch.Tensor], Any], dev: torch.device
) -> None:
    inputs = inputs_of(spec, dev)
    inputs[name] = spoil(inputs[name])
    arguments = "|".join(inspect.signature(spec.launch).parameters)
    assert re.match(rf"{spec.name}: ({arguments}) must ", refusal(spec, inputs))
    if name not in spec.outputs:
        inputs = {n: v for n, v in inputs.items() if n not in spec.outputs}
        assert re.match(rf"{spec.name}: ({arguments}) must ", refusal(spec, inputs))


@pytest.mark.thin(2)
@pytest.mark.parametrize(("spec", "name", "spoil"), _spoilt([*PRECISE, *MISFITS], accepted=True))
def test_listed_exceptions_are_taken(
    spec: KernelSpec, name: str, spoil: Callable[[torch.Tensor], Any], dev: torch.device
) -> None:
    """What ACCEPTED lists is right, not merely silent."""
    inputs = inputs_of(spec, dev)
    if name not in spec.outputs:  # the results follow the arguments, so let the kernel make them
        inputs = {n: v for n, v in inputs.items() if n not in spec.outputs}
    inputs[name] = spoil(inputs[name])
    if name == "cos_sin_cache":
        inputs["positions"].zero_()  # a shorter table has fewer valid positions
    got = tensors_of(spec.launch(**clone_inputs(inputs)))
    expected = tensors_of(spec.reference(**clone_inputs(inputs)))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@each_spec
def test_exceptions_name_real_arguments(spec: KernelSpec) -> None:
    assert set(ACCEPTED) <= {s.name for s in SPECS}
    assert set(ACCEPTED.get(spec.name, ())) <= set(tensor_names(spec))


@each_spec
def test_missing_argument_is_a_type_error(spec: KernelSpec, dev: torch.device) -> None:
    inputs = inputs_of(spec, dev)
    for name, parameter in inspect.signature(spec.launch).parameters.items():
        if parameter.default is parameter.empty:
            fewer = {n: v for n, v in inputs.items() if n != name}
            with pytest.raises(TypeError, match=name):
                spec.launch(**fewer)


def _sparse(t: torch.Tensor) -> torch.Tensor:
    return t.to_sparse_csr()


def test_sparse_is_refused(dev: torch.device) -> None:
    weight = torch.ones(8, device=dev)
    with pytest.raises(ValueError, match=r"^rms_norm: x must be dense, got float32 \[8, 8\] of"):
        tkernels.rms_norm(_sparse(torch.eye(8, device=dev)), weight)


def test_described_in_one_short_line(dev: torch.device) -> None:
    for value in (np.ones((40, 40)), list(range(1000)), "two\nlines"):
        with pytest.raises(TypeError, match=r"^rms_norm: x must be a tensor, got [^\n]{1,110}$"):
            tkernels.rms_norm(value, torch.ones(8, device=dev))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kernel", "first", "second"),
    [
        ("fused_add_rms_norm", "out", "residual_out"),
        ("rope", "q_out", "k_out"),
        ("fused_qk_norm_rope", "q_out", "k_out"),
        ("append_paged_kv", "k_cache", "v_cache"),
        ("fused_qk_norm_rope_append", "k_cache", "v_cache"),
        ("fused_qk_norm_rope_append_attn", "k_cache", "v_cache"),
    ],
)
def test_one_tensor_cannot_hold_two_results(
    kernel: str, first: str, second: str, dev: torch.device
) -> None:
    spec = get(kernel)
    inputs = inputs_of(spec, dev)
    if kernel == "rope":  # as many k heads as q heads, or the shapes say it
        inputs = {**inputs, "k": inputs["q"].clone()}
    inputs[second] = inputs[first]
    assert refusal(spec, inputs) == (
        f"{kernel}: {second} must be another tensor than {first}, got one for both"
    )


# ---- sizes of zero -------------------------------------------------------------------------------


def _without_rows(inputs: dict[str, Any]) -> dict[str, Any]:
    """``inputs`` with zero rows: each tensor as long as the first argument is cut."""
    first = next(v for v in inputs.values() if _is_tensor(v))
    return {
        n: v[:0] if _is_tensor(v) and v.shape[0] == first.shape[0] else v for n, v in inputs.items()
    }


@each_spec
def test_zero_rows(spec: KernelSpec, dev: torch.device) -> None:
    if spec.name in ("moe_dispatch", "moe_gemm", "moe_w4a16_gemm"):
        pytest.skip(
            "tensors have a row a token, an expert or an assignment; "
            f"tests/ops/test_{spec.name}.py calls it without tokens"
        )
    inputs = _without_rows(inputs_of(spec, dev))
    given = [inputs[name] for name in spec.outputs]
    mutated = {name: inputs[name].clone() for name in spec.mutates}
    results = tensors_of(spec.launch(**inputs))
    assert len(results) == len(given)
    for result, out in zip(results, given, strict=True):
        assert result is out
        assert result.shape[0] == 0
    for name, before in mutated.items():
        assert torch.equal(_bytes(inputs[name]), _bytes(before))
    plain = {n: v for n, v in inputs.items() if n not in spec.outputs}
    for result, expected in zip(
        tensors_of(spec.launch(**plain)), tensors_of(spec.reference(**plain)), strict=True
    ):
        assert result.shape == expected.shape
        assert result.dtype == expected.dtype
        assert result.numel() == 0


@each_spec
def test_no_columns_are_refused(spec: KernelSpec, dev: torch.device) -> None:
    inputs = {n: v for n, v in inputs_of(spec, dev).items() if n not in spec.outputs}
    first = next(n for n, v in inputs.items() if _is_tensor(v))
    inputs[first] = inputs[first][..., :0]
    assert re.match(rf"{spec.name}: {first} must have shape ", refusal(spec, inputs))


# ---- signature and plain arguments ---------------------------------------------------------------


@each_spec
def test_reference_has_the_same_signature(spec: KernelSpec) -> None:
    public, reference = (inspect.signature(f) for f in (spec.launch, spec.reference))
    assert public == reference  # names, order, kinds, defaults, annotations and result
    assert public.parameters["config"].default is None
    for name in (*spec.outputs, "config"):
        assert public.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY, name


WITH_EPS = [s for s in SPECS if "eps" in inspect.signature(s.launch).parameters]


@pytest.mark.parametrize("spec", WITH_EPS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("eps", [0, 0.0, -1e-6, math.nan, "1e-6", None, True], ids=repr)
def test_eps_must_be_positive(spec: KernelSpec, eps: Any, dev: torch.device) -> None:
    message = refusal(spec, {**inputs_of(spec, dev), "eps": eps})
    assert re.match(rf"{spec.name}: eps must be a number > 0, got ", message)


@pytest.mark.parametrize(
    "name",
    ["masked_gemm", "moe_gemm", "moe_w4a16_gemm", "skinny_linear", "w4a16_gemm", "w8a16_gemm"],
)
def test_products_write_to_a_tensor_of_their_own(name: str, dev: torch.device) -> None:
    """Programs with other outputs still read x."""
    x = torch.randn(4, 64, dtype=torch.bfloat16, device=dev)
    weight = torch.randn(64, 64, dtype=x.dtype, device=dev)
    codes, scale = tkernels.reference.quantize_per_token(weight)
    offsets = torch.tensor([0, 4], dtype=torch.int32, device=dev)
    ids = torch.arange(4, dtype=torch.int32, device=dev)
    words = torch.zeros(64, 8, dtype=torch.int32, device=dev)
    scales = weight[:, :2].contiguous()
    arguments: dict[str, Any] = {
        "masked_gemm": (x, codes, scale),
        "moe_gemm": (x, weight[None], offsets, ids),
        "moe_w4a16_gemm": (x, words[None], scales[None], offsets, ids),
        "skinny_linear": (x, weight),
        "w4a16_gemm": (x, words, scales),
        "w8a16_gemm": (x, codes, scales),
    }
    with pytest.raises(ValueError, match=rf"{name}: out must be a tensor of its own, .* got x"):
        getattr(tkernels, name)(*arguments[name], out=x)
