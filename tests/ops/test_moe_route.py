"""What is special to moe_route: ties, groups, logits that are not numbers, refusals of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tkernels
from tkernels import device
from tkernels.ops.moe_route import SPEC, route_problem
from tkernels.testing import poisoned_memory


def route(logits: torch.Tensor, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids; results that nothing was written to would be NaN and the largest int."""
    with poisoned_memory():
        return tkernels.moe_route(logits, **given)


def block_of(tokens: int, n_experts: int, top_k: int) -> dict[str, Any]:
    """A config in which ``tokens`` share a program."""
    problem = route_problem(tokens, n_experts, top_k)
    return {**SPEC.default_config(problem, device.current()), "BLOCK_T": tokens}


def test_softmax_is_over_all_experts(dev: torch.device) -> None:
    logits = torch.tensor([[0.0, math.log(3.0), math.log(4.0), -math.inf]], device=dev)
    weights, ids = route(logits, top_k=2, renormalize=False)
    assert ids.tolist() == [[2, 1]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[0.5, 0.375]]))
    weights, _ = route(logits, top_k=2, scale=7.0)
    torch.testing.assert_close(weights.cpu(), torch.tensor([[4.0, 3.0]]))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
def test_ties_go_to_the_lower_expert(score: str, biased: bool, dev: torch.device) -> None:
    """Also between -0 and 0, whose bits differ."""
    logits = torch.full((3, 60), 0.25, device=dev)
    logits[1, 41] = logits[1, 7] = 2.0
    logits[2, ::2], logits[2, 1::2] = -0.0, 0.0
    bias = torch.zeros(60, device=dev) if biased else None
    _, ids = route(logits, top_k=4, score=score, bias=bias)
    assert ids.tolist() == [[0, 1, 2, 3], [7, 41, 0, 1], [0, 1, 2, 3]]


def test_order_is_kept_where_probabilities_vanish(dev: torch.device) -> None:
    """exp(-200) is 0 in fp32; without a bias the logits decide."""
    logits = torch.tensor([[-200.0, 0.0, -150.0, -math.inf, -199.0]], device=dev)
    weights, ids = route(logits, top_k=5)
    assert ids.tolist() == [[1, 2, 4, 0, 3]]
    assert weights.tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
def test_a_spoilt_token_spoils_no_other(
    score: str, biased: bool, grouped: bool, value: float, dev: torch.device
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 24, generator=generator).to(dev)
    given: dict[str, Any] = {"top_k": 8, "score": score, "config": block_of(4, 24, 8)}
    if biased:
        given["bias"] = torch.randn(24, generator=generator).to(dev)
    if grouped:
        given |= {"num_groups": 4, "top_groups": 2}
    before = route(logits, **given)
    logits[2, 5:18] = value
    weights, ids = route(logits, **given)
    if math.isnan(value) or score == "softmax":
        assert bool(weights[2].isnan().all())
    else:
        assert bool(weights[2].isfinite().all())
    for row in ids.tolist():
        assert len(set(row)) == 8
        assert set(row) <= set(range(24))
    expected = tkernels.reference.moe_route(logits, **given)
    assert torch.equal(ids, expected[1])
    keep = [0, 1, 3]
    assert torch.equal(weights[keep], before[0][keep])
    assert torch.equal(ids[keep], before[1][keep])


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_token_without_any_number(value: float, dev: torch.device) -> None:
    logits = torch.full((2, 60), value, device=dev)
    logits[1] = torch.arange(60)
    weights, ids = route(logits, top_k=3)
    assert ids.tolist() == [[0, 1, 2], [59, 58, 57]]
    assert bool(weights[0].isnan().all())
    assert bool(weights[1].isfinite().all())


def test_sigmoid_scores_that_are_all_zero(dev: torch.device) -> None:
    weights, ids = route(torch.full((1, 8), -math.inf, device=dev), top_k=2, score="sigmoid")
    assert (weights.tolist(), ids.tolist()) == ([[0.0, 0.0]], [[0, 1]])


def test_bias_chooses_and_does_not_weigh(dev: torch.device) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=dev)
    bias = torch.tensor([0.0, 0.0, -3.0, 5.0], device=dev)
    weights, ids = route(logits, top_k=2, score="sigmoid", bias=bias, renormalize=False)
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights[0], logits[0, [3, 0]].sigmoid())
    bias[3] = math.nan  # an expert that cannot be compared comes last
    _, ids = route(logits, top_k=4, score="sigmoid", bias=bias)
    assert ids.tolist() == [[0, 1, 2, 3]]


