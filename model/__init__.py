"""Runner for real checkpoints: Qwen3 dense and the Llama family. ``python -m model.generate``."""

import time

STARTED = time.perf_counter()  # the zero of "load" in the statistics: before torch is imported
