"""The decode step as graphs: the same tokens as launched one by one, whatever was replayed before.

On the CPU a recording stands in for the device's graphs (tests/graphs.py). On a GPU the tests at
the end capture real ones, and compare them with the same launches made anew.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_folder, make_folder, new_runner, tiny
from graphs import Graph, Launched, sides_filled, stand_in
from torch.utils._python_dispatch import TorchDispatchMode

import tkernels
from model import calibrate_watch, cpu_ops, generate, quantize, qwen3
from model.ahead import Ahead, choice_of, kind_of, step_inputs
from model.fallback import Calibration
from model.graph import KINDS, DecodeGraphs, batch_sizes, obstacle
from model.kv_cache import BLOCK_SIZE, SequenceState
from model.kv_quant import choose
from model.loop import Limits, Reply
from model.loop import generate as replies_to
from model.qwen3 import Linear, Model
from model.runner import Runner
from model.sampler import SamplingParams, alike, request_key, sample, sample_rows
from tkernels import device, flash_attn_hopper
from tkernels import paged_attn_quantized_chunk as chunk
from tkernels.registry import Config, Problem

pytestmark = pytest.mark.thin(2)

OPS = Launched(tkernels.reference)
POISON = 63  # a block of the cache that no sequence gets
on_cpu = pytest.mark.skipif(device.KIND != "cpu", reason="the stand-in's tensors are on the CPU")
SAMPLINGS = {
    "greedy": SamplingParams(),
    "drawn": SamplingParams(temperature=1.5),
    "narrowed": SamplingParams(temperature=2.0, top_k=40, top_p=0.9, min_p=0.01),
    "logits": SamplingParams(temperature=1.0, repetition_penalty=1.3),
}


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with stand_in() as patch:
        yield patch


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(331, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def captured(runner: Runner, sizes: tuple[int, ...] = (1, 2, 4), **more: Any) -> DecodeGraphs:
    given: dict[str, Any] = {"max_blocks": 4, "kinds": KINDS, "watch": runner.watch, **more}
    return DecodeGraphs(
        runner.model, runner.ops, runner.cache, runner.cos_sin_cache, sizes=sizes, **given
    )


def poison(runner: Runner, graphs: DecodeGraphs) -> None:
    """Whatever a step does not fill in its tables names a block full of NaN."""
    for part in (*runner.cache.k, *runner.cache.v):
        if isinstance(part, torch.Tensor):
            part[POISON] = torch.nan
        elif part.scale is not None:
            part.scale[POISON] = torch.nan
    for side in graphs._staging.sides:
        for arrays in side.arrays.values():
            arrays["block_table"][:] = POISON


def started(runner: Runner, lengths: tuple[int, ...] = (5, 16, 31, 1)) -> list[SequenceState]:
    """Sequences whose prompts are computed, and the first token after them chosen."""
    sequences = [SequenceState(random_ids(n, seed=n)) for n in lengths]
    for s, row in zip(sequences, runner.prefill(sequences), strict=True):
        s.token_ids.append(int(row.argmax()))
    return sequences


# Numbers of sequences of successive steps: each size comes after a wider and a narrower one.
COUNTS = (4, 1, 2, 1, 4, 2, 3, 1, 3, 2, 4)


def steps_of(
    make: Callable[[], Runner], *, tolerance: float, sizes: tuple[int, ...] = (1, 2, 4)
) -> None:
    """Steps by graphs give the logits that steps of another runner, launched one by one, give."""
    one, other = make(), make()
    graphs = captured(one, sizes, kinds=("greedy", "logits"))
    ours, theirs = started(one), started(other)
    for step, count in enumerate(COUNTS):
        chosen = [(step + i) % 4 for i in range(count)]  # not always in the same rows
        expected = other.decode([theirs[i] for i in chosen])
        poison(one, graphs)
        mine = [ours[i] for i in chosen]
        inputs = step_inputs(one, mine)
        ids = last_ids(mine)
        logits = graphs.decode(ids, **inputs, logits=True).logits()
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)
        # Once more, which writes the same keys and values: tokens, chosen in the graph.
        found = graphs.decode(ids, **inputs).ids()
        assert found == logits.argmax(-1).tolist()
        for i, token in zip(chosen, found, strict=True):
            ours[i].num_computed += 1
            ours[i].token_ids.append(token)
            theirs[i].token_ids.append(token)


def keys_appended_in_passing(graphs: DecodeGraphs) -> bool:
    """Whether all graphs have one launch for keys, values and queries, or all have two."""
    [found] = {
        "fused_qk_norm_rope_append" in " ".join(str(launch[0]) for launch in graph.launches)
        for graph in graphs._graphs.values()
    }
    return found


def last_ids(sequences: list[SequenceState]) -> Any:
    return torch.tensor([s.token_ids[-1] for s in sequences]).numpy()


@on_cpu
@pytest.mark.parametrize("name", ["qwen3", "llama-bias", "qwen3_moe-every-other"])
def test_each_size_after_wider_and_narrower(name: str, patch: pytest.MonkeyPatch) -> None:
    steps_of(lambda: new_runner(tiny(name).ours, OPS), tolerance=2e-4)


@on_cpu
def test_sizes_between_are_padded(patch: pytest.MonkeyPatch) -> None:
    steps_of(lambda: new_runner(tiny("qwen3").ours, OPS), tolerance=2e-4, sizes=(3, 7))


def quantised(model: Model, ops: Any, tau: float = 0.012, mode: str = "int8_fp4") -> Runner:
    quantization = choose(mode, None, tau if mode == "int8_fp4" else None, model.config)
    return Runner(model, ops, num_blocks=64, max_positions=64, quantization=quantization)


@on_cpu
def test_a_cache_with_residuals(patch: pytest.MonkeyPatch) -> None:
    """Slots of residuals are taken on the device, by real rows alone."""
    one = quantised(tiny("qwen3-heads-of-32").ours, OPS, tau=0.0)  # every token has a residual
    graphs = captured(one, (1, 4))
    sequences = started(one, (5, 3, 2, 1))
    parts = [part for part in one.cache.quantized if part.has_residual]

    def free() -> int:
        return sum(int(part.free_count.sum()) for part in parts)

    heads = sum(part.free_count.numel() for part in parts)
    for some in (sequences, sequences[:3], sequences[3:]):
        before = free()
        graphs.decode(last_ids(some), **step_inputs(one, some)).ids()
        for s in some:
            s.num_computed += 1
        assert before - free() == heads * len(some)
    for s in sequences:
        one.release(s)
    assert all(int(part.free_count.min()) == part.free_slots.shape[1] for part in parts)


@on_cpu
def test_logits_over_a_cache_with_residuals(patch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3-heads-of-32").ours
    steps_of(lambda: quantised(model, OPS), tolerance=2e-2)  # a code may be another one


@on_cpu
@pytest.mark.parametrize(("appended_rows", "decode_rows"), [(0, 0), (2, 0), (2, 2)])
def test_kernels_with_padding(
    appended_rows: int, decode_rows: int, patch: pytest.MonkeyPatch
) -> None:
    """The kernels, not their references: one real row of two, then both, then one."""
    patch.setattr(qwen3, "APPENDED_ROWS", appended_rows)
    patch.setattr(qwen3, "FUSED_DECODE_ROWS", decode_rows)
    model = dataclasses.replace(tiny("qwen3").ours, layers=tiny("qwen3").ours.layers[:1])
    one, other = (new_runner(model, ops) for ops in (Launched(tkernels), tkernels.reference))
    graphs = captured(one, (2,), max_blocks=2, kinds=("logits",))
    assert keys_appended_in_passing(graphs) == (appended_rows > 0)
    ours, theirs = (started(r, (3, 17)) for r in (one, other))
    for chosen in ([1], [0, 1], [0]):
        poison(one, graphs)
        mine = [ours[i] for i in chosen]
        found = graphs.decode(last_ids(mine), **step_inputs(one, mine), logits=True).logits()
        expected = other.decode([theirs[i] for i in chosen])
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
        for i, row in zip(chosen, found, strict=True):
            ours[i].num_computed += 1
            for s in (ours[i], theirs[i]):
                s.token_ids.append(int(row.argmax()))


@on_cpu
def test_padding_writes_nothing(patch: pytest.MonkeyPatch) -> None:
    runner = new_runner(tiny("qwen3").ours, OPS)
    for part in (*runner.cache.k, *runner.cache.v):
        part.zero_()
    graphs = captured(runner, (4,))
    assert all(not part.any() for part in (*runner.cache.k, *runner.cache.v))
    sequences = started(runner)[:1]
    slots = [part.flatten(0, 1) for part in (*runner.cache.k, *runner.cache.v)]
    before = [part.clone() for part in slots]
    inputs = step_inputs(runner, sequences)
    graphs.decode(last_ids(sequences), **inputs).ids()
    written = int(inputs["slot_mapping"][0])
    for now, then in zip(slots, before, strict=True):
        changed = (now != then).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == [written]


@on_cpu
def test_padding_is_filled_anew(patch: pytest.MonkeyPatch) -> None:
    """Rows that a wider step of the same size had."""
    runner = new_runner(tiny("qwen3").ours, OPS)
    graphs = captured(runner, (4,), kinds=("narrowed",))
    sequences = started(runner)
    for count in (4, 1):
        some, choice = sequences[:count], choice_of(SAMPLINGS["narrowed"], [7] * count)
        graphs.decode(last_ids(some), **step_inputs(runner, some), choice=choice)
    inputs = graphs._staging.inputs[4]
    found = {name: t[1:].tolist() for name, t in inputs.items() if t.dim() == 1}
    padding = dict.fromkeys(found, [0] * 3)
    assert found == {**padding, "slot_mapping": [-1] * 3, "groups": [-1] * 3, "top_p": [1] * 3}


# ---- what surrounds a replay ---------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Names of PyTorch's operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@on_cpu
def test_a_step_is_two_copies_and_a_replay(patch: pytest.MonkeyPatch) -> None:
    runner = new_runner(tiny("qwen3").ours, OPS)
    graphs = captured(runner)
    sequences = started(runner)
    made = graphs._graphs[4, "greedy"]
    patch.setattr(made, "replay", lambda: None)
    with Seen() as seen:
        step = graphs.decode(last_ids(sequences), **step_inputs(runner, sequences))
    assert seen.names == ["aten.copy_.default"] * 2
    with Seen() as seen:
        assert len(step.ids()) == 4
    assert seen.names == []


def launched_beside_layers(graphs: DecodeGraphs, kind: str) -> list[str]:
    """PyTorch's operations in a captured step that are neither views nor projections."""
    names = []
    for function, args, _, results in graphs._graphs[2, kind].launches:
        if not isinstance(function, torch._ops.OpOverload) or "linear" in str(function):
            continue
        storage = args[0].untyped_storage() if function.is_view else None
        if storage is None or results.untyped_storage().data_ptr() != storage.data_ptr():
            names.append(str(function).removeprefix("aten."))
    return names


