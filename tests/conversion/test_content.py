"""One or more sources as one AnnData, compared with anndata.concat, and the sources that are refused."""

from __future__ import annotations

import contextlib
import warnings

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import LAYOUTS, assert_same, counts, dense, full_anndata, layers_of

from zloader.common.errors import OptionError, SourceError
from zloader.conversion.joining.content import Content
from zloader.conversion.joining.selection import Selection
from zloader.conversion.sources.inputs import open_inputs

GENES = [f"g{i}" for i in (3, 1, 4, 15, 9, 2, 6, 5, 35, 8)]
OTHERS = [f"g{i}" for i in (9, 7, 1, 3, 23, 8, 4, 62)]


def an_adata(seed, genes=GENES, layout="csr", n_rows=7, dtype=np.float32):
    """AnnData with every kind of element that sources can share; some elements are only partly shared."""
    rng = np.random.default_rng(seed)
    names = [f"cell{seed}-{i}" for i in range(n_rows)]
    numbers = [int(gene[1:]) for gene in genes]
    raw_genes = [*genes, f"g{100 + seed}"]
    obs = pd.DataFrame(
        {
            "kind": pd.Categorical(rng.choice([f"k{seed}", "k10", "k9"], n_rows)),
            "text": [f"t{i}" for i in range(n_rows)],
            "number": rng.integers(0, 9, n_rows).astype(np.int16),
            f"only {seed}": rng.random(n_rows) > 0.5,
        },
        index=names,
    )
    var = pd.DataFrame(
        {"symbol": [f"s{i}" for i in numbers], "own": seed, "length": [i * 10 for i in numbers]}, index=genes
    )
    adata = ad.AnnData(
        LAYOUTS[layout](counts(n_rows, len(genes), seed, dtype)),
        obs=obs,
        var=var,
        layers={"a": counts(n_rows, len(genes), seed + 10), "b": rng.random((n_rows, len(genes)))},
        obsm={
            "X_pca": rng.random((n_rows, 3), np.float32),
            "frame": pd.DataFrame({"f": rng.random(n_rows), f"f{seed}": 1}, index=names),
            "sparse": counts(n_rows, 4, seed),
        },
        varm={
            "same": np.array([[i, -i] for i in numbers], float),
            "differs": rng.random((len(genes), 2)),
            "frame": pd.DataFrame({"twice": [i * 2.0 for i in numbers]}, index=genes),
        },
        varp={"same": np.array([[float(i * j) for i in numbers] for j in numbers])},
        obsp={"graph": sp.random(n_rows, n_rows, 0.5, "csr", random_state=seed)},
        uns={"same": "text", "nested": {"array": np.arange(4), "own": seed, "deep": {"own": seed}}, f"u{seed}": 1},
    )
    raw = ad.AnnData(counts(n_rows, len(raw_genes), seed + 20), obs=obs, var=pd.DataFrame({"c": 1}, index=raw_genes))
    adata.raw = raw
    return adata


def contents(adatas, **select):
    return Content(open_inputs(list(adatas)), Selection(**select))


def whole(matrix):
    """The matrix that will be stored."""
    with matrix:
        windows = list(matrix.windows())
    values = np.concatenate([window.values for window in windows])
    assert values.dtype == matrix.dtype
    shape = (matrix.n_rows, matrix.n_genes)
    if matrix.encoding == "dense":
        return values.reshape(shape)
    genes = np.concatenate([window.genes for window in windows])
    lengths = np.concatenate([window.lengths for window in windows])
    return sp.csr_matrix((values, genes, np.concatenate([[0], np.cumsum(lengths)])), shape=shape)


@contextlib.contextmanager
def same_names_allowed():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(Observation|Variable) names are not unique", UserWarning)
        yield