def test_groups(dev: torch.device) -> None:
    """A group is worth its best expert, with a bias its two best; of equal ones the lower."""
    logits = torch.tensor([[5.0, -5.0, 3.0, 3.5, 0.0, 0.0, 5.0, -6.0]], device=dev)
    given: dict[str, Any] = {"top_k": 2, "num_groups": 4, "score": "sigmoid"}
    zeros = torch.zeros(8, device=dev)
    assert route(logits, **given)[1].tolist() == [[0, 1]]
    assert route(logits, **given, top_groups=2)[1].tolist() == [[0, 6]]
    assert route(logits, **given, bias=zeros)[1].tolist() == [[3, 2]]
    assert route(logits, **given, bias=zeros, top_groups=4)[1].tolist() == [[0, 6]]
    same = torch.ones(1, 8, device=dev)
    ids = route(same, top_k=4, num_groups=4, top_groups=2)[1]
    assert ids.tolist() == [[0, 1, 2, 3]]


def test_groups_against_deepseek(dev: torch.device) -> None:
    """DeepSeek-V3 as its authors write it, with what may not be chosen at 0 (scores are above)."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 256, generator=generator).to(dev)
    bias = 0.1 * torch.rand(256, generator=generator).to(dev)
    scores = logits.sigmoid()
    choice = (scores + bias).view(4, 8, 32)
    best = choice.topk(2, -1).values.sum(-1).topk(4, -1).indices
    mask = torch.zeros(4, 8, device=dev).scatter(1, best, 1.0)
    ids = (choice * mask[:, :, None]).view(4, 256).topk(8, -1).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
    got = route(logits, top_k=8, score="sigmoid", bias=bias, num_groups=8, top_groups=4, scale=2.5)
    assert torch.equal(got[1], ids.int())
    torch.testing.assert_close(got[0], weights, rtol=1e-5, atol=1e-6)


def test_no_tokens(dev: torch.device) -> None:
    weights, ids = route(torch.empty(0, 16, device=dev), top_k=3)
    assert (weights.shape, weights.dtype) == ((0, 3), torch.float32)
    assert (ids.shape, ids.dtype) == ((0, 3), torch.int32)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"top_k": 0}, "top_k must be an int from 1 to 16, got 0 .int."),
        ({"top_k": 17}, "top_k must be an int from 1 to 16, got 17 .int."),
        ({"top_k": True}, "top_k must be an int from 1 to 16, got True"),
        ({"score": "relu"}, "score must be 'softmax' or 'sigmoid', got 'relu'"),
        ({"score": ["softmax"]}, "score must be 'softmax' or 'sigmoid', got "),
        ({"renormalize": 1}, "renormalize must be a bool, got 1 .int."),
        ({"num_groups": 3}, "num_groups must be an int that divides 16 experts, got 3"),
        ({"num_groups": 0}, "num_groups must be an int that divides 16 experts, got 0"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups must be an int from 1 to 4, got 5"),
        ({"num_groups": 8, "top_groups": 1}, "top_k must be an int from 1 to 2, got 3"),
        ({"scale": 0.0}, "scale must be a number > 0, got 0.0"),
    ],
    ids=str,
)
def test_plain_arguments_are_checked(given: Any, words: str, dev: torch.device) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^moe_route: {words}"):
        tkernels.moe_route(torch.zeros(2, 16, device=dev), **{"top_k": 3, **given})


def test_too_many_experts_are_refused(dev: torch.device) -> None:
    with pytest.raises(ValueError, match=r"^moe_route: router_logits must have shape \[T, 1 <= E"):
        tkernels.moe_route(torch.zeros(2, 1025, device=dev), top_k=1)


def test_traced_with_a_name(dev: torch.device) -> None:
    """The name of the score is a string in the operator's schema, its default quoted."""
    operator = torch.ops.tkernels.moe_route.default
    [score] = [a for a in operator._schema.arguments if a.name == "score"]
    assert (str(score.type), score.default_value) == ("str", "softmax")
    logits = torch.randn(3, 16, device=dev)
    for given in ({}, {"score": "sigmoid"}):
        torch.library.opcheck(
            operator,
            (logits,),
            {"top_k": 2, **given},
            test_utils=("test_schema", "test_faketensor"),
        )

        def call(x: torch.Tensor, given: dict[str, str] = given) -> Any:
            return tkernels.moe_route(x, top_k=2, **given)  # type: ignore[arg-type]

        weights, ids = torch.compile(call, fullgraph=True, backend="aot_eager")(logits)
        expected = tkernels.reference.moe_route(logits, top_k=2, **given)  # type: ignore[arg-type]
        torch.testing.assert_close(weights, expected[0])
        assert torch.equal(ids, expected[1])
    torch._dynamo.reset()
