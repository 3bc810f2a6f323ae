"""How mypy sees ``triton`` and ``tl``: kernels are launched as ``kernel[grid](...)``."""

from collections.abc import Callable
from typing import Any

class Kernel:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...  # from another kernel

def jit(fn: Callable[..., Any]) -> Kernel: ...
def __getattr__(name: str) -> Any: ...
