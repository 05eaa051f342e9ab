"""Cells in Parquet files with lists of genes and values, as Tahoe-100M and X-Atlas/Orion are published."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hubs import Hub
from sources import SMALL, FailingDestination, assert_not_a_store, counts, disk_full, files

import zloader as zl
from zloader.access.location import Location
from zloader.common.errors import AccessDeniedError, OptionError, SourceError, StoreError, StoreNotFoundError
from zloader.conversion import parquet
from zloader.conversion.convert import convert_to

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.any_version

N_ROWS, N_GENES = 600, 80
IDS = np.random.default_rng(1).permutation(N_GENES) + 3  # 0, 1 and 2 are markers
MARKED = "ignore:.*the marker that begins a row"


def cells() -> ad.AnnData:
    """The cells as an AnnData. Text is categorical, as AnnData stores it."""
    obs = pd.DataFrame(
        {
            "drug": pd.Categorical([f"drug{i % 7}" for i in range(N_ROWS)]),
            "pubchem_cid": pd.array([None if i % 5 == 0 else 2**53 + 1 + i for i in range(N_ROWS)], dtype="Int64"),
            "treated": [i % 2 == 0 for i in range(N_ROWS)],
            "dose": np.arange(N_ROWS) / 4,
            "plate": pd.Categorical([f"p{i % 3}" for i in range(N_ROWS)], categories=["p2", "p0", "p1", "unused"]),
            "note": [f"note {i} ä" for i in range(N_ROWS)],
        },
        index=pd.Index([f"barcode{i}" for i in range(N_ROWS)], name="BARCODE_SUB_LIB_ID"),
    )
    var = pd.DataFrame(
        {"gene_symbol": ["twice", "twice", *(f"s{i}" for i in range(2, N_GENES))], "token_id": IDS},
        index=pd.Index([f"ENSG{i}" for i in range(N_GENES)], name="ensembl_id"),
    )
    return ad.AnnData(counts(N_ROWS, N_GENES), obs=obs, var=var)


ADATA = cells()


def table(adata: ad.AnnData = ADATA, *, marker: bool = True, names: tuple[str, str] = ("genes", "expressions")):
    """The rows as the datasets have them: each begins with a marker."""
    x, before = adata.X, ([1], [-2]) if marker else ([], [])
    rows = [slice(x.indptr[i], x.indptr[i + 1]) for i in range(x.shape[0])]
    genes = [np.r_[before[0], IDS[x.indices[row]]].astype(np.int64) for row in rows]
    values = [np.r_[before[1], x.data[row]].astype(np.float32) for row in rows]
    obs = adata.obs.reset_index()
    lists = {
        names[0]: pa.array(genes, pa.list_(pa.int64())),
        names[1]: pa.array(values, pa.list_(pa.float32())),
    }
    return pa.table(lists | {name: pa.array(obs[name]) for name in obs})


def write(folder: Path, cut: tuple[int, ...] = (0, 250, 250, N_ROWS), rows: int = 100, **how) -> Path:
    """Files of a dataset and its gene metadata; one of the files is empty."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    whole = table(**how)
    for number, (start, stop) in enumerate(itertools.pairwise(cut)):
        pq.write_table(
            whole.slice(start, stop - start), folder / "data" / f"train-{number}.parquet", row_group_size=rows
        )
    pq.write_table(pa.Table.from_pandas(ADATA.var.reset_index()), folder / "gene_metadata.parquet")
    return folder


def source(folder: Path, **options) -> zl.Parquet:
    given = {"gene_metadata": folder / "gene_metadata.parquet", "obs_names": "BARCODE_SUB_LIB_ID"}
    return zl.Parquet(folder / "data", **given | options)


def read(store: Path) -> ad.AnnData:
    return ad.read_zarr(store)


def assert_is_adata(store: Path, wanted: ad.AnnData = ADATA) -> None:
    found = read(store)
    np.testing.assert_array_equal(found.X.toarray(), wanted.X.toarray())
    pd.testing.assert_frame_equal(found.obs, wanted.obs, check_categorical=True)
    pd.testing.assert_frame_equal(found.var.astype(object), wanted.var.astype(object), check_dtype=False)


