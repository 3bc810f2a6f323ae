"""How much a linear layer would lose in int8, as figures of its inputs, outputs and weight.

W8A8 is what ``masked_gemm`` computes: int8 weights with a scale an output channel, int8 activations
with a scale a token, both by ``quantize_per_token`` (absmax / 127, round half to even).
"""

from __future__ import annotations

import math

import torch

from tkernels.reference import quantize_per_token

BINS = 64
SMOOTHING = 0.5  # counts added to each bin, so that none is empty
_AT_ONCE = 2**22  # output values whose bins are looked up at once
MOST_DISPERSION = 1e6  # where the middle half of the values is (almost) one value


def fake_quantised(x: torch.Tensor) -> torch.Tensor:
    """Rows of ``x`` [R, C] as int8 with a scale a row gives them back; the same dtype."""
    codes, scale = quantize_per_token(x)
    return (codes * scale[:, None]).to(x.dtype)


def histogram_kl(p: torch.Tensor, q: torch.Tensor, bins: int = BINS) -> torch.Tensor:
    """KL(P||Q) in nats between the histograms of each column of ``p`` and ``q`` [T, C]: fp64 [C].

    Both histograms of a column have the same ``bins`` of equal width, from the least to the largest
    value in either. ``SMOOTHING`` is added to each count. A column of one value gives 0.
    """
    low = p.amin(0).minimum(q.amin(0))
    width = p.amax(0).maximum(q.amax(0)) - low
    per_width = torch.where(width > 1e-30, bins / width, 0.0)
    first = torch.arange(p.shape[1], device=p.device) * bins
    total = p.shape[0] + SMOOTHING * bins

    def shares(x: torch.Tensor) -> torch.Tensor:
        places = ((x - low) * per_width).long().clamp_(0, bins - 1) + first
        counts = torch.bincount(places.view(-1), minlength=first.numel() * bins)
        return (counts.view(-1, bins).double() + SMOOTHING) / total

    shares_p, shares_q = shares(p), shares(q)
    return (shares_p * (shares_p / shares_q).log()).sum(1)


def output_kl(
    x: torch.Tensor,
    x_quantised: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    bins: int = BINS,
) -> float:
    """Mean over output channels of KL(plain || w8a8) between histograms of a layer's outputs.

    Args:
        x, x_quantised: fp32 [T, K], inputs and what ``fake_quantised`` makes of them.
        weight: [N, K]. bias: [N].
    """
    total, step = 0.0, max(1, _AT_ONCE // len(x))
    for i in range(0, len(weight), step):
        rows = weight[i : i + step].float()
        add = None if bias is None else bias[i : i + step].float()
        plain = torch.nn.functional.linear(x, rows, add)
        quantised = torch.nn.functional.linear(x_quantised, fake_quantised(rows), add)
        total += float(histogram_kl(plain, quantised, bins).sum())
    return total / len(weight)


def dispersion(x: torch.Tensor) -> float:
    """(max - min) / (Q3 - Q1) over all values of ``x``; at most ``MOST_DISPERSION``, NaN if one
    of them is not finite.

    Quartiles are exact, between two values linearly interpolated: by NumPy, because
    ``torch.quantile`` refuses more than 16 million values.
    """
    import numpy as np

    values = x.float().flatten().cpu().numpy()
    q1, q3 = (float(q) for q in np.quantile(values, (0.25, 0.75)))
    spread = float(values.max()) - float(values.min())
    if spread == 0 or not math.isfinite(spread):
        return 0.0 if spread == 0 else math.nan
    return MOST_DISPERSION if q3 - q1 < spread / MOST_DISPERSION else spread / (q3 - q1)


def energy_ratio(weight: torch.Tensor) -> float:
    """Largest singular value over the sum of all; 1 for a rank of one, 0 for a weight of zeros.

    Singular values are square roots of the eigenvalues of the smaller Gram matrix in fp64, which is
    several times faster than a decomposition of the weight. What that loses, singular values below
    1e-8 of the largest, no sum would show.
    """
    w = weight.double()
    gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
    sigma = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    total = float(sigma.sum())
    return float(sigma[-1]) / total if total else 0.0
