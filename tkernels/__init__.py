"""tkernels: Triton kernels for Qwen3-class models on NVIDIA GPUs and Ascend NPUs.

Inference only: no operation has a backward pass, and an eager result does not require a gradient,
whatever its arguments do.

Import it before triton on a machine without an accelerator (see ``tkernels.device``).
"""

from tkernels import device, reference  # isort: skip  (device decides how triton is imported)
from tkernels.config import force_config
from tkernels.device import UnsupportedError
from tkernels.kv_format import QuantizedKV, allocate_quantized
from tkernels.moe import fused_moe
from tkernels.ops.append_paged_kv import append_paged_kv
from tkernels.ops.flash_attn import flash_attn
from tkernels.ops.fp4_dequant import fp4_dequant
from tkernels.ops.fused_add_rms_norm import fused_add_rms_norm
from tkernels.ops.fused_add_rms_norm_quantized import fused_add_rms_norm_quantized
from tkernels.ops.fused_qk_norm_rope import fused_qk_norm_rope
from tkernels.ops.fused_qk_norm_rope_append import fused_qk_norm_rope_append
from tkernels.ops.fused_qk_norm_rope_append_attn import fused_qk_norm_rope_append_attn
from tkernels.ops.masked_gemm import masked_gemm
from tkernels.ops.merge_attn_states import merge_attn_states
from tkernels.ops.moe_combine import moe_combine
from tkernels.ops.moe_dispatch import moe_dispatch
from tkernels.ops.moe_gemm import moe_gemm
from tkernels.ops.moe_route import moe_route
from tkernels.ops.moe_w4a16_gemm import moe_w4a16_gemm
from tkernels.ops.paged_attn import paged_attn
from tkernels.ops.quantize_per_token import quantize_per_token
from tkernels.ops.release_residual_slots import release_residual_slots
from tkernels.ops.rms_norm import rms_norm
from tkernels.ops.rope import rope
from tkernels.ops.silu_and_mul import silu_and_mul
from tkernels.ops.silu_and_mul_quantized import silu_and_mul_quantized
from tkernels.ops.skinny_linear import skinny_linear
from tkernels.ops.w4a16_gemm import w4a16_gemm
from tkernels.ops.w8a16_gemm import w8a16_gemm
from tkernels.ops.watch_activations import watch_activations
from tkernels.quantized import append_quantized_kv, paged_attn_quantized
from tkernels.rope_table import build_cos_sin_cache
from tkernels.w4_format import repack_awq, repack_gptq, unpack_zero_points
from tkernels.w8_format import expand_block_scales

if device.INTERPRETED:  # whose bfloat16 is wrong
    from tkernels.interpreter import correct_bfloat16

    correct_bfloat16()

__version__ = "0.1.0"

__all__ = [
    "QuantizedKV",
    "UnsupportedError",
    "allocate_quantized",
    "append_paged_kv",
    "append_quantized_kv",
    "build_cos_sin_cache",
    "device",
    "expand_block_scales",
    "flash_attn",
    "force_config",
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
    "reference",
    "release_residual_slots",
    "repack_awq",
    "repack_gptq",
    "rms_norm",
    "rope",
    "silu_and_mul",
    "silu_and_mul_quantized",
    "skinny_linear",
    "unpack_zero_points",
    "w4a16_gemm",
    "w8a16_gemm",
    "watch_activations",
]


def __dir__() -> list[str]:
    """What users call, and what they look things up with; not each module that was imported."""
    return [*__all__, "config", *(name for name in globals() if name.startswith("__"))]
