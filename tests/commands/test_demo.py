"""The demo end to end: its output, its cleanup however it ends, and the labels it accepts."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from forked import CLI
from helpers import PATIENCE_S, processes_that_name, write_store

import zloader as zl
from zloader.commands.demo import running_demo_server, write_access
from zloader.commands.demo_run import Classifier, DemoRun, choose_label, run_demo
from zloader.commands.output import unbroken
from zloader.common.errors import MissingColumnError, OptionError

pytestmark = pytest.mark.any_version

# Number and sum of the counts, and a hash of every count, label and name, taken from the source of the bundled cells.
BUNDLED_VALUES = (4_015_200, 12_261_492)
BUNDLED_DIGEST = "1f614964c37e8b0e3e6dddd5df73791c5ddc1bc1c45c414cdfde0526c58c37fd"


def environment(tmp: Path) -> dict[str, str]:
    tmp.mkdir()
    return {**os.environ, "TMPDIR": str(tmp), "AWS_PROFILE": "no-such-profile", "http_proxy": "http://127.0.0.1:1"}


def cells(n_rows: int, n_genes: int = 120, *, seed: int = 0) -> ad.AnnData:
    """Counts of three kinds of cells, with obs columns that can be labels and columns that cannot."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 3, n_rows)
    rates = rng.gamma(0.5, 2.0, (3, n_genes))
    obs = pd.DataFrame(
        {
            "barcode": [f"cell {row}" for row in range(n_rows)],
            "age": rng.random(n_rows),
            "species": pd.Categorical(["mouse"] * n_rows),
            "kind": pd.Categorical.from_codes(np.where(np.arange(n_rows) % 10 == 7, -1, kinds), ["a", "b", "c"]),
            "batch": pd.Categorical(rng.choice(["x", "y"], n_rows)),
        },
        index=[str(row) for row in range(n_rows)],
    )
    return ad.AnnData(X=scipy.sparse.csr_matrix(rng.poisson(rates[kinds]).astype(np.float32)), obs=obs)


@pytest.mark.slow  # CI runs the command itself, too
def test_end_to_end(tmp_path):
    page = tmp_path / "page.html"
    done = subprocess.run(
        [sys.executable, "-c", CLI, "demo", "--json", "--report", str(page)],
        env=environment(tmp_path / "tmp"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    first, *later = shown["epochs"]
    assert len(later) == 2
    assert first["kind"] == "cold"
    assert first["gets"] > 0
    assert first["bytes_read"] > 5_000_000
    assert [(epoch["kind"], epoch["gets"], epoch["bytes_read"]) for epoch in later] == [("warm", 0, 0)] * 2
    assert all(epoch["rows"] == shown["train_rows"] == 1714 for epoch in shown["epochs"])
    assert shown["held_out_rows"] == 428
    assert all(0 <= epoch["wait_share"] <= 1 and epoch["rows_per_s"] > 0 for epoch in shown["epochs"])
    assert later[-1]["accuracy"] > 0.93
    assert later[-1]["loss"] < first["loss"] / 10
    cold, warm = shown["loading"]
    assert [(each["kind"], each["rows"]) for each in (cold, warm)] == [("cold", 1714), ("warm", 1714)]
    assert (cold["gets"], cold["bytes_read"]) == (first["gets"], first["bytes_read"])
    assert all(each["rows_per_s"] == pytest.approx(each["rows"] / each["seconds"]) for each in (cold, warm))
    assert f"{warm['rows_per_s']:,.0f} from the mirror" in shown["sentence"]
    assert shown["sentence"] in done.stderr, "with --json, text goes to stderr"
    assert shown["report"] == str(page)
    text = page.read_text()
    assert "Baron et al. 2016" in text
    assert unbroken(shown["sentence"]) in text
    for word in ("epoch 1", "loading alone", "held-out accuracy", "warm, mirror"):
        assert word in done.stderr
        assert word in text
    assert not re.search(r"zloader-demo-|/tmp|127\.0\.0\.1|secret", text)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert processes_that_name(tmp_path / "tmp") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "number", "flags"),
    [
        ("loading", signal.SIGINT, ["--epochs", "1000"]),
        ("converting", signal.SIGINT, ["--epochs", "1000"]),
        ("learning", signal.SIGTERM, ["--epochs", "1000"]),
        ("report", signal.SIGINT, ["--epochs", "1", "--keep"]),
    ],
)
def test_whatever_ends_it_leaves_nothing(interpreter, tmp_path, after, number, flags):
    """The signal arrives in mid-run: there are more epochs than there is time for."""
    tmp, words = tmp_path / "tmp", ["demo", "--json", "--report", tmp_path / "page.html", *flags]
    with interpreter.running(CLI, *words, **environment(tmp)) as demo:
        for line in demo.stderr:
            if line.startswith("Ctrl-C" if after == "report" else after):
                break
        demo.send_signal(number)
        out, err = demo.communicate()
    assert "Traceback" not in err
    assert demo.returncode == (0 if after == "report" else 128 + number), err  # with --keep a signal is the normal end
    assert processes_that_name(tmp) == []
    if after == "report":
        (kept,) = tmp.iterdir()
        assert {"seaweedfs", "cache", "access.sh"} <= {path.name for path in kept.iterdir()}
        assert json.loads(out)["epochs"]
    else:
        assert out == ""
        assert list(tmp.iterdir()) == []


