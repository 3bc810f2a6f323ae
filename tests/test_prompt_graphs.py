"""Steps with one prompt as whole graphs: the same logits as launched one by one.

On the CPU a recording stands in for the device's graphs (tests/graphs.py). On a GPU the tests at
the end capture real ones.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import graphs as recorded
import pytest
import test_engine as plain
import test_graph
import test_pieces
import torch
from checkpoints import load_folder, new_runner, tiny
from graphs import sides_filled, spoil_inputs, stand_in, written_slots
from test_pieces import OPS, arrays_of, on_cpu, sequences_of

import tkernels
from model import qwen3
from model.engine import Engine
from model.kv_cache import BLOCK_SIZE, SequenceState
from model.loop import Limits
from model.prompt_graphs import PromptGraphs, rows_beside
from model.runner import Runner
from model.threads import cpu_threads
from tkernels import device

# Steps as (sequence, its new tokens): 16 or 32 tokens with padding, each after wider and narrower.
STEPS = [
    [(0, 5)],  # a prompt
    [(0, 1), (1, 20)],  # a token beside a part of a prompt
    [(1, 9)],  # the prompt goes on, nothing beside
    [(0, 1), (1, 1), (2, 30)],  # 32: no padding
    [(2, 1), (1, 1), (0, 1), (3, 2)],
    [(3, 16)],
    [(0, 1), (3, 12)],
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The networks are so small that a second thread would only be waited for."""
    with cpu_threads(1):
        yield


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with stand_in() as patch:
        yield patch


def with_graphs(runner: Runner, sizes: tuple[int, ...] = (16, 32), **more: Any) -> PromptGraphs:
    given = {"max_beside": 3, "max_blocks": 4, **more}
    runner.prompts = PromptGraphs(
        runner.model, runner.ops, runner.cache, runner.cos_sin_cache, sizes=sizes, **given
    )
    return runner.prompts


@torch.inference_mode()
def poison(prompts: PromptGraphs) -> None:
    """Whatever a step does not write itself is NaN, or no place that there is."""
    spoil_inputs(prompts._staging)
    for made in prompts._made.values():
        for _, hidden in made.values():
            hidden.fill_(torch.nan)


def steps_of(make: Callable[[], Runner], *, tolerance: float) -> None:
    """Captured steps give the logits of steps of another runner, launched one by one."""
    one, other = make(), make()
    prompts = with_graphs(one)
    ours, theirs = sequences_of(), sequences_of()
    for number, step in enumerate(STEPS):
        poison(prompts)
        num_logits = [len(step), None, 0, len(step) - 1][number % 4]
        found = one.step(arrays_of(one, ours, step), num_logits)
        expected = other.step(arrays_of(other, theirs, step), num_logits)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert prompts.launched == len(STEPS)
    assert other.prompts is None


