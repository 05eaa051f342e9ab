"""Opening something that has to be converted: the error says how, and that works."""

from __future__ import annotations

import re
import shlex

import h5py
import pytest
from helpers import check_minibatch, counts
from sources import TENX
from sources import counts as random_counts
from typer.testing import CliRunner

import zloader as zl
from benchmarks.harness.s3 import Sim
from zloader.commands.cli import app
from zloader.common.errors import FormatError, OptionError, SourceError, StoreNotFoundError

ADATA = counts(20, 10)


def write_linked(path):
    """A file whose obs lies in another, which is not followed."""
    ADATA.write_h5ad(path.with_suffix(".obs"))
    ADATA.write_h5ad(path)
    with h5py.File(path, "r+") as file:
        del file["obs"]
        file["obs"] = h5py.ExternalLink(str(path.with_suffix(".obs")), "/obs")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory with a bucket of such files below it."""
    folder = tmp_path_factory.mktemp("root")
    bucket = folder / "bucket"
    bucket.mkdir()
    for name in ("cells.h5ad", "plates/a.h5ad", "plates/b.h5ad"):
        (bucket / name).parent.mkdir(exist_ok=True)
        ADATA.write_h5ad(bucket / name)
    for name in ("two words.h5", "cells.hdf5", "cells.data"):
        write_linked(bucket / name)
    (bucket / "notes.txt").write_text("hello")
    return folder


@pytest.fixture(scope="module")
def server(root):
    with Sim(root=root) as running:
        yield running


def advised(error):
    """Source and destination in the advice of an error. They are the same in the command and in Python."""
    command, function = re.search(
        r"Convert it once: (zloader convert .+) \(in Python: zl\.(.+)\)$", str(error)
    ).groups()
    _, _, source, store = shlex.split(command)
    assert function == f"convert({source!r}, {store!r})"
    return source, store


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("name", "kind", "source", "store"),
    [
        ("two words.h5", "obs of .* cannot be read in place: it is a link", "two words.h5", "two words.zarr"),
        ("cells.hdf5/", "obs of .* cannot be read in place: it is a link", "cells.hdf5", "cells.zarr"),
        ("cells.data", "obs of .* cannot be read in place: it is a link", "cells.data", "cells.data.zarr"),
    ],
)
def test_the_advised_command_makes_a_store(root, tmp_path, monkeypatch, name, kind, source, store):
    (tmp_path / "bucket").symlink_to(root / "bucket")
    monkeypatch.chdir(tmp_path / "bucket")
    with pytest.raises(FormatError, match=kind) as caught:
        zl.open_dataset(name).obs()
    assert advised(caught.value) == (source, store)
    zl.convert(source, tmp_path / "made.zarr", progress=False)
    assert zl.open_dataset(tmp_path / "made.zarr").n_obs == 20


def verify(path):
    (problem,) = zl.verify(path, progress=False).problems
    raise FormatError(problem.what)


OPENS = {"open_dataset": zl.open_dataset, "verify": verify, "convert": lambda path: zl.convert(path, "never.zarr")}


@pytest.mark.slow  # importing scanpy takes seconds
@pytest.mark.filterwarnings("ignore:Variable names are not unique")
@pytest.mark.parametrize("opens", OPENS)
@pytest.mark.parametrize("name", TENX)
def test_the_advice_for_10x_makes_a_store(tmp_path, monkeypatch, name, opens):
    monkeypatch.chdir(tmp_path)
    TENX[name](tmp_path / name, random_counts())
    with pytest.raises((FormatError, SourceError), match=r"plate\S* is a 10x (file|directory)\. ") as caught:
        OPENS[opens](name)
    exec(str(caught.value).partition("reads in Python: ")[2], {"zl": zl, "sc": pytest.importorskip("scanpy")})
    assert zl.open_dataset("plate.zarr").shape == (60, 290)  # only genes, as scanpy reads it by default


def test_10x_on_a_server_is_to_be_downloaded(tmp_path):
    TENX["plate.h5"](tmp_path / "plate.h5", random_counts())
    with Sim(root=tmp_path.parent) as running:
        url = f"{running.url}/{tmp_path.name}/plate.h5"
        for opens in (zl.open_dataset, OPENS["convert"]):
            with pytest.raises((FormatError, SourceError), match=r"Download it, .*sc\.read_10x_h5\('plate\.h5'\)"):
                opens(url)


@pytest.mark.parametrize("opens", OPENS)
@pytest.mark.parametrize(("mark", "name"), [("__tiledb_group.tdb", "SOMA"), ("header.sch", "SCDL")])
def test_other_formats_lead_to_their_page(tmp_path, mark, name, opens, pytestconfig):
    (tmp_path / "cells" / "more").mkdir(parents=True)
    (tmp_path / "cells" / mark).touch()
    (tmp_path / "cells" / "more" / "data").touch()
    with pytest.raises((FormatError, SourceError), match=rf"cells is in the format {name}\. .*own_format\.md"):
        OPENS[opens](tmp_path / "cells")
    assert name in (pytestconfig.rootpath / "docs" / "howto" / "own_format.md").read_text()


def test_a_folder_of_files_is_opened_by_a_glob(root):
    with pytest.raises(FormatError, match="open them with the glob") as caught:
        zl.open_dataset(root / "bucket" / "plates")
    assert zl.open_dataset(str(caught.value).split("'")[1]).n_obs == 40


@pytest.mark.slow
def test_on_s3_the_store_goes_beside_the_file(server):
    options = {"key": "any", "secret": "any", "endpoint_url": server.url}
    with pytest.raises(FormatError, match=r"obs of .* cannot be read in place: it is a link") as caught:
        zl.open_dataset("s3://bucket/two words.h5", storage_options=options).obs()
    assert advised(caught.value) == ("s3://bucket/two words.h5", "s3://bucket/two words.zarr")
    assert zl.open_dataset("s3://bucket/cells.h5ad", storage_options=options).n_obs == 20
    with pytest.raises(StoreNotFoundError, match="nothing is stored"):
        zl.open_dataset("s3://bucket/nothing.h5ad", storage_options=options)


@pytest.mark.slow
def test_of_a_web_server_the_store_goes_to_this_machine(server):
    with pytest.raises(FormatError, match=r"obs of .* cannot be read in place: it is a link") as caught:
        zl.open_dataset(f"{server.url}/bucket/cells.hdf5").obs()
    assert advised(caught.value) == (f"{server.url}/bucket/cells.hdf5", "cells.zarr")
    dataset = zl.open_dataset(f"{server.url}/bucket/cells.h5ad")
    assert sorted(check_minibatch(next(iter(zl.Loader(dataset))), ADATA)) == list(range(20))
    with pytest.raises(StoreNotFoundError, match=r"no zarr\.json"):
        zl.open_dataset(f"{server.url}/bucket/nothing.h5ad")


def test_a_store_may_have_any_name(root, tmp_path):
    zl.convert(root / "bucket" / "cells.h5ad", tmp_path / "odd.h5ad", progress=False)
    (tmp_path / "odd.h5ad" / "matrix.mtx").touch()
    assert zl.open_dataset(tmp_path / "odd.h5ad").n_obs == 20
    with Sim(root=tmp_path.parent) as running:
        assert zl.open_dataset(f"{running.url}/{tmp_path.name}/odd.h5ad").n_obs == 20


def test_any_other_file_is_no_store_either(root, tmp_path):
    (tmp_path / "all.parquet").touch()
    with pytest.raises(FormatError, match=r"all\.parquet is a table, not a store\. .* give a list of their URLs"):
        zl.open_dataset(tmp_path / "all.parquet")
    with pytest.raises(FormatError, match=r"notes\.txt is a single file, but a Zarr store is a directory"):
        zl.open_dataset(root / "bucket" / "notes.txt")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.h5ad").touch()
    (tmp_path / "mixed" / "zloader.partial").touch()
    with pytest.raises(FormatError, match="its conversion did not finish"):
        zl.open_dataset(tmp_path / "mixed")


@pytest.mark.parametrize(
    "given", [ADATA, [ADATA], 3, None, [None]], ids=["AnnData", "a list of it", "3", "None", "[None]"]
)
def test_what_is_no_url_is_refused(given):
    with pytest.raises(OptionError, match=r"by its path or URL, .* zl\.convert\(adata, 'x\.zarr'\)"):
        zl.open_dataset(given)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "arguments",
    [["info"], ["verify"], ["bench"], ["warm", "--cache", "cache"]],
    ids=lambda arguments: arguments[0],
)
def test_commands_that_open_a_store_say_so(root, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.h5ad").symlink_to(root / "bucket" / "cells.hdf5")
    command, *flags = arguments
    done = CliRunner().invoke(app, [command, "x.h5ad", *flags])
    assert done.exit_code == 1
    assert "zloader convert x.h5ad x.zarr (in Python: zl.convert('x.h5ad', 'x.zarr'))" in done.stdout + done.stderr