@on_cpu
def test_few_launches_stand_beside_the_layers(patch: pytest.MonkeyPatch) -> None:
    """In a step of a 16-bit network: each costs a microsecond or two, and a gap."""
    graphs = captured(new_runner(load_folder(tiny("qwen3").folder, torch.bfloat16), OPS), (2,))
    ids = ["index_select.default", "embedding.default"]
    assert launched_beside_layers(graphs, "greedy") == [*ids, "argmax.out"]
    assert launched_beside_layers(graphs, "logits") == [*ids, "copy_.default"]
    for kind in ("drawn", "narrowed"):
        names = launched_beside_layers(graphs, kind)
        assert (names[:2], names[-1]) == (ids, "argmax.out")
        assert names.count("to.dtype") == 2  # of logits, and of random bits


@on_cpu
def test_inputs_are_not_overwritten_before_they_are_taken(patch: pytest.MonkeyPatch) -> None:
    """Also where nobody reads ids in between."""
    runner = new_runner(tiny("qwen3").ours, OPS)
    graphs = captured(runner, (4,), kinds=("greedy",))
    sequences, filled = started(runner), sides_filled(patch)
    for _ in range(5):
        graphs.decode(last_ids(sequences), **step_inputs(runner, sequences))
    assert filled[:2] * 2 + filled[:1] == filled
    assert filled[0] is not filled[1]


