"""What is special to moe_dispatch: both ways of counting, stray experts, no tokens, determinism."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tkernels
from tests.compiled_for import lines_of
from tkernels import device
from tkernels.ops.moe_dispatch import SPEC, dispatch_problem
from tkernels.testing import guarded, poisoned_memory

BLOCKS = [0, 64]


def configured(tokens: int, experts: int, top_k: int, block_n: int) -> dict[str, Any]:
    """The default config, in one launch (0) or in blocks of ``block_n`` assignments."""
    problem = dispatch_problem(tokens, experts, top_k)
    default = SPEC.default_config(problem, device.current())
    warps = {"num_warps": 4} if "num_warps" in default else {}
    return {**default, "BLOCK_N": block_n, "BLOCK_Q": 32, "BLOCK_J": 64} | warps


def dispatch(ids: torch.Tensor, block_n: int = 0, **given: Any) -> tuple[torch.Tensor, ...]:
    """Results that nothing was written to would be the largest int."""
    config = configured(len(ids), given["num_experts"], ids.shape[1], block_n)
    with poisoned_memory():
        return tkernels.moe_dispatch(ids, **given, config=config)


def assert_consistent(
    ids: torch.Tensor, got: tuple[torch.Tensor, ...], local: list[int], n_local: int
) -> None:
    """Told in words, without the reference: ``local`` is the local expert of each id, or -1."""
    offsets, rows, positions = (t.tolist() for t in got)
    places = [p for row in positions for p in row]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert sum(e >= 0 for e in local) == offsets[-1]
    for e in range(n_local):
        mine = [i for i, one in enumerate(local) if one == e]
        assert rows[offsets[e] : offsets[e + 1]] == mine
    assert rows[offsets[-1] :] == [-1] * (ids.numel() - offsets[-1])
    for i, p in enumerate(places):
        assert (p == -1 and local[i] == -1) or rows[p] == i


@pytest.mark.parametrize("block_n", BLOCKS)
@pytest.mark.parametrize("top_k", [1, 3, 20])
def test_stray_and_repeated_experts(block_n: int, top_k: int, dev: torch.device) -> None:
    generator = torch.Generator().manual_seed(top_k)
    ids = torch.randint(-3, 23, (19, top_k), generator=generator).int()
    ids[0, 0], ids[1, 0], ids[2, 0] = 2**31 - 1, -(2**31), 20
    local = [e if 0 <= e < 20 else -1 for e in ids.flatten().tolist()]
    assert_consistent(ids, dispatch(ids.to(dev), block_n, num_experts=20), local, 20)


@pytest.mark.parametrize("block_n", BLOCKS)
def test_map(block_n: int, dev: torch.device) -> None:
    """Local numbers in any order; numbers of the map that no expert has are elsewhere too."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 12, (40, 4), generator=generator).int()
    table = torch.tensor([-1, 4, 0, -1, 2, -7, 3, 5, 2**31 - 1, 1, -1, 4], dtype=torch.int32)
    local = [int(table[e]) if 0 <= table[e] < 5 else -1 for e in ids.flatten().tolist()]
    given = {"num_experts": 12, "expert_map": table.to(dev), "num_local_experts": 5}
    assert_consistent(ids, dispatch(ids.to(dev), block_n, **given), local, 5)


@pytest.mark.parametrize("block_n", BLOCKS)
def test_no_expert_is_here(block_n: int, dev: torch.device) -> None:
    ids = torch.arange(130, device=dev, dtype=torch.int32).view(65, 2) % 8
    table = torch.full((8,), -1, dtype=torch.int32, device=dev)
    offsets, rows, positions = dispatch(
        ids, block_n, num_experts=8, expert_map=table, num_local_experts=3
    )
    assert offsets.tolist() == [0, 0, 0, 0]
    assert rows.tolist() == [-1] * 130
    assert bool((positions == -1).all())


@pytest.mark.parametrize("block_n", BLOCKS)
@pytest.mark.parametrize("expert", [0, 6])
def test_all_on_one_expert(block_n: int, expert: int, dev: torch.device) -> None:
    ids = torch.full((150, 1), expert, dtype=torch.int32, device=dev)
    offsets, rows, positions = dispatch(ids, block_n, num_experts=7)
    assert offsets.tolist() == [0] * (expert + 1) + [150] * (7 - expert)
    assert rows.tolist() == list(range(150))
    assert positions.flatten().tolist() == list(range(150))


