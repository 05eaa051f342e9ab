"""The command line: convert and info as a user calls them, and the form of error messages."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import anndata as ad
import numpy as np
import pytest
import typer.main
from forked import CLI
from helpers import counts, write_store
from sources import layers_of
from typer.testing import CliRunner

import zloader as zl
from zloader.commands import cli
from zloader.commands.cli import app
from zloader.conversion.encode import ConvertOptions
from zloader.insight.cost import epoch_costs
from zloader.order.shuffling import DEFAULT_BLOCK_SIZE, stratified


def zloader(*arguments, status=0):
    """Runs the command in this process, with stdout and stderr separate."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == status, f"{done.stdout}\n{done.stderr}\n{done.exception!r}"
    return done


@pytest.fixture(scope="module")
def h5ad(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "cells.h5ad"
    counts(700, 300).write_h5ad(path)
    return path


def params(command):
    return {param.name: param for param in typer.main.get_command(app).commands[command].params}


def test_version_and_help():
    assert zloader("--version").stdout == f"zloader {zl.__version__}\n"
    module = [sys.executable, "-m", "zloader", "--version"]
    assert subprocess.run(module, capture_output=True, text=True, check=True).stdout == f"zloader {zl.__version__}\n"
    for command in ("convert", "info", "demo"):
        assert command in zloader("--help").stdout
        assert "--json" in zloader(command, "--help").stdout


def test_every_option_of_convert_is_a_flag_with_its_default():
    flags = params("convert")
    for option in [*dataclasses.fields(ConvertOptions), *dataclasses.fields(zl.Selection)]:
        if option.name in ("window_bytes", "order"):  # follows from memory; is as long as the rows
            continue
        assert option.name in flags, f"{option.name} has no flag"
        if flags[option.name].default is None and option.default is not None:
            assert flags[option.name].show_default == str(option.default)
        else:
            assert flags[option.name].default == option.default


def test_choices_reach_the_conversion(tmp_path):
    layers = {"two": counts(60, 30, seed=1).X, "three": counts(60, 30, seed=2).X}
    for name in ("a", "b"):
        adata = counts(60, 30)
        adata.layers.update(layers)
        adata.obs_names = [f"{name}{row}" for row in range(60)] if name == "a" else ["same"] * 60
        adata.write_h5ad(tmp_path / f"{name}.h5ad")
    (tmp_path / "genes.txt").write_text("gene 3\n\ngene 1\n")
    flags = ["--x", "layers/two", "--layers", "none", "--obs", "cell_type, lane", "--genes", tmp_path / "genes.txt"]
    flags += ["--source-column", "file", "--unique-obs-names", "--shuffle", 5, "--memory", "600MiB", "--json"]
    done = json.loads(zloader("convert", str(tmp_path / "?.h5ad"), tmp_path / "c.zarr", *flags).stdout)
    out = ad.read_zarr(tmp_path / "c.zarr")
    assert (done["rows"], len(done["sources"])) == (120, 2)
    assert list(out.var_names) == ["gene 3", "gene 1"]
    assert list(out.obs) == ["cell_type", "lane", "file", "source_row"]
    assert out.obs_names.is_unique
    assert not layers_of(out)
    rows = out.obs["source_row"].to_numpy()
    assert sorted(rows) == list(range(120))
    assert list(out.obs["file"]) == [("a", "b")[row // 60] for row in rows]
    np.testing.assert_array_equal(out.X.toarray(), layers["two"].toarray()[rows % 60][:, [3, 1]])


def test_the_plan_of_info_is_the_loaders():
    flags = params("info")
    for name, default in (
        ("batch_size", zl.Loader.batch_size),
        ("fetch_factor", zl.Loader.fetch_factor),
        ("block_size", DEFAULT_BLOCK_SIZE),
    ):
        assert flags[name].show_default == str(default)


def test_no_flag_takes_a_secret():
    for command in ("convert", "info", "demo"):
        assert not {"key", "secret", "token", "password"} & params(command).keys()


def test_convert_round_trip(h5ad, tmp_path):
    dest = tmp_path / "cells.zarr"
    flags = ("--chunk-rows", 1, "--shard-size", "4kB", "--codec", "zstd", "--preserve-dtype")
    done = json.loads(zloader("convert", h5ad, dest, "--json", *flags).stdout)
    assert done["rows"] == 700
    assert done["dtypes_changed"] == {}
    adata = ad.read_h5ad(h5ad)
    dataset = zl.open_dataset(dest)
    np.testing.assert_array_equal(dataset.take(np.arange(700)).X.toarray(), adata.X.toarray())
    values = dataset.store.matrix("X").values
    assert values.dtype == np.float32
    assert values.n_shards > 10
    assert "zstd" in str(values.codecs)


def test_convert_says_what_it_did_and_overwrites_only_when_told(h5ad, tmp_path):
    dest = tmp_path / "cells.zarr"
    text = zloader("convert", h5ad, dest).stdout
    assert "700 rows x 300 genes" in text
    assert "X/data: float32 -> uint16, without loss" in text
    assert f"written to {dest}" in text
    refused = zloader("convert", h5ad, dest, status=1)
    assert refused.stdout == ""
    assert refused.stderr.startswith("error: ")
    zloader("convert", h5ad, dest, "--overwrite")


def test_s3_through_flags_and_the_environment(h5ad, s3, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.storage_options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.storage_options["secret"])
    url, flags = s3.url("cells.zarr"), ("--endpoint-url", s3.endpoint_url, "--region", "us-east-1")
    zloader("convert", h5ad, url, *flags)
    shown = json.loads(zloader("info", url, "--json", *flags).stdout)
    assert (shown["url"], shown["rows"]) == (url, 700)
    assert shown["epoch"]["unmirrored"]["gets"] == 4
    refused = zloader("info", url, "--anon", *flags, status=1)
    assert refused.stderr.startswith("error: not allowed to list ")
    assert s3.storage_options["secret"] not in refused.stderr


@pytest.mark.slow
def test_info_foretells_what_an_epoch_costs(tmp_path):
    write_store(counts(700, 300), tmp_path / "cells.zarr", tmp_path)
    flags = {"batch_size": 16, "fetch_factor": 4, "block_size": 8}
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
    shown = json.loads(zloader("info", tmp_path / "cells.zarr", "--json", *words).stdout)
    for cache, cost in ((None, "unmirrored"), (tmp_path / "cache", "first_mirrored")):
        dataset = zl.open_dataset(tmp_path / "cells.zarr", cache=cache)
        loader = zl.Loader(dataset, batch_size=16, fetch_factor=4, sampling=stratified(8))
        for _ in loader:
            pass
        assert shown["epoch"][cost]["gets"] == pytest.approx(loader.statistics().gets, rel=0.02)
        assert shown["epoch"][cost]["bytes_read"] == pytest.approx(loader.statistics().bytes_read, rel=0.02)
    assert shown["fingerprint"] == dataset.fingerprint
    assert {column["name"] for column in shown["obs"]} == set(dataset.obs_columns)
    assert shown["epoch"] | flags == shown["epoch"]


@pytest.mark.slow
def test_info_foretells_the_cost_of_sets_and_controls(tmp_path):
    write_store(counts(700, 300), tmp_path / "cells.zarr", tmp_path)
    flags = ("--group", "donor", "--group", "lane", "--set-size", 8, "--controls", "passed", "--match", "donor")
    shown = json.loads(zloader("info", tmp_path / "cells.zarr", "--json", "--fetch-factor", 5, *flags).stdout)["epoch"]
    dataset = zl.open_dataset(tmp_path / "cells.zarr")
    sampling, controls = zl.CellSets(["donor", "lane"], 8), zl.MatchedControls("passed", match="donor")
    loader = zl.Loader(dataset, batch_size=8, fetch_factor=5, sampling=sampling, controls=controls)
    for _ in loader:
        pass
    assert shown["unmirrored"]["gets"] == loader.statistics().gets
    assert shown["unmirrored"]["bytes_read"] == loader.statistics().bytes_read
    assert (shown["group"], shown["set_size"], shown["controls"]) == (["donor", "lane"], 8, "passed")
    text = zloader("info", tmp_path / "cells.zarr", *flags).stdout
    assert "sets of 8, a control for each row" in text
    assert "--match goes with --controls" in zloader("info", tmp_path / "cells.zarr", *flags[-2:], status=1).stderr


def test_blocks_of_info_shrink_with_a_fetch(tmp_path):
    write_store(counts(300, 60), tmp_path / "cells.zarr", tmp_path)
    flags = ("--batch-size", 4, "--fetch-factor", 4)
    shown = json.loads(zloader("info", tmp_path / "cells.zarr", "--json", *flags).stdout)["epoch"]
    dataset = zl.open_dataset(tmp_path / "cells.zarr")
    cost = epoch_costs(dataset, zl.Loader(dataset, batch_size=4, fetch_factor=4).plan(0)).unmirrored
    assert (shown["block_size"], shown["unmirrored"]["gets"]) == (16, cost.gets)
    refused = zloader("info", tmp_path / "cells.zarr", *flags, "--block-size", 64, status=1)
    assert "block_size 64 is larger than a fetch" in refused.stderr
    refused = zloader("info", tmp_path / "cells.zarr", "--batch-size", 0, status=1)
    assert "batch_size must be a whole number of at least 1, not 0" in refused.stderr


def test_info_as_text(tmp_path):
    adata = counts(300, 60)
    adata.layers["dense"] = adata.X.toarray()
    adata.obs["[red]lane"] = adata.obs["lane"]
    write_store(adata, tmp_path / "cells.zarr", tmp_path)
    text = zloader("info", tmp_path / "cells.zarr", "--x", "layers/dense").stdout
    dataset = zl.open_dataset(tmp_path / "cells.zarr")
    cost = epoch_costs(dataset, zl.Loader(dataset, x="layers/dense").plan(0), x="layers/dense").unmirrored
    assert "300 x 60" in text
    assert "cell_type" in text
    assert "[red]lane" in text
    assert "uint16 (was float32)" in text
    assert text.count(" as stored") == text.count("mirror: ") == 2
    assert any(line.split()[-3] == str(cost.gets) for line in text.splitlines() if line.startswith("without a mirror"))
    assert "…" not in text, "nothing is truncated without a terminal"


def test_info_says_where_compact_rows_pay(tmp_path, monkeypatch):
    write_store(counts(100, 3000, density=0.5), tmp_path / "cells.zarr", tmp_path)
    assert "Compact rows" not in zloader("info", tmp_path / "cells.zarr").stdout
    monkeypatch.setattr(cli, "available_bytes", lambda: 2000)
    text = " ".join(zloader("info", tmp_path / "cells.zarr").stdout.split())
    assert 'Raw rows are more than the 2.0 kB of memory here. Compact rows (zl.Cache(form="compact")) read less' in text


def test_info_of_a_matrix_that_is_not_there_still_shows_the_store(tmp_path):
    write_store(counts(30, 20), tmp_path / "cells.zarr", tmp_path)
    done = zloader("info", tmp_path / "cells.zarr", "--x", "layers/none", status=1)
    assert "30 x 20" in done.stdout
    assert "cannot estimate an epoch: there is no matrix 'layers/none'" in done.stdout
    shown = json.loads(zloader("info", tmp_path / "cells.zarr", "--x", "layers/none", "--json", status=1).stdout)
    assert "there is no matrix" in shown["epoch"]["problem"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("info", "/nowhere.zarr"), "no such directory: /nowhere.zarr"),
        (("info", "ftp://host/x.zarr"), "cannot open 'ftp://host/x.zarr'"),
        (("convert", "/nowhere.h5ad", "/tmp/never.zarr"), "/nowhere.h5ad"),
        (("convert", "/nowhere.h5ad", "/tmp/never.zarr", "--codec", "brotli"), "codec must be one of"),
        (("demo", "--report", "/nowhere/report.html"), "cannot write /nowhere/report.html"),
    ],
)
def test_an_error_is_one_line(arguments, said):
    done = zloader(*arguments, status=1)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_the_demo_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert 'pip install "zloader[demo]"' in zloader("demo", status=1).stderr


@pytest.mark.any_version
@pytest.mark.slow
def test_a_traceback_only_for_those_who_ask(interpreter):
    plain = interpreter.run(CLI, "info", "/nowhere.zarr")
    full = interpreter.run(CLI, "info", "/nowhere.zarr", "--debug")
    assert (plain.returncode, full.returncode) == (1, 1)
    assert "Traceback" not in plain.stderr
    assert "Traceback" in full.stderr
    assert "StoreNotFoundError" in full.stderr


def test_usage_errors_say_how_to_get_help():
    done = zloader("info", status=2)
    assert "Missing argument" in done.stderr
