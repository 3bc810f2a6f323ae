"""The PyTorch version of every operation, under the operation's own name.

``tkernels.reference.rms_norm`` takes the arguments of ``tkernels.rms_norm`` and needs no triton.
"""

from tkernels.ops.fused_add_rms_norm import fused_add_rms_norm_ref as fused_add_rms_norm
from tkernels.ops.rms_norm import rms_norm_ref as rms_norm

__all__ = ["fused_add_rms_norm", "rms_norm"]
