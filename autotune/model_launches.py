"""What a model launches with so many sequences of so many tokens: kernels and their shapes.

The order of the kernels is that of ``model/qwen3.py``, the steps are those of ``model/runner.py``;
``tests/test_problems.py`` compares both with what these launch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from autotune.model_facts import ModelFacts
from tkernels.device import Device
from tkernels.moe import chunk_of
from tkernels.skinny_linear_rows import takes_product

# Prompt tokens that the runner (model.generate) computes at once.
PREFILL_CHUNK = 2048
# Steps of up to so many tokens take fused kernels: those of model/qwen3.py.
FEW_ROWS, APPENDED_ROWS, FUSED_DECODE_ROWS = 1, 2048, 1


@dataclasses.dataclass(frozen=True)
class Step:
    """New tokens of some sequences, computed at once."""

    sequences: int
    tokens: int  # new ones, of all sequences
    query: int  # new ones, of the sequence with most
    context: int  # of the longest sequence, new ones included
    fresh: bool  # nothing is in the cache yet
    logits: int  # sequences that end their prompt, or decode


def steps(batch: int, context: int, chunk: int = PREFILL_CHUNK) -> list[Step]:
    """The steps, each once, of a prefill of ``batch`` prompts of ``context`` tokens, and a decode.

    The prompts stand one after the other and are cut every ``chunk`` tokens.
    """
    found = {Step(batch, batch, 1, context, False, batch): None}
    total = batch * context
    for begin in range(0, total, chunk):
        end = min(begin + chunk, total)
        first, last = begin // context, (end - 1) // context
        computed = begin - first * context
        fresh, logits = computed == 0, end // context - first
        if first == last:
            found[Step(1, end - begin, end - begin, computed + end - begin, fresh, logits)] = None
            continue
        ends_first, begins_last = context - computed, end - last * context
        query = context if last - first > 1 else max(ends_first, begins_last)
        found[Step(last - first + 1, end - begin, query, context, fresh, logits)] = None
    return list(found)


def launches(
    facts: ModelFacts, batch: int, context: int, chunk: int = PREFILL_CHUNK, *, dev: Device
) -> list[tuple[str, dict[str, Any]]]:
    """(kernel, arguments of its spec's ``shape``) of ``steps`` on such a device."""
    return [one for step in steps(batch, context, chunk) for one in _layer(facts, step, dev)]


def _layer(facts: ModelFacts, step: Step, dev: Device) -> list[tuple[str, dict[str, Any]]]:
    """And the norm and the projection behind the last layer."""
    heads = {"num_heads": facts.num_heads, "num_kv_heads": facts.num_kv_heads}
    size = {"head_dim": facts.head_dim, "dtype": facts.dtype}
    kv = {"num_kv_heads": facts.num_kv_heads, **size}
    rotary_dim = 0 if facts.rotary_dim == facts.head_dim else facts.rotary_dim
    turned = {"tokens": step.tokens, **heads, **size, "rotary_dim": rotary_dim}
    attended = [_attention(step, window, heads | size) for window in facts.windows]
    rows = {"tokens": step.tokens, "hidden": facts.hidden_size, "dtype": facts.dtype}
    one_each = step.tokens <= FUSED_DECODE_ROWS and step.query == 1
    if facts.qk_norm and not step.fresh and one_each and not rotary_dim:
        sizes = {"batch": step.sequences, "context": step.context, **heads, **size}
        placed, attended = [], [("fused_qk_norm_rope_append_attn", sizes)]
    elif facts.qk_norm and not step.fresh and step.tokens <= APPENDED_ROWS:
        placed = [("fused_qk_norm_rope_append", turned)]
    else:
        rope = "fused_qk_norm_rope" if facts.qk_norm else "rope"
        placed = [(rope, turned), ("append_paged_kv", {"tokens": step.tokens, **kv})]
    return [
        ("rms_norm", rows),
        *placed,
        *attended,
        *(
            _few_rows(facts, step)
            if step.tokens <= FEW_ROWS and not facts.quantised
            else _many_rows(facts, step, dev)
        ),
        *([_product(step.logits, facts.vocab_size, facts)] if step.logits == 1 else []),
        *_experts(facts, step),
    ]


def _many_rows(facts: ModelFacts, step: Step, dev: Device) -> list[tuple[str, dict[str, Any]]]:
    """Norms and activations of their own, beside products, PyTorch's or those of a body.

    Of a quantised network those of ``w8a16_gemm`` are derived; what makes codes in passing is not.
    """
    tokens, hidden = step.tokens, facts.hidden_size
    rows = {"tokens": tokens, "hidden": hidden, "dtype": facts.dtype}
    heads = facts.num_heads + 2 * facts.num_kv_heads
    layers = [
        (tokens, heads * facts.head_dim, hidden),
        (tokens, hidden, facts.num_heads * facts.head_dim),
    ]
    for n, width in facts.mlps:
        layers += [(n * tokens, 2 * width, hidden), (n * tokens, hidden, width)]
    products = [*([] if facts.quantised else layers), (step.logits, facts.vocab_size, hidden)]
    return [
        *(one for m, n, k in layers for one in _product_of_bytes(m, n, facts, k)),
        *(
            _product(m, n, facts, k)
            for m, n, k in products
            if m > FEW_ROWS and takes_product(m, n, k, facts.dtype, dev)
        ),
        ("fused_add_rms_norm", rows),
        *(
            ("silu_and_mul", {"tokens": n * step.tokens, "intermediate": i, "dtype": facts.dtype})
            for n, i in facts.mlps
        ),
    ]


def _few_rows(facts: ModelFacts, step: Step) -> list[tuple[str, dict[str, Any]]]:
    """Norms, activations and sums taken along in products."""
    tokens, hidden = step.tokens, facts.hidden_size
    heads = facts.num_heads + 2 * facts.num_kv_heads
    found = [
        _product(tokens, heads * facts.head_dim, facts, normed=True),
        _product(tokens, hidden, facts, facts.num_heads * facts.head_dim),
    ]
    for n, width in facts.mlps:
        found.append(_product(n * tokens, width, facts, silu_and_mul=True, normed=True))
        found.append(_product(n * tokens, hidden, facts, width))
    if facts.experts is not None:  # of which the sum is not made in passing
        rows = {"tokens": tokens, "hidden": hidden, "dtype": facts.dtype}
        found.append(("fused_add_rms_norm", rows))
        found.append(_product(tokens, heads * facts.head_dim, facts))
    return found


def _product(
    tokens: int, outputs: int, facts: ModelFacts, inputs: int = 0, **more: bool
) -> tuple[str, dict[str, Any]]:
    sizes = {"tokens": tokens, "outputs": outputs, "inputs": inputs or facts.hidden_size}
    return "skinny_linear", {**sizes, **more, "dtype": facts.dtype}


def _product_of_bytes(
    tokens: int, outputs: int, facts: ModelFacts, inputs: int
) -> list[tuple[str, dict[str, Any]]]:
    """Of a layer in 8 bits, if it is one: scales have 16 bits, as most checkpoints' do."""
    codes = facts.byte_codes
    group = None if codes is None else codes.group_of(inputs)
    if codes is None or group is None:
        return []
    sizes = {"tokens": tokens, "outputs": outputs, "inputs": inputs, "group": group}
    kind = {"fp8": codes.fp8, "scale16": codes.fp8, "dtype": facts.dtype}  # int8's do anyway
    return [("w8a16_gemm", {**sizes, **kind})]


def _experts(facts: ModelFacts, step: Step) -> list[tuple[str, dict[str, Any]]]:
    """What ``fused_moe`` launches: the route of all tokens, the rest a chunk of them at a time.

    Products of quantised experts are not derived.
    """
    if facts.experts is None:
        return []
    experts, top_k, width = facts.experts
    hidden, dtype = {"hidden": facts.hidden_size}, {"dtype": facts.dtype}
    choice = {"experts": experts, "top_k": top_k}
    most = chunk_of(top_k, facts.hidden_size, width, facts.dtype)
    chunks = dict.fromkeys((min(most, step.tokens), step.tokens % most or most))
    found: list[tuple[str, dict[str, Any]]] = [
        ("moe_route", {"tokens": step.tokens, **choice, **dtype})
    ]
    for tokens in (n for n in chunks if n <= step.tokens):
        sizes = {"tokens": tokens, **choice, **hidden, "intermediate": width, **dtype}
        products = [("moe_gemm", sizes), ("moe_gemm", {**sizes, "down": True})]
        found += [
            ("moe_dispatch", {"tokens": tokens, **choice}),
            *([] if facts.quantised_experts else products),
            ("moe_combine", {"tokens": tokens, **hidden, "top_k": top_k, **dtype}),
        ]
    return found


def _attention(step: Step, window: int | None, sizes: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    seen = {"window": window or 0, **sizes}
    if step.fresh:
        return "flash_attn", {"batch": step.sequences, "seqlen": step.query, **seen}
    return (
        "paged_attn",
        {"batch": step.sequences, "context": step.context, "query": step.query, **seen},
    )
