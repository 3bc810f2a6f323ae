"""Every registered kernel, every smoke and edge case: equals its reference, writes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tkernels
from tkernels import config, device
from tkernels.registry import Case, KernelSpec, all_kernels
from tkernels.rows import ROW_FIELDS, row_layout
from tkernels.testing import (
    assert_close,
    assert_right,
    clone_inputs,
    guarded,
    may_be_padded,
    tensors_of,
    without_nan,
    written_by,
)

TESTED = [
    pytest.param(spec, case, id=f"{spec.name}-{case.name}")
    for spec in all_kernels().values()
    for case in spec.cases
    if case.tags & {"smoke", "edge"}
]
each_case = pytest.mark.parametrize(("spec", "case"), TESTED)


def run(spec: KernelSpec, inputs: dict[str, Any], **more: Any) -> tuple[torch.Tensor, ...]:
    """Results, then mutated arguments, of a call on ``inputs`` (which it may change)."""
    results = tensors_of(spec.launch(**inputs, **more))
    return (*results, *(inputs[name] for name in spec.mutates))


@each_case
def test_equals_reference(spec: KernelSpec, case: Case, dev: torch.device) -> None:
    inputs = spec.make_inputs(case.problem, dev)
    kept = clone_inputs(inputs)
    got = run(spec, inputs)
    assert_right(spec, kept, got)
    for name, before in kept.items():
        if name not in spec.mutates and isinstance(before, torch.Tensor):
            assert torch.equal(without_nan(inputs[name]), without_nan(before)), (
                f"{name} was changed"
            )


@pytest.mark.thin(2)
@each_case
def test_guarded_strided(spec: KernelSpec, case: Case, dev: torch.device) -> None:
    """Padded rows of NaN round every tensor: nothing is read from or written to the gaps."""
    plain = spec.make_inputs(case.problem, dev)
    padded = {
        name: guarded(value) for name, value in plain.items() if may_be_padded(spec, name, value)
    }
    inputs = {**clone_inputs(plain), **{name: g.tensor for name, g in padded.items()}}
    reference = tensors_of(spec.reference(**clone_inputs(plain)))
    outs = {
        name: guarded(torch.full_like(result, 77.0))
        for name, result in zip(spec.outputs, reference, strict=False)
    }
    got = run(spec, inputs, **{name: g.tensor for name, g in outs.items()})
    assert_right(spec, plain, got)
    for name, g in {**padded, **outs}.items():
        g.check(f"{spec.name}: {name}")


@pytest.mark.thin(12)
@each_case
def test_same_bits_again(spec: KernelSpec, case: Case, dev: torch.device) -> None:
    inputs = spec.make_inputs(case.problem, dev)
    first, second = (clone_inputs(inputs) for _ in range(2))
    results = [tensors_of(spec.launch(**one)) for one in (first, second)]
    states = [written_by(spec, one) for one in (first, second)]
    for a, b in zip((*results[0], *states[0]), (*results[1], *states[1]), strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("spec", all_kernels().values(), ids=lambda s: s.name)
def test_fullgraph_compile(spec: KernelSpec, dev: torch.device) -> None:
    """A model that calls the op traces without a graph break, out arguments included."""
    case = next(c for c in spec.cases if "smoke" in c.tags)
    inputs = spec.make_inputs(case.problem, dev)
    reference = tensors_of(spec.reference(**clone_inputs(inputs)))

    def call(kwargs: dict[str, Any]) -> Any:
        return spec.launch(**kwargs)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for outs in ({}, dict(zip(spec.outputs, map(torch.zeros_like, reference), strict=False))):
        kwargs = {**clone_inputs(inputs), **outs}
        results = tensors_of(compiled(kwargs))
        assert_right(spec, inputs, (*results, *(kwargs[n] for n in spec.mutates)))
        for name, result in zip(outs, results, strict=False):
            assert torch.equal(kwargs[name], result)
    torch._dynamo.reset()


@pytest.mark.parametrize("spec", all_kernels().values(), ids=lambda s: s.name)
def test_operator_is_well_formed(spec: KernelSpec, dev: torch.device) -> None:
    """torch's own check: schema, fake implementation and mutation annotations agree."""
    case = next(c for c in spec.cases if "smoke" in c.tags)
    inputs = spec.make_inputs(case.problem, dev)
    operator = getattr(torch.ops.tkernels, spec.name).default
    torch.library.opcheck(operator, (), inputs, test_utils=checks_of(inputs))


def checks_of(inputs: dict[str, Any]) -> tuple[str, ...]:
    """PyTorch's own checks; that of the schema multiplies arguments, which FP8 cannot be."""
    fp8 = any(getattr(v, "dtype", None) == torch.float8_e4m3fn for v in inputs.values())
    return ("test_faketensor",) if fp8 else ("test_schema", "test_faketensor")


def reordered(value: Any) -> Any:
    """The same values with the strides of a transposed tensor, where that is possible."""
    if not isinstance(value, torch.Tensor) or value.dim() < 3:
        return value
    return value.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.thin(40)
