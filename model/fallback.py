"""Dynamic fallback: a request whose activations leave what was calibrated goes on in 16 bits.

Some layers' activations (the inputs of ``down_proj``) are watched by ``watch_activations``, one
launch a step. It sets the bit of a request's slot in one mask of the device, and all w8a8 layers
multiply by that mask, so a verdict holds from the next step on, for all layers and remaining tokens
of that request, and for no other request. Nothing here waits for the device.

The layers' ``ops`` are wrapped for a step (``Watch.step``): the network itself knows nothing of it.
Networks with experts are refused: a bit of the mask stands for a request, one of ``fused_moe``'s
for an expert, and no ``silu_and_mul`` of experts is there to be watched.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from model.config import ModelConfig
    from model.kv_cache import Ints, SequenceState
    from model.qwen3 import Model

FORMAT = "tkernels.watch"
BINS = 512
WINDOW = 64  # tokens between two verdicts
PROMPT_ROWS = 256  # tokens of a prompt's chunk that are watched, at most, evenly spread
# What was seen in a slot: histogram [W, 512], moments [W, 5], counters [W, 4].
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
REASONS = {1: "kl", 2: "skewness", 3: "kl and skewness", 4: "not finite"}


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What the inputs of ``down_proj`` of some layers look like, and how far they may go."""

    layers: tuple[int, ...]  # in order
    facts: torch.Tensor  # fp32 [W, 4]: low, bins per unit, centre, 1 / spread
    reference: torch.Tensor  # fp32 [W, 512], shares, above 0
    kl_above: float
    skewness_above: float

    def save(self, path: Path, found: dict[str, Any]) -> None:
        """Write it to a safetensors file; ``found`` says what it was made from."""
        from safetensors.torch import save_file

        facts = {
            "format": FORMAT,
            "layers": json.dumps(self.layers),
            "kl_above": str(self.kl_above),
            "skewness_above": str(self.skewness_above),
            "found": json.dumps(found),
        }
        tensors = {"facts": self.facts.contiguous(), "reference": self.reference.contiguous()}
        save_file(tensors, path, metadata=facts)


def refuse_experts(config: ModelConfig) -> None:
    """Raises for networks in which not every layer has a ``down_proj`` to watch."""
    if config.mixture is not None:
        raise ValueError(
            "expected a network whose layers all have a down_proj that can be watched, got one "
            f"with experts in {len(config.mixture.layers)} of {config.num_layers} layers"
        )


