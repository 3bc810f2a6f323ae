"""Runner for real checkpoints: Qwen3 dense and the Llama family. ``python -m model.generate``."""

import time

STARTED = time.perf_counter()  # the zero of "load" in the statistics: before torch is imported

# Prompt tokens of one step, at most: enough work for any device, and activations of some 100 MB.
PREFILL_CHUNK = 2048
