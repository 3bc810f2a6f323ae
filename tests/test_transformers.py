"""transformers' models on our attention: the logits and tokens of their own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tkernels  # noqa: F401  (before transformers' models, which import triton)
from tkernels.testing import TOLERANCE

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM, StaticCache
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

import tkernels.transformers_attention as ours
from tkernels.transformers_attention import MaskRule

pytestmark = pytest.mark.thin(3)

LIMIT = 1e-4  # max abs difference of fp32 logits
BASE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"num_key_value_heads": 1},
    "mistral": {"sliding_window": 5},
    "gemma2": {
        "sliding_window": 5, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 7,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {
        "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2_moe": {  # its layers do not say that they have a window: only their mask does
        "use_sliding_window": True, "sliding_window": 5, "num_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}  # fmt: skip
# What transformers calls the argument that holds the cache: a new name since 5.24.
CACHE = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)
WITHOUT_SDPA = ("gemma2", "gpt_oss")  # compared with "eager"

each_kind = pytest.mark.parametrize("kind", KINDS)


def randomise(model: Any) -> Any:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 1.0 if "sinks" in name else 0.15)
    return model.eval()


@functools.cache
@torch.inference_mode(False)  # the first caller may stand in it, a later one asks for a gradient
def model_of(kind: str) -> Any:
    torch.manual_seed(len(kind))
    config = AutoConfig.for_model(kind, **(BASE | KINDS[kind]))
    return randomise(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def switched(kind: str, dev: torch.device) -> Iterator[Any]:
    """The model on transformers' own attention, then on ours."""
    model = model_of(kind).to(dev)
    for name in ("eager" if kind in WITHOUT_SDPA else "sdpa", "tkernels"):
        model.set_attn_implementation(name)
        yield model


def token_ids(*shape: int, dev: torch.device) -> torch.Tensor:
    return torch.randint(2, 97, shape, generator=torch.Generator().manual_seed(0)).to(dev)


