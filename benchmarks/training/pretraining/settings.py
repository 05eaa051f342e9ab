"""The options of a run of pretrain.py, where its rows come from, and its tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zloader as zl
from benchmarks.data.programmes import Atlas

N_BINS = 51
SPECIAL = {"<pad>": 0, "<cls>": 1}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a run. `steps` ends it early. The learning rate falls over all `epochs`.

    `probe_s` is for how long the peak of the device, and the speed without loading, are measured.
    """

    size: str = "tiny"
    batch_size: int = 16
    fetch_factor: int = 64
    tokens: int = 64
    masked: float = 0.25
    epochs: int = 8
    steps: int | None = None
    rate: float = 3e-3
    warmup: int = 100
    seed: int = 0
    held_out: int = 1000
    device: str = "cpu"
    bf16: bool = False
    compile: bool = False
    peak_tflops: float | None = None
    ray_tasks: int = 0
    ray_address: str | None = None
    checkpoint: str | None = None
    checkpoint_steps: int = 200
    probe_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Source:
    """A store, and what is known of it. The vocabulary is a JSON file; None stands for all genes of the store."""

    url: str
    storage_options: dict[str, Any] = field(default_factory=dict)
    cache: str | None = None
    vocabulary: str | None = None
    atlas: Atlas | None = None

    @property
    def name(self) -> str:
        """The last part of the URL, which says all about an atlas. The same store may have several URLs."""
        return self.url.rstrip("/").rpartition("/")[2]


def tokenizer_of(settings: Settings, vocabulary: dict[str, int]) -> zl.tokenizers.ScGPT:
    """scGPT's tokens. Compiled models get rows of one length."""
    return zl.tokenizers.ScGPT(
        vocabulary,
        n_bins=N_BINS,
        max_length=settings.tokens,
        side="one",
        pad_to=settings.tokens if settings.compile else None,
    )


def vocabulary_of(source: Source, dataset: zl.Dataset) -> dict[str, int]:
    """Token ids by name."""
    if source.vocabulary is not None:
        try:
            return dict(json.loads(Path(source.vocabulary).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise SystemExit(
                f"--vocabulary {source.vocabulary} is no JSON file of token ids by name: {error}"
            ) from error
    return SPECIAL | {name: len(SPECIAL) + number for number, name in enumerate(dataset.var_names)}
