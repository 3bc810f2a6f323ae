"""Bars on a terminal while prompts are computed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(
    prompt_tokens: list[int], chunk: int
) -> Iterator[tuple[Callable[[int], None] | None, Callable[[int, int], None] | None]]:
    """Bars on stderr, if that is a terminal: of several prompts, and of a prompt in several chunks.

    Yields what ``on_done`` and ``on_prefill`` may call.
    """
    several = len(prompt_tokens) > 1
    if not sys.stderr.isatty() or not (several or prompt_tokens[0] > chunk):
        yield None, None
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=not several)
    prompts = bar.add_task("prompts", total=len(prompt_tokens), visible=several)
    tokens = bar.add_task("prompt tokens", visible=False)

    def on_prefill(done: int, total: int) -> None:
        shown = done < total and total > chunk
        bar.update(tokens, completed=done, total=total, visible=shown, refresh=True)
        if not several:  # the reply is streamed to the same terminal
            (bar.start if done < total else bar.stop)()

    if several:
        bar.start()
    try:
        yield (lambda index: bar.advance(prompts)), on_prefill
    finally:
        bar.stop()