@on_cpu
@pytest.mark.parametrize("appended_rows", [0, 2048])
@pytest.mark.parametrize("name", ["qwen3", "llama-bias", "qwen3_moe"])
def test_each_size_after_wider_and_narrower(
    name: str, appended_rows: int, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(qwen3, "APPENDED_ROWS", appended_rows)
    steps_of(lambda: new_runner(tiny(name).ours, OPS), tolerance=2e-5)


@on_cpu
def test_a_cache_with_residuals(patch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3-heads-of-32").ours
    steps_of(lambda: test_graph.quantised(model, OPS), tolerance=2e-2)  # a code may be another one


@on_cpu
def test_layers_in_int8(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    model = load_folder(test_graph.in_w8a8(tmp_path, "llama-32"))
    steps_of(lambda: new_runner(model, OPS), tolerance=2e-2)  # a code may be another one


@on_cpu
@pytest.mark.filterwarnings("ignore:invalid value")  # NaN in padding, which the interpreter tells
def test_kernels_with_padding(patch: pytest.MonkeyPatch) -> None:
    """The kernels, not their references."""
    model = dataclasses.replace(tiny("qwen3").ours, layers=tiny("qwen3").ours.layers[:1])
    one, other = (
        new_runner(model, ops) for ops in (recorded.Launched(tkernels), tkernels.reference)
    )
    prompts = with_graphs(one, (16,))
    ours, theirs = sequences_of(2), sequences_of(2)
    for step in ([(0, 3)], [(0, 1), (1, 4)]):
        poison(prompts)
        found = one.step(arrays_of(one, ours, step), len(step))
        expected = other.step(arrays_of(other, theirs, step), len(step))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@on_cpu
def test_which_steps_fit(patch: pytest.MonkeyPatch) -> None:
    """One sequence brings several tokens; others, not too many, one each."""
    runner = new_runner(tiny("qwen3").ours, OPS)
    prompts = with_graphs(runner, (16,), max_beside=2)
    sequences = sequences_of(5)
    for step, expected in (
        ([(0, 16)], True),
        ([(1, 17)], False),
        ([(0, 1)], False),
        ([(0, 1), (1, 1)], False),
        ([(0, 1), (2, 2)], True),
        ([(0, 1), (2, 2), (3, 2)], False),
        ([(2, 1), (0, 1), (1, 2)], True),
        ([(2, 1), (0, 1), (3, 1), (1, 2)], False),
    ):
        assert prompts.fits(arrays_of(runner, sequences, step)) == expected, step
    long = SequenceState(test_graph.random_ids(80), num_computed=70)
    assert not prompts.fits(arrays_of(runner, [long], [(0, 10)]))


@on_cpu
@pytest.mark.parametrize("mode", ["none", "int8_fp4"])
def test_padding_writes_nothing(mode: str, patch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3-heads-of-32").ours
    runner = new_runner(model, OPS) if mode == "none" else test_graph.quantised(model, OPS, 0.0)

    for part in (*runner.cache.k, *runner.cache.v):
        (part if isinstance(part, torch.Tensor) else part.codes).zero_()
    prompts = with_graphs(runner)
    assert written_slots(runner) == []
    arrays = arrays_of(runner, sequences_of(), [(0, 1), (1, 4)])
    poison(prompts)
    runner.step(arrays, 2)
    assert written_slots(runner) == sorted(arrays.slot_mapping.tolist())


@on_cpu
def test_a_step_is_one_copy_and_one_replay(patch: pytest.MonkeyPatch) -> None:
    """And no value is read by the host; the table's rows that are not there are not copied."""
    runner = new_runner(tiny("qwen3").ours, OPS)
    prompts = with_graphs(runner)
    for beside, (graph, _) in prompts._made[32].items():
        texts = " ".join(str(launch[0]) for launch in graph.launches)
        assert texts.count("paged_attn") == len(runner.model.layers) * (1 + (beside > 0))
        graph.launches.clear()
    arrays = arrays_of(runner, sequences_of(), [(0, 1), (1, 20)])
    copy, copied = prompts._staging.copy, []
    patch.setattr(prompts._staging, "copy", lambda side, n: copied.append(n) or copy(side, n))
    with test_graph.Seen() as seen:
        runner.step(arrays, 2)
    assert [name.split(".")[1] for name in seen.names] == ["copy_", "sub", "index", "linear"]
    assert {rows: graph.replays for rows, (graph, _) in prompts._made[32].items()} == {3: 1, 0: 0}
    three, one = (prompts._staging.layouts[32].end_of("beside_table", rows) for rows in (3, 1))
    assert copied == [one] == [three - 2 * 4 * 4]  # two rows of 4 blocks


@on_cpu
def test_few_that_decode_are_few_rows(patch: pytest.MonkeyPatch) -> None:
    """Each step replays the graph of its size that has as few rows as it can."""
    patch.setattr("model.prompt_graphs._FEW_BESIDE", (1,))
    runners = []

    def make() -> Runner:
        runners.append(new_runner(tiny("qwen3").ours, OPS))
        return runners[-1]

    steps_of(make, tolerance=2e-5)
    prompts = runners[0].prompts
    assert prompts is not None
    replays = {
        size: {rows: graph.replays for rows, (graph, _) in made.items()}
        for size, made in prompts._made.items()
    }
    assert replays == {32: {3: 1, 1: 1, 0: 0}, 16: {3: 1, 1: 1, 0: 3}}
    for size, made in prompts._made.items():
        assert list(made) == [3, 1, 0]  # captured the largest first
        for rows, (graph, _) in made.items():
            attended = [len(one[1][0]) for one in graph.launches if "paged_attn" in str(one[0])]
            a_layer = [rows, size] if rows else [size]
            assert attended == a_layer * len(prompts.model.layers)


@pytest.mark.parametrize("most", [0, 1, 8, 23, 24, 63, 191, 192, 255, 1000])
def test_rows_beside(most: int) -> None:
    """Whoever decodes has rows; there are few numbers of them, and none is hardly any other."""
    found = rows_beside(most)
    assert found[0] == 0
    assert found[-1] == most
    assert len(found) <= 4
    assert all(3 * a <= b for a, b in itertools.pairwise(found))
    assert most < 24 or found[1] == 8


@on_cpu
def test_inputs_are_not_overwritten_before_they_are_taken(patch: pytest.MonkeyPatch) -> None:
    runner = new_runner(tiny("qwen3").ours, OPS)
    with_graphs(runner, (16,))
    filled, sequences = sides_filled(patch), sequences_of()
    for _ in range(4):
        runner.step(arrays_of(runner, sequences, [(0, 2)]), 1)
    assert filled[0] is not filled[1]
    assert filled == filled[:2] * 2


@on_cpu
def test_what_is_refused(patch: pytest.MonkeyPatch) -> None:
    runner = new_runner(tiny("qwen3").ours, OPS)
    for sizes in ((), (1, 16)):
        with pytest.raises(ValueError, match="prompt graphs: expected sizes of 2 tokens or more"):
            with_graphs(runner, sizes)
    free = iter([100, 60])
    patch.setattr(device, "memory_free", lambda: next(free))
    with pytest.raises(ValueError, match="at most 39 bytes, got 40 after capturing 16 tokens"):
        with_graphs(runner, (16,), max_bytes=39)


@on_cpu
@pytest.mark.parametrize(
    ("blocks", "more"),
    [
        (64, {"max_num_seqs": 3}),
        (64, {"max_num_seqs": 1}),
        (7, {"max_num_seqs": 4, "reserve": 0.0}),
    ],
    ids=["shared prefixes", "one at a time", "preemption"],
)
def test_the_engine_answers_alike(
    blocks: int, more: dict[str, Any], patch: pytest.MonkeyPatch
) -> None:
    prefix = plain.ids(20)
    prompts = [[*prefix, *plain.ids(5 + 3 * i, seed=i + 1)] for i in range(4)]
    expected, _ = test_pieces.answers(False, blocks, prompts, **more)
    found, engine = test_pieces.answers(True, blocks, prompts, whole=True, **more)
    assert found == expected
    runner = engine.runner
    assert runner.prompts is not None
    assert runner.pieces is not None
    assert runner.prompts.launched >= 2
    assert runner.prompts.launched + runner.pieces.launched == engine.counts.steps


@on_cpu
@pytest.mark.parametrize("mode", ["none", "int8_fp4"])
def test_a_prompt_finds_a_page_that_the_same_step_fills(
    mode: str, patch: pytest.MonkeyPatch
) -> None:
    """Beside a token that fills the page; the step that was launched for it ahead is of no use."""
    limits = Limits(30, plain.FOREVER)
    alone, cached = plain.new_engine(64, mode), 2 * BLOCK_SIZE
    (first,) = alone.generate([plain.ids(20)], limits=limits)
    prompt = [*plain.ids(20), *first.token_ids][:cached] + plain.ids(5, seed=1)
    (second,) = plain.new_engine(64, mode).generate([prompt], limits=limits)
    engine = plain.new_engine(64, mode, OPS, graphs=True, max_num_seqs=3)
    prompts, decoding = engine.runner.prompts, engine.graphs
    assert prompts is not None
    assert decoding is not None
    engine.add(plain.ids(20), limits=limits)
    while engine.batch.num_computed.max() < cached - 1:
        engine.step()
    before = (prompts.launched, decoding.launched)
    assert engine._early is not None
    engine.add(prompt, limits=limits)
    poison(prompts)
    engine.step()
    assert (prompts.launched, decoding.launched) == (before[0] + 1, before[1])
    assert engine.counts.found_tokens == cached
    answers = plain.run_all(engine)
    assert [answers[i, 0].token_ids for i in (0, 1)] == [first.token_ids, second.token_ids]


# ---- real graphs ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("few", [(), (1,)], ids=["three rows", "one or three rows"])
@pytest.mark.parametrize("name", ["qwen3", "llama-32", "qwen3_moe"])
def test_real_graphs_equal_an_eager_runner(
    name: str, few: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32, where kernels of other sizes differ in their last bits alone."""
    monkeypatch.setattr("model.prompt_graphs._FEW_BESIDE", few)
    model = test_graph.on_device(tiny(name).folder, torch.float32)
    steps_of(lambda: new_runner(model, tkernels), tolerance=1e-4)


@pytest.mark.gpu
def test_real_graphs_of_a_cache_with_residuals() -> None:
    model = test_graph.on_device(tiny("qwen3-heads-of-32").folder)
    steps_of(lambda: test_graph.quantised(model, tkernels), tolerance=5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["int8", "int8_fp4"])
def test_real_graphs_of_chunks_that_are_converted(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hopper's body for chunks over int8 pages, for so few tokens, beside the references."""
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
        answers = engine.generate(prompts, limits=Limits(12, frozenset()))
        found.append([a.token_ids for a in answers])
    assert runner.prompts is not None
    assert runner.prompts.launched > 2
    assert found[0] == found[1]


def test_blocks_of_the_tests_hold_their_sequences() -> None:
    """All sequences of ``STEPS`` fit the columns that the graphs are made for."""
    longest = max(sum(n for step in STEPS for i, n in step if i == j) for j in range(4))
    assert longest <= 4 * BLOCK_SIZE