def padded_left(dev: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [3, 9] and their mask: three, no and eight tokens of padding in front."""
    ids, mask = token_ids(3, 9, dev=dev), torch.ones(3, 9, dtype=torch.long, device=dev)
    for row, count in ((0, 3), (2, 8)):
        ids[row, :count], mask[row, :count] = 0, 0
    return ids, mask


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of each call of the kernel."""
    made: list[dict[str, Any]] = []
    kernel = ours.flash_attn

    def recording(**arguments: Any) -> Any:
        made.append(arguments)
        return kernel(**arguments)

    monkeypatch.setattr(ours, "flash_attn", recording)
    return made


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 0.1  # a network of zeros would pass anything
    assert (got - expected).abs().max() <= LIMIT


def compare_generation(kind: str, dev: torch.device, ids: torch.Tensor, **how: Any) -> None:
    """Logits of each step, and the greedy tokens."""
    expected, got = (
        model.generate(
            ids,
            max_new_tokens=3,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **how,
        )
        for model in switched(kind, dev)
    )
    assert len(got.logits) == 3
    for a, b in zip(got.logits, expected.logits, strict=True):
        close(a, b)
    assert torch.equal(got.sequences, expected.sequences)


# ---- against transformers' own attention -------------------------------------------------------


@each_kind
@torch.inference_mode()
def test_prompt_and_generation(kind: str, dev: torch.device, calls: list[dict[str, Any]]) -> None:
    """A prompt longer than the windows, then decode steps; masks are not built for either."""
    ids = token_ids(2, 11, dev=dev)
    expected, got = (model(ids).logits for model in switched(kind, dev))
    close(got, expected)
    compare_generation(kind, dev, ids)
    assert len(calls) == 2 + 2 * 3
    heads_kv = KINDS[kind].get("num_key_value_heads", 2)
    for call in calls:
        assert call["mask"] is None
        assert call["causal"]
        assert call["k"].shape[2] == heads_kv  # not repeated
    windows = {call["window"] for call in calls}
    assert (5 in windows) == ("sliding_window" in KINDS[kind])


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen2_moe"])
@torch.inference_mode()
def test_padding_on_the_left(kind: str, dev: torch.device, calls: list[dict[str, Any]]) -> None:
    ids, mask = padded_left(dev)
    expected, got = (model(ids, attention_mask=mask).logits for model in switched(kind, dev))
    close(got[mask.bool()], expected[mask.bool()])
    for call in calls:
        assert call["mask"].shape == (3, 1, 1, 9)  # one row of keys, whatever the queries
        assert call["causal"]
    compare_generation(kind, dev, ids, attention_mask=mask)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@torch.inference_mode()
def test_padding_on_the_right(kind: str, dev: torch.device) -> None:
    ids, mask = padded_left(dev)
    ids, mask = ids.flip(1), mask.flip(1)
    expected, got = (model(ids, attention_mask=mask).logits for model in switched(kind, dev))
    close(got[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gpt_oss"])
@torch.inference_mode()
def test_static_cache(kind: str, dev: torch.device, calls: list[dict[str, Any]]) -> None:
    """Keys behind the last token exist and are not seen; those of an empty cache are cut off."""
    ids, mask = padded_left(dev)
    how = {"cache_implementation": "static", "disable_compile": True}
    compare_generation(kind, dev, ids, **how)
    compare_generation(kind, dev, ids, attention_mask=mask, **how)
    full = [call for call in calls if call["q"].shape[1] == 9]
    assert full
    assert {call["k"].shape[1] for call in full} == {9}


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
@torch.inference_mode()
def test_prompt_in_chunks(kind: str, dev: torch.device, calls: list[dict[str, Any]]) -> None:
    """Several queries behind cached keys: causal from the last key backwards."""
    compare_generation(kind, dev, token_ids(2, 11, dev=dev), prefill_chunk_size=4)
    ids, mask = padded_left(dev)
    compare_generation(kind, dev, ids, attention_mask=mask, prefill_chunk_size=4)
    assert any(1 < call["q"].shape[1] < call["k"].shape[1] for call in calls)


@torch.inference_mode()
def test_beams(dev: torch.device) -> None:
    expected, got = (
        model.generate(token_ids(2, 6, dev=dev), max_new_tokens=4, num_beams=3, do_sample=False)
        for model in switched("qwen3", dev)
    )
    assert torch.equal(got, expected)


@torch.inference_mode()
def test_a_mask_of_ones_own(dev: torch.device, calls: list[dict[str, Any]]) -> None:
    """bool [B, 1, Sq, Sk], here a prefix of four that sees itself, is all that counts."""
    ids = token_ids(2, 9, dev=dev)
    mask = torch.ones(9, 9, dtype=torch.bool, device=dev).tril()
    mask[:4, :4] = True
    mask = mask.expand(2, 1, 9, 9)
    expected, got = (model(ids, attention_mask=mask).logits for model in switched("llama", dev))
    close(got, expected)
    assert not calls[0]["causal"]


@torch.inference_mode()
def test_packed_sequences(dev: torch.device) -> None:
    """Two sequences in one row, told by their positions."""
    ids = token_ids(1, 9, dev=dev)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]], device=dev)
    for kind in ("qwen3", "mistral"):
        expected, got = (
            model(ids, position_ids=positions, use_cache=False).logits
            for model in switched(kind, dev)
        )
        close(got, expected)


@torch.inference_mode()
def test_encoder(dev: torch.device, calls: list[dict[str, Any]]) -> None:
    fields = {**BASE, "max_position_embeddings": 32, "pad_token_id": 0}
    torch.manual_seed(3)
    model = randomise(AutoModel.from_config(AutoConfig.for_model("bert", **fields))).to(dev)
    ids, mask = padded_left(dev)
    results = []
    for name in ("sdpa", "tkernels"):
        model.set_attn_implementation(name)
        plain = model(ids).last_hidden_state
        results.append((plain, model(ids, attention_mask=mask).last_hidden_state[mask.bool()]))
    for got, expected in zip(results[1], results[0], strict=True):
        close(got, expected)
    assert not any(call["causal"] for call in calls)
    assert calls[0]["mask"] is None