@on_cpu
def test_sizes_are_captured_from_the_largest_on(patch: pytest.MonkeyPatch) -> None:
    graphs = captured(new_runner(tiny("qwen3").ours, OPS), (2, 4, 1), kinds=("greedy",))
    assert list(graphs._graphs) == [(4, "greedy"), (2, "greedy"), (1, "greedy")]
    assert graphs.sizes == [1, 2, 4]


@on_cpu
def test_sizes_beyond_the_memory_are_left_out(patch: pytest.MonkeyPatch) -> None:
    """40 bytes for the largest, 10 for each other: 55 are enough for two of four."""
    runner = new_runner(tiny("qwen3").ours, OPS)
    free = iter([100, 60, 50, 40])
    patch.setattr(device, "memory_free", lambda: next(free))
    graphs = captured(runner, (1, 2, 3, 4), kinds=("greedy", "logits"), max_bytes=55)
    assert graphs.sizes == [3, 4]
    assert sorted(graphs._graphs) == [(n, kind) for n in (3, 4) for kind in ("greedy", "logits")]
    assert graphs.num_bytes == 50
    sequences = started(runner, (5,))
    assert len(graphs.decode(last_ids(sequences), **step_inputs(runner, sequences)).ids()) == 1
    free = iter([100, 60])
    with pytest.raises(ValueError, match="expected to take at most 39 bytes, got 40"):
        captured(runner, (1, 2), kinds=("greedy",), max_bytes=39)


@on_cpu
def test_a_device_keeps_so_many_graphs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device, "most_graphs", lambda: 5)
    runner = new_runner(tiny("qwen3").ours, OPS)
    with pytest.raises(ValueError, match="at most 5 graphs on this device, got 3 sizes of 2 kinds"):
        captured(runner, kinds=("greedy", "drawn"))


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 65, 100, 256, 257, 1000])
@pytest.mark.parametrize("limit", [None, 1, 3, 32])
def test_batch_sizes(most: int, limit: int | None) -> None:
    sizes = batch_sizes(most, limit)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert limit is None or len(sizes) <= limit
    if limit is None:
        assert sizes[0] == 1
        assert all(b - a <= min(32, max(a, 8)) for a, b in itertools.pairwise(sizes))