@pytest.mark.slow
@pytest.mark.filterwarnings(MARKED)
@pytest.mark.parametrize("rows", [100, 7])
@pytest.mark.parametrize("how", [{}, {"marker": False}, {"names": ("gene_token_id", "gene_expression")}])
def test_the_same_cells_written_both_ways_are_equal(tmp_path, monkeypatch, rows, how):
    monkeypatch.setattr(parquet, "MOST_BYTES", 64 * 1000)
    write(tmp_path, rows=rows, **how)
    report = zl.convert(source(tmp_path), tmp_path / "a.zarr", options=SMALL, progress=False)
    zl.convert(ADATA, tmp_path / "b.zarr", options=SMALL, progress=False)
    assert_is_adata(tmp_path / "a.zarr", read(tmp_path / "b.zarr"))
    assert report.values == ADATA.X.nnz
    for name in ("data", "indices", "indptr"):
        assert files(tmp_path / f"a.zarr/X/{name}/c") == files(tmp_path / f"b.zarr/X/{name}/c")
    assert zl.verify(tmp_path / "a.zarr", against=source(tmp_path), progress=False).ok
    assert zl.verify(tmp_path / "a.zarr", against=ADATA, progress=False).ok


def test_the_marker_is_said_once(tmp_path):
    write(tmp_path)
    with pytest.warns(UserWarning, match=r"train-0\.parquet: the marker .* is left out") as said:
        zl.convert(source(tmp_path), tmp_path / "a.zarr", progress=False)
    assert len(said) == 1
    assert said[0].filename == __file__
    write(tmp_path, marker=False)
    zl.convert(source(tmp_path), tmp_path / "b.zarr", progress=False)  # warnings are errors


@pytest.mark.every(3)
@pytest.mark.filterwarnings(MARKED)
@pytest.mark.parametrize("given", ["glob", "list", "file"])
def test_files_are_one_source(tmp_path, given):
    write(tmp_path, cut=(0, N_ROWS) if given == "file" else (0, 250, N_ROWS))
    names = sorted((tmp_path / "data").iterdir())
    url = {"glob": tmp_path / "data" / "*.parquet", "list": names, "file": names[0]}[given]
    report = zl.convert(dataclasses.replace(source(tmp_path), url=url), tmp_path / "a.zarr", progress=False)
    assert_is_adata(tmp_path / "a.zarr")
    assert report.sources == [str(names[0]) + " and 1 more" * (given != "file")]
    wanted = sum(name.stat().st_size for name in [*names, tmp_path / "gene_metadata.parquet"])
    assert report.bytes_in == wanted


@pytest.mark.slow
@pytest.mark.filterwarnings(MARKED)
@pytest.mark.parametrize("survives", [5, 30, 45])
def test_resumes(tmp_path, survives):
    write(tmp_path)
    zl.convert(source(tmp_path), tmp_path / "whole.zarr", options=SMALL, progress=False)
    whole, dest = files(tmp_path / "whole.zarr"), tmp_path / "a.zarr"
    failing = FailingDestination(Location(url=str(dest)), survives=survives, fail=disk_full)
    with pytest.raises(StoreError, match="No space left"):
        convert_to(failing, source(tmp_path), options=SMALL)
    assert_not_a_store(dest)
    with pytest.raises(StoreError, match="a different conversion was interrupted"):
        zl.convert(source(tmp_path, obs_names="note"), dest, options=SMALL, resume=True, progress=False)
    resumed = FailingDestination(Location(url=str(dest)))
    convert_to(resumed, source(tmp_path), options=SMALL, resume=True)
    assert files(dest) == whole
    before = {key for key in failing.stored[:survives] if key.startswith("X/") and "/c/" in key}
    assert len(before & set(resumed.stored)) <= 2
    assert zl.convert(source(tmp_path), dest, options=SMALL, resume=True, progress=False).already_complete
    write(tmp_path)  # the same, but written again
    with pytest.raises(StoreError, match="sources differ"):
        zl.convert(source(tmp_path), dest, options=SMALL, resume=True, progress=False)


def test_numbered_cells_and_columns_by_name(tmp_path):
    write(tmp_path, marker=False, names=("g", "v"))
    named = source(tmp_path, lists=("g", "v"), gene_id="token_id", obs_names=None)
    zl.convert(named, tmp_path / "a.zarr", progress=False)
    found = read(tmp_path / "a.zarr")
    assert list(found.obs_names) == [str(i) for i in range(N_ROWS)]
    assert list(found.obs["BARCODE_SUB_LIB_ID"]) == list(ADATA.obs_names)


