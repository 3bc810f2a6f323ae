"""Decode steps (``python -m bench model``), the engine (``engine``), layers of experts (``moe``).

This folder alone of ``bench`` imports the runner, ``model``.
"""