@on_cpu
def test_what_is_refused(patch: pytest.MonkeyPatch) -> None:
    runner = new_runner(tiny("qwen3").ours, OPS)
    graphs = captured(runner, (1, 2), kinds=("drawn",), max_blocks=2)
    sequences = started(runner)
    two, three = step_inputs(runner, sequences[:2]), step_inputs(runner, sequences[:3])
    ids = last_ids(sequences)
    with pytest.raises(ValueError, match="up to 2 sequences and 2 blocks, got 3 and 2"):
        graphs.decode(ids[:3], **three)
    wide = {**two, "block_table": three["block_table"].repeat(2, axis=1)[:2]}
    with pytest.raises(ValueError, match="up to 2 sequences and 2 blocks, got 2 and 4"):
        graphs.decode(ids[:2], **wide)
    narrowed = choice_of(SAMPLINGS["narrowed"], [1, 2])
    with pytest.raises(ValueError, match="expected a kind of drawn, got narrowed"):
        graphs.decode(ids[:2], **two, choice=narrowed)
    with pytest.raises(ValueError, match="expected a kind of drawn, got logits"):
        graphs.decode(ids[:2], **two, logits=True)
    with pytest.raises(ValueError, match="expected groups with a watch and only then"):
        graphs.decode(ids[:2], **{**two, "groups": ids[:2]})
    short = {**two, "positions": two["positions"][:1], "context_lens": three["context_lens"]}
    with pytest.raises(ValueError, match=r"inputs of 2 .* got others in positions, context_lens"):
        graphs.decode(ids[:2], **short)
    with pytest.raises(ValueError, match=r"expected input ids of 0 and more, .* got -1"):
        graphs.decode(-1 - ids[:2] * 0, **two)  # there was no step before
    first = graphs.decode(ids[:2], **two)
    with pytest.raises(ValueError, match=r"-1 to -2 .*, got -3"):
        graphs.decode(ids[:2] * 0 - 3, **two)
    with pytest.raises(RuntimeError, match="the newest step, of kind logits"):
        first.logits()
    graphs.decode(ids[:2], **two)
    assert len(first.ids()) == 2  # one step later
    graphs.decode(ids[:2], **two)
    with pytest.raises(RuntimeError, match="read before two more steps are launched, got 2"):
        first.ids()
    with pytest.raises(ValueError, match="expected sizes of 1 or more and kinds of greedy"):
        captured(runner, (0, 1))
    with pytest.raises(ValueError, match="expected sizes of 1 or more and kinds of greedy"):
        captured(runner, kinds=("other",))


@on_cpu
def test_the_stand_in_finds_host_reads(patch: pytest.MonkeyPatch) -> None:
    graph, x = device.new_graph(), torch.ones(2)
    with device.capture(graph, pool="pool"):
        y = x * 2
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [8, 8]
    with (
        pytest.raises(AssertionError, match="the host reads"),
        device.capture(graph, pool="pool"),
    ):
        int(x[0])


# ---- choosing tokens -----------------------------------------------------------------------------


@on_cpu
@pytest.mark.parametrize("kinds", [("drawn", "narrowed"), ("narrowed",)])
def test_rows_choose_each_its_own_way(kinds: tuple[str, ...], patch: pytest.MonkeyPatch) -> None:
    """A graph that narrows serves rows that are greedy or only drawn, with the same tokens."""
    runner = new_runner(tiny("qwen3").ours, OPS)
    graphs = captured(runner, kinds=(*kinds, "logits"))
    sequences = started(runner)
    inputs, ids = step_inputs(runner, sequences), last_ids(sequences)
    logits = graphs.decode(ids, **inputs, logits=True).logits().clone()
    names = ["greedy", "drawn", "narrowed", "drawn"]
    keys = [request_key(3, i) for i in range(4)]
    parts = [choice_of(SAMPLINGS[name], [key]) for name, key in zip(names, keys, strict=True)]
    mixed = type(parts[0])(
        *(
            torch.cat([torch.from_numpy(getattr(p, f.name)) for p in parts]).numpy()
            for f in dataclasses.fields(parts[0])
        )
    )
    assert mixed.kind == "narrowed"
    found = graphs.decode(ids, **inputs, choice=mixed).ids()
    for i, name in enumerate(names):
        history = sequences[i].token_ids
        assert found[i : i + 1] == sample(logits[i : i + 1], SAMPLINGS[name], [history], [keys[i]])


@on_cpu
def test_rows_take_their_ids_from_where_the_host_says(patch: pytest.MonkeyPatch) -> None:
    """Given ones and those that the step before chose, beyond one line of 64 bytes."""
    runner = new_runner(tiny("qwen3").ours, OPS)
    graphs = captured(runner, (3, 9), kinds=("greedy",))
    sequences = started(runner, tuple(range(1, 10)))
    taken: list[list[int]] = []
    embed = qwen3._embed

    def seen(table: Any, ids: torch.Tensor) -> torch.Tensor:
        taken.append(ids.tolist())
        return embed(table, ids)

    patch.setattr(qwen3, "_embed", seen)
    graphs._graphs = {key: Anew(graphs, *key) for key in graphs._graphs}
    given = last_ids(sequences)
    chosen = graphs.decode(given, **step_inputs(runner, sequences)).ids()
    assert len(set(chosen)) > 3
    mine = [sequences[i] for i in (8, 3, 0)]
    ids = given[:3].copy()
    ids[0], ids[2] = -1 - 8, -1 - 0
    last = graphs.decode(ids, **step_inputs(runner, mine)).ids()
    graphs.decode(-1 - torch.arange(2).numpy(), **step_inputs(runner, mine[:2]))
    assert taken == [
        given.tolist(), [chosen[8], int(given[1]), chosen[0]], [last[0], last[1], 0],
    ]  # fmt: skip


@on_cpu
@pytest.mark.parametrize("strange", [0.0, torch.nan, torch.inf])
def test_the_likeliest_of_16_bit_logits(strange: float, patch: pytest.MonkeyPatch) -> None:
    """The first of equal ones, as in fp32, where the likeliest are there twice."""
    model = load_folder(tiny("qwen3").folder, torch.bfloat16)
    half = model.lm_head.weight[:165].clone()
    half[50, 0] += strange
    head = Linear(torch.cat((half, half, torch.zeros_like(half[:1]))))
    runner = new_runner(dataclasses.replace(model, lm_head=head), OPS)
    graphs = captured(runner, (4,), kinds=("greedy", "narrowed", "logits"))
    sequences = started(runner)
    inputs, ids = step_inputs(runner, sequences), last_ids(sequences)
    logits = graphs.decode(ids, **inputs, logits=True).logits()
    assert torch.equal(logits[:, :165].nan_to_num(), logits[:, 165:330].nan_to_num())
    expected = logits.argmax(-1)
    assert int(expected.max()) < 165
    assert not strange or 50 in expected.tolist()
    assert graphs.decode(ids, **inputs).ids() == expected.tolist()
    choice = choice_of(SAMPLINGS["greedy"], [0] * 4)
    patch.setattr(graphs, "_kinds", ["narrowed"])
    assert graphs.decode(ids, **inputs, choice=choice).ids() == expected.tolist()
    for s in sequences:
        s.num_computed += 1
        s.token_ids.append(1)
    assert {t.dtype for t in (logits, runner.decode(sequences))} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [331, 151936])
def test_16_bits_rank_as_fp32_does(vocabulary: int, dtype: torch.dtype) -> None:
    """On which greedy steps rely: the same place, also of ties, infinities and NaN."""
    logits = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0] = 0
    logits[1, 7::50] = 60
    logits[2, 9::50] = torch.inf
    logits[3, 11::50] = torch.nan
    logits[3, 12] = torch.inf
    logits[4] = -torch.inf
    logits = logits.to(device.tensor_device())
    found = torch.empty(6, dtype=torch.int64, device=logits.device)
    torch.argmax(logits, dim=-1, out=found)
    assert found.tolist() == logits.float().argmax(-1).tolist()
    assert found[:5].tolist() == [0, 7, 9, 11, 0]


class Numbers:
    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(f"<{i}>" for i in ids)


def replies(
    model: Model, ops: Any, params: SamplingParams, limits: Limits, **more: Any
) -> list[Reply]:
    prompts = [random_ids(n, seed=n) for n in (30, 2, 9, 14, 1)]
    found, times = replies_to(model, ops, Numbers(), prompts, params, limits, batch_size=3, **more)
    assert (times.graphs is not None) == more.get("graphs", False)
    return found


# Some end by a token, some by a text, the others by their length.
LIMITS = Limits(9, frozenset(range(0, 331, 13)), ("<17>", "<99>", "<200>"))


@on_cpu
@pytest.mark.parametrize("kind", KINDS)
def test_replies_are_the_same(kind: str, patch: pytest.MonkeyPatch) -> None:
    params = dataclasses.replace(SAMPLINGS[kind], seed=5)
    assert kind_of(params) == kind
    model = tiny("qwen3").ours
    plain = replies(model, OPS, params, LIMITS)
    assert replies(model, OPS, params, LIMITS, graphs=True) == plain
    assert len({r.finish_reason for r in plain}) > 1
    whole = replies(model, OPS, params, Limits(9, frozenset()))
    assert replies(model, OPS, params, Limits(9, frozenset()), graphs=True) == whole
    assert {len(r.token_ids) for r in whole} == {9}


@on_cpu
def test_replies_are_the_same_with_keys_appended_in_passing(patch: pytest.MonkeyPatch) -> None:
    whole = tiny("qwen3").ours
    model = dataclasses.replace(whole, layers=whole.layers[:1])
    params = dataclasses.replace(SAMPLINGS["drawn"], seed=5)
    patch.setattr(qwen3, "FUSED_DECODE_ROWS", 0)
    patch.setattr(qwen3, "APPENDED_ROWS", 0)
    plain = replies(model, OPS, params, Limits(5, frozenset()))
    patch.setattr(qwen3, "APPENDED_ROWS", 4)
    steps: list[int] = []  # rows of each
    append = tkernels.reference.fused_qk_norm_rope_append
    patch.setattr(
        tkernels.reference,
        "fused_qk_norm_rope_append",
        lambda qkv, *args, **more: steps.append(len(qkv)) or append(qkv, *args, **more),
    )
    assert replies(model, OPS, params, Limits(5, frozenset()), graphs=True) == plain
    assert len({tuple(r.token_ids) for r in plain}) == 5
    assert set(steps) == {1, 2, 3}


@on_cpu
def test_a_step_is_launched_before_the_last_is_read(patch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int]] = []
    decode, read = DecodeGraphs.decode, DecodeGraphs.read

    def launched(self: DecodeGraphs, *args: Any, **kwargs: Any) -> Any:
        step = decode(self, *args, **kwargs)
        told.append(("launched", step.number))
        return step

    def was_read(self: DecodeGraphs, step: Any) -> list[int]:
        told.append(("read", step.number))
        return read(self, step)

    patch.setattr(DecodeGraphs, "decode", launched)
    patch.setattr(DecodeGraphs, "read", was_read)
    replies_to(
        tiny("qwen3").ours, OPS, Numbers(), [[1, 2], [3]], SAMPLINGS["drawn"],
        Limits(4, frozenset()), graphs=True,
    )  # fmt: skip
    assert told == [
        ("launched", 1), ("launched", 2), ("read", 1), ("launched", 3), ("read", 2), ("read", 3),
    ]  # fmt: skip


@on_cpu
def test_all_is_given_back(patch: pytest.MonkeyPatch) -> None:
    """Also by sequences that were computed once too often."""
    model = tiny("qwen3-heads-of-32").ours
    runner = quantised(model, OPS)
    graphs = captured(runner)
    sequences = started(runner)
    ahead = Ahead(runner, graphs, SAMPLINGS["greedy"])
    for _ in range(3):
        tokens = ahead.tokens(sequences, [0] * len(sequences), [False] * len(sequences))
        for s, token in zip(sequences, tokens, strict=True):
            s.token_ids.append(token)
        runner.release(sequences.pop(1))
    for s in sequences:
        runner.release(s)
    runner.blocks.grow([], 64 * BLOCK_SIZE)  # all of them
    for part in runner.cache.quantized:
        assert int(part.free_count.min()) == part.free_slots.shape[1]


# ---- layers in int8, and requests that leave it --------------------------------------------------


def in_w8a8(folder: Path, name: str) -> Path:
    base, out = make_folder(folder / "base", None, name), folder / "w8a8"
    argv = ["--model", str(base), "--scheme", "w8a8", "--out", str(out), "--json"]
    assert quantize.main(argv) == 0
    return out


@pytest.fixture(scope="module")
def w8a8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_w8a8(tmp_path_factory.mktemp("w8a8"), "llama-32")


@on_cpu
def test_experts_in_int8(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    model = load_folder(in_w8a8(tmp_path, "qwen3_moe-one-of-three"))
    steps_of(lambda: new_runner(model, OPS), tolerance=2e-2)  # a code may be another one


def watched(model: Model, ops: Any, calibration: Calibration | None) -> Runner:
    return Runner(model, ops, num_blocks=64, max_positions=96, fallback=calibration, num_groups=4)


@on_cpu
def test_requests_leave_int8_in_a_graph(w8a8: Path, patch: pytest.MonkeyPatch) -> None:
    model = load_folder(w8a8)
    made = calibrate_watch.calibrate(model, cpu_ops, random_ids(128, 1), (0, 2))
    strict = dataclasses.replace(made, kl_above=1e-6, skewness_above=1e-6)
    found = []
    for by_graph in (False, True):
        runner = watched(model, OPS, strict)
        sequences = started(runner, (62, 30))
        graphs = captured(runner, (4,), max_blocks=6, kinds=("logits",)) if by_graph else None
        rows = []
        for step in range(6):
            if graphs is None:
                rows.append(runner.decode(sequences))
            else:
                poison(runner, graphs)
                inputs = step_inputs(runner, sequences)
                ids = last_ids(sequences)
                rows.append(graphs.decode(ids, **inputs, logits=True).logits().clone())
            for s in sequences:
                s.num_computed += graphs is not None
                s.token_ids.append(step)
        assert runner.watch is not None
        reports = [runner.watch.report(s) for s in sequences]
        found.append((torch.cat(rows), int(runner.watch.mask), reports))
    (expected, mask, reports), (logits, their_mask, their_reports) = found
    assert (mask, reports[1]) == (1, None)
    assert reports[0] is not None
    assert reports[0]["token"] == 64
    assert their_mask == mask
    assert [r and {**r, "kl": 0, "skewness": 0} for r in their_reports] == [
        r and {**r, "kl": 0, "skewness": 0} for r in reports
    ]
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=0)