def test_the_index_of_a_pandas_frame_has_the_names(tmp_path):
    write(tmp_path, marker=False)
    frame = table(marker=False).to_pandas().set_index("BARCODE_SUB_LIB_ID").rename_axis(None)
    frame.to_parquet(tmp_path / "frame.parquet")
    one = zl.Parquet(tmp_path / "frame.parquet", gene_metadata=tmp_path / "gene_metadata.parquet")
    zl.convert(one, tmp_path / "a.zarr", progress=False)
    pd.testing.assert_index_equal(read(tmp_path / "a.zarr").obs_names, ADATA.obs_names, check_names=False)


def test_no_cells(tmp_path):
    write(tmp_path, cut=(0, 0))
    zl.convert(source(tmp_path), tmp_path / "a.zarr", progress=False)
    assert zl.open_dataset(tmp_path / "a.zarr").n_obs == 0


@pytest.mark.slow
@pytest.mark.filterwarnings(MARKED)
def test_from_hugging_face_at_one_commit(tmp_path):
    hub = Hub(tmp_path)
    write(hub.folder)
    with hub.running() as address:
        options = {"endpoint": address, "token": False}
        url = "hf://datasets/lab/cells"
        given = zl.Parquet(
            f"{url}/data/*.parquet", gene_metadata=f"{url}/gene_metadata.parquet", obs_names="BARCODE_SUB_LIB_ID"
        )
        report = zl.convert(given, tmp_path / "a.zarr", source_options=options, progress=False)
        assert_is_adata(tmp_path / "a.zarr")
        assert report.sources == [f"hf://datasets/lab/cells@{hub.commit}/data/train-0.parquet and 2 more"]
        assert hub.revisions == {hub.commit}
        again = zl.convert(given, tmp_path / "a.zarr", source_options=options, resume=True, progress=False)
        assert again.already_complete
        missing = dataclasses.replace(given, url=f"{url}/data/none.parquet")
        with pytest.raises(StoreNotFoundError):
            zl.convert(missing, tmp_path / "b.zarr", source_options=options, progress=False)
        hub.private = True
        with pytest.raises(AccessDeniedError, match="401"):
            zl.convert(given, tmp_path / "b.zarr", source_options=options, progress=False)


def changed(row: int, column: int, change) -> pa.Table:
    """The rows with another list in one place."""
    whole = table(marker=False)
    lists = whole.column(column).to_pylist()
    lists[row] = change(lists[row])
    return whole.set_column(column, whole.field(column), pa.array(lists, whole.field(column).type))


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("row", "column", "change", "words"),
    [
        (410, 0, lambda genes: [*genes[:-1], 999], r"train-1\.parquet: row 160 has gene 999, which is not in the gene"),
        (410, 0, lambda genes: [-7, *genes[1:]], "row 160 has gene -7, which is not in"),
        (410, 0, lambda genes: [*genes[:-1], 2], "row 160 has gene 2, which is not in"),
        (3, 0, lambda genes: [*genes, 5], r"train-0\.parquet: row 3 has 1 genes, but 0 expressions"),
        (410, 1, lambda values: [*values[:-1], -1.0], "row 160 has the value -1.0 for gene"),
        (410, 1, lambda values: [-2.0, *values[1:]], "row 160 has the value -2.0 for gene"),
        (410, 1, lambda values: [*values[:-1], None], "row 160 has a missing value in expressions"),
        (410, 0, lambda genes: None, "row 160 has no genes"),
    ],
)
def test_wrong_rows(tmp_path, row, column, change, words):
    write(tmp_path, marker=False)
    pq.write_table(changed(row, column, change)[250:], tmp_path / "data" / "train-1.parquet")
    (tmp_path / "data" / "train-2.parquet").unlink()
    pq.write_table(changed(row, column, change)[:250], tmp_path / "data" / "train-0.parquet")
    with pytest.raises(SourceError, match=words):
        zl.convert(source(tmp_path), tmp_path / "a.zarr", progress=False)
    assert not (tmp_path / "a.zarr" / "zarr.json").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gene_metadata": None}, "only the ids of genes"),
        ({"lists": ("genes", "x")}, r"no columns genes, x: .* It has genes, expressions, BARCODE"),
        ({"lists": ("expressions", "genes")}, "'expressions' is list<.*float>, but must be lists of integers or text"),
        ({"lists": ("genes", "drug")}, "'drug' is .*, but must be lists of numbers"),
        ({"gene_id": "gene_symbol"}, "no column 'gene_symbol' of integers"),
        ({"gene_id": "id"}, "no column 'id' of integers"),
        ({"obs_names": "cell"}, "no column 'cell' with names of cells"),
        ({"obs_names": "genes"}, "no column 'genes' with names of cells"),
        ({"obs_names": "pubchem_cid"}, "'pubchem_cid' has no name for cell 0"),
    ],
)
def test_wrong_options(tmp_path, options, words):
    write(tmp_path, marker=False)
    with pytest.raises(SourceError, match=words):
        zl.convert(source(tmp_path, **options), tmp_path / "a.zarr", progress=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lists": "genes"}, "lists must be two names"),
        ({"lists": ("genes", "genes")}, "lists must be two names"),
        ({"url": []}, "the list of Parquet files is empty"),
    ],
)
def test_impossible_options(options, words):
    with pytest.raises(OptionError, match=words):
        zl.Parquet(**{"url": "cells.parquet"} | options)


