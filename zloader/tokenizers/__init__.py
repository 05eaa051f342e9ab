"""Rows of counts as the tokens of a model: compiled loops over many rows at a time. `zl.tokenizers` is this folder."""

from zloader.common.keywords import answers
from zloader.tokenizers.geneformer import Geneformer
from zloader.tokenizers.scgpt import ScGPT

__all__ = ["Geneformer", "ScGPT"]

for _name in __all__:
    globals()[_name] = answers(globals()[_name])
