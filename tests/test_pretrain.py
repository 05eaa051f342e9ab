"""benchmarks/training/pretrain.py: its model, its oracles, its figures, and runs that go on after a kill."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import PATIENCE_S

import zloader as zl
from benchmarks.data import programmes
from benchmarks.harness.measuring import importing, program

pytestmark = pytest.mark.any_version

ROOT = Path(__file__).parents[1]
SIZES = ["--rows", "160", "--genes", "40", "--programmes", "2", "--types", "3", "--held-out", "32"]
TINY = [*SIZES, "--tokens", "24", "--batch-size", "16", "--fetch-factor", "2", "--peak-tflops", "0.1", "--threads", "1"]
STEPS = 8  # per epoch of 128 rows


@pytest.fixture(scope="module")
def pretrain() -> SimpleNamespace:
    """The modules of the benchmark."""
    names = ("checkpoint", "model", "costs", "oracle", "page", "ranks", "run", "settings")
    modules = {name: importlib.import_module(f"benchmarks.training.pretraining.{name}") for name in names}
    main = importlib.import_module("benchmarks.training.pretrain")
    return SimpleNamespace(main=main, programmes=programmes, **modules)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch wait for each other, which takes long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def work(pretrain: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as --work that has the atlas of SIZES already."""
    folder = tmp_path_factory.mktemp("work")
    pretrain.main.convert_atlas(atlas_in(pretrain, folder), atlas_of(pretrain))
    return folder


def atlas_of(pretrain: SimpleNamespace) -> Any:
    return pretrain.programmes.Atlas(rows=160, genes=40, programmes=2, types=3)


def atlas_in(pretrain: SimpleNamespace, work: Path) -> Path:
    return work / "root" / "bucket" / pretrain.main.store_name(atlas_of(pretrain))


@pytest.fixture(scope="module")
def source(pretrain: SimpleNamespace, work: Path) -> Any:
    return pretrain.settings.Source(url=str(atlas_in(pretrain, work)))


def settings_of(pretrain: SimpleNamespace, **options: Any) -> Any:
    return pretrain.settings.Settings(
        **{"batch_size": 16, "fetch_factor": 2, "tokens": 24, "epochs": 2, "held_out": 32, "peak_tflops": 0.1,
           "probe_s": 0.01, **options}
    )  # fmt: skip


