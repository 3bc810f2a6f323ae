"""Attention of Hugging Face ``transformers`` models on ``flash_attn``, after one import.

    import tkernels.transformers_attention  # before transformers on a machine without accelerator
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="tkernels")

Prefill and decode, padded batches, dynamic and static caches, grouped queries, sliding windows,
logit softcapping, attention sinks, encoders; also under ``torch.compile(fullgraph=True)``. The
cache stays transformers' own. This is the only file of the package that needs ``transformers``,
and nothing else imports it.

transformers asks twice. Once a forward pass and kind of layer, ``attention_mask`` answers which
keys are seen: where the kernel can tell by itself, the answer is None or a ``MaskRule`` and no mask
of queries by keys is built. Then ``attention_forward`` computes each layer by that answer.

Inference only: dropout and training are refused, and a backward pass raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tkernels.check import describe
from tkernels.ops.flash_attn import flash_attn

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        sdpa_mask,
    )
    from transformers.utils import is_tracing
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "tkernels.transformers_attention: expected transformers to be installed "
        "(tkernels[transformers]), got none"
    ) from None

NAME = "tkernels"
_OP = "tkernels.transformers_attention"


class MaskRule(NamedTuple):
    """Which keys are seen, where no mask of queries by keys is needed to say it.

    A tuple, so that accelerate moves ``padding`` along when layers lie on several devices.
    """

    causal: bool  # the last query stands at the last key, and none looks ahead
    window: int | None = None  # a query sees as many keys, its own included
    padding: torch.Tensor | None = None  # bool [B, Sk], True = may be seen; None: all

    @property
    def ndim(self) -> int:
        """Not 2: transformers asks whether a mask is padding that is still to be worked out."""
        return 0


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | MaskRule | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **given: Any,
) -> torch.Tensor | MaskRule | None:
    """The answer for the layers of one kind; arguments as transformers gives them.

    Args:
        batch_size, q_length, kv_length: B, Sq, Sk of the attention to come.
        q_offset, kv_offset: positions of the first query and the first key. A static cache gives
            the former as a tensor.
        mask_function: which pairs of positions are seen, padding apart.
        attention_mask: bool [B, positions], False = padding.
        local_size: width of a sliding window or of a chunk.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether the answer may be other than a
            tensor; False also where ``mask_function`` was combined with others.
        config: the model's.

    Returns:
        None: plain causal or bidirectional attention over all keys, as the layer says. Otherwise a
        ``MaskRule``, or bool [B, 1, Sq, Sk]. With a static cache that is still empty Sk is Sq: the
        keys behind are not looked at.
    """
    if isinstance(attention_mask, MaskRule):  # answered before: generate() asks ahead
        return attention_mask
    rule = _rule(mask_function, local_size, config)
    if rule is not None and not rule.causal:
        rule = rule if allow_is_bidirectional_skip else None
    elif rule is not None and not allow_is_causal_skip:
        rule = None
    # A static cache counts on the device, and has keys behind the last query.
    elif isinstance(q_offset, torch.Tensor) or q_offset + q_length != kv_offset + kv_length:
        if rule is not None and kv_offset == 0 and not is_tracing(q_offset) and q_offset == 0:
            kv_length = min(kv_length, q_length)
        rule = None
    if rule is None:
        mask: torch.Tensor = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            **given,
        )
        return mask
    rule = rule._replace(padding=_padding(attention_mask, kv_length, kv_offset))
    if rule.window is not None and kv_length <= rule.window:
        rule = rule._replace(window=None)
    said_by_layer = rule.causal or getattr(config, "is_causal", None) is None
    plain = rule.padding is None and rule.window is None
    return None if plain and said_by_layer else rule


def _rule(
    mask_function: Callable[..., Any], local_size: int | None, config: Any
) -> MaskRule | None:
    """The rule that ``mask_function`` amounts to where nothing was combined with it, or None."""
    if mask_function is bidirectional_mask_function:
        return MaskRule(causal=False)
    if mask_function is causal_mask_function:
        return MaskRule(causal=True)
    # A window, and not chunks, which come with the same argument.
    sliding = local_size == getattr(config, "sliding_window", None)
    chunks = local_size == getattr(config, "attention_chunk_size", None)
    return MaskRule(True, local_size) if local_size and sliding and not chunks else None


def _padding(
    attention_mask: torch.Tensor | None, kv_length: int, kv_offset: int
) -> torch.Tensor | None:
    """The part of the keys at hand, or None where none is padding.

    Asking that waits for the device once a forward pass, as transformers' own masks do; while a
    graph is traced there is nothing to ask.
    """
    if attention_mask is None:
        return None
    padding = attention_mask[:, kv_offset : kv_offset + kv_length]
    missing = kv_length - padding.shape[1]
    if missing > 0:
        padding = torch.nn.functional.pad(padding, (0, missing))
    return None if not is_tracing(padding) and bool(padding.all()) else padding


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | MaskRule | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer; arguments as transformers gives them.

    Args:
        module: the layer; ``module.is_causal`` counts where ``attention_mask`` is None.
        query: [B, Hq, Sq, D].
        key, value: [B, Hk, Sk, D], with all that the cache holds.
        attention_mask: what the function of that name answered, or bool [B, 1 or Hq, Sq, <= Sk],
            True = may be seen, which then says all.
        scaling: factor of the scores; None is D**-0.5.
        is_causal: overrides ``module.is_causal``.
        sliding_window: width, where ``attention_mask`` is None.
        softcap: scores become softcap * tanh(score / softcap).
        s_aux: [Hq], sinks: logits that join the softmax's sum.

    Returns:
        ([B, Sq, Hq, D], None); rows that see nothing are zeros. Weights are never formed.

    Raises:
        ValueError: dropout, a float mask, a position bias or attention weights are asked for.
    """
    if dropout or module.training:
        raise ValueError(
            f"{_OP}: the model must be in evaluation mode (model.eval()), without dropout, got "
            f"training {module.training} and dropout {dropout}"
        )
    if position_bias is not None:
        raise ValueError(f"{_OP}: position_bias must be None, got {describe(position_bias)}")
    if kwargs.get("output_attentions"):
        raise ValueError(f"{_OP}: output_attentions must be False, got True")
    mask = None
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        window = sliding_window
        if window is not None and (window >= key.shape[2] or not causal):
            if window < key.shape[2]:
                raise ValueError(
                    f"{_OP}: a sliding window that is not causal must come as an attention_mask, "
                    f"got None for a window of {window} and {key.shape[2]} keys"
                )
            window = None
    elif isinstance(attention_mask, MaskRule):
        causal, window, padding = attention_mask
        mask = None if padding is None else padding[:, None, None, :]
    else:
        causal, window, mask = False, None, _checked(attention_mask)
        if mask.shape[-1] < key.shape[2]:  # the rest of a static cache
            key, value = key[:, :, : mask.shape[-1]], value[:, :, : mask.shape[-1]]
    arguments: dict[str, Any] = {
        "q": query.transpose(1, 2),
        "k": key.transpose(1, 2),
        "v": value.transpose(1, 2),
        "causal": causal,
        "window": window,
        "scale": scaling,
        "softcap": softcap,
        "mask": mask,
        "sinks": None if s_aux is None else s_aux.float(),
    }
    if torch.is_grad_enabled() and query.requires_grad:
        # The operator raises in a backward pass; the plain function would leave a silent gap.
        return torch.ops.tkernels.flash_attn(**arguments)[0], None
    out = flash_attn(**arguments)
    assert isinstance(out, torch.Tensor)
    return out, None


def _checked(mask: torch.Tensor) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.dtype != torch.bool:
        raise ValueError(
            f"{_OP}: attention_mask must be bool [B, 1 or Hq, Sq, Sk] (True = may be seen), got "
            f"{describe(mask)}"
        )
    return mask


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
