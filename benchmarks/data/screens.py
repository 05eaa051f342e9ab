"""A synthetic drug screen in which there is something to learn: counts of cell lines x drugs, as an .h5ad file.

    python -m benchmarks.data.screens OUT.h5ad [--rows-per-group 128] [--obsm]

Rows are sorted by cell line and drug, `rows_per_group` rows each; the last drug of each cell line is the control, DMSO.
obs has cell_line, drug and plate. Each cell line has its own mean counts, from 6 programmes of genes. Each drug shifts
the logarithm of the mean counts along two of the programmes, and the cell line decides how strongly: by a logistic
function of its activity in a third programme. Counts are Poisson, with a log-normal total per row.

So a model that knows the drug can learn its mean shift, and one that also sees control cells of the cell line can learn
more. The mean shift of a new pair of cell line and drug is not that of the other cell lines.

--obsm also stores the counts as a dense obsm array "X_hvg", which is the form that cell-load reads fastest.
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

CONTROL = "DMSO"
PROGRAMMES = 6


@dataclass(frozen=True, kw_only=True)
class Screen:
    """The size of a screen. The control counts as one of the drugs."""

    cell_lines: int = 12
    drugs: int = 17
    genes: int = 2000
    rows_per_group: int = 128

    @property
    def rows(self) -> int:
        return self.cell_lines * self.drugs * self.rows_per_group


def mean_counts(screen: Screen, rng: np.random.Generator) -> NDArray[np.float64]:
    """The mean count of each gene: cell lines x drugs x genes."""
    base = rng.normal(-1.2, 0.8, screen.genes)
    programmes = rng.normal(size=(PROGRAMMES, screen.genes)) * (rng.random((PROGRAMMES, screen.genes)) < 0.15)
    activity = rng.normal(size=(screen.cell_lines, PROGRAMMES))
    shift = np.zeros((screen.drugs, PROGRAMMES))
    decides = rng.integers(0, PROGRAMMES, screen.drugs)
    for of_drug in shift[:-1]:
        of_drug[rng.choice(PROGRAMMES, 2, replace=False)] = rng.choice([-1, 1], 2) * rng.uniform(1.5, 2.5, 2)
    strength = 1 / (1 + np.exp(-3 * activity[:, decides]))
    moved = 0.5 * activity[:, None] + strength[..., None] * shift
    return np.exp(base + moved @ programmes)


def screen_of(screen: Screen, *, seed: int = 0, obsm: bool = False) -> ad.AnnData:
    """The screen in memory."""
    rng = np.random.default_rng(seed)
    means = mean_counts(screen, rng).reshape(-1, screen.genes)
    totals = rng.lognormal(0, 0.3, (len(means), screen.rows_per_group, 1))
    groups = [rng.poisson(mean * total) for mean, total in zip(means, totals, strict=True)]
    x = scipy.sparse.vstack([scipy.sparse.csr_matrix(group, dtype=np.float32) for group in groups], format="csr")
    group = np.arange(screen.rows) // screen.rows_per_group
    lines = [f"line {line:02d}" for line in range(screen.cell_lines)]
    drugs = [*(f"drug {drug:02d}" for drug in range(screen.drugs - 1)), CONTROL]
    obs = {
        "cell_line": pd.Categorical.from_codes(group // screen.drugs, lines),
        "drug": pd.Categorical.from_codes(group % screen.drugs, drugs),
        "plate": pd.Categorical.from_codes(rng.integers(0, 4, screen.rows), [f"plate {k}" for k in range(4)]),
    }
    names = [f"cell {row}" for row in range(screen.rows)]
    var = pd.DataFrame(index=[f"gene {gene}" for gene in range(screen.genes)])
    dense = {"X_hvg": x.toarray()} if obsm else {}
    return ad.AnnData(X=x, obs=pd.DataFrame(obs, index=names), var=var, obsm=dense)


def write(path: Path, screen: Screen, *, seed: int = 0, obsm: bool = False) -> None:
    """Writes the screen to an .h5ad file."""
    screen_of(screen, seed=seed, obsm=obsm).write_h5ad(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows-per-group", type=int, default=Screen.rows_per_group)
    parser.add_argument("--obsm", action="store_true")
    options = parser.parse_args()
    write(options.path, Screen(rows_per_group=options.rows_per_group), obsm=options.obsm)


if __name__ == "__main__":
    main()
