"""The parameters of pretrain.py's model, its FLOPs, and the peak of a device."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.training.pretraining.model import MaskedValues

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense FLOPs per second in bfloat16, as NVIDIA states them


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The parameters of a model, and its FLOPs per token in a training step, in two counts.

    `flops` counts the multiplications and additions of its matrix products: 6 per weight of a linear layer, and
    `12 * layers * width * length` for attention. `six_n` is 6 per parameter, embeddings included, as is usual.
    """

    parameters: int
    embedding_parameters: int
    weights: int
    attention: int

    def flops(self, length: int) -> float:
        """FLOPs per token in rows of `length` places."""
        return 6.0 * self.weights + 12.0 * self.attention * length

    @property
    def six_n(self) -> float:
        return 6.0 * self.parameters


def costs_of(model: MaskedValues) -> Costs:
    """Counts the parameters and products of a model."""
    return Costs(
        parameters=sum(each.numel() for each in model.parameters()),
        embedding_parameters=model.gene.weight.numel(),
        weights=sum(each.weight.numel() for each in model.modules() if isinstance(each, nn.Linear)),
        attention=model.shape.layers * model.shape.width,
    )


def peak_flops(device: torch.device, *, bf16: bool, seconds: float) -> tuple[float, str]:
    """The peak of a device in FLOPs per second, and where the number comes from.

    Known for some GPUs in bfloat16. Otherwise it is the fastest of the matrix products that fit into some seconds, with
    as many threads as torch uses.
    """
    if device.type == "cuda" and bf16:
        name = torch.cuda.get_device_name(device)
        for known, peak in PEAKS.items():
            if known in name:
                return peak, f"as stated for {name}"
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16 if bf16 else torch.float32) for _ in range(2))
    fastest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or fastest == float("inf"):
        began = time.perf_counter()
        product = a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - began)
        del product
    return 2 * size**3 / fastest, f"measured: products of {size} x {size} {str(a.dtype).removeprefix('torch.')}"