@torch.inference_mode()
def test_decoder_without_causality(dev: torch.device) -> None:
    """``config.is_causal = False`` makes an embedding model; a mask of all ones says the same."""
    ids = token_ids(2, 9, dev=dev)
    everything = torch.ones(2, 1, 9, 9, dtype=torch.bool, device=dev)
    model = list(switched("llama", dev))[1]
    expected = model(ids, attention_mask=everything).logits
    model.config.is_causal = False
    try:
        close(model(ids).logits, expected)
        close(model(ids, attention_mask=torch.ones_like(ids)).logits, expected)
    finally:
        del model.config.is_causal


@torch.inference_mode()
def test_bfloat16(dev: torch.device) -> None:
    ids, mask = padded_left(dev)
    expected, got = (
        model.bfloat16()(ids, attention_mask=mask).logits.float()[mask.bool()]
        for model in switched("qwen3", dev)
    )
    model_of.cache_clear()  # the next test wants its float32 weights back
    assert (got - expected).norm() / expected.norm() <= 4 * TOLERANCE[torch.bfloat16][1]


# ---- torch.compile -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("gpt_oss", marks=pytest.mark.slow)])
@pytest.mark.parametrize("with_mask", [False, True])
@torch.no_grad()
def test_compiled_prompt(kind: str, with_mask: bool, dev: torch.device) -> None:
    ids, mask = padded_left(dev) if with_mask else (token_ids(2, 9, dev=dev), None)
    model = list(switched(kind, dev))[1]
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    got = compiled(ids, attention_mask=mask, use_cache=False).logits
    torch._dynamo.reset()
    keep = slice(None) if mask is None else mask.bool()
    close(got[keep], expected[keep])


@torch.no_grad()
def test_compiled_for_any_length(dev: torch.device) -> None:
    """One graph with symbolic sizes serves prompts of several lengths."""
    model = list(switched("qwen3", dev))[1]
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for length in (6, 11):
        ids = token_ids(2, length, dev=dev)
        close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    torch._dynamo.reset()
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
@torch.no_grad()
def test_compiled_decode_with_static_cache(kind: str, dev: torch.device) -> None:
    """A graph of one step, replayed for the tokens after the prompt."""
    ids = token_ids(2, 12, dev=dev)
    model = list(switched(kind, dev))[1]
    expected = model(ids).logits
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(ids[:, :9], **{CACHE: cache})
    step = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    for i in range(9, 12):
        got = step(ids[:, i : i + 1], **{CACHE: cache}).logits[:, 0]
        close(got, expected[:, i])
    torch._dynamo.reset()


# ---- refusals ----------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    is_causal = True


def heads(dev: torch.device, seq: int = 3) -> list[torch.Tensor]:
    return [torch.randn(1, 2, seq, 16, device=dev) for _ in range(3)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"dropout": 0.1},
            r"the model must be in evaluation mode .* got training False and dropout 0\.1",
        ),
        ({"output_attentions": True}, r"output_attentions must be False, got True"),
        ({"position_bias": torch.zeros(1, 2, 3, 3)}, r"position_bias must be None, got float32"),
        ({"is_causal": False, "sliding_window": 2}, r"a sliding window that is not causal must .*"),
    ],
)
def test_refused(given: dict[str, Any], words: str, dev: torch.device) -> None:
    with pytest.raises(ValueError, match=rf"^tkernels\.transformers_attention: {words}"):
        ours.attention_forward(Layer().eval(), *heads(dev), None, **given)


def test_training_is_refused(dev: torch.device) -> None:
    with pytest.raises(ValueError, match=r"must be in evaluation mode .* got training True"):
        ours.attention_forward(Layer().train(), *heads(dev), None)


@pytest.mark.parametrize(
    "mask", [torch.zeros(1, 1, 3, 3), torch.ones(3, 3, dtype=torch.bool), "causal"]
)
def test_mask_of_another_kind_is_refused(mask: Any, dev: torch.device) -> None:
    with pytest.raises(ValueError, match=r"attention_mask must be bool \[B, 1 or Hq, Sq, Sk\] .*g"):
        ours.attention_forward(Layer().eval(), *heads(dev), mask)


