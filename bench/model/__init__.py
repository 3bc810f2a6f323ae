"""Whole networks: decode steps (``python -m bench model``) and the engine (``... engine``).

This folder alone of ``bench`` imports the runner, ``model``.
"""