def built(content):
    """The whole content as an AnnData."""
    parts = {"layers": {}, "obsm": {}, "varm": {}, "obsp": {}, "varp": {}, "raw": {"varm": {}}, "X": None, "uns": {}}
    matrices = [(matrix.name, whole(matrix)) for matrix in content.matrices(4096)]
    for path, element in [*matrices, *content.elements()]:
        *within, name = path.split("/")
        target = parts
        for part in within:
            target = target[part]
        assert name not in target or path in ("X", "uns"), f"{path} comes twice"
        target[name] = element
    raw = parts.pop("raw")
    obs = pd.DataFrame({name: content.obs_column(name).array for name in content.obs_columns}, content.obs_names())
    with same_names_allowed():
        adata = ad.AnnData(**parts, obs=obs, var=content.var)
    if content.raw_var is not None:
        adata.raw = ad.AnnData(X=raw["X"], obs=obs[[]], var=content.raw_var, varm=raw["varm"])
    return adata


def concatenated(adatas, join, genes=None):
    """The result of anndata.concat, with all columns of obs."""
    with same_names_allowed():
        wanted = ad.concat(adatas, join=join, merge="same", uns_merge="same", fill_value=0)
        wanted.obs = ad.concat(adatas, join="outer").obs
        return wanted if genes is None else wanted[:, genes].copy()


def assert_as(out, wanted):
    """Equal AnnData. CSR may stand for CSC, and nullable text for objects with missing values."""
    assert_same(dict(out.obsm), dict(wanted.obsm))
    layers = {key: value.tocsr() if sp.issparse(value) else value for key, value in layers_of(wanted).items()}
    assert_same(layers_of(out), layers)
    assert sp.issparse(out.X) == sp.issparse(wanted.X)
    assert wanted.X.dtype in (out.X.dtype, np.float64)  # anndata 0.13 widens a dense X when it joins genes
    np.testing.assert_array_equal(dense(out.X), dense(wanted.X))
    pd.testing.assert_frame_equal(out.var, wanted.var)
    for column in wanted.obs:
        if out.obs[column].dtype == "string" and wanted.obs[column].dtype != "string":
            wanted.obs[column] = wanted.obs[column].astype("string")
    pd.testing.assert_frame_equal(out.obs, wanted.obs)
    for name in ("varm", "varp"):
        assert_same(dict(getattr(out, name)), dict(getattr(wanted, name)))
    assert_same(dict(out.uns), dict(wanted.uns))
    assert (out.raw is None) == (wanted.raw is None)
    if wanted.raw is not None:
        np.testing.assert_array_equal(dense(out.raw.X), dense(wanted.raw.X))
        pd.testing.assert_frame_equal(out.raw.var, wanted.raw.var)
        assert_same(dict(out.raw.varm), dict(wanted.raw.varm))


@pytest.mark.every(3)
@pytest.mark.parametrize("layouts", [("csr", "csr"), ("csc", "dense"), ("dense", "dense"), ("csr", "csc", "dense")])
@pytest.mark.parametrize("join", ["inner", "outer"])
def test_a_join_is_what_anndata_concat_makes(join, layouts):
    genes = [GENES, OTHERS, GENES[::-1]]
    adatas = [an_adata(i, genes[i], layout, n_rows=5 + i) for i, layout in enumerate(layouts)]
    assert_as(built(contents(adatas, join=join)), concatenated(adatas, join))


