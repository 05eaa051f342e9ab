"""Rows of counts as the tokens of a model: compiled loops over many rows at a time. `zl.tokenizers` is this folder."""

from zloader.tokenizers.geneformer import Geneformer
from zloader.tokenizers.masking import Masked
from zloader.tokenizers.scgpt import ScGPT

__all__ = ["Geneformer", "Masked", "ScGPT"]