# ---- the command ---------------------------------------------------------------------------------


@on_cpu
def test_the_command(
    tmp_path: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "m", None, "qwen3")
    argv = ["--model", str(folder), "--prompt", "abc", "--max-tokens", "5", "--ignore-eos"]
    assert generate.main([*argv, "--graphs"]) == 2
    assert "--graphs: expected an accelerator, got the CPU" in capsys.readouterr().err
    assert generate.main(argv) == 0
    assert "captured" not in capsys.readouterr().err
    patch.setattr("model.graph.obstacle", lambda *_, **__: None)
    patch.setattr("model.runner.operations", lambda _: ("torch", OPS))
    assert generate.main(argv) == 0
    assert "| 1 graph captured in " in capsys.readouterr().err
    assert generate.main([*argv, "--no-graphs"]) == 0
    assert "captured" not in capsys.readouterr().err


def test_obstacles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "tensor_device", lambda: torch.device("meta"))
    monkeypatch.setattr("tkernels.check.DEBUG", False)
    assert obstacle(tkernels) is None
    assert obstacle(tkernels.reference) == "expected --kernels triton, got torch"
    assert "--moe-stats" in (obstacle(tkernels, routing=True) or "")
    monkeypatch.setattr("tkernels.check.DEBUG", True)
    assert "expected TKERNELS_DEBUG to be off" in (obstacle(tkernels) or "")
    monkeypatch.setattr(device, "tensor_device", lambda: torch.device("cpu"))
    assert obstacle(tkernels) == "expected an accelerator, got the CPU"


# ---- real graphs ---------------------------------------------------------------------------------


class Anew:
    """Instead of a graph: its launches, made anew."""

    def __init__(self, graphs: DecodeGraphs, rows: int, kind: str) -> None:
        self._call = lambda: graphs._compute(rows, kind)

    def replay(self) -> None:
        with torch.inference_mode():
            self._call()


def tokens_of(make: Callable[[], Runner], params: SamplingParams, *, anew: bool) -> list[list[int]]:
    """Of four sequences, in steps of ``COUNTS``; each step's ids come from the device."""
    runner = make()
    graphs = captured(runner, kinds=(kind_of(params),))
    if anew:
        graphs._graphs = {key: Anew(graphs, *key) for key in graphs._graphs}
    else:
        assert not any(isinstance(g, Graph) for g in graphs._graphs.values())
    sequences = started(runner)
    for step, count in enumerate(COUNTS):
        chosen = [(step + i) % 4 for i in range(count)]
        mine = [sequences[i] for i in chosen]
        poison(runner, graphs)
        choice = choice_of(params, [request_key(i, 0) for i in chosen])
        found: list[list[int]] = []
        for ids in (last_ids(mine), -1 - torch.arange(count).numpy()):  # then the device's own
            launched = graphs.decode(ids, **step_inputs(runner, mine), choice=choice)
            found.append(launched.ids())
            for s in mine:
                s.num_computed += 1
        for s, new in zip(mine, zip(*found, strict=True), strict=True):
            s.token_ids.extend(new)
    return [s.token_ids for s in sequences]