@pytest.mark.slow
def test_files_are_joined_as_those_in_memory(tmp_path):
    adatas = [an_adata(0), an_adata(1, OTHERS, "csc")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adatas[0].write_h5ad(tmp_path / "a.h5ad")
        adatas[1].write_zarr(tmp_path / "b.zarr")
    inputs = open_inputs([tmp_path / "a.h5ad", tmp_path / "b.zarr"])
    out = built(Content(inputs, Selection(join="outer", source_column="file")))
    wanted = concatenated([ad.read_h5ad(tmp_path / "a.h5ad"), ad.read_zarr(tmp_path / "b.zarr")], "outer")
    wanted.obs["file"] = pd.Categorical(["a"] * 7 + ["b"] * 7)
    assert_as(out, wanted)
    for source in inputs:
        source.close()


def test_without_a_join_genes_may_come_in_any_order_and_the_first_one_counts():
    adatas = [an_adata(0), an_adata(1, GENES[::-1]), an_adata(2, sorted(GENES))]
    for adata in adatas:
        adata.raw = None
    out = built(contents(adatas))
    assert list(out.var_names) == GENES
    adatas[0].obsm["frame"]["f1"] = np.nan  # obsm frames keep all their columns
    wanted = concatenated(adatas, "inner")
    del out.obsm["frame"], wanted.obsm["frame"]
    assert_as(out, wanted)


def test_genes_named_come_in_that_order_and_are_zero_where_they_are_not():
    adatas = [an_adata(0, layout="dense"), an_adata(1, OTHERS)]
    for adata in adatas:
        adata.raw = None
    genes = ["g62", "g1", "g3", "g35", "g9"]
    # Genes that are not selected do not affect which elements agree.
    chosen = [adata[:, [gene for gene in adata.var_names if gene in genes]].copy() for adata in adatas]
    assert_as(built(contents(adatas, genes=genes)), concatenated(chosen, "outer", genes))
    assert_as(built(contents(adatas[:1], genes=pd.Index(GENES[3:0:-1]))), adatas[0][:, GENES[3:0:-1]].copy())


@settings(max_examples=12)
@given(
    st.lists(st.permutations(GENES).flatmap(lambda p: st.integers(1, 10).map(lambda n: p[:n])), min_size=2, max_size=4)
)
def test_any_genes_are_joined_as_anndata_joins_them(gene_lists):
    adatas = [
        ad.AnnData(
            counts(3, len(genes), seed),
            obs=pd.DataFrame(index=[f"{seed}-{i}" for i in range(3)]),
            var=pd.DataFrame({"symbol": [gene.upper() for gene in genes]}, index=genes),
        )
        for seed, genes in enumerate(gene_lists)
    ]
    for join in ("inner", "outer", None):
        if join is None and any(set(genes) != set(gene_lists[0]) for genes in gene_lists):
            with pytest.raises(SourceError, match="pass join='inner' or 'outer'"):
                contents(adatas)
        elif join == "inner" and not set.intersection(*map(set, gene_lists)):
            with pytest.raises(SourceError, match="no gene is in all sources"):
                contents(adatas, join=join)
        else:
            assert_as(built(contents(adatas, join=join)), concatenated(adatas, join or "inner"))


def test_genes_are_joined_by_a_column():
    adatas = [an_adata(0), an_adata(1, OTHERS)]
    for adata in adatas:
        adata.raw = None
    out = built(contents(adatas, join="outer", genes_by="symbol"))
    for adata in adatas:
        adata.var["var_names"] = adata.var_names
        adata.var_names = adata.var["symbol"].to_numpy()
    assert_as(out, concatenated(adatas, "outer"))


def test_genes_of_one_source_are_named_by_a_column_and_their_former_names_kept():
    adata = an_adata(0)
    adata.raw = None
    adata.var_names = ["twice"] * len(GENES)
    adata.varm["frame"].index = adata.var_names
    out = built(contents([adata], genes_by="symbol"))
    assert list(out.var_names) == list(adata.var["symbol"])
    assert list(out.var["var_names"]) == ["twice"] * len(GENES)
    np.testing.assert_array_equal(out.varm["frame"], adata.varm["frame"])
    np.testing.assert_array_equal(dense(out.X), dense(adata.X))


def test_one_source_is_carried_unchanged():
    adata = full_anndata()
    adata.var_names = ["twice", "twice", *adata.var_names[2:]]
    content = contents([adata])
    out = built(content)
    assert_as(out, adata)
    assert_same(dict(out.obsp), dict(adata.obsp))
    assert content.dropped == []
    assert [matrix.name for matrix in content.matrices(4096)][:5] == [
        "X",
        "layers/csc",
        "layers/csr",
        "layers/dense",
        "raw/X",
    ]


def test_parts_are_chosen():
    adata = full_anndata()
    out = built(contents([adata], layers=["csc"], obsm=[], obs=["zero", "kind"], raw=False))
    assert list(layers_of(out)) == ["csc"]
    assert list(out.obs) == ["zero", "kind"]
    assert not out.obsm
    assert out.raw is None


def test_a_layer_becomes_x_and_is_no_layer_any_more():
    adatas = [an_adata(0), an_adata(1)]
    del adatas[1].X
    for adata in adatas:
        adata.raw = None
    out = built(contents(adatas, x="layers/a"))
    assert list(layers_of(out)) == ["b"]
    np.testing.assert_array_equal(dense(out.X), np.concatenate([dense(adata.layers["a"]) for adata in adatas]))


def test_raw_becomes_x_with_its_var_and_varm():
    adata = full_anndata()
    with pytest.raises(OptionError, match=r"leave them out with select=zl.Selection\(layers=\[\]\) \(--layers none\)"):
        contents([adata], x="raw/X")
    out = built(contents([adata], x="raw/X", layers=[]))
    np.testing.assert_array_equal(dense(out.X), dense(adata.raw.X))
    pd.testing.assert_frame_equal(out.var, adata.raw.var)
    assert_same(dict(out.varm), dict(adata.raw.varm))
    assert not out.varp
    assert out.raw is None
    both = built(contents([adata, adata], x="raw/X", layers=[], obsm=[]))
    np.testing.assert_array_equal(dense(both.X), np.tile(dense(adata.raw.X), (2, 1)))
    assert_same(dict(both.varm), dict(adata.raw.varm))


def test_sources_without_x():
    adatas = [an_adata(0), an_adata(1)]
    for adata in adatas:
        del adata.X
        adata.raw = None
    assert [matrix.name for matrix in contents(adatas, obsm=[]).matrices(4096)] == ["layers/a", "layers/b"]


def test_what_several_sources_cannot_share_is_told():
    content = contents([an_adata(0), an_adata(1, OTHERS)], join="outer")
    list(content.elements())
    dropped = ["var/own", "raw/var/c", "obsp/graph", "varm/differs", "uns/u0", "uns/u1"]
    assert set(content.dropped) >= set(dropped)
    out = built(contents([an_adata(0), an_adata(1, OTHERS)], join="outer"))
    assert not {f"varm/{key}" for key in out.varm} & set(content.dropped)


def test_sources_are_told_apart_and_names_made_unique(tmp_path):
    for plate in ("p1", "p2"):
        (tmp_path / plate).mkdir()
        adata = an_adata(0)
        del adata.raw
        adata.write_h5ad(tmp_path / plate / "x.h5ad")
    inputs = open_inputs([tmp_path / "p1" / "x.h5ad", tmp_path / "p2" / "x.h5ad"])
    content = Content(inputs, Selection(source_column="plate", unique_obs_names=True))
    assert content.obs_columns[-1] == "plate"
    assert list(content.obs_column("plate")) == ["x"] * 7 + ["x-1"] * 7
    names = [f"cell0-{i}" for i in range(7)]
    assert list(content.obs_names()) == names + [f"{name}-1" for name in names]
    frames = [element for path, element in content.elements() if path == "obsm/frame"]
    assert list(frames[0].index) == list(content.obs_names())
    for source in inputs:
        source.close()


def test_the_name_of_the_index_stays_where_all_agree():
    adatas = [an_adata(0), an_adata(1)]
    for adata in adatas:
        adata.raw = None
        adata.obs_names.name = "barcode"
    assert contents(adatas).obs_names().name == "barcode"
    adatas[1].obs["barcode"] = list(adatas[1].obs_names)
    assert contents(adatas).obs_names().name is None  # because a column of that name has missing values


# Refusals.


def refused(adatas, error=SourceError, **select):
    with pytest.raises(error) as caught:
        contents(adatas, **select)
    return str(caught.value)


def two(**changes):
    """Two small compatible sources; `changes` apply to the second."""
    first, second = (
        ad.AnnData(counts(3, 10, seed), obs=pd.DataFrame({"n": 1}, index=list("abc")), var=pd.DataFrame(index=GENES))
        for seed in range(2)
    )
    for name, value in changes.items():
        setattr(second, name, value)
    return [first, second]


FIRST, SECOND = (f"the AnnData in memory (source {i})" for i in range(2))


def test_all_problems_are_told_at_once():
    first, second = two()
    second.layers["spliced"] = second.X
    second.obsm["X_pca"] = np.zeros((3, 2))
    second.raw = second
    second.obs["n"] = ["x", "y", "z"]
    second = second[:, GENES[:-2]].copy()
    second.var_names = [*GENES[:-3], "other"]
    message = refused([first, second])
    for part in ("layers/spliced", "obsm/X_pca", "raw is missing", "obs column 'n'", "lacks 3 genes", "has 1 that"):
        assert part in message
    assert message.count("\n") == 4


def test_layers_and_obsm_must_be_in_all_sources():
    first, second = two()
    first.layers["spliced"], first.obsm["X_pca"] = first.X, np.zeros((3, 2))
    message = refused([first, second])
    assert f"layers/spliced is missing in {SECOND}, but other sources have it: choose" in message
    assert "select=zl.Selection(layers=[...]) (--layers a,b), or [] (--layers none)" in message
    assert "obsm=[...]) (--obsm a,b)" in message
    assert "layers/spliced is missing in" in refused([first, second], layers=["spliced"], obsm=[])
    assert built(contents([first, second], layers=[], obsm=[])).shape == (6, 10)


def test_x_and_raw_must_be_in_all_sources():
    first, second = two()
    first.raw = first
    assert f"raw is missing in {SECOND}" in refused([first, second])
    assert "select=zl.Selection(raw=False) (--no-raw)" in refused([first, second])
    assert "raw/X is missing in" in refused([first, second], x="raw/X")
    assert contents([first, second], raw=False).raw_var is None
    second.layers["a"] = second.X
    assert "layers/a is missing in the AnnData in memory (source 0)" in refused(
        [first, second], x="layers/a", raw=False
    )
    del second.X
    assert f"X is missing in {SECOND}" in refused([first, second], raw=False, layers=[])


@pytest.mark.parametrize("select", [{"layers": ["q"]}, {"obsm": ["q"]}, {"obs": ["q"]}, {"x": "layers/q"}])
def test_unknown_names_are_answered_with_those_there_are(select):
    first, second = two()
    for adata in (first, second):
        adata.layers["spliced"], adata.obsm["spliced"], adata.obs["spliced"] = adata.X, np.zeros((3, 2)), 1
    message = refused([first, second], OptionError, **select)
    assert "q" in message
    assert "spliced" in message


def test_obsm_must_fit():
    first, second = two()
    first.obsm["X_pca"], second.obsm["X_pca"] = np.zeros((3, 2)), np.zeros((3, 5))
    first.obsm["mixed"], second.obsm["mixed"] = np.zeros((3, 2)), pd.DataFrame({"a": 1}, index=list("abc"))
    message = refused([first, second])
    assert f"obsm/X_pca cannot be joined: it is 2 wide in {FIRST}, 5 wide in {SECOND}" in message
    assert f"dense in {FIRST}, dataframe in {SECOND}" in message
    first.obsm["X_pca"], second.obsm["X_pca"] = sp.csr_matrix(np.eye(3)), np.eye(3)
    del first.obsm["mixed"], second.obsm["mixed"]
    assert_as(built(contents([first, second])), concatenated([first, second], "inner"))


def test_differing_genes_need_a_decision():
    first, second = two(var_names=[*GENES[2:], "x", "y"])
    message = refused([first, second])
    assert f"{SECOND}: var lacks 2 genes of {FIRST} (g3, g1)" in message
    assert f"has 2 that {FIRST} lacks (x, y)" in message
    assert "pass join='inner' or 'outer' (--join), or list" in message
    assert "with select=zl.Selection(genes=[...]) (--genes FILE)" in message
    second.var_names = [f"x{i}" for i in range(10)]
    assert "no gene is in all sources" in refused([first, second], join="inner")


def test_repeated_gene_names_are_listed_where_genes_are_joined():
    repeated = [*(f"r{i}" for i in range(12)), *(f"r{i}" for i in range(12))]
    adatas = [ad.AnnData(counts(3, 24), obs=pd.DataFrame(index=list("abc"))) for _ in range(2)]
    adatas[1].var_names = repeated
    for adata in adatas:
        adata.var["id"] = [f"id{i}" for i in range(24)]
    message = refused(adatas, join="outer")
    shown = ", ".join(repeated[:10])
    assert f"{SECOND}: var: 12 repeated gene names ({shown} and 2 more)" in message
    assert "genes_by=... (--genes-by)" in message
    assert "12 repeated gene names" in refused(adatas[1:], genes=["r1"])
    assert len(contents(adatas, genes_by="id").var) == 24


def test_a_column_that_cannot_name_genes():
    first, second = two()
    first.var["id"] = [f"i{i}" for i in range(10)]
    assert f"{SECOND}: var has no column 'id' to name genes by" in refused([first, second], genes_by="id")
    assert "has no column 'q' to name genes by. It has: id" in refused([first], genes_by="q")
    second.var["id"] = ["i1", "i1", *(f"i{i}" for i in range(2, 10))]
    message = refused([first, second], genes_by="id")
    assert "1 repeated gene name (i1) in the column 'id'" in message
    second.var["id"] = [None, None, *(f"i{i}" for i in range(2, 10))]
    assert "has 2 genes without a value in 'id'" in refused([first, second], genes_by="id")


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ([1, 2, 3], ["a", "b", "c"], "numbers in {}, text in"),
        ([True, False, True], [1, 2, 3], "true or false in {}, numbers in"),
        (pd.Categorical(["a", "b", "c"]), [1.0, 2.0, np.nan], "text in {}, numbers in"),
        (pd.to_datetime(["2020"] * 3), [1.0, 2.0, np.nan], "dates in {}, numbers in"),
    ],
)
def test_columns_of_different_kinds_are_not_united(one, other, words, tmp_path):
    adatas = two()
    adatas[0].obs["n"], adatas[1].obs["n"] = one, other
    message = refused(adatas)
    assert f"obs column 'n' cannot be joined: it holds {words.format(FIRST)}" in message
    assert "select=zl.Selection(obs=[...]) (--obs a,b)" in message
    assert contents(adatas, obs=[]).obs_columns == []
    if not isinstance(one, pd.DatetimeIndex):
        for number, adata in enumerate(adatas):
            adata.write_h5ad(tmp_path / f"{number}.h5ad")
        inputs = open_inputs(str(tmp_path / "*.h5ad"))
        with pytest.raises(SourceError, match="obs column 'n' cannot be joined"):
            Content(inputs, Selection())
        for source in inputs:
            source.close()


