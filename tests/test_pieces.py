"""Steps in pieces of graphs: the same logits as launched one by one, whatever was replayed before.

On the CPU a recording stands in for the device's graphs (tests/graphs.py). On a GPU the tests at
the end capture real ones.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import graphs as recorded
import pytest
import test_engine as plain
import test_graph
import torch
from checkpoints import load_folder, new_runner, tiny
from graphs import Launched, sides_filled, spoil_inputs, stand_in, written_slots

import tkernels
from model import kv_cache, qwen3
from model import pieces as pieces_module
from model.engine import Engine
from model.kv_cache import BLOCK_SIZE, SequenceState, StepArrays, step_arrays
from model.loop import Limits
from model.pieces import StepPieces, most_tokens, token_sizes
from model.qwen3 import OverCache
from model.runner import Runner
from model.threads import cpu_threads
from tkernels import device

OPS = Launched(tkernels.reference)
on_cpu = pytest.mark.skipif(device.KIND != "cpu", reason="the stand-in's tensors are on the CPU")
# Steps as (sequence, its new tokens): 16 or 32 tokens with padding, each after wider and narrower.
STEPS = [
    [(0, 5)],  # a prompt
    [(0, 1), (1, 20)],  # a token beside a part of a prompt
    [(0, 1), (1, 1), (2, 9), (3, 3)],
    [(0, 1), (1, 7), (3, 24)],  # 32: no padding
    [(2, 16)],
    [(3, 1), (0, 1), (1, 1)],  # one token each
    [(1, 18)],
]
Pieces = Callable[[Runner], StepPieces]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The networks are so small that a second thread would only be waited for."""
    with cpu_threads(1):
        yield


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with stand_in() as patch:
        yield patch


def with_pieces(runner: Runner, sizes: tuple[int, ...] = (16, 32), **more: Any) -> StepPieces:
    runner.pieces = StepPieces(
        runner.model, runner.ops, runner.cache, runner.cos_sin_cache,
        sizes=sizes, max_seqs=4, max_blocks=4, **more,
    )  # fmt: skip
    return runner.pieces


def sequences_of(count: int = 4) -> list[SequenceState]:
    return [SequenceState(test_graph.random_ids(60, seed=i)) for i in range(count)]


def arrays_of(
    runner: Runner, sequences: list[SequenceState], step: list[tuple[int, int]]
) -> StepArrays:
    """The step's arrays; afterwards its tokens count as computed."""
    chosen, new = [sequences[i] for i, _ in step], [n for _, n in step]
    for s, n in zip(chosen, new, strict=True):
        runner.blocks.grow(s.block_ids, s.num_computed + n)
    arrays = step_arrays(chosen, new)
    for s, n in zip(chosen, new, strict=True):
        s.num_computed += n
    return arrays


@torch.inference_mode()
def poison(pieces: StepPieces) -> None:
    """Whatever a step does not write itself is NaN, or no place that there is."""
    spoil_inputs(pieces._staging)
    for buffer in (pieces._q, pieces._attended):
        buffer.fill_(torch.nan)


def steps_of(make: Callable[[], Runner], *, tolerance: float) -> None:
    """Steps in pieces give the logits of steps of another runner, launched one by one."""
    one, other = make(), make()
    pieces = with_pieces(one)
    ours, theirs = sequences_of(), sequences_of()
    for number, step in enumerate(STEPS):
        poison(pieces)
        num_logits = [len(step), None, 0][number % 3] if number > 3 else len(step)
        found = one.step(arrays_of(one, ours, step), num_logits)
        expected = other.step(arrays_of(other, theirs, step), num_logits)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert pieces.launched == len(STEPS)
    assert other.pieces is None


@on_cpu
@pytest.mark.parametrize(("appended_rows", "many_keys"), [(0, 2048), (2048, 1)])
@pytest.mark.parametrize("name", ["qwen3", "llama-bias", "qwen3_moe", "qwen3_moe-every-other"])
def test_each_size_after_wider_and_narrower(
    name: str, appended_rows: int, many_keys: int, patch: pytest.MonkeyPatch
) -> None:
    """Also where chunks of prompts are attended to apart from tokens beside them."""
    patch.setattr(qwen3, "APPENDED_ROWS", appended_rows)
    patch.setattr(kv_cache, "_MANY_KEYS", many_keys)
    steps_of(lambda: new_runner(tiny(name).ours, OPS), tolerance=2e-5)


