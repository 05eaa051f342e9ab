"""Rows of counts as the tokens of a model: compiled loops over many rows at a time. `zl.tokenizers` is this folder."""

from typing import NoReturn

from zloader.common.keywords import answers
from zloader.common.removed import absent
from zloader.tokenizers.geneformer import Geneformer
from zloader.tokenizers.scgpt import ScGPT

__all__ = ["Geneformer", "ScGPT"]

for _name in __all__:
    globals()[_name] = answers(globals()[_name])


def __getattr__(name: str) -> NoReturn:
    raise absent(__name__, name)