@pytest.mark.parametrize("values", [["a", 1, None], [True, 1, 2], [b"a", b"b", b"c"], [(1,), (2,), (3,)]])
def test_objects_of_no_one_kind_are_refused(values):
    adata = two()[0]
    adata.obs["n"] = pd.Series(values, index=adata.obs_names, dtype=object)
    assert "obs column 'n' cannot be stored: it holds objects (" in refused([adata])


def test_the_source_column_must_be_new():
    adatas = two()
    assert "obs already has a column 'n'" in refused(adatas, OptionError, source_column="n")
    assert contents(adatas, source_column="n", obs=[]).obs_columns == ["n"]
    adatas[0].obs_names.name = "barcode"
    assert contents(adatas[:1], source_column="barcode").obs_names().name is None
    assert contents(adatas[:1], source_column="file").obs_names().name == "barcode"


def test_a_matrix_of_the_wrong_shape_is_found_before_anything_is_read(tmp_path):
    two()[0].write_h5ad(tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        file["X"].attrs["shape"] = [3, 11]
    inputs = open_inputs(tmp_path / "a.h5ad")
    with pytest.raises(SourceError, match=r"a.h5ad: X has shape \(3, 11\)"):
        Content(inputs, Selection())
    inputs[0].close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"x": "layers"}, "x must be"),
        ({"join": "left"}, "join must be"),
        ({"join": "inner", "genes": ["a"]}, "exclude each other"),
        ({"genes": []}, "genes is empty"),
        ({"genes": ["a", "b", "a"]}, "genes has repeated names: a"),
        ({"layers": "counts"}, r"layers must be a list of names, such as \['counts'\]"),
        ({"obs": ["a", "a"]}, "obs has repeated names: a"),
    ],
)
def test_options_that_make_no_sense(options, words):
    with pytest.raises(OptionError, match=words):
        Selection(**options)
