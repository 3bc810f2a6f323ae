"""Which problems the tuner takes on: bench cases, sizes by hand, what a model launches."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tkernels
from autotune import model_launches, problems
from autotune.command import Target, _fitting
from autotune.model_facts import ByteCodes, facts_of, read_facts
from autotune.model_launches import Step, _experts, launches, steps
from autotune.records import label_of
from model.compressed import Float8
from model.config import ModelConfig, from_folder
from model.kv_cache import SequenceState
from model.quantized_matrix import ByteMatrix
from model.qwen3 import Experts, Layer, Linear, Model
from model.runner import PREFILL_CHUNK, Runner, split_prefill
from tkernels import config, device, skinny_linear_rows
from tkernels.moe import chunk_of
from tkernels.offline import replaced_run
from tkernels.registry import Case, KernelSpec, Problem, all_kernels, get

SPECS = list(all_kernels().values())
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}


def shapes(kernel: str, *texts: str) -> list[Any]:
    return problems.shape_tasks([get(kernel)], texts, "sm90")


# ---- sizes by hand -----------------------------------------------------------------------------


SKINNY = [  # (tokens, outputs, inputs) of skinny_linear
    *((1, 1024, 2048), (1, 1024, 3072), (1, 3072, 1024), (1, 4096, 1024), (1, 151936, 4096)),
    *((1, n, k) for n, k in ((6144, 2560), (2560, 4096), (9728, 2560), (2560, 9728))),
    (1, 4096, 12288),
    *((m, n, k) for m in (1, 4, 16) for n, k in ((4096, 4096), (6144, 4096), (12288, 4096))),
    *((4, 1024, 3072), (4, 2560, 9728), (16, 6144, 1024), (16, 1024, 3072), (16, 19456, 2560)),
    *((16, 2560, 9728), (64, 19456, 2560), (64, 2560, 9728)),
]
MORE = {
    "": "",
    "added-": ",residual=true",
    "normed-": ",normed=true",
    "gated-": ",silu_and_mul=true,normed=true",
}
SHAPES = {  # of each bench case; of all its kernels where several have one of that name
    "decode-b64-ctx4096-32/8x128-bf16": "batch=64,context=4096",
    "decode-b256-ctx1024-32/8x128-bf16": "batch=256,context=1024",
    **{
        f"decode-b{b}-ctx{n}-{heads}/8x128-bf16": f"batch={b},context={n},num_heads={heads}"
        for heads in (16, 32)
        for b, n in ((1, 384), (1, 4096), (64, 1024))
    },
    "decode-b64-ctx4096-32/8x128-int8-bf16": "batch=64,context=4096",
    "decode-b64-ctx4096-32/8x128-int8_fp4-bf16": "batch=64,context=4096,residuals=true",
    "decode-b64-ctx4096-32/8x128-int8_static-bf16": "batch=64,context=4096,static=true",
    "decode-b64-ctx4096-32/8x128-int8_static_fp4-bf16": (
        "batch=64,context=4096,residuals=true,static=true"
    ),
    "decode-b256-ctx1024-32/8x128-int8-bf16": "batch=256,context=1024",
    "decode-b256-ctx1024-32/8x128-int8_fp4-bf16": "batch=256,context=1024,residuals=true",
    "decode-b1-ctx32768-32/8x128-int8-bf16": "batch=1,context=32768",
    "decode-b1-ctx32768-32/8x128-int8_fp4-bf16": "batch=1,context=32768,residuals=true",
    "decode-b16-ctx4096-32/8x128-int8-bf16": "batch=16,context=4096",
    "decode-b16-ctx4096-32/8x128-int8_fp4-bf16": "batch=16,context=4096,residuals=true",
    "chunk-2048-ctx8192-32/8x128-int8-bf16": "batch=1,context=8192,query=2048",
    "chunk-2048-ctx8192-32/8x128-int8_fp4-bf16": "batch=1,context=8192,query=2048,residuals=true",
    "chunk-2048-ctx8192-32/8x128-int8_static-bf16": "batch=1,context=8192,query=2048,static=true",
    "decode-b1-ctx32768-32/8x128-bf16": "batch=1,context=32768",
    "decode-b16-ctx4096-32/8x128-bf16": "batch=16,context=4096",
    "chunk-2048-ctx8192-32/8x128-bf16": "batch=1,context=8192,query=2048",
    "causal-4x4096-32/8x128-bf16": "batch=4,seqlen=4096",
    "causal-1x16384-32/8x128-bf16": "batch=1,seqlen=16384",
    "causal-16x512-32/8x128-bf16": "batch=16,seqlen=512",
    "full-4x4096-32/8x128-bf16": "batch=4,seqlen=4096,causal=false",
    "causal-4x4096-16/8x64-bf16": "batch=4,seqlen=4096,num_heads=16,head_dim=64",
    "1x4096-bf16": "tokens=1,hidden=4096",
    "16x4096-bf16": "tokens=16,hidden=4096",
    "16x4096-keep-bf16": "tokens=16,hidden=4096,keep=true",
    "4096x4096-keep-bf16": "tokens=4096,hidden=4096,keep=true",
    "64x4096-bf16": "tokens=64,hidden=4096",
    "4096x4096-bf16": "tokens=4096,hidden=4096",
    "16384x5120-bf16": "tokens=16384,hidden=5120",
    "32768x768-bf16": "tokens=32768,hidden=768",
    "1x12288-bf16": "tokens=1,intermediate=12288",
    "16x12288-bf16": "tokens=16,intermediate=12288",
    "16x12288-keep-bf16": "tokens=16,intermediate=12288,keep=true",
    "4096x12288-keep-bf16": "tokens=4096,intermediate=12288,keep=true",
    "64x12288-bf16": "tokens=64,intermediate=12288",
    "4096x12288-bf16": "tokens=4096,intermediate=12288",
    "qwen3-0.6b-t1": "tokens=1,num_heads=16",
    "qwen3-8b-t1": "tokens=1",
    "qwen3-8b-t64": "tokens=64",
    "qwen3-8b-t2048": "tokens=2048",
    "qwen3-8b-t8192": "tokens=8192",
    "64x8x128-bf16": "tokens=64",
    "4096x8x128-bf16": "tokens=4096",
    "64x8x128-int8-bf16": "tokens=64,residuals=false,scattered=true",
    "64x8x128-fp4-bf16": "tokens=64,scattered=true",
    "512x8x128-int8-blocks-bf16": "tokens=512,residuals=false",
    "512x8x128-fp4-blocks-bf16": "tokens=512",
    "4096x8x128-int8-bf16": "tokens=4096,residuals=false,scattered=true",
    "4096x8x128-int8-blocks-bf16": "tokens=4096,residuals=false",
    "4096x8x128-fp4-blocks-bf16": "tokens=4096",
    "4096x8x128-static-fp4-blocks-bf16": "tokens=4096,static=true",
    "256x8x16": "blocks=256",
    "32768x128-bf16": "rows=32768",
    "int8-8192x8192x8192-bf16": "tokens=8192,outputs=8192,inputs=8192",
    "int8-4096x12288x4096-bf16": "tokens=4096,outputs=12288,inputs=4096",
    "int8-4096x4096x12288-bf16": "tokens=4096,outputs=4096,inputs=12288",
    "int8-64x12288x4096-bf16": "tokens=64,outputs=12288,inputs=4096",
    "quantizes-16x12288x4096-bf16": "tokens=16,outputs=12288,inputs=4096,quantized=false",
    **{
        f"w8a16-{m}x{n}x4096-bf16": f"tokens={m},outputs={n},inputs=4096,high=true"
        for m, n in ((16, 4096), *((m, 12288) for m in (1, 16, 64, 256, 1024, 4096)))
    },
    "int8-1x12288x4096-bf16": "tokens=1,outputs=12288,inputs=4096",
    "int8-16x4096x12288-bf16": "tokens=16,outputs=4096,inputs=12288",
    "1x12288x4096-bf16": "tokens=1,outputs=12288,inputs=4096",
    "16x12288x4096-bf16": "tokens=16,outputs=12288,inputs=4096",
    "1x4096x12288-bf16": "tokens=1,outputs=4096,inputs=12288",
    "16x4096x12288-bf16": "tokens=16,outputs=4096,inputs=12288",
    "16x4096x4096-bf16": "tokens=16,outputs=4096,inputs=4096",
    **{f"{m}x12288x4096-bf16": f"tokens={m},outputs=12288,inputs=4096" for m in (32, 64, 128)},
    **{f"{m}x12288x4096-bf16": f"tokens={m},outputs=12288,inputs=4096" for m in (256, 1024, 4096)},
    **{
        f"{m}x{n}x{k}-{codes}-bf16": f"tokens={m},outputs={n},inputs={k}{more}"
        for m in (1, 16, 64, 256, 4096)
        for n, k in ((12288, 4096), (4096, 12288), (9728, 2560), (2560, 9728))
        for codes, more in (("fp8", ""), ("int8", ",fp8=false"))
    },
    **{
        f"{prefix}{m}x{n}x{k}-bf16": f"tokens={m},outputs={n},inputs={k}{more}"
        for prefix, more in MORE.items()
        for m, n, k in SKINNY
    },
    "1x151936x4096-bf16": "tokens=1,outputs=151936,inputs=4096",
    "none-8192x8192x8192-bf16": "tokens=8192,outputs=8192,inputs=8192,masked=true",
    "none-16x12288x4096-bf16": "tokens=16,outputs=12288,inputs=4096,masked=true",
    "none-64x12288x4096-bf16": "tokens=64,outputs=12288,inputs=4096,masked=true",
    "64x32x128-bf16": "tokens=64",
    "4096x32x128-bf16": "tokens=4096",
    **{f"t{t}-e128-k8": f"tokens={t}" for t in (1, 64, 512, 4096)},
    **{f"t{t}-k8-h2048-bf16": f"tokens={t}" for t in (1, 64, 512, 4096)},
    **{
        f"{which}-{t}{name}-bf16": (
            f"tokens={t},experts=128,top_k=8,hidden=2048,intermediate=768{down}{int8}"
        )
        for which, down in (("gate_up", ""), ("down", ",down=true"))
        for t in (1, 16, 64, 512, 4096)
        for name, int8 in (("", ""), ("-w8a8", ",w8a8=true"))
    },
    "t64-e256-k8-v3": "tokens=64,experts=256,v3=true",
    "1x8x12288-bf16": "tokens=8,hidden=12288",
    "4x64x12288-bf16": "tokens=64,hidden=12288,watches=4",
}
NO_SHAPE = {"decode-mixed-b64-128+8192-32/8x128-bf16"}  # its sequences differ in length


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_shape_gives_the_problem_of_each_bench_case(
    spec: KernelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {task.case: task for task in problems.bench_tasks(spec, "sm90")}
    assert cases
    for name in [name for name in cases if name not in NO_SHAPE]:
        [task] = shapes(spec.name, SHAPES[name])
        assert dict(task.problem) == dict(cases[name].problem)
        assert task.key == cases[name].key
        assert shapes(spec.name, task.case) == [task]  # its name is a shape too
        # The kernel takes one of them; that it takes each of its cases is test_sm90's.
        monkeypatch.setattr(problems, "_check", lambda *given: None)


def test_every_kernel_has_a_shape() -> None:
    assert [spec.name for spec in SPECS if spec.shape is None] == []


def test_lists_give_the_product_without_repeats() -> None:
    tasks = shapes("paged_attn", "batch=1:16:64,context=1024:8192", "batch=16,context=1024")
    assert len(tasks) == 6
    assert len({task.label for task in tasks}) == 6
    assert tasks[0].case == "batch=1,context=1024"


@pytest.mark.parametrize("text", ["batch=5:8", "batch=8:5", "batch=6:8:7"])
def test_of_problems_with_one_key_the_largest_is_tuned(text: str) -> None:
    assert [task.case for task in shapes("paged_attn", f"{text},context=1000")] == [
        "batch=8,context=1000"
    ]


def test_bench_cases_with_one_key_are_one_problem() -> None:
    spec = get("rms_norm")
    cases = [
        Case(f"{n}", spec.shape(tokens=n, hidden=64), frozenset({"bench"}))  # type: ignore[misc]
        for n in (6, 16, 5)
    ]
    doubled = dataclasses.replace(spec, cases=tuple(cases))
    assert [task.case for task in problems.bench_tasks(doubled, "sm90")] == ["16"]


def test_what_is_left_out_of_a_name_is_the_default() -> None:
    [task] = shapes("paged_attn", "dtype=FP16,context=64,batch=2,num_heads=32,query=1")
    assert task.case == "dtype=fp16,context=64,batch=2"


@pytest.mark.parametrize(
    ("kernel", "text", "words"),
    [
        ("paged_attn", "contxt=3", "takes batch, context, query=1.*got 'contxt'; did you mean con"),
        ("paged_attn", "batch=2", "must give context, got 'batch=2'"),
        ("paged_attn", "batch=0,context=8", "batch must be a whole number from 1 to .*, got '0'"),
        ("paged_attn", "batch=-1,context=8", "batch must be a whole number from 1 to .*'-1'"),
        ("paged_attn", "batch=x,context=8", "batch must be a whole number from 1 to .*, got 'x'"),
        ("paged_attn", "batch=1.5,context=8", "batch must be a whole number from 1 to .*'1.5'"),
        ("paged_attn", "batch=1:,context=8", "batch must be a whole number from 1 to .*, got ''"),
        ("paged_attn", "batch=2147483648,context=8", "from 1 to 2147483647, got '2147483648'"),
        (
            "paged_attn",
            "batch=2147483647,context=8",
            r"at most 2\*\*24 blocks of 16, got 2147483647",
        ),
        ("paged_attn", "batch=1,context=2147483647", r"at most 2\*\*24 blocks of 16, got 1 \*"),
        ("paged_attn", "", "must be name=value,..."),
        ("paged_attn", "batch=2,context=8,dtype=int8", "dtype must be one of bf16, fp16, fp32"),
        ("paged_attn", "batch=2,batch=3,context=8", "each name once"),
        ("paged_attn", "batch", "must be name=value,..."),
        ("paged_attn", "batch=2,context=8,query=9", "query must be at most context=8, got 9"),
        ("paged_attn", "batch=2,context=8,num_heads=3", "k_cache must have a number of heads"),
        ("flash_attn", "batch=2,seqlen=8,head_dim=300", "head_dim 1 to 256, got"),
        ("flash_attn", "batch=2,seqlen=8,causal=maybe", "causal must be true or false, got"),
        ("flash_attn", "batch=2,seqlen=8,window=3,causal=false", "window must be None where"),
        ("rope", "tokens=4,rotary_dim=200", "rotary_dim in .2, head_dim=128., got"),
        ("rope", "tokens=4,head_dim=7", "must be even"),
        ("rms_norm", "tokens=4,hidden=8,eps=1", "takes tokens, hidden, dtype=bf16, got 'eps'$"),
        ("rms_norm", "tokens=2147483647,hidden=2147483647", "hidden=2147483647 moves"),
    ],
)
def test_shapes_that_are_refused(kernel: str, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        shapes(kernel, text)
    assert "\n" not in str(caught.value)


def test_unknown_kernel_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="got 'page_attn'; did you mean paged_attn"):
        get("page_attn")


def test_a_kernel_without_a_shape_says_so() -> None:
    bare = dataclasses.replace(get("rms_norm"), shape=None)
    with pytest.raises(ValueError, match="needs a kernel whose spec has a shape, got rms_norm"):
        problems.shape_tasks([bare], ["tokens=1"], "sm90")


def test_bytes_of_inputs_are_known_without_memory() -> None:
    [task] = shapes("rms_norm", "tokens=1000000,hidden=100000")
    assert problems.input_bytes(get("rms_norm"), task.problem) == 2 * (10**11 + 10**5)
    [task] = shapes("append_paged_kv", "tokens=32,num_kv_heads=1,head_dim=8")
    # qkv of four heads, of which k and v are views; two pools of twice the tokens; int64
    # slots, 32 of 64.
    assert (
        problems.input_bytes(get("append_paged_kv"), task.problem)
        == 2 * (32 * 4 * 8 + 2 * 64 * 8) + 8 * 64
    )


def test_problems_beyond_memory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = get("rms_norm")
    [task] = shapes("rms_norm", "tokens=524288,hidden=4096")  # 4 GiB, twice
    monkeypatch.setattr(device, "memory_bytes", lambda: 9 << 30)
    assert problems.why_too_large(spec, task.problem) is None
    monkeypatch.setattr(device, "memory_bytes", lambda: 8 << 30)  # the weight is too much
    assert problems.why_too_large(spec, task.problem) == (
        "it needs 8.0 GiB or more, got a device with 8.0"
    )
    monkeypatch.setattr(device, "memory_bytes", lambda: 0)  # a CPU has the machine's
    [task] = shapes("rms_norm", "tokens=100000000,hidden=100000")
    assert "it needs 37252.9 GiB or more" in str(problems.why_too_large(spec, task.problem))


def test_what_does_not_fit_is_named_and_the_rest_tuned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = shapes("rms_norm", "tokens=16:64,hidden=4096")
    here = Target(device.current(), offline=False, python="python")
    monkeypatch.setattr(device, "memory_bytes", lambda: 2**19)
    assert _fitting(SPECS, tasks, here) == tasks[:1]
    err = capsys.readouterr().err
    assert re.fullmatch("autotune: rms_norm tokens=64,hidden=4096 is left out: it needs .*\n", err)
    assert _fitting(SPECS, tasks, dataclasses.replace(here, offline=True)) == tasks
    with pytest.raises(ValueError, match="a problem that fits into the device's memory, got none"):
        _fitting(SPECS, tasks[1:], here)


# ---- models ------------------------------------------------------------------------------------


TINY = {
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20},
    "llama": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "qwen2": {"num_attention_heads": 6, "num_key_value_heads": 1, "torch_dtype": "float16"},
    "qwen3_moe": {
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20, "num_experts": 5,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
        "num_hidden_layers": 2,
    },
}  # fmt: skip


# Layers in 8 bits.
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
        }
    },
}
GROUPS = {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True}
IN_BYTES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-blocks": ("qwen3", BLOCKS),
    "llama-channels": ("llama", CHANNELS),
    "qwen3_moe-blocks": ("qwen3_moe", BLOCKS),
    "qwen3-groups": ("qwen3", GROUPS),
}


def tiny_config(family: str) -> dict[str, Any]:
    sizes = {"hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 1, "vocab_size": 9}
    rope = {"max_position_embeddings": 4096, "rope_theta": 1e4}
    kind, quantization = IN_BYTES.get(family, (family, None))
    found = {"model_type": kind, "torch_dtype": "float32", **sizes, **rope, **TINY[kind]}
    if quantization is None:
        return found
    found |= {"torch_dtype": "bfloat16", "quantization_config": quantization}
    if quantization == GROUPS:
        found |= {"hidden_size": 64, "intermediate_size": 160, "head_dim": 32}
    return found


def network(config: ModelConfig) -> Model:
    """Layers whose values do not matter; with experts two, which differ in what they norm."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, config.dtype), device=device.tensor_device())

    def linear(name: str, outputs: int, inputs: int) -> Linear:
        """With a weight of the kind that a checkpoint of this config would have."""
        scheme = None
        if config.quantization is not None:
            scheme = config.quantization.scheme_of(f"model.layers.0.mlp.{name}")
        dtype = getattr(torch, config.dtype)
        if scheme is None or not scheme.keeps_codes(inputs, dtype):
            return Linear(zeros(outputs, inputs))
        if isinstance(scheme, Float8):
            kind, group = torch.float8_e4m3fn, scheme.block_of(outputs, inputs)[1]
        else:
            kind, group = torch.int8, scheme.group or inputs
        codes = zeros(outputs, inputs).to(kind)
        return Linear(ByteMatrix(codes, zeros(outputs, -(-inputs // group))))

    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    mlp: dict[str, Any] = {
        "gate_up_proj": linear("gate_up_proj", 2 * inner, hidden),
        "down_proj": linear("down_proj", hidden, inner),
    }
    if config.mixture is not None:
        n, k, wide = 5, 2, config.mixture.intermediate_size
        shapes = zeros(n, hidden), zeros(n, 2 * wide, hidden), zeros(n, hidden, wide)
        mlp = {"experts": Experts(*shapes, top_k=k, renormalize=True)}
    layer = Layer(
        input_layernorm=zeros(hidden),
        qkv_proj=linear("qkv_proj", config.q_size + 2 * config.kv_size, hidden),
        q_norm=zeros(dim) if config.qk_norm else None,
        k_norm=zeros(dim) if config.qk_norm else None,
        o_proj=linear("o_proj", hidden, config.q_size),
        post_attention_layernorm=zeros(hidden),
        **mlp,
    )
    table = zeros(config.vocab_size, hidden)
    return Model(config, table, [layer] * config.num_layers, zeros(hidden), Linear(table))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """(kernel, key) of each problem whose config is looked up; the launches themselves are not."""
    found: set[tuple[str, str]] = set()
    explain: Callable[..., Any] = config.explain

    def noting(spec: KernelSpec, problem: Problem, given: Any = None) -> Any:
        found.add((spec.name, label_of(spec.tuning_key(problem))))
        return explain(spec, problem, given)

    monkeypatch.setattr(config, "explain", noting)
    with replaced_run(lambda *args, **kwargs: None):
        yield found


@pytest.mark.parametrize("bodies", [False, True])  # as on a device that has them, for 2 to 64 rows
@pytest.mark.parametrize(
    ("family", "batch", "context", "chunk"),
    [
        ("qwen3", 3, 16, 32),  # whole prompts in a step
        ("qwen3", 2, 1024, 2048),
        ("llama", 1, 3000, 2048),  # a prompt in two steps
        ("llama", 3, 20, 32),  # the end of a prompt with the next one
        ("qwen2", 7, 100, 256),
        ("qwen2", 1, 2049, 2048),  # a step of one token
        ("qwen3_moe", 3, 16, 32),
        ("qwen3", 1, 40, 16),  # steps of one token take fused kernels
        ("qwen3_moe", 1, 40, 64),
        ("qwen3-blocks", 3, 16, 32),
        ("qwen3-blocks", 1, 40, 16),
        ("llama-channels", 3, 20, 32),
        ("qwen3_moe-blocks", 1, 40, 64),
        ("qwen3-groups", 3, 16, 32),
        ("qwen3-groups", 1, 40, 16),
    ],
)
def test_what_a_model_launches_is_what_is_tuned(
    family: str,
    batch: int,
    context: int,
    chunk: int,
    bodies: bool,
    launched: set[tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The keys that --model derives are those of a real prefill and decode step, no more."""
    monkeypatch.setattr(skinny_linear_rows, "takes", lambda x, _: bodies and 2 <= len(x) <= 64)
    monkeypatch.setattr(model_launches, "takes_product", lambda m, *_: bodies and 2 <= m <= 64)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(family)))
    model = network(from_folder(tmp_path))

    def prefilled(length: int) -> tuple[Runner, list[SequenceState]]:
        blocks = batch * (context // 16 + 1)
        runner = Runner(model, tkernels, num_blocks=blocks, max_positions=4096, prefill_chunk=chunk)
        sequences = [SequenceState([1] * length) for _ in range(batch)]
        runner.prefill(sequences)
        return runner, sequences

    # A prompt one shorter, then the step that brings the context to its length.
    runner, sequences = prefilled(context - 1)
    for sequence in sequences:
        sequence.token_ids.append(7)
    launched.clear()
    config.reload()  # plans that are remembered ask for no config
    runner.decode(sequences)
    kernels = {kernel for kernel, _ in launched}
    assert "rms_norm" in kernels
    assert ("w8a16_gemm" in kernels) == (family in IN_BYTES)
    config.reload()
    prefilled(context)
    arch = device.current().arch
    tasks = problems.model_tasks(SPECS, tmp_path, [batch], [context], arch, chunk=chunk)
    assert {(task.kernel, task.label) for task in tasks} == launched


@pytest.mark.parametrize(
    ("batch", "context", "chunk"),
    [(1, 1, 1), (3, 5, 4), (2, 16, 32), (7, 10, 64), (4, 7, 3), (5, 6, 13), (1, 40, 16)],
)
def test_steps_are_the_runners(batch: int, context: int, chunk: int) -> None:
    computed = [0] * batch
    expected = [Step(batch, batch, 1, context, False, batch)]
    for step in split_prefill([context] * batch, chunk):
        fresh = not any(computed[i] for i, _ in step)
        for i, n in step:
            computed[i] += n
        news = [n for _, n in step]
        longest = max(computed[i] for i, _ in step)
        ended = sum(computed[i] == context for i, _ in step)
        expected.append(Step(len(step), sum(news), max(news), longest, fresh, ended))
    assert steps(batch, context, chunk) == list(dict.fromkeys(expected))


def test_each_kind_of_attention_and_mlp_is_tuned() -> None:
    facts = facts_of(
        {
            **CONFIG,
            "model_type": "mixtral",
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    )
    found = launches(facts, batch=4, context=2048, dev=device.current())
    decode = [shape for kernel, shape in found if kernel == "paged_attn"]
    assert [shape["window"] for shape in decode] == [0, 128]
    mlps = [shape for kernel, shape in found if kernel == "silu_and_mul"]
    assert [shape["tokens"] for shape in mlps] == [8, 4096]


def test_a_model_that_launches_none_of_the_kernels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match=r"and not rope, merge_attn_states$"):
        problems.model_tasks([get("rope"), get("merge_attn_states")], tmp_path, [1], [16], "sm90")


def test_sizes_beyond_all_machines_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match="--batch times --context must be at most 67108864, got"):
        problems.model_tasks(SPECS, tmp_path, [1, 10**8], [10**5], "sm90")


def test_problems_of_a_model_are_named_by_what_is_unusual(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_attention_heads": 64}))
    tasks = problems.model_tasks([get("paged_attn")], tmp_path, [64, 1], [8192], "sm90")
    assert [task.case for task in tasks] == [
        "batch=64,context=8192,num_heads=64",
        "batch=1,context=4096,query=2048,num_heads=64",
        "batch=1,context=8192,query=2048,num_heads=64",
    ]
    tasks = problems.model_tasks(SPECS, tmp_path, [1], [8192], "sm90")
    names = [t.case for t in tasks if t.kernel == "fused_qk_norm_rope_append_attn"]
    assert names == ["batch=1,context=8192,num_heads=64"]


def test_the_runners_chunk_is_ours() -> None:
    assert problems.PREFILL_CHUNK == PREFILL_CHUNK


def test_facts_are_read_from_a_folder_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    facts = read_facts(tmp_path)
    assert facts == read_facts(tmp_path / "config.json") == facts_of(CONFIG)
    assert (facts.head_dim, facts.rotary_dim, facts.qk_norm) == (128, 128, True)
    assert facts.dtype == torch.bfloat16
    llama = {**CONFIG, "model_type": "llama", "head_dim": None, "num_key_value_heads": None}
    assert facts_of(llama).num_kv_heads == 32
    assert not facts_of(llama).qk_norm
    assert facts_of({**llama, "num_attention_heads": 64}).head_dim == 64
    assert facts_of({**CONFIG, "rope_parameters": {"partial_rotary_factor": 0.5}}).rotary_dim == 64
    assert facts_of({**CONFIG, "partial_rotary_factor": 0.25}).rotary_dim == 32
    assert facts_of({"text_config": CONFIG, "dtype": "float16"}).hidden_size == 4096


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"num_bits": 8, **weights}}
    groups = {"group_0": scheme}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


ALL_INPUTS = ByteCodes(0, True)


@pytest.mark.parametrize(
    ("given", "experts", "byte_codes"),
    [
        (None, False, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, False, ByteCodes(64, True)),
        ({"quant_method": "fp8", "weight_block_size": [128, 48]}, False, None),
        (compressed("float-quantized", strategy="channel"), False, ALL_INPUTS),
        (compressed("naive-quantized", strategy="tensor"), False, ALL_INPUTS),
        (compressed("float-quantized", block_structure=[64, 128]), False, ByteCodes(128, True)),
        (compressed("float-quantized", block_structure=[64, 24]), False, None),
        (compressed("pack-quantized", group_size=64), True, ByteCodes(64, False)),
        (compressed("pack-quantized", group_size=64, num_bits=4), True, None),
        (compressed("pack-quantized", group_size=None), True, None),
        (compressed("int-quantized"), True, None),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, False, None),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, True, None),
        ({"quant_method": "gptq", "bits": 8}, False, ByteCodes(128, False)),
        ({"quant_method": "gptq", "bits": 8, "sym": False}, False, None),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, True, None),
        (
            {"quant_method": "gptq", "bits": 8, "dynamic": {".*": {"bits": 4}}},
            True,
            ByteCodes(128, False),
        ),
        ({"quant_method": "gptq", "bits": 4}, True, None),
        ({"quant_method": "awq"}, True, None),
    ],
)
def test_what_is_dequantised_multiplies_like_16_bits(
    given: Any, experts: bool, byte_codes: ByteCodes | None
) -> None:
    facts = facts_of({**CONFIG, "quantization_config": given})
    assert facts.quantised_experts == experts
    assert facts.byte_codes == byte_codes
    assert facts.quantised == (experts or byte_codes is not None)
    facts = facts_of({**CONFIG, "torch_dtype": "float32", "quantization_config": given})
    assert facts.byte_codes is None


def test_layers_in_8_bits_are_derived(tmp_path: Path) -> None:
    given = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": given}))
    tasks = problems.model_tasks([get("w8a16_gemm")], tmp_path, [1], [64], "sm90")
    sizes = {tuple(task.problem[name] for name in ("m", "n", "k")) for task in tasks}
    layers = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
    assert sizes == {(m, n, k) for m in (1, 64) for n, k in layers}
    kinds = {tuple(task.problem[name] for name in ("group", "codes", "scale")) for task in tasks}
    assert kinds == {(128, torch.float8_e4m3fn, torch.bfloat16)}


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": None}, (None,)),
        ({"model_type": "mistral", "sliding_window": 4096}, (4096,)),
        (
            {"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 4096},
            (None,),
        ),
        ({"sliding_window": 4096, "use_sliding_window": False}, (None,)),
        ({"sliding_window": 4096, "use_sliding_window": True}, (None, 4096)),
        ({"sliding_window": 64, "layer_types": ["sliding_attention"] * 2}, (64,)),
        ({"sliding_window": 64, "layer_types": ["linear_attention", "full_attention"]}, (None,)),
    ],
)
def test_windows_are_those_that_layers_use(
    fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert facts_of({**CONFIG, **fields}).windows == windows


def test_mlps_are_those_that_the_kernel_serves() -> None:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    assert facts_of(CONFIG).mlps == ((1, 12288),)
    assert facts_of({**CONFIG, **experts}).mlps == ((8, 768),)
    shared = {**experts, "shared_expert_intermediate_size": 512}
    assert facts_of({**CONFIG, **shared}).mlps == ((8, 768), (1, 512))
    assert facts_of({**CONFIG, "hidden_activation": "gelu_pytorch_tanh"}).mlps == ()


def test_linear_layers_of_a_quantised_model_are_not_derived(tmp_path: Path) -> None:
    quantised = {**CONFIG, "quantization_config": {"quant_method": "compressed-tensors"}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    one, other = (facts_of(config) for config in (CONFIG, quantised))
    for batch in (1, 4):
        plain, found = (
            {kernel for kernel, _ in launches(facts, batch, 64, dev=device.sm_facts(90))}
            for facts in (one, other)
        )
        assert "skinny_linear" in plain
        assert {"rms_norm", "fused_add_rms_norm", "silu_and_mul"} <= found
    decoding = [
        values
        for kernel, values in launches(other, 4, 64, dev=device.sm_facts(90))
        if kernel == "skinny_linear"
    ]
    assert all(values["outputs"] == other.vocab_size for values in decoding)
    with pytest.raises(
        ValueError, match=r"not w4a16_gemm \(its linear layers are quantised: --sha"
    ):
        problems.model_tasks([get("w4a16_gemm")], tmp_path, [1], [64], "sm90")


def test_experts_are_those_that_fused_moe_has() -> None:
    experts = {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "model_type": "qwen3_moe"}
    for named in ("num_experts", "num_local_experts"):
        facts = facts_of({**CONFIG, **experts, named: 128})
        assert (facts.experts, facts.mlps) == ((128, 8, 768), ())
        for mixed in ({"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}):
            assert facts_of({**CONFIG, **experts, named: 128, **mixed}).mlps == ((1, 12288),)
    found = [
        one
        for one in launches(facts, batch=4, context=64, dev=device.current())
        if one[0].startswith("moe")
    ]
    sizes = {"experts": 128, "top_k": 8}
    dtype = {"dtype": torch.bfloat16}
    layer = {"hidden": 4096, "intermediate": 768, **dtype}
    assert found == [
        launch
        for tokens in (4, 256)
        for launch in (
            ("moe_route", {"tokens": tokens, **sizes, **dtype}),
            ("moe_dispatch", {"tokens": tokens, **sizes}),
            ("moe_gemm", {"tokens": tokens, **sizes, **layer}),
            ("moe_gemm", {"tokens": tokens, **sizes, **layer, "down": True}),
            ("moe_combine", {"tokens": tokens, "hidden": 4096, "top_k": 8, **dtype}),
        )
    ]
    most = chunk_of(8, 4096, 768, torch.bfloat16)
    for tokens, chunks in ((most, [most]), (most + 5, [most, 5]), (2 * most, [most])):
        step = _experts(facts, Step(1, tokens, tokens, tokens, True, 1))
        assert [size["tokens"] for name, size in step if name == "moe_dispatch"] == chunks
    assert facts_of(CONFIG).experts is None
    with pytest.raises(ValueError, match="num_experts_per_tok must be an integer >= 1, got None"):
        facts_of({**CONFIG, **experts, "num_experts": 128, "num_experts_per_tok": None})


def test_products_of_quantised_experts_are_not_derived(tmp_path: Path) -> None:
    """Those of layers whose experts are left out are."""
    experts = {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "model_type": "qwen3_moe"}
    config = {**CONFIG, **experts, "num_experts": 128}
    scheme = {"quant_method": "compressed-tensors", "ignore": ["lm_head", r"re:.*\.mlp\.gate$"]}
    kept = {**scheme, "ignore": [*scheme["ignore"], r"re:.*\.layers\.(0)\.mlp\.experts\..*"]}
    for given, derived in ((None, True), (scheme, False), (kept, True)):
        facts = facts_of({**config, "quantization_config": given})
        found = {name for name, _ in launches(facts, 4, 64, dev=device.sm_facts(90))}
        assert {"moe_route", "moe_dispatch", "moe_combine"} <= found
        assert ("moe_gemm" in found) == derived
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    for name in ("moe_gemm", "moe_w4a16_gemm"):
        with pytest.raises(
            ValueError, match=rf"not {name} \(its linear layers are quantised: --sh"
        ):
            problems.model_tasks([get(name)], tmp_path, [1], [64], "sm90")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "must be a config.json or a folder with one, got .*No such file"),
        ("{", "it is not JSON"),
        ("[]", "must hold an object"),
        (json.dumps({**CONFIG, "hidden_size": 0}), "hidden_size must be an integer >= 1, got 0"),
        (json.dumps({**CONFIG, "intermediate_size": "x"}), "intermediate_size must be an integer"),
        (json.dumps({**CONFIG, "num_key_value_heads": 5}), "must be a multiple of num_key_value"),
        (json.dumps({**CONFIG, "torch_dtype": "int8"}), "dtype must be one of bfloat16.*'int8'"),
        (json.dumps({**CONFIG, "kv_lora_rank": 512}), "latent attention .kv_lora_rank=512."),
        (json.dumps({**CONFIG, "rope_parameters": [1]}), "must be objects, got .1."),
        (json.dumps({**CONFIG, "partial_rotary_factor": "x"}), "a number in .0, 1., got 'x'"),
        (
            json.dumps({**CONFIG, "partial_rotary_factor": 0.01}),
            "give what fused_qk_norm_rope takes, got",
        ),
        (
            json.dumps({**CONFIG, "model_type": "x", "head_dim": None, "hidden_size": 4095}),
            "must be a multiple of num_attention_heads where head_dim is not .* 4095 and 32",
        ),
        (json.dumps({"model_type": "gpt2", "n_embd": 768}), "num_attention_heads must be an int"),
        ("[" * 100_000, "it is not JSON"),
    ],
)
def test_models_that_cannot_be_read(text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"^autotune: --model.*{words}"):
        problems.model_tasks(SPECS, tmp_path, [1], [16], "sm90")


def test_a_gguf_file_is_not_a_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got .*x\.gguf; the config.json of the checkpoint that"):
        read_facts(tmp_path / "x.gguf")