@pytest.mark.parametrize("tokens", [1, 32, 33, 100])
def test_both_ways_are_the_same(tokens: int, dev: torch.device) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, 130, (tokens, 2), generator=generator).int().to(dev)
    one = dispatch(ids, 0, num_experts=130)
    for block_n in (64, 128):
        blocks = dispatch(ids, block_n, num_experts=130)
        assert all(torch.equal(a, b) for a, b in zip(one, blocks, strict=True))


@pytest.mark.parametrize("block_n", [4, 64])
def test_more_blocks_and_experts_than_a_tile_of_counts_has(block_n: int, dev: torch.device) -> None:
    ids = (torch.arange(34 * block_n, device=dev, dtype=torch.int32) * 7 % 71).view(-1, 2)
    config = configured(len(ids), 70, 2, block_n) | {"BLOCK_Q": 64}
    if "num_warps" in config:
        config |= {"num_warps": 1 if block_n < 64 else 4}
    got = tkernels.moe_dispatch(ids, num_experts=70, config=config)
    expected = tkernels.reference.moe_dispatch(ids, num_experts=70)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_default_in_blocks(dev: torch.device) -> None:
    problem = dispatch_problem(1030, 6, 4)
    assert SPEC.default_config(problem, device.current())["BLOCK_N"]
    inputs = SPEC.make_inputs(problem, dev)
    got, expected = tkernels.moe_dispatch(**inputs), tkernels.reference.moe_dispatch(**inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("given", [False, True])
def test_no_tokens(given: bool, dev: torch.device) -> None:
    ids = torch.empty(0, 3, dtype=torch.int32, device=dev)
    outs = {}
    if given:
        outs = {"expert_offsets": torch.full((6,), 77, dtype=torch.int32, device=dev)}
        outs |= {"sorted_ids": ids.new_empty(0), "positions": torch.empty_like(ids)}
    with poisoned_memory():
        offsets, rows, positions = tkernels.moe_dispatch(ids, num_experts=5, **outs)
    assert offsets.tolist() == [0] * 6
    assert (rows.shape, positions.shape) == ((0,), (0, 3))
    assert not given or offsets is outs["expert_offsets"]


@pytest.mark.parametrize("block_n", BLOCKS)
def test_results_are_written_and_nothing_else(block_n: int, dev: torch.device) -> None:
    ids = guarded(torch.randint(-1, 6, (50, 3), device=dev).int())
    outs = {"expert_offsets": (6,), "sorted_ids": (150,), "positions": (50, 3)}
    bands = {
        name: guarded(torch.zeros(shape, dtype=torch.int32, device=dev))
        for name, shape in outs.items()
    }
    results = dispatch(
        ids.tensor, block_n, num_experts=5, **{name: g.tensor for name, g in bands.items()}
    )
    expected = tkernels.reference.moe_dispatch(ids.tensor, num_experts=5)
    for name, result, wanted in zip(outs, results, expected, strict=True):
        assert result is bands[name].tensor
        assert torch.equal(result, wanted)
        bands[name].check(name)


@pytest.mark.parametrize("count", [1, 2, 64])
@pytest.mark.parametrize("block_n", BLOCKS)
@pytest.mark.parametrize("tokens", [0, 90])
def test_tickets_are_set(tokens: int, block_n: int, count: int, dev: torch.device) -> None:
    ids = torch.randint(0, 5, (tokens, 3), device=dev).int()
    tickets = guarded(torch.full((count,), 77, dtype=torch.int32, device=dev))
    got = dispatch(ids, block_n, num_experts=5, tickets=tickets.tensor)
    assert tickets.tensor.tolist() == [0] * count
    tickets.check("tickets")
    expected = tkernels.reference.moe_dispatch(ids, num_experts=5, tickets=tickets.tensor.fill_(3))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert tickets.tensor.tolist() == [0] * count


def test_a_compiler_does_not_see_tickets(dev: torch.device) -> None:
    """As inputs of an operator that writes to them they might be copied before it does."""
    for name in ("moe_dispatch", "moe_gemm"):
        schema = getattr(torch.ops.tkernels, name).default._schema
        assert "tickets" not in [argument.name for argument in schema.arguments]
    ids = torch.randint(0, 5, (9, 3), device=dev).int()
    tickets = torch.full((2,), 7, dtype=torch.int32, device=dev)

    def call(ids: torch.Tensor, tickets: torch.Tensor) -> Any:
        results = tkernels.moe_dispatch(ids, num_experts=5, tickets=tickets)
        return results, tickets + 1

    got, more = torch.compile(call, fullgraph=True, backend="aot_eager")(ids, tickets)
    torch._dynamo.reset()
    expected = tkernels.moe_dispatch(ids, num_experts=5)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert (tickets.tolist(), more.tolist()) == ([0, 0], [1, 1])


@pytest.mark.parametrize("shape", [(0,), (65,), (2, 2)])
def test_tickets_are_few(shape: tuple[int, ...], dev: torch.device) -> None:
    ids = torch.zeros(2, 3, dtype=torch.int32, device=dev)
    with pytest.raises(ValueError, match=r"moe_dispatch: tickets must have shape \[1 to 64\], got"):
        tkernels.moe_dispatch(ids, num_experts=5, tickets=ids.new_zeros(shape))
    with pytest.raises(ValueError, match="moe_dispatch: tickets must be int32, got"):
        tkernels.moe_dispatch(ids, num_experts=5, tickets=ids.new_zeros(2).long())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_experts": 0}, "num_experts must be an int from 1 to 65536, got 0 .int."),
        ({"num_experts": True}, "num_experts must be an int from 1 to 65536, got True"),
        ({"num_local_experts": 2}, "expert_map must be given with num_local_experts, got None"),
        ({"expert_map": None, "num_local_experts": 0}, "num_local_experts must be an int from 1"),
        ({"expert_map": torch.int32}, "num_local_experts must be given with expert_map, got None"),
    ],
    ids=str,
)
def test_plain_arguments_are_checked(given: Any, words: str, dev: torch.device) -> None:
    ids = torch.zeros(2, 3, dtype=torch.int32, device=dev)
    if given.get("expert_map") is torch.int32:
        given = {"expert_map": torch.zeros(8, dtype=torch.int32, device=dev)}
    with pytest.raises(ValueError, match=f"^moe_dispatch: {words}"):
        tkernels.moe_dispatch(ids, **{"num_experts": 8, **given})