def test_backward_raises(dev: torch.device) -> None:
    ids = token_ids(1, 4, dev=dev)
    model = list(switched("qwen3", dev))[1]
    logits = model(ids).logits
    with pytest.raises(RuntimeError, match=r"backward through tkernels.flash_attn"):
        logits.sum().backward()


# ---- which masks are built ---------------------------------------------------------------------


def ask(dev: torch.device, **given: Any) -> Any:
    sizes = {"batch_size": 2, "q_length": 4, "kv_length": 10, "q_offset": 6, "device": dev}
    return ours.attention_mask(**{**sizes, **given})


class Config:
    sliding_window = 3
    attention_chunk_size = None


def test_no_mask_where_the_kernel_can_tell(dev: torch.device) -> None:
    ones = torch.ones(2, 10, dtype=torch.bool, device=dev)
    assert ask(dev) is None
    assert ask(dev, attention_mask=ones) is None
    assert ask(dev, q_length=1, q_offset=9) is None
    window = {"mask_function": sliding_window_causal_mask_function(3), "config": Config()}
    assert ask(dev, local_size=3, **window) == MaskRule(True, 3)
    assert ask(dev, local_size=3, kv_length=6, kv_offset=4, **window) == MaskRule(True, 3)
    assert ask(dev, local_size=3, kv_length=3, q_length=3, q_offset=0, **window) is None
    both = {"mask_function": bidirectional_mask_function, "allow_is_causal_skip": False}
    assert ask(dev, allow_is_bidirectional_skip=True, **both) is None


def test_padding_alone_is_handed_on(dev: torch.device) -> None:
    """Cut to the keys at hand, and filled up with padding where it is shorter than they are."""
    mask = torch.tensor([[0] * 5 + [1] * 5, [1] * 10], device=dev).bool()
    causal, window, padding = ask(dev, attention_mask=mask)
    assert (causal, window) == (True, None)
    assert torch.equal(padding, mask)
    given = {"mask_function": sliding_window_causal_mask_function(3), "config": Config()}
    rule = ask(dev, attention_mask=mask, kv_length=6, kv_offset=4, local_size=3, **given)
    assert rule[:2] == (True, 3)
    assert torch.equal(rule.padding, mask[:, 4:])
    short = ask(dev, attention_mask=mask[:, :8])
    assert torch.equal(short.padding, torch.cat([mask[:, :8], torch.zeros_like(mask[:, :2])], 1))


class Chunked(Config):
    attention_chunk_size = 3


WINDOW = sliding_window_causal_mask_function(3)
NEEDED: dict[str, dict[str, Any]] = {
    "asked for": {"allow_is_causal_skip": False},
    "chunks": {
        "mask_function": chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long)),
        "config": Chunked(),
    },
    "combined window": {"mask_function": WINDOW, "allow_is_causal_skip": False},
    "static cache": {"kv_length": 14},
    "static cache and window": {"kv_length": 14, "mask_function": WINDOW},
    "static count": {"q_offset": torch.tensor([6])},
    "bidirectional": {"mask_function": bidirectional_mask_function},
}


@pytest.mark.parametrize("given", NEEDED.values(), ids=NEEDED)
def test_mask_where_it_is_needed(given: dict[str, Any]) -> None:
    cpu = torch.device("cpu")
    mask = ask(cpu, **{"local_size": 3, "config": Config(), **given})
    function = given.get("mask_function", causal_mask_function)
    q, kv = torch.arange(6, 10)[:, None], torch.arange(given.get("kv_length", 10))
    if function is bidirectional_mask_function:
        expected = torch.ones(4, 10, dtype=torch.bool)
    else:
        expected = function(torch.zeros(1, dtype=torch.long), 0, q, kv).view(4, -1)
    assert mask.shape == (2, 1, *expected.shape)
    assert torch.equal(mask, expected.expand_as(mask))