def on_device(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Model:
    return load_folder(folder, dtype=dtype, device=device.tensor_device())


def chunks_are_converted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Attention to int8 pages takes Hopper's body for chunks wherever that can; the list that is
    returned gets an entry for each call that was bound to it."""
    if device.current().arch != "sm90":
        pytest.skip("needs an sm90 GPU; this machine has none")
    bound: list[int] = []
    bind_body = chunk.bind_body

    def counting(*args: Any, **kwargs: Any) -> Any:
        bound.append(1)
        return bind_body(*args, **kwargs)

    def wherever(problem: Problem, dev: device.Device) -> Config | None:
        if chunk.why_unfit(problem, dev):
            return None
        body = flash_attn_hopper.default_config(problem["head_dim"])
        of_body = {name: body[name] for name in ("BLOCK_N", "num_stages")}
        more = {"SPLITS": 1, "MIN_SHARE": 256, "PACK_HEADS": True, "PDL": True}
        return {**chunk.FIXED, **more, **of_body}

    monkeypatch.setattr(chunk, "bind_body", counting)
    monkeypatch.setattr(chunk, "default_config", wherever)
    monkeypatch.setattr(chunk, "MIN_ROWS", 0)
    return bound


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["greedy", "drawn", "narrowed"])
@pytest.mark.parametrize("name", ["qwen3", "llama-32", "qwen3_moe", "qwen3_moe-every-other"])
def test_graphs_equal_launches(name: str, kind: str) -> None:
    model = on_device(tiny(name).folder)
    params = SAMPLINGS[kind]
    found = [
        tokens_of(lambda: new_runner(model, tkernels), params, anew=anew) for anew in (False, True)
    ]
    assert found[0] == found[1]


@pytest.mark.gpu
def test_graphs_over_a_cache_with_residuals() -> None:
    model = on_device(tiny("qwen3-heads-of-32").folder)
    found = [
        tokens_of(lambda: quantised(model, tkernels), SAMPLINGS["greedy"], anew=anew)
        for anew in (False, True)
    ]
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama-32", "qwen3_moe"])
def test_graphs_of_layers_in_int8(name: str, tmp_path: Path) -> None:
    model = on_device(in_w8a8(tmp_path, name))
    found = [
        tokens_of(lambda: watched(model, tkernels, None), SAMPLINGS["greedy"], anew=anew)
        for anew in (False, True)
    ]
    assert found[0] == found[1]


@pytest.mark.gpu
def test_a_request_leaves_int8_in_a_real_graph(w8a8: Path) -> None:
    model = on_device(w8a8)
    made = calibrate_watch.calibrate(model, tkernels, random_ids(128, 1), (0, 2))
    strict = dataclasses.replace(made, kl_above=1e-6, skewness_above=1e-6)
    runner = watched(model, tkernels, strict)
    sequences = started(runner, (62, 30))
    graphs = captured(runner, (4,), max_blocks=6, kinds=("greedy",))
    ahead = Ahead(runner, graphs, SAMPLINGS["greedy"])
    for _ in range(6):
        for s, token in zip(
            sequences, ahead.tokens(sequences, [0, 0], [False, False]), strict=True
        ):
            s.token_ids.append(token)
    assert runner.watch is not None
    assert int(runner.watch.mask) == 1
    report = runner.watch.report(sequences[0])
    assert report is not None
    assert report["token"] == 64


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_replies_are_the_same_on_the_device(kind: str) -> None:
    """fp32, where the kernels of steps with narrower tables differ in their last bits alone."""
    params = dataclasses.replace(SAMPLINGS[kind], seed=5)
    model = on_device(tiny("qwen3").folder, torch.float32)
    plain = replies(model, tkernels, params, LIMITS)
    assert replies(model, tkernels, params, LIMITS, graphs=True) == plain


@pytest.mark.gpu
def test_a_step_allocates_nothing() -> None:
    runner = quantised(on_device(tiny("qwen3-heads-of-32").folder), tkernels)
    graphs = captured(runner, kinds=("narrowed",))
    sequences = started(runner)
    choice = choice_of(SAMPLINGS["narrowed"], [1, 2, 3, 4])
    counted = []
    for step in range(8):
        ids = last_ids(sequences) if step == 0 else -1 - torch.arange(4).numpy()
        launched = graphs.decode(ids, **step_inputs(runner, sequences), choice=choice)
        for s in sequences:
            s.num_computed += 1
        counted.append(torch.cuda.memory_stats()["allocation.all.allocated"])
    launched.ids()
    assert len(set(counted[1:])) == 1


@pytest.mark.gpu
def test_free_memory_is_told() -> None:
    free = device.memory_free()
    held = torch.empty(2**28, dtype=torch.uint8, device=device.tensor_device())
    assert device.memory_free() <= free - held.nbytes
    del held
    assert device.memory_free() > free - 2**27
    host = device.pinned(64)
    assert host.is_pinned()
    assert host.dtype == torch.uint8


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_large_vocabularies_are_narrowed_in_a_graph(rows: int) -> None:
    """What a request gets depends on its row alone: not on how many there are, nor on the graph."""
    dev = device.tensor_device()
    logits = torch.randn(rows, 151936, device=dev) * 3
    params = SamplingParams(temperature=0.9, top_k=50000, top_p=0.95, min_p=1e-5)
    chosen = alike(params, [request_key(7, i) for i in range(rows)], range(9, 9 + rows), dev)
    expected = sample_rows(logits, chosen)
    out = torch.empty_like(expected)
    graph = device.new_graph()
    with device.capture(graph, pool=device.graph_pool()):
        out.copy_(sample_rows(logits, chosen))
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
    for i in range(0, rows, 50):
        alone = alike(params, [request_key(7, i)], [9 + i], dev)
        assert int(sample_rows(logits[i : i + 1], alone)) == int(expected[i])