@pytest.mark.parametrize("kind", ["large", "half", "small"])
def test_other_types_of_lists(tmp_path, kind):
    lists, genes, values = {
        "large": (pa.large_list, pa.int32(), pa.int16()),
        "half": (pa.list_, pa.uint64(), pa.float16()),
        "small": (pa.list_, pa.uint8(), pa.uint8()),
    }[kind]
    rows = [np.array([1, 2]), np.array([]), np.array([3, 4])]  # the second gene of the last cell twice
    made = {"genes": [[3, 4], [], [4, 4]], "expressions": [row.astype(values.to_pandas_dtype()) for row in rows]}
    types = {"genes": lists(genes), "expressions": lists(values)}
    pq.write_table(pa.table({name: pa.array(made[name], types[name]) for name in made}), tmp_path / "cells.parquet")
    pq.write_table(pa.table({"token_id": [3, 4], "name": ["A", "B"]}), tmp_path / "genes.parquet")
    given = zl.Parquet(tmp_path / "cells.parquet", gene_metadata=tmp_path / "genes.parquet")
    report = zl.convert(given, tmp_path / "a.zarr", progress=False)
    assert read(tmp_path / "a.zarr").X.toarray().tolist() == [[1, 2], [0, 0], [0, 7]]
    assert report.rows_made_canonical == {"X": 1}


NAMES = ADATA.var_names.to_numpy(str)


def with_names(folder: Path, names=NAMES, *, large: bool = False) -> Path:
    """The files of `write`, whose lists hold the names of genes."""
    write(folder, marker=False)
    text = pa.large_list(pa.large_string()) if large else pa.list_(pa.string())
    for file in sorted((folder / "data").iterdir()):
        found = pq.read_table(file)
        position = dict(zip(IDS.tolist(), names.tolist(), strict=True))
        lists = [[position[gene] for gene in row] for row in found.column("genes").to_pylist()]
        place = found.schema.get_field_index("genes")
        pq.write_table(found.set_column(place, "genes", pa.array(lists, text)), file, row_group_size=100)
    return folder


@pytest.mark.parametrize("large", [False, True])
def test_lists_of_names(tmp_path, monkeypatch, large):
    monkeypatch.setattr(parquet, "MOST_BYTES", 64 * 1000)
    with_names(tmp_path, large=large)
    zl.convert(source(tmp_path), tmp_path / "a.zarr", options=SMALL, progress=False)
    assert_is_adata(tmp_path / "a.zarr")
    assert zl.verify(tmp_path / "a.zarr", against=source(tmp_path), progress=False).ok


def test_the_column_of_names_can_be_named(tmp_path):
    symbols = np.array([f"s{i}" for i in range(N_GENES)])
    with_names(tmp_path, symbols)
    place = tmp_path / "gene_metadata.parquet"
    var = ADATA.var.reset_index()
    pq.write_table(pa.Table.from_pandas(var.assign(gene_symbol=symbols)), place)
    named = source(tmp_path, gene_id="gene_symbol")
    zl.convert(named, tmp_path / "a.zarr", progress=False)
    found = read(tmp_path / "a.zarr")
    assert found.var_names.tolist() == NAMES.tolist()  # named by the usual column, matched by another
    np.testing.assert_array_equal(found.X.toarray(), ADATA.X.toarray())
    for options, words in [
        ({}, "row 0 has gene s[0-9]+, which is not in the gene metadata"),
        ({"gene_id": "token_id"}, "no column 'token_id' of text, as in the lists of genes"),
        ({"gene_id": "nope"}, "no column 'nope' of text"),
    ]:
        with pytest.raises(SourceError, match=words):
            zl.convert(source(tmp_path, **options), tmp_path / "b.zarr", progress=False)
    pq.write_table(pa.Table.from_pandas(var), place)
    with pytest.raises(SourceError, match="gene_symbol twice in row 1 is given to an earlier gene, too"):
        zl.convert(named, tmp_path / "b.zarr", progress=False)
    assert not (tmp_path / "b.zarr" / "zarr.json").exists()


