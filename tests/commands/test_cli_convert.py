"""convert and verify as a user types them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import zarr
from forked import Interpreter
from helpers import counts
from test_cli import zloader


def write(path: Path, n_rows: int, seed: int) -> Path:
    counts(n_rows, 30, seed=seed).write_h5ad(path)
    return path


@pytest.mark.slow
def test_convert_and_verify(tmp_path: Path) -> None:
    sources = [write(tmp_path / f"{name}.h5ad", rows, rows) for name, rows in (("a", 60), ("b", 50), ("c", 40))]
    store = tmp_path / "a.zarr"
    zloader("convert", *sources, store)
    out = ad.concat([ad.read_h5ad(source) for source in sources], index_unique="-")
    x = ad.io.read_elem(zarr.open_group(store, mode="r")["X"])
    np.testing.assert_array_equal(x.toarray(), out.X.toarray())
    against = [part for source in sources for part in ("--against", source)]
    assert "no problems, and every value equals" in zloader("verify", store, *against).stdout
    seen = json.loads(zloader("verify", store, "--json", *against).stdout)
    assert (seen["ok"], seen["rows"], seen["problems"]) == (True, 150, [])


def test_a_finished_conversion_can_be_repeated_with_resume(tmp_path: Path) -> None:
    source = write(tmp_path / "a.h5ad", 60, 0)
    first = json.loads(zloader("convert", source, tmp_path / "a.zarr", "--resume", "--json").stdout)
    assert not first["already_complete"]
    assert "values: already complete" in zloader("convert", source, tmp_path / "a.zarr", "--resume").stdout


def test_info_describes_a_store_without_rows(tmp_path: Path) -> None:
    zloader("convert", write(tmp_path / "a.h5ad", 0, 0), tmp_path / "a.zarr")
    shown = json.loads(zloader("info", tmp_path / "a.zarr", "--json").stdout)
    assert (shown["rows"], shown["epoch"]["problem"]) == (0, f"{tmp_path / 'a.zarr'} has no rows to load")


def test_what_is_wrong_is_named_and_is_a_failure(tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    zloader("convert", write(tmp_path / "a.h5ad", 60, 0), store)
    assert "no problems" in zloader("verify", store).stdout
    other = write(tmp_path / "b.h5ad", 60, 1)
    assert "X" in zloader("verify", store, "--against", other, status=1).stdout
    (store / "X" / "data" / "c" / "0").unlink()
    text = zloader("verify", store, status=1).stdout
    assert "X/data/c/0" in text
    assert "problems: " in text
    assert not json.loads(zloader("verify", store, "--json", status=1).stdout)["ok"]


def test_sources_in_parquet_with_their_options(tmp_path: Path) -> None:
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    for name in ("a", "b"):
        cells = {"g": [[7, 8], [8]], "v": [[1.0, 2.0], [3.0]], "barcode": [f"{name}0", f"{name}1"]}
        pq.write_table(pa.table(cells), tmp_path / f"{name}.parquet")
    pq.write_table(pa.table({"number": [7, 8], "symbol": ["A", "B"]}), tmp_path / "genes.parquet")
    both, store = tmp_path / "[ab].parquet", tmp_path / "a.zarr"
    flags = ("--gene-metadata", tmp_path / "genes.parquet", "--lists", "g,v", "--gene-id", "number")
    flags += ("--obs-names", "barcode")
    zloader("convert", both, store, *flags)
    found = ad.read_zarr(store)
    assert list(found.obs_names) == ["a0", "a1", "b0", "b1"]
    assert found.X.toarray().tolist() == [[1, 2], [0, 3]] * 2
    assert "every value equals" in zloader("verify", store, "--against", both, *flags).stdout
    refused = zloader("convert", both, tmp_path / "b.zarr", *flags[:2], "--lists", "g", status=1)
    assert "lists must be two names of columns" in refused.stderr


_DROPPED = """
import signal, sys
from zloader.commands.command import app

class Dying:
    def __del__(self):
        signal.raise_signal(int(sys.argv[1]))

@app.command()
def wait():
    Dying()  # Python discards the handler's exception
    signal.sigtimedwait([], 100)

app(["wait"])
"""


@pytest.mark.any_version
@pytest.mark.slow  # each starts several interpreters
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_in_a_destructor_is_not_lost(interpreter: Interpreter, number: int) -> None:
    done = interpreter.run(_DROPPED, int(number))
    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr
