"""Every file in tkernels/ops is one complete, documented, exported kernel."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tkernels
from tkernels import device, reference, registry
from tkernels.kv_format import FIELDS
from tkernels.masked_gemm_cases import gemm_reads
from tkernels.moe_gemm_cases import touched_experts
from tkernels.registry import Case, Config, KernelSpec, all_kernels, get, op, register
from tkernels.testing import assert_right, result_names, tensors_of, without_nan

OPS = Path(tkernels.__file__).parent / "ops"
FILES = sorted(path for path in OPS.glob("*.py") if path.stem != "__init__")
SPECS = list(all_kernels().values())
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
each_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


def functions(path: Path) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]


def is_jit(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(d).startswith("triton.jit") for d in function.decorator_list)


# ---- files -------------------------------------------------------------------------------------


def test_one_kernel_a_file() -> None:
    assert sorted(all_kernels()) == [path.stem for path in FILES]


@each_file
def test_file_registers_itself_last(path: Path) -> None:
    tree = ast.parse(path.read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    count = sum(ast.unparse(call.func) == "register" for call in calls)
    assert count == 1, f"{path.name} must call register() once, got {count} calls"
    last = tree.body[-1]
    assert isinstance(last, ast.Assign), f"{path.name} must end with SPEC = register(...)"
    assert ast.unparse(last.targets[0]) == "SPEC"
    spec = importlib.import_module(f"tkernels.ops.{path.stem}").SPEC
    assert spec is all_kernels()[path.stem]


@each_file
def test_file_is_documented(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert len(text.splitlines()) >= 3, (
        f"{path.name} must begin with a docstring that gives formula, shapes and what is fused"
    )


@each_file
def test_everything_but_kernels_is_annotated(path: Path) -> None:
    """mypy lets these files be, because of the kernels in them."""
    for function in functions(path):
        if is_jit(function):
            continue
        arguments = function.args
        bare = [
            a.arg
            for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            if a.annotation is None
        ]
        assert not bare, f"{path.name}: {function.name} must annotate {bare}"
        assert function.returns is not None, (
            f"{path.name}: {function.name} must annotate its result"
        )


# ---- the public function -----------------------------------------------------------------------


@each_spec
def test_exported(spec: KernelSpec) -> None:
    home = spec.public_module or f"tkernels.ops.{spec.name}"
    for module, end in ((tkernels, ""), (reference, "_ref")):
        line = f"from {home} import {spec.name}{end}" + f" as {spec.name}" * bool(end)
        assert spec.name in module.__all__, (
            f'{module.__name__} lacks the line "{line}" or the name in __all__'
        )
        public = getattr(importlib.import_module(home), f"{spec.name}{end}")
        assert getattr(module, spec.name) is public
        assert spec.public_module or public in (spec.launch, spec.reference)


def test_exports_exist() -> None:
    for module in (tkernels, reference):
        for name in module.__all__:
            assert hasattr(module, name), f"{module.__name__}.__all__ names {name}, which is absent"


def test_dir_shows_what_is_public() -> None:
    shown = {name for name in dir(tkernels) if not name.startswith("__")}
    assert shown == {*tkernels.__all__, "config"}
    assert {"__version__", "__doc__", "__all__"} <= set(dir(tkernels))
    assert all(hasattr(tkernels, name) for name in dir(tkernels))
    assert set(tkernels.__all__) >= {name for name in dir(reference) if not name.startswith("__")}


@each_spec
def test_docstring_says_it_all(spec: KernelSpec) -> None:
    text = inspect.getdoc(spec.launch) or ""
    returns_nothing = inspect.signature(spec.launch).return_annotation in (None, "None")
    for part in ("Args:", "Raises:", *(() if returns_nothing else ("Returns:",))):
        assert f"\n{part}" in text, f"the docstring of {spec.name} lacks {part!r}"
    arguments = text.partition("\nArgs:")[2].partition("\nRaises:")[0]
    for name in inspect.signature(spec.launch).parameters:
        told = any(
            name in line.partition(":")[0].replace(",", " ").split()
            for line in arguments.splitlines()
        )
        assert told, f"the docstring of {spec.name} does not tell what {name} is"
    assert inspect.getdoc(spec.reference), f"{spec.name}_ref has no docstring"


@each_spec
def test_reference_has_the_same_signature(spec: KernelSpec) -> None:
    assert inspect.signature(spec.reference) == inspect.signature(spec.launch)
    assert spec.reference.__name__ == f"{spec.name}_ref"


@each_spec
def test_signature_follows_the_rules(spec: KernelSpec) -> None:
    parameters = inspect.signature(spec.launch).parameters
    last = list(parameters.values())[-1]
    assert (last.name, last.kind, last.default) == ("config", last.KEYWORD_ONLY, None)
    for name in (*spec.outputs, *spec.mutates):
        assert name in parameters, f"{spec.name}: {name} is not an argument"
    for name in spec.outputs:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default is None


@each_spec
def test_decorated_with_op(spec: KernelSpec) -> None:
    plain = inspect.unwrap(spec.launch)
    assert plain is not spec.launch, f"{spec.name} must be decorated with @op"
    assert inspect.signature(plain) == inspect.signature(spec.launch)
    assert (plain.__name__, plain.__doc__) == (spec.launch.__name__, spec.launch.__doc__)
    assert hasattr(torch.ops.tkernels, spec.name)


def test_op_keeps_signature_and_calls_through() -> None:
    def double(x: torch.Tensor, *, times: int = 2) -> torch.Tensor:
        """Says what it does."""
        return x * times

    public = op(double)
    assert inspect.signature(public) == inspect.signature(double)
    assert public.__doc__ == double.__doc__
    assert public(torch.tensor(3.0), times=4).item() == 12.0


# ---- facts for tools ---------------------------------------------------------------------------


@each_spec
def test_cases_cover_the_tags(spec: KernelSpec) -> None:
    tags = Counter(tag for case in spec.cases for tag in case.tags)
    assert tags["smoke"] >= 2, f"{spec.name} needs two smoke cases or more"
    assert tags["edge"] >= 1, f"{spec.name} needs an edge case"
    assert tags["bench"] >= 1, f"{spec.name} needs a bench case"


@each_spec
def test_problems_hold_what_launch_resolves(spec: KernelSpec) -> None:
    for case in spec.cases:
        missing = set(spec.problem_fields) - set(case.problem)
        assert not missing, f"{spec.name}/{case.name} lacks {missing}"
        hash(tuple(case.problem[name] for name in spec.problem_fields))  # the memo's key


@each_spec
def test_config_depends_on_what_launch_resolves_alone(spec: KernelSpec) -> None:
    """A problem may hold more for make_inputs, but a launch knows only ``problem_fields``."""
    facts = device.current()
    for case in spec.cases:
        known = {name: case.problem[name] for name in spec.problem_fields}
        assert spec.tuning_key(known) == spec.tuning_key(case.problem), case.name
        chosen = spec.default_config(case.problem, facts)
        assert spec.default_config(known, facts) == chosen, case.name
        assert spec.why_illegal(chosen, known, facts) is None, case.name


@each_spec
def test_tuning_key_is_small_and_json(spec: KernelSpec) -> None:
    for case in spec.cases:
        key = spec.tuning_key(case.problem)
        assert json.loads(json.dumps(key)) == key


@each_spec
def test_cost_is_positive(spec: KernelSpec) -> None:
    for case in spec.cases:
        cost = spec.cost(case.problem)
        assert isinstance(cost.bytes, int)
        assert isinstance(cost.flops, int)
        # A pure copy computes nothing, and a case may have zero rows; a timed one moves bytes.
        assert cost.flops >= 0
        assert cost.bytes > 0 or (cost.bytes == 0 and "bench" not in case.tags), case.name


@each_spec
def test_cost_counts_the_bytes_that_must_move(spec: KernelSpec, dev: torch.device) -> None:
    """Each argument read once and each result written once; of a table, a row a token."""
    if spec.name == "paged_attn_quantized":
        pytest.skip(
            "outliers are counted as a share; tests/ops/test_paged_attn_quantized.py has it"
        )
    for case in (c for c in spec.cases if c.tags & {"smoke", "edge"}):
        inputs = spec.make_inputs(case.problem, dev)
        tensors = {n: v for n, v in inputs.items() if isinstance(v, torch.Tensor)}
        moved = {n: v.nbytes for n, v in tensors.items() if n not in spec.mutates}
        if "cos_sin_cache" in tensors:
            moved["cos_sin_cache"] = len(tensors["positions"]) * tensors["cos_sin_cache"][0].nbytes
        if "qkv" in tensors:  # v is read where there is a cache for it, and goes there with k
            hq, hk = inputs["num_heads"], inputs["num_kv_heads"]
            both = 2 * moved["qkv"] * hk // (hq + 2 * hk)
            cached = "v_cache" in tensors
            moved |= {"k and v": both} if cached else {"qkv": moved["qkv"] - both // 2}
        if "slot_mapping" in tensors:  # skipped tokens and the width of a slot are not known
            moved["slot_mapping"] = 8 * len(tensors["slot_mapping"])
            new = [t for n, t in tensors.items() if n in ("k", "v")]
            moved["written"] = sum(t.numel() * t.itemsize for t in new)
        for which in "kv" if "k_codes" in tensors else "":  # a code a number, scale, slot
            cache = {field: tensors[f"{which}_{field}"] for field in FIELDS}
            x, static = tensors[which], cache["scale"].dim() == 2
            vectors = x.numel() // x.shape[-1]
            moved["written"] -= x.numel() * (x.itemsize - 1)
            moved[f"{which}_scale"] = cache["scale"].nbytes if static else 4 * vectors
            moved[f"{which}_free_slots"] = 0  # where a token is an outlier
            moved[f"{which}_slots"] = 2 * vectors if cache["slots"].numel() else 0
        if "block_table" in tensors:  # what is out of sight is NaN there
            caches = {n: t for n, t in tensors.items() if n in ("k_cache", "v_cache")}
            moved |= {n: int((~t.isnan()).sum()) * t.itemsize for n, t in caches.items()}
            moved["block_table"] = 4 * int((~caches["k_cache"].isnan()).any((1, 2, 3)).sum())
        if spec.name == "release_residual_slots":  # looked at and erased; the stack is not known
            released = len(tensors["blocks"]) * tensors["slots"][0].nbytes
            moved |= {"released": released, "count": 2 * tensors["free_count"].nbytes}
        if spec.name == "watch_activations":  # its state is read, too
            moved |= {n: 2 * tensors[n].nbytes for n in spec.mutates}
        if spec.name in ("moe_gemm", "moe_w4a16_gemm"):
            # Experts without rows are not read, and how many is a mean.
            names = ("weight", "weight_scale", "weight_zero")
            parts = [moved.pop(n) for n in names if n in moved]
            share = touched_experts(case.problem) / case.problem["experts"]
            moved["weights"] = int(sum(parts) * share)
            if case.problem.get("path") == "int8" and "x_q" in moved:
                del moved["x"]
        if spec.name == "masked_gemm":  # rows that all run one way leave the other's alone
            moved = {n: moved[n] for n in gemm_reads(case.problem)}
        results = spec.reference(**inputs)
        for i, result in enumerate(tensors_of(results)):
            moved[f"result {i}"] = result.nbytes
        assert spec.cost(case.problem).bytes == sum(moved.values()), (case.name, moved)


@each_spec
def test_inputs_are_the_arguments_and_seeded(spec: KernelSpec, dev: torch.device) -> None:
    case = next(case for case in spec.cases if "smoke" in case.tags)
    first, second = (spec.make_inputs(case.problem, dev) for _ in range(2))
    inspect.signature(spec.launch).bind(**first)
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(without_nan(value), without_nan(second[name])), (
                f"{spec.name}: {name} differs from call to call"
            )


def test_get_names_the_kernels_there_are() -> None:
    assert get("rms_norm").name == "rms_norm"
    with pytest.raises(ValueError, match=r"kernel must be one of .*rms_norm.*, got 'rms'"):
        get("rms")


def test_register_refuses_what_breaks_the_one_name() -> None:
    spec = get("rms_norm")
    with pytest.raises(ValueError, match="kernel name 'rms_norm' must be new"):
        register(spec)
    with pytest.raises(ValueError, match="public function must be named 'other', got 'rms_norm'"):
        register(dataclasses.replace(spec, name="other"))


def test_case_refuses_an_unknown_tag() -> None:
    with pytest.raises(ValueError, match="tags must be of smoke, edge, bench"):
        Case("x", {}, frozenset({"smokey"}))
    with pytest.raises(ValueError, match="tags must be of smoke, edge, bench"):
        Case("x", {}, frozenset())


# ---- ops that return their log-sum-exp where asked ---------------------------------------------


def toy_attn_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    max_len: int | None = None,
    mask: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    config: Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Mean of the keys that the mask lets through, of the first ``lengths`` (a value is read)."""
    seen = torch.ones(k.shape[0], dtype=torch.bool) if mask is None else mask
    if lengths is not None:
        seen = seen & (torch.arange(k.shape[0]) < int(lengths[0]))
    result = k.float()[seen].mean(0).to(q.dtype).expand(q.shape).contiguous()
    result = result if out is None else out.copy_(result)
    lse = torch.full(q.shape[:-1], float(seen.sum()))
    return (result, lse) if return_lse else result