def test_one_tensor_cannot_hold_two_results(dev: torch.device) -> None:
    ids, both = torch.zeros(2, 3, dtype=torch.int32, device=dev), torch.zeros(6, device=dev).int()
    words = "sorted_ids must be another tensor than expert_offsets, got one for both"
    with pytest.raises(ValueError, match=f"^moe_dispatch: {words}"):
        tkernels.moe_dispatch(ids, num_experts=5, expert_offsets=both, sorted_ids=both)


def test_rows_are_those_that_combine_takes(dev: torch.device) -> None:
    """Dispatch, the identity for each expert, combine: every token top_k times."""
    x = torch.randn(9, 40, device=dev)
    ids = torch.randint(0, 6, (9, 3), device=dev).int()
    _, rows, positions = tkernels.moe_dispatch(ids, num_experts=6)
    assert torch.equal(tkernels.moe_combine(x[rows.long() // 3], positions), x + x + x)


CHILD = r"""
import re
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tkernels import offline
from tkernels.ops.moe_dispatch import SPEC, dispatch_problem

with FakeTensorMode(), offline.record_launches() as launches:
    SPEC.launch(**SPEC.make_inputs(dispatch_problem(4096, 128, 8), torch.device("cpu")))
for launch in launches:
    ptx = offline.compiled_cuda(launch, 90).asm["ptx"]
    print(*re.findall(r"griddepcontrol\.\w+|(?:ld|st)\.global[.\w:]*|\$L__BB\w+:", ptx))
"""


def test_many_are_compared_while_they_are_counted() -> None:
    """Compiled for sm_90: ids are read once, each by a thread, and before the counts are there."""
    count, place = (line.split() for line in lines_of(CHILD)[-2:])
    wait, start, load = "griddepcontrol.wait", "griddepcontrol.launch_dependents", "ld.global.b32"
    assert [what for what in count if "BB" not in what] == [wait, start, load, "st.global.b16"]
    # The kernel that counts waits before it lets this one start, which reads ids before it waits.
    at = place.index(wait)
    assert place[0] == start
    assert place[1].startswith("$L__BB")  # what follows is of the loop: its end comes first
    label, *around = place[at - 2 : at + 1]
    assert label.startswith("$L__BB")  # its beginning: nothing else is read or written before
    assert around == [load, wait]
    counts = [what for what in place[at:] if what.startswith("ld")]
    assert counts == ["ld.global.v4.b32"] * 4  # of 128 blocks and 64 experts