@on_cpu
@pytest.mark.parametrize("many_keys", [1, 2048])
def test_a_cache_with_residuals(many_keys: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv_cache, "_MANY_KEYS", many_keys)
    model = tiny("qwen3-heads-of-32").ours
    steps_of(lambda: test_graph.quantised(model, OPS), tolerance=2e-2)  # a code may be another one


@on_cpu
@pytest.mark.parametrize("name", ["llama-32", "qwen3_moe-one-of-three"])
def test_layers_in_int8(name: str, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    model = load_folder(test_graph.in_w8a8(tmp_path, name))
    steps_of(lambda: new_runner(model, OPS), tolerance=2e-2)  # a code may be another one


@on_cpu
@pytest.mark.filterwarnings("ignore:invalid value")  # NaN in padding, which the interpreter tells
@pytest.mark.parametrize("name", ["qwen3", "llama-bias", "qwen3_moe"])
def test_kernels_with_padding(name: str, patch: pytest.MonkeyPatch) -> None:
    """The kernels, not their references; a token and a chunk apart."""
    patch.setattr(kv_cache, "_MANY_KEYS", 1)
    model = dataclasses.replace(tiny(name).ours, layers=tiny(name).ours.layers[:1])
    each = (Launched(tkernels), tkernels, tkernels.reference)
    one, eager, other = (new_runner(model, ops) for ops in each)
    pieces = with_pieces(one, (16,))
    ours, alike, theirs = (sequences_of(2) for _ in each)
    for step in ([(0, 3)], [(0, 1), (1, 4)]):
        poison(pieces)
        found = one.step(arrays_of(one, ours, step), len(step))
        expected = other.step(arrays_of(other, theirs, step), len(step))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        found = eager.step(arrays_of(eager, alike, step), len(step))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_which_sequences_are_attended_to_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that bring a token each, where what stands behind them sees many keys."""
    runner, sequences = new_runner(tiny("qwen3").ours, OPS), sequences_of()
    for step, keys, expected in (
        ([(0, 5), (1, 20)], 1, None),
        ([(0, 1), (1, 1)], 1, None),
        ([(0, 1), (1, 1), (2, 40)], 41, None),
        ([(0, 1), (2, 1), (3, 40)], 40, (2, 3, [0, 40])),  # 41 tokens of sequence 2: 3 blocks
        ([(0, 1), (1, 3), (2, 2)], 9, (1, 1, [0, 3, 5])),
    ):
        arrays = arrays_of(runner, sequences, step)
        monkeypatch.setattr(kv_cache, "_MANY_KEYS", keys)
        found = kv_cache.apart(arrays, torch.from_numpy(arrays.cu_seqlens_q))
        if expected is None:
            assert found is None, step
        else:
            assert found is not None
            assert (found.ones, found.num_blocks, found.cu_seqlens_q.tolist()) == expected
            beside = int(arrays.context_lens[: found.ones].sum())
            monkeypatch.setattr(kv_cache, "_MANY_KEYS", 2048)
            for many in (beside, beside + 1):  # or where the others see many, together
                monkeypatch.setattr(kv_cache, "_MANY_KEYS_BESIDE", many)
                seen = kv_cache.apart(arrays, torch.from_numpy(arrays.cu_seqlens_q))
                assert (seen is not None) == (many == beside)


@on_cpu
def test_a_step_that_does_not_fit_is_launched_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Too many tokens, sequences or blocks."""
    one, other = (new_runner(tiny("qwen3").ours, OPS) for _ in range(2))
    pieces = with_pieces(one, (16,))
    ours, theirs = sequences_of(5), sequences_of(5)
    launched = [0, 1, 1, 2]
    for i, step in enumerate([[(0, 17)], [(0, 16)], [(j, 1) for j in range(5)], [(1, 2)]]):
        found = one.step(arrays_of(one, ours, step), 1)
        expected = other.step(arrays_of(other, theirs, step), 1)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
        assert pieces.launched == launched[i]
    long = SequenceState(test_graph.random_ids(80), num_computed=70)
    assert not pieces.fits(arrays_of(one, [long], [(0, 10)]))


@on_cpu
@pytest.mark.parametrize("mode", ["none", "int8_fp4"])
def test_padding_writes_nothing(mode: str, patch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3-heads-of-32").ours
    runner = new_runner(model, OPS) if mode == "none" else test_graph.quantised(model, OPS, 0.0)

    def free() -> int:
        return sum(int(part.free_count.sum()) for part in runner.cache.quantized)

    for part in (*runner.cache.k, *runner.cache.v):
        (part if isinstance(part, torch.Tensor) else part.codes).zero_()
    before = free()
    pieces = with_pieces(runner)
    assert (written_slots(runner), free()) == ([], before)
    arrays = arrays_of(runner, sequences_of(), [(0, 3), (1, 2)])
    poison(pieces)
    runner.step(arrays, 2)
    assert written_slots(runner) == sorted(arrays.slot_mapping.tolist())
    heads = sum(part.free_count.numel() for part in runner.cache.quantized)
    assert before - free() == 5 * heads  # every token has a residual, padding has none


# ---- what surrounds the pieces -------------------------------------------------------------------


@on_cpu
def test_a_step_is_one_copy_and_replays_around_attention(patch: pytest.MonkeyPatch) -> None:
    """And no value is read by the host."""
    runner = new_runner(tiny("qwen3").ours, OPS)
    pieces = with_pieces(runner)
    told: list[str] = []
    num_layers = len(runner.model.layers)
    for number, graph in enumerate(pieces._made[32].graphs):
        patch.setattr(graph, "replay", functools.partial(told.append, f"piece {number}"))

    def attend(q: torch.Tensor, k_cache: torch.Tensor, *_: Any, **more: Any) -> torch.Tensor:
        layer = next(i for i, part in enumerate(runner.cache.k) if part is k_cache)
        told.append(f"attention {layer}")
        assert (len(q), len(more["out"]), more["max_seqlen_q"]) == (21, 21, 20)
        assert q.data_ptr() == pieces._q.data_ptr()
        result: torch.Tensor = more["out"]
        return result

    pieces.ops = SimpleNamespace(paged_attn=attend)
    arrays = arrays_of(runner, sequences_of(), [(0, 1), (1, 20)])
    with test_graph.Seen() as seen:
        runner.step(arrays, 2)
    expected = [f"{what} {i}" for i in range(num_layers) for what in ("piece", "attention")]
    assert told == [*expected, f"piece {num_layers}"]
    assert [name.split(".")[1] for name in seen.names] == ["copy_", "sub", "index", "linear"]


@on_cpu
def test_pieces_are_cut_at_attention(patch: pytest.MonkeyPatch) -> None:
    pieces = with_pieces(new_runner(tiny("llama-bias").ours, OPS), (32, 16))
    assert list(pieces._made) == [32, 16]
    assert pieces.sizes == [16, 32]
    for made in pieces._made.values():
        texts = [" ".join(str(launch[0]) for launch in g.launches) for g in made.graphs]
        assert len(texts) == len(pieces.model.layers) + 1
        assert "embedding" in texts[0]
        assert ["append_paged_kv" in text for text in texts] == [True] * (len(texts) - 1) + [False]
        assert not any("paged_attn" in text or "flash_attn" in text for text in texts)
    assert recorded.current == [None]


@on_cpu
def test_a_capture_that_fails_ends(patch: pytest.MonkeyPatch) -> None:
    runner = new_runner(tiny("qwen3").ours, OPS)
    calls = iter(range(100))

    read = pieces_module._Between.read

    def sometimes(self: Any, layer: int, q: torch.Tensor, out: Any = None) -> torch.Tensor:
        if next(calls) == 4:  # the second layer of the capture, behind a warm-up of three
            raise RuntimeError("out of memory")
        return read(self, layer, q, out)

    patch.setattr(pieces_module._Between, "read", sometimes)
    with pytest.raises(RuntimeError, match="out of memory"):
        with_pieces(runner)
    assert recorded.current == [None]


@on_cpu
def test_queries_that_lie_elsewhere_are_noticed(patch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        def __getattr__(self, name: str) -> Any:
            return getattr(OPS, name)

        def fused_qk_norm_rope_append(self, *args: Any, q_out: Any, **more: Any) -> Any:
            return OPS.fused_qk_norm_rope_append(*args, **more)

    with pytest.raises(RuntimeError, match="expected q to be where attention will look for it"):
        with_pieces(new_runner(tiny("qwen3").ours, Elsewhere()))


@on_cpu
def test_inputs_are_not_overwritten_before_they_are_taken(patch: pytest.MonkeyPatch) -> None:
    runner = new_runner(tiny("qwen3").ours, OPS)
    with_pieces(runner, (16,))
    filled, sequences = sides_filled(patch), sequences_of()
    for _ in range(4):
        runner.step(arrays_of(runner, sequences, [(0, 2)]), 1)
    assert filled[0] is not filled[1]
    assert filled == filled[:2] * 2


@on_cpu
def test_sizes_beyond_the_memory_are_left_out(patch: pytest.MonkeyPatch) -> None:
    runner = new_runner(tiny("qwen3").ours, OPS)
    free = iter([100, 60, 50, 40])
    patch.setattr(device, "memory_free", lambda: next(free))
    pieces = with_pieces(runner, (16, 32, 48), max_bytes=55)
    assert (pieces.sizes, pieces.num_bytes) == ([32, 48], 50)
    runner.step(arrays_of(runner, sequences_of(), [(0, 3)]), 1)
    assert pieces.launched == 1
    free = iter([100, 60])
    with pytest.raises(ValueError, match="at most 39 bytes, got 40 after capturing 16 tokens"):
        with_pieces(runner, (16,), max_bytes=39)


@on_cpu
def test_what_is_refused(patch: pytest.MonkeyPatch) -> None:
    runner = new_runner(tiny("qwen3").ours, OPS)
    for sizes in ((), (0,), (16, 24)):
        with pytest.raises(ValueError, match="pieces: expected sizes that 16 divides, got"):
            with_pieces(runner, sizes)
    patch.setattr(device, "most_graphs", lambda: 32)
    with pytest.raises(ValueError, match="as many graphs as there is memory for, got one that"):
        with_pieces(runner)


@on_cpu
def test_where_there_are_none(patch: pytest.MonkeyPatch) -> None:
    """A runner that something looks at, or a device that keeps few graphs."""
    runner = new_runner(tiny("qwen3").ours, OPS)
    for name in ("watch", "routing"):
        patch.setattr(runner, name, object())
        runner.capture_prompts(32, 4)
        assert runner.pieces is None
        patch.setattr(runner, name, None)
    patch.setattr(device, "most_graphs", lambda: 32)
    runner.capture_prompts(32, 4)
    assert runner.pieces is None
    patch.setattr(device, "most_graphs", lambda: None)
    runner.capture_prompts(20, 4)
    assert runner.pieces is not None
    assert runner.pieces.sizes == [16, 32]


@pytest.mark.parametrize("most", [1, 16, 17, 200, 2048, 5000])
def test_token_sizes(most: int) -> None:
    sizes = token_sizes(most)
    assert sizes == sorted(set(sizes))
    assert most <= sizes[-1] < most + 16
    assert all(n % 16 == 0 for n in sizes)
    assert all(b - a <= b / 4 for a, b in itertools.pairwise(sizes) if b > 256)


def test_steps_that_keep_the_device_busy_have_no_pieces() -> None:
    def model(params_a_layer: int) -> Any:
        one = SimpleNamespace(nbytes=1000, weight=SimpleNamespace(nbytes=10**8))
        total = 28 * 2 * params_a_layer + 1000 + 10**8
        return SimpleNamespace(norm=one, lm_head=one, bytes_per_step=total, layers=[None] * 28)

    assert most_tokens(model(15_730_000)) == 5403  # Qwen3-0.6B
    assert 400 < most_tokens(model(193_000_000)) < 500  # Qwen3-8B
    assert most_tokens(model(10**12)) == 16


# ---- the engine ----------------------------------------------------------------------------------


def answers(
    pieces: bool, blocks: int, prompts: list[list[int]], *, whole: bool = False, **more: Any
) -> tuple[Any, Engine]:
    """``whole``: steps with one prompt as one graph."""
    engine = plain.new_engine(blocks, "none", OPS, max_num_batched_tokens=24, **more)
    if pieces:
        engine.runner.capture_prompts(24, more["max_num_seqs"])
        engine.runner.prompts = engine.runner.prompts if whole else None
    for prompt in prompts:
        engine.add(prompt, limits=Limits(6, plain.FOREVER))
    found = plain.run_all(engine)
    return {key: answer.token_ids for key, answer in found.items()}, engine


@on_cpu
@pytest.mark.parametrize(
    ("blocks", "more"),
    [(64, {"max_num_seqs": 3}), (7, {"max_num_seqs": 4, "reserve": 0.0})],
    ids=["shared prefixes", "preemption"],
)
def test_the_engine_answers_alike(
    blocks: int, more: dict[str, Any], patch: pytest.MonkeyPatch
) -> None:
    prefix = plain.ids(20)
    prompts = [[*prefix, *plain.ids(5 + 3 * i, seed=i + 1)] for i in range(4)]
    expected, _ = answers(False, blocks, prompts, **more)
    found, engine = answers(True, blocks, prompts, **more)
    assert found == expected
    assert engine.runner.pieces is not None
    assert engine.runner.pieces.launched == engine.counts.steps
    assert engine.counts.preemptions > 0 if blocks == 7 else engine.counts.found_tokens > 0


# ---- real graphs ---------------------------------------------------------------------------------


@torch.inference_mode()
def launched_anew(runner: Runner, arrays: StepArrays) -> torch.Tensor:
    """A step's hidden states by the launches that its pieces hold."""
    pieces = runner.pieces
    assert pieces is not None
    count = len(arrays.input_ids)
    size = next(n for n in pieces.sizes if n >= count)
    over = OverCache(pieces.ops, pieces.cache, pieces._put(arrays, size))

    def attend(layer: int) -> None:
        over.read(layer, pieces._q[:count], pieces._attended[:count])

    return pieces._hidden(size, attend)[:count].clone()


def replays_equal_launches(make: Callable[[], Runner]) -> None:
    runner = make()
    pieces = with_pieces(runner)
    sequences = sequences_of()
    for step in STEPS:
        arrays = arrays_of(runner, sequences, step)
        count = len(arrays.input_ids)
        poison(pieces)
        runner.step(arrays, 0)
        size = next(n for n in pieces.sizes if n >= count)
        found = pieces._made[size].hidden[:count].clone()
        assert torch.isfinite(found).all()
        assert torch.equal(found, launched_anew(runner, arrays))  # writes the same keys and values


@on_cpu
def test_replays_equal_launches(patch: pytest.MonkeyPatch) -> None:
    replays_equal_launches(lambda: new_runner(tiny("qwen3").ours, OPS))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "llama-32", "qwen3_moe", "qwen3_moe-every-other"])
def test_real_replays_equal_launches(name: str) -> None:
    model = test_graph.on_device(tiny(name).folder)
    replays_equal_launches(lambda: new_runner(model, tkernels))


@pytest.mark.gpu
def test_real_replays_of_layers_in_int8(tmp_path: Path) -> None:
    model = test_graph.on_device(test_graph.in_w8a8(tmp_path, "llama-32"))
    replays_equal_launches(lambda: new_runner(model, tkernels))


@pytest.mark.gpu
def test_real_pieces_equal_an_eager_runner() -> None:
    """fp32, where kernels of other sizes differ in their last bits alone."""
    model = test_graph.on_device(tiny("qwen3").folder, torch.float32)
    steps_of(lambda: new_runner(model, tkernels), tolerance=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["int8", "int8_fp4"])
def test_real_pieces_of_chunks_that_are_converted(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = test_graph.chunks_are_converted(monkeypatch)
    model = test_graph.on_device(tiny("qwen3-heads-of-64").folder)
    runners = (
        test_graph.quantised(model, ops, mode=mode) for ops in (tkernels, tkernels.reference)
    )
    steps_of(lambda: next(runners), tolerance=5e-2)
    assert bound


@pytest.mark.gpu
def test_the_engine_on_the_device_answers_alike() -> None:
    model = test_graph.on_device(tiny("qwen3").folder, torch.float32)
    prompts = [plain.ids(7 + 9 * i, seed=i) for i in range(6)]
    found = []
    for graphs in (False, True):
        runner = Runner(model, tkernels, num_blocks=64, max_positions=256)
        engine = Engine(runner, max_num_seqs=4, max_num_batched_tokens=40, graphs=graphs)
        runner.prompts = None
        found.append(
            [a.token_ids for a in engine.generate(prompts, limits=Limits(12, frozenset()))]
        )
        assert (runner.pieces is not None) == graphs
    assert runner.pieces is not None
    assert runner.pieces.launched > 3
    assert found[0] == found[1]


@pytest.mark.gpu
def test_a_real_step_allocates_for_attention_and_logits_alone() -> None:
    model = test_graph.on_device(tiny("qwen3").folder)
    runner = new_runner(model, tkernels)
    arrays = arrays_of(runner, sequences_of(), [(0, 3), (1, 20)])  # and once more, and again
    counted = []
    for pieces in (False, True):
        if pieces:
            with_pieces(runner)
        for _ in range(3):
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            runner.step(arrays, 2)
            reserved = torch.cuda.memory_stats()["reserved_bytes.all.current"]
            counted.append(
                (torch.cuda.memory_stats()["allocation.all.allocated"] - before, reserved)
            )
    assert counted[-1] == counted[-2]
    # Parts of attention's results in each layer; rows of the last tokens, logits and their copy.
    assert counted[-1][0] <= 2 * len(model.layers) + 8 < counted[2][0]


def test_blocks_of_the_tests_hold_their_sequences() -> None:
    """All sequences of ``STEPS`` fit the columns that the pieces are made for."""
    longest = max(sum(n for step in STEPS for i, n in step if i == j) for j in range(4))
    assert longest <= 4 * BLOCK_SIZE