@pytest.fixture(scope="module")
def toy() -> Iterator[Callable[..., Any]]:
    """An op like attention, known to the registry while the tests below run."""

    def toy_attn(
        q: torch.Tensor,
        k: torch.Tensor,
        *,
        lengths: torch.Tensor | None = None,
        max_len: int | None = None,
        mask: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        config: Config | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        assert max_len is None or type(max_len) is int
        return toy_attn_ref(q, k, lengths=lengths, mask=mask, out=out, return_lse=return_lse)

    spec = dataclasses.replace(
        get("rms_norm"),
        name="toy_attn",
        launch=op(toy_attn),
        reference=toy_attn_ref,
        outputs=("out",),
    )
    yield register(spec).launch
    del registry._SPECS["toy_attn"]


def toy_inputs() -> dict[str, Any]:
    q = torch.randn(5, 2, 8, dtype=torch.bfloat16)
    return {"q": q.transpose(0, 1), "k": torch.randn(6, 8, dtype=torch.bfloat16)}


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("values", ["none", "lengths", "mask"])
def test_traced_call_returns_what_an_eager_one_does(
    toy: Callable[..., Any], return_lse: bool, with_out: bool, values: str
) -> None:
    given = toy_inputs() | {"return_lse": return_lse}
    if values == "lengths":
        given |= {"lengths": torch.tensor([3], dtype=torch.int32), "max_len": 3}
    if values == "mask":
        given["mask"] = torch.arange(6) % 2 == 0
    expected = tensors_of(toy(**given))
    assert len(expected) == 1 + return_lse
    if with_out:
        given["out"] = torch.zeros_like(expected[0])

    def call(kwargs: dict[str, Any]) -> Any:
        result = toy(**kwargs)  # the caller needs no other code under torch.compile
        return (result[0] * 2, result[1] + 1) if return_lse else result * 2

    results = tensors_of(torch.compile(call, fullgraph=True, backend="aot_eager")(given))
    torch._dynamo.reset()
    assert len(results) == len(expected)
    assert torch.equal(results[0], 2 * expected[0])
    if return_lse:
        assert torch.equal(results[1], expected[1] + 1)
    if with_out:
        assert torch.equal(given["out"], expected[0])


def test_operator_always_gives_a_pair(toy: Callable[..., Any]) -> None:
    operator = torch.ops.tkernels.toy_attn.default
    kinds = [str(argument.type) for argument in operator._schema.arguments]
    assert kinds[2:] == ["Optional[Tensor]", "Optional[int]", "Optional[Tensor]", "bool"]
    given = toy_inputs() | {"lengths": torch.tensor([3], dtype=torch.int32)}
    for return_lse, shape in ((False, (0,)), (True, (2, 5))):
        kwargs = {**given, "return_lse": return_lse}
        out, lse = operator(**kwargs)
        assert torch.equal(out, tensors_of(toy(**kwargs))[0])
        assert (lse.dtype, lse.shape) == (torch.float32, shape)
        # Here q is transposed: out is contiguous in eager calls and for the compiler alike.
        torch.library.opcheck(operator, (), kwargs, test_utils=("test_schema", "test_faketensor"))


def test_sizes_may_be_arguments_of_a_dynamic_graph(toy: Callable[..., Any]) -> None:
    """``max_seqlen=x.shape[1]`` stays symbolic: one graph for every length."""
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def call(q: torch.Tensor, k: torch.Tensor) -> Any:
        return toy(q, k, max_len=q.shape[0])

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    for n in (3, 5, 7):
        q, k = torch.randn(n, 2, 8), torch.randn(6, 8)
        torch.testing.assert_close(compiled(q, k), toy(q, k))
    torch._dynamo.reset()
    assert len(graphs) == 1


def test_return_lse_and_its_hint_go_together() -> None:
    def half_said(q: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return q

    def unsaid(q: torch.Tensor, *, return_lse: bool = False) -> torch.Tensor:
        return q

    for fn in (half_said, unsaid):
        spec = dataclasses.replace(get("rms_norm"), name=fn.__name__, launch=fn, outputs=())
        with pytest.raises(ValueError, match=rf"register: {fn.__name__} must have .*, got \(q: "):
            register(spec)
        assert fn.__name__ not in all_kernels()


def test_lse_has_a_name_in_messages(toy: Callable[..., Any]) -> None:
    spec = get("toy_attn")
    given = toy_inputs() | {"return_lse": True}
    assert result_names(spec, given) == ("out", "lse")
    assert result_names(spec, toy_inputs()) == ("out",)
    out, lse = toy(**given)
    assert_right(spec, given, (out, lse))
    with pytest.raises(AssertionError, match="toy_attn: lse: largest relative error"):
        assert_right(spec, given, (out, lse + 1))