def test_ids_beyond_a_table_are_looked_up_all_the_same(tmp_path):
    ids = [2**40, 7, -3]
    pq.write_table(pa.table({"genes": [[7, 2**40], [-3]], "expressions": [[1, 2], [3]]}), tmp_path / "cells.parquet")
    pq.write_table(pa.table({"token_id": ids, "name": ["A", "B", "C"]}), tmp_path / "genes.parquet")
    given = zl.Parquet(tmp_path / "cells.parquet", gene_metadata=tmp_path / "genes.parquet")
    zl.convert(given, tmp_path / "a.zarr", progress=False)
    assert read(tmp_path / "a.zarr").X.toarray().tolist() == [[2, 1, 0], [0, 0, 3]]


def test_wrong_genes(tmp_path):
    write(tmp_path)
    place = tmp_path / "gene_metadata.parquet"
    for frame, words in [
        ({"token_id": [3, 4, 3], "name": ["a", "b", "c"]}, "token_id 3 in row 2 is given to an earlier gene"),
        ({"token_id": [3, 4], "name": ["a", "a"]}, "no column of text that names each gene"),
        ({"name": ["a", "b"]}, "no column 'token_id' of integers"),
    ]:
        pq.write_table(pa.table(frame), place)
        with pytest.raises(SourceError, match=words):
            zl.convert(source(tmp_path), tmp_path / "a.zarr", progress=False)
    place.unlink()
    with pytest.raises(StoreNotFoundError):
        zl.convert(source(tmp_path), tmp_path / "a.zarr", progress=False)


def test_wrong_files(tmp_path, monkeypatch):
    write(tmp_path, marker=False)
    last = tmp_path / "data" / "train-2.parquet"
    intact = last.read_bytes()
    pq.write_table(pq.read_table(last).drop_columns(["drug"]), last)
    with pytest.raises(
        SourceError, match=r"train-2\.parquet: column 'drug' is missing, but dictionary<.* in .*train-0"
    ):
        zl.convert(source(tmp_path), tmp_path / "a.zarr", progress=False)
    for damaged in (b"", intact[:-20], b"PAR1" + b"\0" * 500 + b"PAR1"):
        last.write_bytes(damaged)
        with pytest.raises(SourceError, match=r"train-2\.parquet cannot be read as Parquet"):
            zl.convert(source(tmp_path), tmp_path / "a.zarr", progress=False)
    flipped = bytearray(intact)
    flipped[8:200] = bytes(192)
    last.write_bytes(flipped)
    with pytest.raises(SourceError, match=r"train-2\.parquet cannot be read as Parquet"):
        zl.convert(source(tmp_path), tmp_path / "a.zarr", progress=False)
    for file in (tmp_path / "data").iterdir():
        file.rename(file.with_suffix(".txt"))
    with pytest.raises(SourceError, match=r"has no \.parquet file"):
        zl.convert(source(tmp_path), tmp_path / "a.zarr", progress=False)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.delitem(__import__("sys").modules, "pyarrow.parquet", raising=False)
    with pytest.raises(SourceError, match=r'read by pyarrow: pip install "zloader\[parquet\]"'):
        zl.convert(source(tmp_path), tmp_path / "a.zarr", progress=False)


def test_a_file_is_recognised(tmp_path):
    write(tmp_path)
    for path in (tmp_path / "data" / "train-0.parquet", tmp_path / "data" / "*.parquet"):
        with pytest.raises(SourceError, match=r"only the ids of genes: .*--gene-metadata"):
            zl.convert(path, tmp_path / "a.zarr", progress=False)
    with pytest.raises(OptionError, match=r"unknown|protocol|cannot open"):
        zl.convert(zl.Parquet("nope://x.parquet", gene_metadata="g"), tmp_path / "a.zarr", progress=False)
