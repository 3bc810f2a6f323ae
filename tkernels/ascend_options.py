"""Options of Huawei's compiler that a config for an Ascend chip may set, beside the tile sizes.

Any kernel's config may hold them; a key that is absent is left to the compiler. They reach it as
keywords of the launch. What each changes in the final IR was looked at with ascendnpu-ir 1.2.0
(most act on some kernels only); what it does to the time is not known without the hardware.
Options that change synchronisation alone (``unit_flag``, ``sync_solver``, ``inject_*``) are not
among them, as nothing but a chip can tell whether it is still right.
"""

from __future__ import annotations

from typing import Any

# None stands for the compiler's own choice.
ASCEND_OPTIONS: dict[str, list[Any]] = {
    "multibuffer": [None, False],  # default: buffers of a loop exist twice
    "enable_auto_bind_sub_block": [None, False],  # default: vector work is split over both cores
    "limit_auto_multi_buffer_of_local_buffer": [None, "no-limit"],  # default: not L0C
    "limit_auto_multi_buffer_only_for_local_buffer": [None, False],
    # These act on kernels whose cube and vector parts are pipelined through a workspace.
    "set_workspace_multibuffer": [None, 2],
    "tile_mix_vector_loop": [None, 2, 4],
    "tile_mix_cube_loop": [None, 2, 4],
    "enable_hivm_auto_cv_balance": [None, True],
}