def script(*flags: str | Path, **options: Any) -> subprocess.Popen[str]:
    command = program("training.pretrain", *TINY, "--json", *flags)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=importing(), **options)


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a run found out. Its status says only whether it has learned something yet."""
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode in (0, 1)
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


# ---- model


# ---- oracles


def test_the_oracles_know_more_than_the_means(pretrain, source):
    training = pretrain.run.Training(settings_of(pretrain, held_out=100), source, pretrain.ranks.Ranks())
    truth = pretrain.programmes.truth_of(pretrain.programmes.Atlas(rows=160, genes=40, programmes=2, types=3))
    losses = pretrain.oracle.oracle_losses(training.held_out, training.tokenizer, truth, share=0.25)
    for minibatch in training.loader:
        training.means.add(minibatch.tokens)
    baseline = training._held_out()["held_out"]["mean of each gene"]
    assert losses["true rates"] < losses["true programmes"] < 0.9 * baseline


def test_the_rates_are_those_of_the_counts(pretrain, source):
    truth = pretrain.programmes.truth_of(pretrain.programmes.Atlas(rows=160, genes=40, programmes=2, types=3))
    dataset = zl.open_dataset(source.url)
    (minibatch,) = zl.Loader(dataset, batch_size=160, layout="dense", shuffle=False)
    rates = truth.rates(slice(None))
    assert minibatch.index.tolist() == list(range(160))
    surprise = (minibatch.x.numpy() - rates) / np.sqrt(rates)  # of Poisson counts: mean 0, deviation 1
    assert abs(surprise.mean()) < 0.05
    assert surprise.std() == pytest.approx(1, abs=0.05)


# ---- runs


@pytest.mark.slow
def test_a_run_counts_every_row_and_resumes_bit_for_bit(pretrain, source, tmp_path):
    """Interrupted after a minibatch, at the last minibatch of an epoch, and just after an epoch."""
    whole = pretrain.run.Training(settings_of(pretrain), source, pretrain.ranks.Ranks())
    figures = whole.train()
    assert [epoch["rows"] for epoch in figures["epochs"]] == [128, 128]
    assert [epoch["steps"] for epoch in figures["epochs"]] == [STEPS, STEPS]
    for epoch in figures["epochs"]:
        assert 0 < epoch["tokens"] <= 128 * 24
        assert 0 <= epoch["wait_share"] <= 1
        assert epoch["gets"] > 0  # there is no mirror
        assert epoch["mfu"] > 0
    checkpoint = settings_of(pretrain, checkpoint=str(tmp_path / "run.pt"), checkpoint_steps=3)
    for steps in (1, 5, STEPS, STEPS + 1, None):
        part = pretrain.run.Training(replace(checkpoint, steps=steps), source, pretrain.ranks.Ranks())
        resumed = part.train()
    for name in ("step", "order", "losses"):
        assert resumed[name] == figures[name]
    assert [epoch["rows"] for epoch in resumed["epochs"]] == [128, 128]
    assert [epoch["held_out"] for epoch in resumed["epochs"]] == [epoch["held_out"] for epoch in figures["epochs"]]
    for name, weights in whole.model.state_dict().items():
        assert torch.equal(weights, part.model.state_dict()[name]), name
    other = replace(checkpoint, rate=0.1)
    with pytest.raises(SystemExit, match=r"rate was 0.003, is 0.1"):
        pretrain.run.Training(other, source, pretrain.ranks.Ranks()).train()
    (tmp_path / "run.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(SystemExit, match="is no checkpoint"):
        pretrain.run.Training(checkpoint, source, pretrain.ranks.Ranks()).train()


def test_a_checkpoint_of_other_rows_is_refused(pretrain, source, tmp_path):
    """Another store with as many genes would go on with other rows, and nobody would notice."""
    settings = settings_of(pretrain, checkpoint=str(tmp_path / "run.pt"), steps=1)
    pretrain.run.Training(settings, source, pretrain.ranks.Ranks()).train()
    vocabulary = {**pretrain.settings.SPECIAL, "gene 1": 2, "gene 0": 3}
    (tmp_path / "words.json").write_text(json.dumps(vocabulary))
    others = {"store": replace(source, url=f"{source.url}/../other.zarr"),
              "vocabulary": replace(source, vocabulary=str(tmp_path / "words.json"))}  # fmt: skip
    shutil.copytree(source.url, Path(source.url).parent / "other.zarr")
    for name, other in others.items():
        with pytest.raises(SystemExit, match=rf"is of another run: .*{name} was"):
            pretrain.run.Training(settings, other, pretrain.ranks.Ranks()).train()
    (tmp_path / "words.json").write_text("[1]")
    with pytest.raises(SystemExit, match=r"words\.json is no JSON file of token ids"):
        pretrain.run.Training(settings, others["vocabulary"], pretrain.ranks.Ranks())


def test_a_loss_that_is_no_number_ends_the_run_and_is_not_saved(pretrain, source, tmp_path):
    settings = settings_of(pretrain, rate=1e20, checkpoint=str(tmp_path / "run.pt"), checkpoint_steps=100)
    with pytest.raises(SystemExit, match=r"the loss of step \d is (nan|inf): lower --rate, and remove the checkpoint"):
        pretrain.run.Training(settings, source, pretrain.ranks.Ranks()).train()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_cannot_be_written_keeps_the_old_one(pretrain, tmp_path):
    write, path = pretrain.checkpoint.write, tmp_path / "run.pt"
    write(path, {}, {"a": torch.ones(3)})
    (tmp_path / "run.pt.partial").mkdir()
    with pytest.raises(SystemExit, match=r"cannot save the checkpoint .*run\.pt: .*Is a directory"):
        write(path, {}, {"a": torch.zeros(3)})
    assert torch.equal(torch.load(path)["a"], torch.ones(3))


def test_a_checkpoint_with_a_flipped_bit_is_refused(pretrain, tmp_path):
    path = tmp_path / "run.pt"
    pretrain.checkpoint.write(path, {}, {"a": torch.ones(3000)})
    assert torch.equal(pretrain.checkpoint.read(path, {}, torch.device("cpu"))["a"], torch.ones(3000))
    content = bytearray(path.read_bytes())
    content[content.index(torch.ones(9).numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(SystemExit, match=r"run\.pt is no checkpoint of pretrain\.py"):
        pretrain.checkpoint.read(path, {}, torch.device("cpu"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rate", "nan"], "--rate must be a number above 0, not nan"),
        (["--peak-tflops", "0"], "--peak-tflops must be a number above 0, not 0"),
        (["--genes", "0"], "--genes must be at least 1, not 0"),
        (["--threads", "-1"], "--threads must be at least 1, not -1"),
        (["--seed", "-1"], "--seed must be at least 0, not -1"),
        (["--work", "w", "--checkpoint", "absent/run.pt"], "cannot save a checkpoint at absent/run.pt"),
        (["--work", "w", "--checkpoint", "."], "cannot save a checkpoint at ."),
        (["--report", "absent/page.html"], "error: cannot write absent/page.html"),
        (["--store", "absent.zarr"], "error: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_said_before_training(pretrain, monkeypatch, tmp_path, capsys, flags, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *TINY, *flags])
    with pytest.raises(SystemExit) as ended:
        pretrain.main.main()
    assert ended.value.code not in (0, 1, None)
    assert said in (str(ended.value.code) + capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_from_s3_writes_its_page(pretrain, work, tmp_path, capsys, monkeypatch):
    report = tmp_path / "page.html"
    flags = ["--work", str(work), "--epochs", "2", "--report", str(report), "--json"]
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *TINY, *flags])
    with pytest.raises(SystemExit):
        pretrain.main.main()
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    cold, warm = document["epochs"]
    assert (cold["source"], warm["source"]) == ("cold", "warm")
    assert document["server"]["bytes_out"] >= cold["bytes_read"] > 0
    html = report.read_text()
    assert html.count("<svg") == 2
    assert "http" not in html.replace("http://www.w3.org", "").replace(document["store"], "")


@pytest.mark.slow
@pytest.mark.long
def test_a_run_learns_more_than_the_means(work):
    """Two thirds of the rows of the default atlas, half of its genes and programmes, and half of the epochs."""
    sizes = ["--rows", "8000", "--genes", "100", "--tokens", "48", "--held-out", "300"]
    found = result(script("--work", work, *sizes, "--fetch-factor", "64", "--epochs", "4"))
    held_out = found["held_out"]
    assert held_out["true rates"] < held_out["true programmes"] < held_out["model"]
    assert held_out["model"] < 0.9 * held_out["mean of each gene"]


@pytest.mark.slow
@pytest.mark.long
def test_killed_runs_end_as_one_that_was_not(work, tmp_path):
    """Killed with all their processes, at random moments after another checkpoint. On a slow machine some may end."""
    flags = ["--work", work, "--epochs", "24", "--checkpoint-steps", "7"]
    whole = result(script(*flags))
    rng, checkpoint = random.Random(0), tmp_path / "run.pt"
    for _ in range(2):
        process = script(*flags, "--checkpoint", checkpoint, start_new_session=True, stderr=subprocess.DEVNULL)
        before = written(checkpoint)
        while process.poll() is None and written(checkpoint) == before:
            time.sleep(0.01)
        time.sleep(rng.random() / 4)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    resumed = result(script(*flags, "--checkpoint", checkpoint))
    for name in ("step", "order", "losses"):
        assert resumed[name] == whole[name]
    assert resumed["held_out"] == whole["held_out"]


def written(path: Path) -> int:
    """When a file was written last; 0 if it is not there."""
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks_share_the_rows_and_resume(work, tmp_path):
    flags = ["--work", work, "--epochs", "2", "--ranks", "2"]
    whole = result(script(*flags))
    assert [epoch["rows"] for epoch in whole["epochs"]] == [128, 128]
    assert whole["step"] == STEPS  # half as many of twice the rows
    checkpoint = tmp_path / "run.pt"
    part = result(script(*flags, "--checkpoint", checkpoint, "--steps", "3"))
    assert part["step"] == 3
    resumed = result(script(*flags, "--checkpoint", checkpoint))
    for name in ("step", "order", "losses"):
        assert resumed[name] == whole[name]


@pytest.mark.slow
def test_torchrun_starts_ranks(source, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
               "--nproc-per-node", "2", "-m", "benchmarks.training.pretrain", *TINY, "--json", "--epochs", "1",
               "--store", source.url, "--cache", tmp_path / "mirror"]  # fmt: skip
    environment = importing(GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=PATIENCE_S, check=False)
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert (found["ranks"], found["epochs"][0]["rows"], found["step"]) == (2, 128, STEPS // 2)


@pytest.mark.slow
@pytest.mark.long
def test_tasks_of_ray_change_nothing(work):
    pytest.importorskip("ray", reason='Ray is not installed: pip install "zloader[ray]"')
    plain, streamed = (result(script("--work", work, "--epochs", "2", *flags)) for flags in ([], ["--ray-tasks", "1"]))
    for name in ("step", "order", "losses", "held_out"):
        assert streamed[name] == plain[name]
    assert streamed["ray_cpu_s"] > 0
