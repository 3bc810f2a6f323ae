"""The PyTorch version of every operation, under the operation's own name.

``tkernels.reference.rms_norm`` takes the arguments of ``tkernels.rms_norm`` and needs no triton.
Arguments are not checked here: what is refused there may give an error of PyTorch, or a result.
"""

from tkernels.moe import fused_moe_ref as fused_moe
from tkernels.ops.append_paged_kv import append_paged_kv_ref as append_paged_kv
from tkernels.ops.flash_attn import flash_attn_ref as flash_attn
from tkernels.ops.fp4_dequant import fp4_dequant_ref as fp4_dequant
from tkernels.ops.fused_add_rms_norm import fused_add_rms_norm_ref as fused_add_rms_norm
from tkernels.ops.fused_add_rms_norm_quantized import (
    fused_add_rms_norm_quantized_ref as fused_add_rms_norm_quantized,
)
from tkernels.ops.fused_qk_norm_rope import fused_qk_norm_rope_ref as fused_qk_norm_rope
from tkernels.ops.fused_qk_norm_rope_append import (
    fused_qk_norm_rope_append_ref as fused_qk_norm_rope_append,
)
from tkernels.ops.fused_qk_norm_rope_append_attn import (
    fused_qk_norm_rope_append_attn_ref as fused_qk_norm_rope_append_attn,
)
from tkernels.ops.masked_gemm import masked_gemm_ref as masked_gemm
from tkernels.ops.merge_attn_states import merge_attn_states_ref as merge_attn_states
from tkernels.ops.moe_combine import moe_combine_ref as moe_combine
from tkernels.ops.moe_dispatch import moe_dispatch_ref as moe_dispatch
from tkernels.ops.moe_gemm import moe_gemm_ref as moe_gemm
from tkernels.ops.moe_route import moe_route_ref as moe_route
from tkernels.ops.moe_w4a16_gemm import moe_w4a16_gemm_ref as moe_w4a16_gemm
from tkernels.ops.paged_attn import paged_attn_ref as paged_attn
from tkernels.ops.quantize_per_token import quantize_per_token_ref as quantize_per_token
from tkernels.ops.release_residual_slots import (
    release_residual_slots_ref as release_residual_slots,
)
from tkernels.ops.rms_norm import rms_norm_ref as rms_norm
from tkernels.ops.rope import rope_ref as rope
from tkernels.ops.silu_and_mul import silu_and_mul_ref as silu_and_mul
from tkernels.ops.silu_and_mul_quantized import (
    silu_and_mul_quantized_ref as silu_and_mul_quantized,
)
from tkernels.ops.skinny_linear import skinny_linear_ref as skinny_linear
from tkernels.ops.w4a16_gemm import w4a16_gemm_ref as w4a16_gemm
from tkernels.ops.w8a16_gemm import w8a16_gemm_ref as w8a16_gemm
from tkernels.ops.watch_activations import watch_activations_ref as watch_activations
from tkernels.quantized import append_quantized_kv_ref as append_quantized_kv
from tkernels.quantized import paged_attn_quantized_ref as paged_attn_quantized

__all__ = [
    "append_paged_kv",
    "append_quantized_kv",
    "flash_attn",
    "fp4_dequant",
    "fused_add_rms_norm",
    "fused_add_rms_norm_quantized",
    "fused_moe",
    "fused_qk_norm_rope",
    "fused_qk_norm_rope_append",
    "fused_qk_norm_rope_append_attn",
    "masked_gemm",
    "merge_attn_states",
    "moe_combine",
    "moe_dispatch",
    "moe_gemm",
    "moe_route",
    "moe_w4a16_gemm",
    "paged_attn",
    "paged_attn_quantized",
    "quantize_per_token",
    "release_residual_slots",
    "rms_norm",
    "rope",
    "silu_and_mul",
    "silu_and_mul_quantized",
    "skinny_linear",
    "w4a16_gemm",
    "w8a16_gemm",
    "watch_activations",
]
