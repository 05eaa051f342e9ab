"""benchmarks/real.py: a store where it lies, locally, in a bucket and on the web, and what may go wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anndata as ad
import pytest
from helpers import PATIENCE_S, counts, write_store
from pages import Page

import benchmarks.real as real
from benchmarks.compare import opening, peers, rivals
from benchmarks.compare.inputs import Data
from benchmarks.compare.reporting import records
from benchmarks.compare.session import Contender, WrongRows, expect
from benchmarks.harness import measuring
from benchmarks.harness.cloud import Cloud, LinkSpeed, cloud
from benchmarks.harness.sides import StoreElsewhere
from zloader.common.errors import FormatError

pytestmark = pytest.mark.any_version

ROWS = 3000
KEYS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def adata() -> ad.AnnData:
    return counts(ROWS, 60)


@pytest.fixture(scope="module")
def root(adata: ad.AnnData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("root")
    write_store(adata, made / "bucket" / "cells.zarr", made / "tmp")
    adata.write_h5ad(made / "bucket" / "cells.h5ad")
    return made


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Cloud]:
    with cloud(root, LinkSpeed(ttfb_ms=2)) as running:
        yield running


def command(store: str, output: Path, *more: object) -> list[str]:
    flags = ("--peers", "zloader,cell-load", "--minutes", 10, "--turns", 1, *more)
    return measuring.program("real", "--store", store, "--output", output, "--work", output.parent, *flags)


def run(store: str, output: Path, *more: object) -> subprocess.CompletedProcess[str]:
    given = {"capture_output": True, "text": True, "timeout": 600, "check": False}
    return subprocess.run(command(store, output, *more), env=measuring.importing(**KEYS), **given)


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*") if path.is_file()}


# ---- whole runs


@pytest.mark.slow  # two tools in new processes
@pytest.mark.parametrize(
    "url",
    [
        "{root}/bucket/cells.zarr",
        "s3://bucket/cells.h5ad",
        pytest.param("s3://bucket/cells.zarr", marks=pytest.mark.long),
        pytest.param("{endpoint}/bucket/cells.zarr", marks=pytest.mark.long),
    ],
)
def test_a_run_measures_all_and_writes_nothing_but_its_results(root, server, adata, tmp_path, url):
    before, found = files_of(root), url.format(root=root, endpoint=server.endpoint)
    server.reset()
    endpoint = ("--endpoint-url", server.endpoint) if url.startswith("s3") else ()
    done = run(found, tmp_path / "page.html", "--gigabyte-egress", 0.09, *endpoint)
    assert done.returncode == 0, done.stderr
    assert files_of(root) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "page.jsonl"]
    assert not {"PUT", "POST", "DELETE"} & server.stats().keys()
    lines = records.read(tmp_path / "page.jsonl")
    measured = {(each.peer.partition(", ")[2], each.case["epoch"]): each for each in lines.measurements}
    form = "h5ad" if url.endswith("h5ad") else ""
    assert measured.keys() == {
        (", ".join(filter(None, (form, mirror))), epoch) for mirror in ("", "no mirror") for epoch in ("cold", "warm")
    }
    assert all(each.rows == ROWS and each.extra["checked"] == "rows and values" for each in measured.values())
    assert all(each.wait_share is not None for (_, epoch), each in measured.items() if epoch == "warm")
    cold, warm = measured[form, "cold"], measured[form, "warm"]
    if url.startswith("{root}"):
        assert (cold.gets, cold.dollars, warm.bytes) == (None, None, None)
    else:
        assert cold.gets > warm.gets == 0
        assert cold.bytes > adata.X.nnz
        assert cold.dollars > warm.dollars
        assert [limit.name for limit in lines.limits] == ["link"]
    assert [each.peer for each in lines.missing] == ["cell-load"]
    alone = f"of --peers reads a store of the kind '{kind_of(url)}' where it lies, so nothing was compared."
    assert alone in done.stderr
    text = Page((tmp_path / "page.html").read_text()).text
    for said in (alone, found, "Cold and warm epochs, this store", "where it lies", f"{ROWS:,} cells"):
        assert said in text
    assert "simulated" not in text.split("What the words mean")[0]


@pytest.mark.slow  # starts processes
def test_ctrl_c_ends_a_run_with_the_page_of_what_was_measured(root, tmp_path):
    output = tmp_path / "page.html"
    store = str(root / "bucket" / "cells.zarr")
    with subprocess.Popen(
        command(store, output, "--turns", 9), stderr=subprocess.PIPE, text=True, env=measuring.importing()
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "epoch warm, turn 1, zloader:" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(PATIENCE_S) == 130, rest
    assert "interrupted: the page has what was measured until now" in rest
    assert "Traceback" not in rest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "page.jsonl"]
    assert records.read(tmp_path / "page.jsonl").end is None
    assert "The run was stopped before its end" in Page(output.read_text()).text


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize(
    ("store", "more", "said"),
    [
        ("{root}/nothing.zarr", (), "nothing.zarr"),
        ("s3://bucket/nothing.h5ad", ("--endpoint-url", "{endpoint}"), "nothing.h5ad"),
        ("s3://bucket/cells.zarr", ("--endpoint-url", "here"), "must have the form http://HOST:PORT"),
        ("{root}/bucket/cells.zarr", ("--minutes", "0.5"), "--minutes 0.5 is too short for 2 ways of reading: give at"),
        ("{root}/bucket/cells.zarr", ("--peers", "cell-load"), "no tool of --peers is installed that can read"),
    ],
)
def test_errors_say_what_to_do_and_leave_nothing_behind(root, server, tmp_path, store, more, said):
    named = {"root": root, "endpoint": server.endpoint}
    done = run(store.format(**named), tmp_path / "page.html", *(flag.format(**named) for flag in more))
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--minutes", "nan"), "--minutes must be a number above 0"),
        (("--turns", "0"), "--turns must be at least 1"),
        (("--peers", "zloadr"), "unknown: zloadr"),
        (("--output", "{folder}/old.html"), "exists; give another name"),
        (("--output", "{folder}/none/a.html"), "there is no directory"),
        (("--work", "{folder}/none"), "there is no directory"),
    ],
)
def test_flags_that_cannot_be(tmp_path, capsys, flags, said):
    (tmp_path / "old.html").touch()
    with pytest.raises(SystemExit, match="2"):
        real.parsed(["--store", "a.zarr", *(flag.format(folder=tmp_path) for flag in flags)])
    assert said in capsys.readouterr().err


# ---- parts


def kind_of(url: str) -> str:
    return ("" if url.startswith("{root}") else "remote ") + url.rpartition(".")[2]


def test_it_says_that_nothing_was_compared_and_what_installs_another_loader():
    assert real.not_compared("h5ad", ["zloader", "scdataset"], {"zloader", "scdataset"}) == ""
    said = real.not_compared("zarr", ["zloader", "annbatch", "scdataset"], {"zloader"})
    assert said.startswith("No other loader is installed, so nothing was compared. To install one: pip install 'annb")
    assert said.endswith(", or pip install scdataset anndata torch s3fs")
    assert "nothing was compared" in real.not_compared("remote h5ad", ["zloader"], {"zloader"})
    able = {kind: [name for name in peers.MODULES if real.can_read(name, kind)] for kind in peers.KINDS}
    assert able["remote h5ad"] == ["zloader"]
    assert {"zloader", "annbatch", "scdataset"} <= set(able["remote zarr"])


def store_of(rows: int, *, rows_per_s: float = 10_000, mirror_bytes: int = 1000) -> opening.Opened:
    data = Data(name="a", path=Path("a"), rows=rows, genes=9, values=1, total=None, label="b")
    more: dict[str, Any] = {"stored_bytes": 1, "mirror_bytes": mirror_bytes, "bytes_per_s": None}
    return opening.Opened(dataset=None, data=data, rows_per_s=rows_per_s, **more)


def test_a_large_store_is_sampled_by_time_and_disk(capsys):
    assert store_of(9_999).sample(1.0, 10**9) == 9_999
    assert store_of(10**6).sample(1.0, 10**9) == 9_984
    assert store_of(10**6, mirror_bytes=10**9).sample(100.0, 10**8) == 49_984
    preset = real.preset_of(store_of(10**6), 2, 1000.0, 10**9)
    assert preset.most_s < preset.check_s < preset.deadline_s
    assert preset.rows == int(preset.most_s * 10_000) // 64 * 64
    assert 2 * (2 * 10 + 5 * preset.check_s) < 1000
    assert real.preset_of(store_of(100), 2, 1000.0, 10**9).fetch_rows == 64
    with pytest.raises(SystemExit, match="zloader would read only 0 cells"):
        real.preset_of(store_of(10**6, rows_per_s=10), 2, 100.0, 10**9)


def test_a_sample_is_compared_by_its_own_rows(tmp_path):
    data = replace(store_of(1000).data, total=50.0)
    contender = Contender(name="zloader", tool="zloader", python=tmp_path, side=peers.peer("zloader").sides["zloader"])
    side = real.sampled(contender, 640).side
    expect({"rows": 640, "ended": True, "total": 30.0}, data, side)
    for rows, ended in ((1000, True), (639, True), (641, False)):
        with pytest.raises(WrongRows):
            expect({"rows": rows, "ended": ended, "total": 30.0}, data, side)
    with pytest.raises(WrongRows):
        expect({"rows": 1000, "ended": True, "total": 30.0}, data, contender.side)
    other = replace(contender, tool="annbatch")
    assert real.sampled(other, 640) is other


@pytest.mark.parametrize("n_sides", [1, 2, 9])
def test_the_least_minutes_that_are_named_are_enough(n_sides):
    with pytest.raises(SystemExit) as error:
        real.require_time(0.1, n_sides)
    least = float(str(error.value).rpartition("at least ")[2].partition(",")[0])
    assert real.require_time(least + 0.1, n_sides) > 0
    with pytest.raises(SystemExit):
        real.require_time(least - 0.1, n_sides)


def test_a_sample_has_whole_blocks_from_the_whole_store(root):
    options = {"store": str(root / "bucket" / "cells.zarr"), "obs": "cell_type", "batch_size": 64, "sample": 640}
    epochs = peers.module("zloader").epochs({**options, "chunk_size": 64, "preload_nchunks": 4})
    rows = sorted(row for minibatch in epochs({}).minibatches for row in minibatch.index.tolist())
    assert (len(set(rows)), rows[0], rows[-1]) == (640, 0, ROWS // 64 * 64 - 1)
    assert all(first % 64 == 0 for first in rows[::64])


def test_values_are_summed_by_other_libraries(root, server, adata):
    total, options = float(adata.X.sum()), {"endpoint_url": server.endpoint, "key": "any", "secret": "any"}
    for name in ("cells.zarr", "cells.h5ad"):
        assert opening.total_of(str(root / "bucket" / name), {}) == total
        assert opening.total_of(f"s3://bucket/{name}", options) == total
    assert opening.total_of(str(root / "nothing.zarr"), {}) is None


def test_a_store_without_labels_is_refused(tmp_path):
    adata = counts(100, 20)
    adata.obs = adata.obs[[]]
    adata.write_h5ad(tmp_path / "a.h5ad")
    with pytest.raises(FormatError, match="obs has no categorical column"):
        opening.opened(StoreElsewhere(url=str(tmp_path / "a.h5ad"), store=tmp_path / "a.h5ad"), 100.0)


def test_installed_tools_are_found(tmp_path):
    assert rivals.installed("annloader", tmp_path) == Path(sys.executable)
    with pytest.raises(
        rivals.EnvironmentFailed, match=r"cell-load not installed. To install: pip install cell-load\. Or"
    ):
        rivals.installed("cell-load", tmp_path)
    (tmp_path / "cell-load").mkdir()
    (tmp_path / "cell-load" / "made_of.json").touch()
    assert rivals.installed("cell-load", tmp_path) == tmp_path / "cell-load" / "bin" / "python"


def test_time_is_up_and_no_alarm_is_left():
    with pytest.raises(real.TimeIsUp), real.ending_after(0.01):
        time.sleep(PATIENCE_S)
    with real.ending_after(PATIENCE_S):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_public_buckets_of_google_have_the_token_of_gcsfs():
    where, kind = real.location(real.parsed(["--store", "gs://bucket/a.h5ad", "--anon"]))
    assert (where.storage_options, kind) == ({"token": "anon"}, "remote h5ad")
