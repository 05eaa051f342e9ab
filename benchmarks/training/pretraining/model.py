"""The model of pretrain.py: a transformer like scGPT that predicts masked values.

A place is the sum of an embedding of its gene and one of its value, or of a learned vector where the value is masked.
Then come layers of attention, without an order of places, and a head that predicts the value of each place.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

Tokens = dict[str, torch.Tensor]  # those of `minibatch.tokens`


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model: the width of a place, layers, heads, and the width within a layer's feed-forward part."""

    width: int
    layers: int
    heads: int
    hidden: int


SHAPES = {
    "tiny": Shape(width=64, layers=2, heads=4, hidden=128),  # for two cores
    "12m": Shape(width=384, layers=6, heads=6, hidden=1536),  # 12 M parameters with 2 000 genes
    "51m": Shape(width=512, layers=12, heads=8, hidden=512),  # scGPT's; 52 M with 62 710 genes
}


class Layer(nn.Module):
    """Attention and a feed-forward part, each after a normalisation and added to what it read."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.forward_part = nn.Sequential(nn.Linear(width, shape.hidden), nn.GELU(), nn.Linear(shape.hidden, width))

    def forward(self, places: torch.Tensor, attended: torch.Tensor | None) -> torch.Tensor:
        rows, length, width = places.shape
        mixed = self.mixed(self.norms[0](places)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        read = functional.scaled_dot_product_attention(query, key, value, attn_mask=attended)
        places = places + self.joined(read.transpose(1, 2).reshape(rows, length, width))
        return places + self.forward_part(self.norms[1](places))


class MaskedValues(nn.Module):
    """Predicts the value of every place. Values are from 0 to 1."""

    def __init__(self, n_tokens: int, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.shape = shape
        self.gene = nn.Embedding(n_tokens, width)
        nn.init.normal_(self.gene.weight, std=0.3)
        self.value = nn.Sequential(nn.Linear(1, width), nn.GELU(), nn.Linear(width, width))
        self.masked = nn.Parameter(torch.zeros(width))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(
        self, ids: torch.Tensor, values: torch.Tensor, masked: torch.Tensor, attended: torch.Tensor | None
    ) -> torch.Tensor:
        """Predictions, rows x places. `attended` is None if no place is padding, else rows x 1 x 1 x places."""
        of_values = torch.where(masked[..., None], self.masked, self.value(values[..., None]))
        places = self.gene(ids) + of_values
        for layer in self.layers:
            places = layer(places, attended)
        return self.head(self.norm(places)).squeeze(-1)


def masked_places(tokens: Tokens, share: float, *key: int) -> torch.Tensor:
    """A share of the genes of each row, rows x places. They depend on the key, and on the shape of the minibatch."""
    generator = torch.Generator(tokens["values"].device).manual_seed(zlib.crc32(repr(key).encode()))
    chosen = torch.rand(tokens["values"].shape, generator=generator, device=tokens["values"].device) < share
    chosen[:, 0] = False  # <cls>
    return chosen & tokens["attention_mask"]


def predicted(model: nn.Module, tokens: Tokens, masked: torch.Tensor, n_bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The predictions of a model, and the true values; each rows x places.

    Attention needs no mask, and is faster without, if the minibatch has no padding.
    """
    values = tokens["values"].clamp(min=0) / n_bins
    attended = None if bool(tokens["attention_mask"].all()) else tokens["attention_mask"][:, None, None]
    return model(tokens["input_ids"], values, masked, attended).float(), values


def masked_loss(predictions: torch.Tensor, truth: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """The mean squared error at the masked places. The shapes do not depend on how many there are."""
    errors = torch.where(masked, predictions - truth, 0).square()
    return errors.sum() / masked.sum().clamp(min=1)
