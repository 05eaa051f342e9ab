"""Genes that sources name differently: `genes_by`, labels, and warnings of joins that find few genes in common."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from typer.testing import CliRunner

import zloader as zl
from zloader.commands.cli import app
from zloader.common.errors import OptionError
from zloader.selecting.gene_names import lost_genes

HUMAN = ["INS", "GCG", "TP53", "ACTB", "MT1"]
MOUSE = ["Actb", "Ins1", "Ins2", "Gcg", "MT1"]
ORTHOLOGS = {"Ins1": "INS", "Gcg": "GCG", "Actb": "ACTB", "Trp53": "TP53"}
JOINED = ["ACTB", "GCG", "INS", "Ins2", "MT1", "TP53"]


def cells(names: list[str], seed: int) -> ad.AnnData:
    obs = pd.DataFrame(index=[f"{seed}-{row}" for row in range(6)])
    x = scipy.sparse.csr_matrix(np.random.default_rng(seed).integers(0, 3, (6, len(names))).astype(np.float32))
    return ad.AnnData(x, obs, pd.DataFrame({"former": names}, index=names))


@pytest.fixture
def human() -> ad.AnnData:
    return cells(HUMAN, 1)


@pytest.fixture
def mouse() -> ad.AnnData:
    return cells(MOUSE, 2)


def by_hand(human: ad.AnnData, mouse: ad.AnnData) -> np.ndarray:
    mouse = mouse.copy()
    mouse.var_names = [ORTHOLOGS.get(name, name) for name in MOUSE]
    return ad.concat([human, mouse], join="outer", fill_value=0)[:, JOINED].X.toarray()


WAYS: dict[str, Any] = {
    "mapping": ORTHOLOGS,
    "series": pd.Series({**ORTHOLOGS, "Ins2": None}),
    "function": lambda name: ORTHOLOGS.get(name),
    "one for each": [None, ORTHOLOGS],
    "columns and functions": ["former", lambda name: ORTHOLOGS.get(name, name)],
}


@pytest.mark.every(6)
@pytest.mark.parametrize("genes_by", WAYS.values(), ids=WAYS)
def test_datasets_and_stores_name_genes_alike(
    tmp_path: Path, human: ad.AnnData, mouse: ad.AnnData, genes_by: Any
) -> None:
    wanted = by_hand(human, mouse)
    urls = [tmp_path / "human.zarr", tmp_path / "mouse.zarr"]
    for url, adata in zip(urls, (human, mouse), strict=True):
        zl.convert(adata, url, progress=False)
    opened = zl.open_dataset(urls, join="outer", genes_by=genes_by)
    zl.convert(urls, tmp_path / "both.zarr", join="outer", genes_by=genes_by, progress=False)
    for dataset in (opened, pickle.loads(pickle.dumps(opened)), zl.open_dataset(tmp_path / "both.zarr")):
        assert dataset.var_names.tolist() == JOINED
        np.testing.assert_array_equal(dataset.take(range(12)).X.toarray(), wanted)
    assert zl.verify(tmp_path / "both.zarr", against=urls, genes_by=genes_by, progress=False).ok
    found = zl.verify(tmp_path / "both.zarr", against=urls, progress=False)
    assert "repeat genes_by" in found.problems[0].what


def test_new_names_of_raw_and_of_one_store(tmp_path: Path, mouse: ad.AnnData) -> None:
    mouse.raw = mouse
    zl.convert(mouse, tmp_path / "a.zarr", progress=False)
    dataset = pickle.loads(pickle.dumps(zl.open_dataset(tmp_path / "a.zarr", genes_by=lambda name: name.upper())))
    for x in ("X", "raw/X"):
        assert dataset.matrices.var_of(x).index.tolist() == [name.upper() for name in MOUSE]
    assert dataset.var["var_names"].tolist() == MOUSE
    zl.convert(mouse, tmp_path / "b.zarr", genes_by=str.upper, progress=False)
    again = ad.read_zarr(tmp_path / "b.zarr")
    assert again.raw.var_names.tolist() == again.var_names.tolist() == [name.upper() for name in MOUSE]


REFUSED: dict[str, tuple[Any, str]] = {
    "two become one": ({"Ins1": "INS", "Ins2": "INS"}, "alike: Ins1 and Ins2 as INS. Leave all but one"),
    "one becomes another": ({"Ins1": "Ins2"}, "Ins1 and Ins2 as Ins2"),
    "numbers": (len, "names the gene 'INS' 3: both names must be text"),
    "number": (3, "genes_by must be the name of a var column"),
    "a number in a list": ([None, 3], "genes_by must be the name of a var column"),
    "a short list": ([ORTHOLOGS], "genes_by lists 1 ways to name genes for 2 sources"),
    "repeats": (pd.Series(["A", "B"], index=["Ins1", "Ins1"]), "1 repeated gene name"),
}


@pytest.mark.every(3)
@pytest.mark.parametrize(("genes_by", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(tmp_path: Path, human: ad.AnnData, mouse: ad.AnnData, genes_by: Any, words: str) -> None:
    urls = [tmp_path / "human.zarr", tmp_path / "mouse.zarr"]
    for url, adata in zip(urls, (human, mouse), strict=True):
        zl.convert(adata, url, progress=False)
    for act in (zl.open_dataset, lambda *a, **k: zl.convert(*a, tmp_path / "both.zarr", progress=False, **k)):
        with pytest.raises(OptionError, match=words.replace("(", r"\(")):
            act(urls, join="outer", genes_by=genes_by)


def test_labels_of_files(tmp_path: Path, human: ad.AnnData) -> None:
    for name in ("p1", "p2"):
        human.write_h5ad(tmp_path / f"{name}.h5ad")
    sources = {"alone": tmp_path / "p1.h5ad", "both": str(tmp_path / "p*.h5ad")}
    select = zl.Selection(source_column="plate", unique_obs_names=True)
    zl.convert(sources, tmp_path / "a.zarr", select=select, progress=False)
    assert zl.open_dataset(tmp_path / "a.zarr").categories("plate").tolist() == ["alone", "both/p1", "both/p2"]
    for wrong in ({1: human}, {"": human}, {None: human}):
        with pytest.raises(OptionError, match="labels of sources must be text"):
            zl.convert(wrong, tmp_path / "b.zarr", progress=False)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="no labels for its stores"):
        zl.open_dataset({"a": tmp_path / "a.zarr"})  # type: ignore[arg-type]


def test_a_join_of_other_names_warns(tmp_path: Path, human: ad.AnnData, mouse: ad.AnnData) -> None:
    urls = [tmp_path / "human.zarr", tmp_path / "mouse.zarr"]
    for url, adata in zip(urls, (human, mouse), strict=True):
        zl.convert(adata, url, progress=False)

    def convert(urls: list[Path], join: str) -> None:
        zl.convert(urls, tmp_path / "both.zarr", join=join, progress=False)

    for act in (zl.open_dataset, convert):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            act(urls, join="inner")
        (found,) = [one for one in seen if "drops most genes" in str(one.message)]
        assert re.search(r"keeps 1 of 5 of \S+human.zarr, 1 of 5 of \S+mouse.zarr", str(found.message))
        assert Path(found.filename) == Path(__file__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = zl.open_dataset(urls, join="inner")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "join=.*")
        pickle.loads(pickle.dumps(dataset))  # a worker that opens it again does not repeat the warning
        zl.open_dataset(urls, join="inner", genes_by=ORTHOLOGS)


IDS = [f"ENSG0000000000{n}" for n in range(1, 7)]
LOST: dict[str, tuple[str, list[str], list[str], list[str] | None, str]] = {
    "case": ("inner", ["AA", "BB", "CC"], ["Aa", "Bb", "DD"], None, "2 would match if upper and lower case"),
    "case, outer": ("outer", ["AA", "BB", "CC"], ["Aa", "Bb", "DD"], None, "2 would match if upper and lower case"),
    "case, listed": ("None", ["AA", "BB", "CC"], ["Aa", "Bb", "DD"], ["AA", "BB"], "0 of 2 of b"),
    "version": (
        "inner",
        IDS,
        [f"{name}.1{n}" for n, name in enumerate(IDS)],
        None,
        "6 would match without the version",
    ),
    "symbols": ("outer", IDS, ["INS", "GCG"], None, "a has Ensembl IDs ENSG (ENSG00000000001), but b has other names"),
    "species": ("inner", IDS, [x.replace("G", "MUSG") for x in IDS], None, "b has Ensembl IDs ENSMUSG (ENSMUSG0"),
    "unknown": ("inner", ["a", "b", "c"], ["a", "d", "e"], None, "keeps 1 of 3 of a, 1 of 3 of b. If"),
    "panels": ("outer", ["a", "b", "c"], ["a", "d", "e"], None, ""),
    "half": ("inner", ["a", "b"], ["a", "c"], None, ""),
    "a panel": ("None", ["a", "b"], ["c", "d"], ["a", "b"], ""),
    "empty": ("inner", [], [], None, ""),
}


@pytest.mark.parametrize(("join", "one", "other", "genes", "words"), LOST.values(), ids=LOST)
def test_reasons(join: str, one: list[str], other: list[str], genes: list[str] | None, words: str) -> None:
    found = lost_genes(join, [("a", one), ("b", other)], genes)
    assert words in found
    assert bool(found) == bool(words)


@pytest.mark.parametrize("write", [lambda rows: ",".join(rows), lambda rows: "\t".join(rows)], ids=["csv", "tsv"])
def test_a_file_of_new_names(
    tmp_path: Path, human: ad.AnnData, mouse: ad.AnnData, write: Callable[[tuple[str, str]], str]
) -> None:
    rows = [("mouse", "human"), *ORTHOLOGS.items(), ("Ins2", ""), ("Gcg", "GCG")]
    file = tmp_path / ("a.tsv" if "\t" in write(rows[0]) else "a.csv")
    file.write_text("\ufeff" + "\r\n".join(map(write, rows)) + "\r\n\r\n", encoding="utf-8")
    paths = [str(tmp_path / "human.h5ad"), str(tmp_path / "mouse.h5ad")]
    for path, adata in zip(paths, (human, mouse), strict=True):
        adata.write_h5ad(path)
    named = ["--genes-by", "none", "--genes-by", str(file)]
    dest = str(tmp_path / "a.zarr")
    done = CliRunner().invoke(app, ["convert", *paths, dest, "--join", "outer", *named])
    assert done.exit_code == 0, done.output
    assert zl.open_dataset(dest).var_names.tolist() == JOINED
    done = CliRunner().invoke(app, ["verify", dest, "--against", paths[0], "--against", paths[1], *named])
    assert done.exit_code == 0, done.output
    for text, words in (("a,b,c\n", "line 1 of"), ("a,b\na,c\n", "gives a the new name c after b")):
        file.write_text(text)
        done = CliRunner().invoke(app, ["convert", *paths, dest, "--overwrite", "--genes-by", str(file)])
        assert done.exit_code == 1
        assert words in done.output
