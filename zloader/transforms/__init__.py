"""Transforms of x that run as compiled code while minibatches are gathered, ahead of the training loop.

>>> loader = zl.Loader(dataset, transforms=[zl.transforms.Downsample(100), zl.transforms.LogNormalize(1e4)])
>>> next(iter(loader)).x.dtype
torch.float32

They apply in the order of the list, to every layout alike, and their result depends on nothing but the values, the
seed, the epoch and the row.

Normalize, LogNormalize and Downsample look at whole rows. They see all genes of the dataset, and those of a panel
`dataset[:, genes]` become the columns of x afterwards, as one normalises with scanpy before one takes a subset of them.
"""

from __future__ import annotations

from zloader.common.keywords import answers
from zloader.transforms.downsampling import Downsample
from zloader.transforms.normalizing import LogNormalize, Normalize
from zloader.transforms.of_values import Clip, Scale
from zloader.transforms.statistics import GeneStatistics

__all__ = ["Clip", "Downsample", "GeneStatistics", "LogNormalize", "Normalize", "Scale"]

for _name in __all__:
    globals()[_name] = answers(globals()[_name])