def load(path: Path, config: ModelConfig) -> Calibration:
    """What ``python -m model.calibrate_watch`` wrote for this model.

    Raises:
        ValueError: no such file, no calibration, or one that does not fit the model.
    """
    from safetensors import SafetensorError, safe_open

    try:
        refuse_experts(config)
    except ValueError as error:
        raise ValueError(f"--fallback: {error}") from None
    try:
        with safe_open(path, framework="pt") as file:
            meta = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--fallback {path}: expected a safetensors file, got {error}") from None
    if meta.get("format") != FORMAT:
        raise ValueError(f"--fallback {path}: expected format {FORMAT}, got {meta.get('format')!r}")
    try:
        layers = tuple(int(i) for i in json.loads(meta["layers"]))
        limits = float(meta["kl_above"]), float(meta["skewness_above"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"--fallback {path}: expected a whole calibration, got {error!r}"
        ) from None
    if not layers or sorted(set(layers)) != list(layers) or layers[-1] >= config.num_layers:
        raise ValueError(
            f"--fallback {path}: expected layers of this model's {config.num_layers}, got "
            f"{list(layers)}"
        )
    for name, columns in (("facts", 4), ("reference", BINS)):
        t = tensors.get(name)
        shape = [len(layers), columns]
        if t is None or list(t.shape) != shape or t.dtype != torch.float32:
            raise ValueError(
                f"--fallback {path}: expected {name} in fp32 {shape}, got "
                f"{'none' if t is None else f'{t.dtype} {list(t.shape)}'}"
            )
        if not bool(t.isfinite().all()):
            raise ValueError(f"--fallback {path}: expected finite {name}, got others")
    least = min(float(tensors["reference"].min()), float(tensors["facts"][:, 1::2].min()), *limits)
    if not least > 0:
        raise ValueError(
            f"--fallback {path}: expected shares, scales and limits above 0, got {least}"
        )
    return Calibration(layers, tensors["facts"], tensors["reference"], *limits)


def multiplies_in_int8(model: Model) -> bool:
    """Whether a mask would change anything: some layer is w8a8."""
    from model.quantized_matrix import multiplies_codes
    from model.qwen3 import Linear

    linears = [v for layer in model.layers for v in vars(layer).values() if isinstance(v, Linear)]
    return any(any(multiplies_codes(linear.weight)) for linear in linears)


class Watch:
    """State of the watched requests on the device. Each has a slot from its first step to its end.

    ``mask``: int64 words, a bit a slot, as ``masked_gemm`` reads it.
    """

    def __init__(
        self, calibration: Calibration, model: Model, n_slots: int, device: torch.device
    ) -> None:
        self.calibration, self.n_slots = calibration, n_slots
        self._num_layers = model.config.num_layers
        self._facts = calibration.facts.to(device)
        self._reference = calibration.reference.to(device)
        w = len(calibration.layers)
        self.histogram = torch.zeros(w, n_slots, BINS, dtype=torch.int32, device=device)
        self.moments = torch.zeros(w, n_slots, 5, device=device)
        self.counters = torch.zeros(w, n_slots, 4, dtype=torch.int32, device=device)
        self.mask = torch.zeros(-(-n_slots // 64), dtype=torch.int64, device=device)
        self._free = list(range(n_slots))[::-1]

    def take(self, sequence: SequenceState) -> None:
        """Give a request a clean slot, if it has none.

        Raises:
            ValueError: all are taken.
        """
        if sequence.group >= 0:
            return
        if not self._free:
            raise ValueError(
                f"fallback: expected at most {self.n_slots} requests at a time, got another"
            )
        sequence.group = self._free.pop()
        self.reset(sequence.group)

    def release(self, sequence: SequenceState) -> None:
        """Take the slot of a request that has ended."""
        if sequence.group >= 0:
            self._free.append(sequence.group)
            sequence.group = -1

    def reset(self, slot: int) -> None:
        """Forget all that was seen in a slot: its next request starts in int8."""
        for part in self.state(slot):
            part.zero_()
        self.mask[slot // 64] &= ~_bit(slot)

    def state(self, slot: int) -> State:
        """What was seen in a slot, as it is and will be."""
        return self.histogram[:, slot], self.moments[:, slot], self.counters[:, slot]

    def put(self, slot: int, state: State) -> None:
        """Go on in a clean slot from what was seen in another."""
        for part, values in zip(self.state(slot), state, strict=True):
            part.copy_(values)
        self.mask[slot // 64] |= state[2][:, 2].any() * _bit(slot)

    def marks(self, sequences: Sequence[SequenceState], new: Sequence[int]) -> Ints:
        """What ``step`` takes for the next ``new[i]`` tokens of sequence i."""
        groups = [s.group for s, n in zip(sequences, new, strict=True) for _ in range(n)]
        watched = [
            s.group if i % -(-n // PROMPT_ROWS) == 0 else -1
            for s, n in zip(sequences, new, strict=True)
            for i in range(n)
        ]
        return np.array([groups, watched], np.int32)

    def step(self, ops: Any, marks: Ints) -> Step:
        """The operations of a step.

        Args:
            marks: int32 [2, T]: of each token its place in the mask, and the slot in which it is
                watched; -1 is none.
        """
        rows = torch.from_numpy(marks).to(self.mask.device, non_blocking=True)
        return Step(self, ops, rows[0], rows[1])

    def see(self, ops: Any, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Take x [W, T, I] of a step into the watch."""
        ops.watch_activations(
            x,
            rows,
            self._facts,
            self._reference,
            self.histogram,
            self.moments,
            self.counters,
            self.mask,
            window=WINDOW,
            kl_above=self.calibration.kl_above,
            skewness_above=self.calibration.skewness_above,
        )

    def report(self, sequence: SequenceState) -> dict[str, Any] | None:
        """``told`` of a request that has a slot."""
        return self.told(self.state(sequence.group))

    def told(self, state: State) -> dict[str, Any] | None:
        """Why a request fell back, None if it did not. Waits for the device: for the end.

        ``token``: how many of its tokens had been watched by the first verdict.
        """
        verdict = first_verdict(state)
        if verdict is None:
            return None
        token, w, reason = verdict
        kl, skewness = state[1][w, 3:].tolist()
        found = {"token": token, "reason": REASONS[reason], "layer": self.calibration.layers[w]}
        return found if reason == 4 else {**found, "kl": kl, "skewness": skewness}


def first_verdict(state: State) -> tuple[int, int, int] | None:
    """(watched tokens by then, watch, reason) of a slot's first verdict. Waits for the device."""
    rows = enumerate(state[2].tolist())
    return min(((at, w, reason) for w, (_, _, reason, at) in rows if reason), default=None)


def _bit(slot: int) -> int:
    """The bit of a slot in its word of the mask, as an int64."""
    return -(2**63) if slot % 64 == 63 else 1 << slot % 64


class Step:
    """The operations of one step: products by the mask, and activations kept to be seen."""

    skinny_linear = None  # its fused activations would not be seen

    def __init__(
        self, watch: Watch, ops: Any, row_group: torch.Tensor, watched: torch.Tensor
    ) -> None:
        self._watch, self._row_group, self._rows = watch, row_group, watched
        self._ops = self.below = ops
        self._place = {layer: w for w, layer in enumerate(watch.calibration.layers)}
        self._calls = 0
        self._kept: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def masked_gemm(self, x: torch.Tensor, *rest: Any, high: bool = False, **more: Any) -> Any:
        if high or x.shape[0] != self._row_group.shape[0]:  # W8A16; lm_head, of some rows
            return self._ops.masked_gemm(x, *rest, high=high, **more)
        return self._ops.masked_gemm(
            x, *rest, mask=self._watch.mask, row_group=self._row_group, **more
        )

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """The input of ``down_proj``; of a watched layer it is written where it stays."""
        found: torch.Tensor = self._ops.silu_and_mul(x, **self._where(x))
        return found

    def silu_and_mul_quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same with its codes; rows may run high, so that they are written too."""
        found: tuple[torch.Tensor, ...]
        found = self._ops.silu_and_mul_quantized(x, keep=True, **self._where(x))
        return found

    def fused_add_rms_norm_quantized(self, *rest: Any, **more: Any) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...]
        found = self._ops.fused_add_rms_norm_quantized(*rest, keep=True, **more)
        return found

    def _where(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Where the next layer's ``silu_and_mul`` of x goes, if it is watched."""
        layer, self._calls = self._calls, self._calls + 1
        w = self._place.get(layer)
        if w is None:
            return {}
        if self._kept is None:
            self._kept = x.new_empty((len(self._place), x.shape[0], x.shape[1] // 2))
        return {"out": self._kept[w]}

    def end(self) -> None:
        """After the last layer."""
        if self._kept is not None:
            self._watch.see(self._ops, self._kept, self._rows)
