"""A synthetic atlas whose genes follow programmes, so that the counts of a cell can be inferred from one another.

    python -m benchmarks.data.programmes OUT.h5ad [--rows 12000 --genes 200 --programmes 4 --types 12 --seed 0]

The logarithm of a gene's mean count is its own level plus the activities of the cell's programmes, each times the
loading of the gene. A gene has loadings in a third of the programmes. A cell has the activities of its type and its
own deviation from them, and a log-normal depth. Counts are Poisson. Rows come in random order, with obs cell_type.

So a model that has seen some counts of a cell can infer the activities, and from them the other counts. Means are 1 to
20 counts, as in deeply sequenced cells, because most counts of shallow cells are 1, and little can be learned of them.

Everything is a function of the Atlas, whose seed is one of its sizes. `truth_of` gives what the counts were drawn from,
for oracles, without drawing them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse
from numpy.typing import NDArray

OF_TYPE_SD, OF_CELL_SD, DEPTH_SD = 0.8, 0.6, 0.3
_LEVEL, _LEVEL_SD, _LOADING_SD, _LOADED = 1.3, 0.7, 0.6, 1 / 3
_BLOCK = 4096  # rows drawn at once


@dataclass(frozen=True, kw_only=True)
class Atlas:
    """The sizes and the seed of an atlas."""

    rows: int = 12_000
    genes: int = 200
    programmes: int = 4
    types: int = 12
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What counts are drawn from. The rates of row r are `exp(log_depth[r] + level + activity[r] @ loadings)`.

    `types` and `log_depth` (rows), `activity` (rows x programmes), `level` (genes), `loadings` (programmes x genes).
    """

    types: NDArray[np.int64]
    activity: NDArray[np.float64]
    log_depth: NDArray[np.float64]
    level: NDArray[np.float64]
    loadings: NDArray[np.float64]

    def rates(self, rows: NDArray[np.int64] | slice) -> NDArray[np.float64]:
        """The mean counts of some rows: rows x genes."""
        return np.exp(self.log_depth[rows, None] + self.level + self.activity[rows] @ self.loadings)


def truth_of(atlas: Atlas) -> Truth:
    """Draws everything but the counts."""
    rng = np.random.default_rng([atlas.seed, 0])
    shape = (atlas.programmes, atlas.genes)
    level = rng.normal(_LEVEL, _LEVEL_SD, atlas.genes)
    loadings = rng.normal(0, _LOADING_SD, shape) * (rng.random(shape) < _LOADED)
    of_types = rng.normal(0, OF_TYPE_SD, (atlas.types, atlas.programmes))
    types = rng.integers(0, atlas.types, atlas.rows)
    activity = of_types[types] + rng.normal(0, OF_CELL_SD, (atlas.rows, atlas.programmes))
    log_depth = rng.normal(0, DEPTH_SD, atlas.rows)
    return Truth(types=types, activity=activity, log_depth=log_depth, level=level, loadings=loadings)


def anndata_of(atlas: Atlas) -> ad.AnnData:
    """The atlas in memory: counts as CSR float32."""
    truth = truth_of(atlas)
    blocks = []
    for first in range(0, atlas.rows, _BLOCK):
        rng = np.random.default_rng([atlas.seed, 1, first])
        drawn = rng.poisson(truth.rates(slice(first, first + _BLOCK)))
        blocks.append(scipy.sparse.csr_matrix(drawn, dtype=np.float32))
    types = pd.Categorical.from_codes(truth.types, [f"type {number:02d}" for number in range(atlas.types)])
    obs = pd.DataFrame({"cell_type": types}, index=[f"cell {row}" for row in range(atlas.rows)])
    var = pd.DataFrame(index=[f"gene {gene}" for gene in range(atlas.genes)])
    return ad.AnnData(X=scipy.sparse.vstack(blocks, format="csr"), obs=obs, var=var)


def write(path: Path, atlas: Atlas) -> None:
    """Writes the atlas to an .h5ad file."""
    anndata_of(atlas).write_h5ad(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    for name, default in vars(Atlas()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args())
    write(options.pop("path"), Atlas(**options))


if __name__ == "__main__":
    main()