@pytest.fixture
def run(tmp_path, seaweed, monkeypatch):
    """Runs the demo on an AnnData in this process, against the session's server."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))

    def started(adata: ad.AnnData, **options) -> DemoRun:
        name = f"own-{uuid.uuid4().hex}"
        adata.write_h5ad(tmp_path / f"{name}.h5ad")
        return run_demo(tmp_path, seaweed, lambda text: None, file=tmp_path / f"{name}.h5ad", **options)

    return started


@pytest.mark.slow
def test_a_file_of_ones_own(run):
    done = run(cells(500), epochs=2)
    assert re.fullmatch(r"own-\w+\.h5ad", done.source)
    assert (done.bundled, done.label, done.categories) == (False, "kind", 3)
    assert (done.train_rows, done.held_out_rows, done.unlabelled) == (360, 90, 50)
    assert done.conversion.dtypes_changed["X/data"] == "float32 -> uint8"
    assert [(each.kind, each.rows) for each in done.loading] == [("cold", 360), ("warm", 360)]
    assert [epoch.kind for epoch in done.epochs] == ["cold", "warm"]
    assert done.epochs[-1].accuracy > 0.9 > done.guess_accuracy
    assert [(each.epoch, each.rows[-1]) for each in done.timelines] == [(1, 360), (2, 360)]
    assert "50 cells without one were left out" in done.page().facts["label"]
    assert "Baron" not in done.page().html()


@pytest.mark.slow
def test_a_label_of_ones_own_dense_values_below_zero_and_the_seed(run):
    adata = cells(200)
    adata.X = np.random.default_rng(0).normal(size=adata.shape).astype(np.float32)
    runs = [run(adata, label="batch", epochs=1, seed=seed) for seed in (5, 5, 6)]
    assert runs[0].label == "batch"
    assert np.isfinite(runs[0].epochs[0].loss)
    assert runs[0].epochs[0].loss == runs[1].epochs[0].loss != runs[2].epochs[0].loss


def test_a_label_that_is_not_there_is_refused_before_anything_is_converted(run):
    with pytest.raises(MissingColumnError, match=r"no obs column 'knd' in .*\.h5ad; its columns are: 'barcode', 'age'"):
        run(cells(20), label="knd")


def test_which_label_is_learnt(tmp_path):
    adata = cells(300)
    adata.obs["cell_type1"] = adata.obs["batch"]
    write_store(adata, tmp_path / "known.zarr", tmp_path)
    assert choose_label(zl.open_dataset(tmp_path / "known.zarr"), None) == "cell_type1"
    write_store(cells(300), tmp_path / "own.zarr", tmp_path)
    dataset = zl.open_dataset(tmp_path / "own.zarr")
    assert choose_label(dataset, None) == "kind"
    assert choose_label(dataset, "batch") == "batch"
    with pytest.raises(OptionError, match=r"'age' cannot be a label.*barcode \(300 cat.*age \(numbers\).*kind \(3 cat"):
        choose_label(dataset, "age")
    with pytest.raises(OptionError, match="'species' cannot be a label"):
        choose_label(dataset, "species")
    adata = cells(300)
    adata.obs = adata.obs[["barcode", "age"]]
    write_store(adata, tmp_path / "none.zarr", tmp_path)
    with pytest.raises(OptionError, match=r"no obs column can be a label.*--label.*age \(numbers\)"):
        choose_label(zl.open_dataset(tmp_path / "none.zarr"), None)


def test_too_few_cells(run):
    with pytest.raises(OptionError, match="2 cells with a kind are too few"):
        run(cells(2), label="kind")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_the_classifier_is_a_linear_layer_over_sparse_rows():
    dense = torch.tensor([[0.0, 3.0, 1.0], [0.0, 0.0, 0.0], [5.0, 0.0, 5.0]])
    model = Classifier(3, 2)
    with torch.no_grad():
        model.weight += torch.arange(6).reshape(3, 2)
        model.bias += 1
    torch.testing.assert_close(model(dense.to_sparse_csr()), dense @ model.weight + 1)


@pytest.mark.slow
def test_the_environment_is_the_demos_own_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    monkeypatch.setenv("NO_PROXY", "example.org")
    before = dict(os.environ)
    with running_demo_server(keep=True) as demo_server:
        assert "AWS_PROFILE" not in os.environ
        assert os.environ["NO_PROXY"] == "example.org,127.0.0.1"
        access = write_access(demo_server)
        assert access.stat().st_mode & 0o777 == 0o600
        assert demo_server.s3.storage_options["secret"] in access.read_text()
    assert dict(os.environ) == before
    assert demo_server.directory.parent == tmp_path
    assert (demo_server.directory / "seaweedfs" / "data").is_dir()


@pytest.mark.slow
def test_only_what_went_well_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ZeroDivisionError), running_demo_server(keep=True):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    assert processes_that_name(tmp_path) == []


def test_the_bundled_cells_are_those_of_the_source(tmp_path):
    adata = ad.read_h5ad(zl.example_h5ad(tmp_path / "example.h5ad"))
    assert adata.shape == (2142, 20125)
    x = adata.X.tocsr()
    x.sort_indices()
    assert (x.nnz, int(x.sum())) == BUNDLED_VALUES
    parts = [x.data.astype("<f4"), x.indices.astype("<i4"), x.indptr.astype("<i8")]
    labels = ["\t".join(map(str, row)) for row in adata.obs.reset_index().itertuples(index=False)]
    parts += ["\n".join([*adata.obs.columns, *labels, *adata.var_names]).encode()]
    assert hashlib.sha256(b"".join(map(bytes, parts))).hexdigest() == BUNDLED_DIGEST
    packed = Path(zl.__file__).parent / "data" / "pancreas_human.h5ad.xz"
    assert packed.stat().st_size < 3_400_000
    assert lzma.decompress(packed.read_bytes()) == (tmp_path / "example.h5ad").read_bytes()