@each_case
def test_operator_promises_the_strides_that_come(
    spec: KernelSpec, case: Case, dev: torch.device
) -> None:
    """Results are contiguous, also of an argument that is not; a compiled graph relies on it."""
    inputs = spec.make_inputs(case.problem, dev)
    # Rows of three levels in another order are refused: two strides must reach them.
    deep = any(isinstance(v, torch.Tensor) and v.dim() > 3 for v in inputs.values())
    if not (deep and spec.name == "merge_attn_states"):
        inputs = {n: reordered(v) if may_be_padded(spec, n, v) else v for n, v in inputs.items()}
    first = next(n for n, v in inputs.items() if isinstance(v, torch.Tensor))
    if spec.problem_fields[0] == "n_outer" and inputs[first].dim() == 2:
        inputs = {
            n: reordered(v[:, None].expand(-1, 2, -1)) if getattr(v, "ndim", 0) == 2 else v
            for n, v in inputs.items()
        }
    operator = getattr(torch.ops.tkernels, spec.name).default
    torch.library.opcheck(operator, (), inputs, test_utils=checks_of(inputs))


@pytest.mark.parametrize("spec", all_kernels().values(), ids=lambda s: s.name)
def test_compile_with_any_number_of_rows(spec: KernelSpec, dev: torch.device) -> None:
    """The first dimension stays symbolic: one compiled graph serves every number of tokens."""
    case = next(c for c in spec.cases if "smoke" in c.tags)
    inputs = clone_inputs(spec.make_inputs(case.problem, dev))
    tensors = {n: v for n, v in inputs.items() if isinstance(v, torch.Tensor)}
    n_rows = next(iter(tensors.values())).shape[0]
    for name, value in tensors.items():
        if value.shape[0] == n_rows and name not in (*spec.mutates, "weight", "cos_sin_cache"):
            torch._dynamo.mark_dynamic(value, 0)
    compiled = torch.compile(lambda kwargs: spec.launch(**kwargs), fullgraph=True, backend="eager")
    kept = clone_inputs(inputs)
    results = tensors_of(compiled(inputs))
    assert_right(spec, kept, (*results, *(inputs[n] for n in spec.mutates)))
    torch._dynamo.reset()


def _cut(out: torch.Tensor) -> torch.Tensor:
    return out[:1]


def _more(out: torch.Tensor) -> torch.Tensor:
    return torch.stack([out, out])


@pytest.mark.thin(2)
@pytest.mark.parametrize("spoil", [torch.Tensor.double, torch.Tensor.short, _cut, _more])
@pytest.mark.parametrize(
    "spec", [s for s in all_kernels().values() if s.outputs], ids=lambda s: s.name
)
def test_compiled_out_that_does_not_fit_is_refused(
    spec: KernelSpec, spoil: Any, dev: torch.device
) -> None:
    """As in an eager call: nothing is broadcast or converted into what was passed as ``out=``."""
    case = next(c for c in spec.cases if "smoke" in c.tags)
    inputs = spec.make_inputs(case.problem, dev)
    result = tensors_of(spec.reference(**clone_inputs(inputs)))[0]
    out = spoil(torch.zeros_like(result))
    compiled = torch.compile(lambda kwargs: spec.launch(**kwargs), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=rf"{spec.name}: {spec.outputs[0]} must be .*, got "):
        compiled({**inputs, spec.outputs[0]: out})
    assert not out.any()
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("spec", all_kernels().values(), ids=lambda s: s.name)
def test_graph_capture(spec: KernelSpec, dev: torch.device) -> None:
    """A captured call computes with the values that its buffers hold at replay."""
    case = next(c for c in spec.cases if "smoke" in c.tags)
    inputs = spec.make_inputs(case.problem, dev)
    static = clone_inputs(inputs)
    run(spec, clone_inputs(inputs))
    graph = device.new_graph()
    with device.capture(graph):
        got = run(spec, static)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            static[name].copy_(value.flip(0) if value.dtype.is_floating_point else value)
    fresh = clone_inputs(static)
    graph.replay()
    device.synchronize()
    assert_right(spec, fresh, got)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "case"),
    [
        pytest.param(spec, case, id=f"{spec.name}-{case.name}")
        for spec in all_kernels().values()
        for case in spec.cases
        if "bench" in case.tags
    ],
)
def test_bench_case_is_right(spec: KernelSpec, case: Case, dev: torch.device) -> None:
    inputs = spec.make_inputs(case.problem, dev)
    kept = clone_inputs(inputs)
    assert_right(spec, kept, run(spec, inputs))


@pytest.mark.parametrize("spec", all_kernels().values(), ids=lambda s: s.name)
def test_unaligned_after_aligned(spec: KernelSpec, dev: torch.device) -> None:
    """The same metadata at an address that does not divide by 16: another compiled variant."""
    case = next(c for c in spec.cases if "smoke" in c.tags)
    plain = spec.make_inputs(case.problem, dev)
    run(spec, clone_inputs(plain))
    names = [name for name, value in plain.items() if isinstance(value, torch.Tensor)]
    if device.KIND == "cpu":  # nothing is compiled there: only the plan may be a wrong one
        names = names[:: max(1, len(names) - 1)]
    else:
        run(spec, clone_inputs(plain))
    for name in names:
        inputs = {**clone_inputs(plain), name: shifted(plain[name])}
        assert inputs[name].data_ptr() % 16
        assert inputs[name].stride() == plain[name].stride()
        assert_right(spec, plain, run(spec, inputs))
    inputs = clone_inputs(plain)
    assert_right(spec, plain, run(spec, inputs))


def shifted(value: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, one element behind an aligned address."""
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    buffer = torch.zeros(span + 1, dtype=value.dtype, device=value.device)
    return buffer.as_strided(value.shape, value.stride(), 1).copy_(value)


ROW_WISE = [s for s in all_kernels().values() if s.problem_fields == ROW_FIELDS]


@pytest.mark.parametrize("spec", ROW_WISE, ids=lambda s: s.name)
@pytest.mark.parametrize("levels", [1, 2])
def test_rows_past_2_31_elements(spec: KernelSpec, levels: int, dev: torch.device) -> None:
    """Row numbers and strides fit 32 bits, their products do not. Few pages are ever touched."""
    problem = {**spec.cases[0].problem, "n_outer": 1, "n_inner": 3 * levels, "n_cols": 32}
    problem["dtype"] = torch.float16
    plain = spec.make_inputs(problem, dev)
    memory = torch.empty(2**31 + 4096, dtype=torch.float16, device=dev)
    shape, strides = ((3,), (2**30,)) if levels == 1 else ((3, 2), (2**30, 100))

    def far(value: torch.Tensor, place: int) -> torch.Tensor:
        n = value.shape[-1]
        return memory.as_strided((*shape, n), (*strides, 1), 500 * place).copy_(
            value.view(*shape, n)
        )

    inputs = {
        n: far(v, i) if getattr(v, "ndim", 0) == 2 else v for i, (n, v) in enumerate(plain.items())
    }
    results = tensors_of(spec.reference(**plain))
    outs = {
        n: far(torch.zeros_like(r), 4 + i)
        for i, (n, r) in enumerate(zip(spec.outputs, results, strict=True))
    }
    got = run(spec, inputs, **outs)
    assert_right(spec, plain, [g.reshape(r.shape) for g, r in zip(got, results, strict=True)])


def test_more_rows_than_a_kernel_counts_are_refused() -> None:
    for shape in ((2**31, 4), (2**16, 2**15, 4), (1, 2**31)):
        x = torch.empty(shape, device="meta")
        with pytest.raises(ValueError, match=r"^norm: x must have at most 2147418112 rows and col"):
            row_layout("norm", ["x"], [x])


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch, dev: torch.device) -> None:
    monkeypatch.setattr(config, "_MEMO_LIMIT", 8)
    config.reload()
    weight = torch.ones(4, device=dev)
    for n in range(1, 12):
        tkernels.rms_norm(torch.ones(n, 4, device=dev), weight)
    assert all(len(plans) <= 8 for plans in config._plans.values())
    config.reload()


def test_plan_is_not_reused_for_other_metadata(dev: torch.device) -> None:
    """Alternating shapes, strides and dtypes: each call gets the plan of its own metadata."""
    wide = torch.randn(6, 64, device=dev)
    for x in (wide, wide[:, :32], wide[::2], wide.half(), wide[:3], wide, wide[::2]):
        weight = torch.rand(x.shape[-1], device=dev)
        expected = tkernels.reference.rms_norm(x.float(), weight)
        assert_close(tkernels.rms_norm(x, weight), expected, what="rms_norm")
    with pytest.raises(ValueError, match="weight must have shape"):
        tkernels.rms_norm(wide, torch.rand(63, device=dev))
    with pytest.raises(ValueError, match="x must be float32 or bfloat16 or float16, got float64"):
        tkernels.rms_norm(wide.double(), torch.rand(64, device=dev))
    tkernels.rms_norm(wide, torch.rand(64, device=dev), eps=0.5)
    for eps in (0.0, True, [0.5], torch.tensor(0.5)):
        with pytest.raises(ValueError, match="eps must be a number > 0"):
            tkernels.rms_norm(wide, torch.rand(64, device=dev), eps=eps)  # type: ignore[arg-type]


@pytest.mark.parametrize("collect", [config._collector(2), config._with_place])
def test_metadata_tells_calls_apart(collect: Any, dev: torch.device) -> None:
    """The short form of an accelerator and the long form: all that a plan depends on is in both."""
    x, other = torch.zeros(4, 6, device=dev), torch.zeros(3, device=dev)
    changes = [x.half(), x[:3], x[:, :5], x.t(), x.t().contiguous().t(), x[:1].expand(4, 6)]
    seen = [collect(value, other) for value in (x, *changes)]
    seen += [collect(x, value) for value in (other.half(), other[:2], x[:3, 0])]
    assert all(seen[i] != seen[j] for i in range(len(seen)) for j in range(i))
    assert collect(x.clone(), other.clone()) == seen[0]
