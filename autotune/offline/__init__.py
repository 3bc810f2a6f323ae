"""Estimates of a config without its chip: a compiler's verdict and a model, for each kind of chip.

A model module has ``estimate(spec, problem, config) -> Answer`` and ``compilers()``, the versions
of what it asks. It runs in a process with ``TKERNELS_DEVICE=compile:<arch>``.
"""

from __future__ import annotations

import importlib
from typing import Any

from tkernels.device import Device


def model_for(dev: Device) -> Any:
    """The module that knows ``dev``; imported here, as each needs another environment."""
    return importlib.import_module(f"autotune.offline.{'ascend' if dev.is_npu else 'nvidia'}")
