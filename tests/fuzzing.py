"""One round of the fuzz test: converts a random AnnData, reads it in many ways, damages it, and checks every value.

    python tests/fuzzing.py FIRST_SEED ROUNDS [DIRECTORY]

runs rounds until one fails, and prints its seed. The seed determines everything. The oracle is the AnnData itself: rows
are matched by obs name, because the store may have them in another order.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
from helpers import dense, fetch_options
from sources import FailingDestination, disk_full

import zloader as zl
from zloader.access.location import Location
from zloader.common.errors import ZloaderError
from zloader.conversion.convert import convert_to
from zloader.training.recipes import LAYOUTS

DTYPES = ("float32", "float64", "int32", "uint16", "int8")


def random_anndata(rng: np.random.Generator) -> ad.AnnData:
    """A random number of rows and genes in any layout and dtype."""
    n_rows, n_genes = int(rng.integers(1, 300)), int(rng.integers(1, 60))
    dtype = np.dtype(rng.choice(DTYPES))
    x = sp.random(n_rows, n_genes, rng.choice([0.0, 0.05, 0.5, 1.0]), "csr", np.float64, random_state=rng)
    x.data[:] = rng.integers(1, 120, x.nnz)
    whole = dtype.kind in "iu" or rng.random() < 0.5
    layout = rng.choice(["csr", "csc", "dense"])
    x = (x if whole else x * 0.37).astype(dtype)
    obs = pd.DataFrame(
        {
            "label": pd.Categorical.from_codes(rng.integers(-1, 3, n_rows), ["a", "b", "never ä"]),
            "text": rng.choice(["x", "y", "zz"], n_rows).astype(object),
            "number": rng.random(n_rows).astype(np.float32),
            "maybe": pd.array([int(i) if i % 3 else None for i in rng.integers(0, 9, n_rows)], dtype="Int32"),
        },
        index=[f"cell{row}" for row in range(n_rows)],
    )
    return ad.AnnData(
        {"csr": x, "csc": x.tocsc(), "dense": x.toarray()}[str(layout)],
        obs=obs,
        var=pd.DataFrame(index=[f"gene{gene}" for gene in range(n_genes)]),
        layers={"twice": (x * 2).astype(np.float64)},
        obsm={"X_pca": rng.random((n_rows, 3), np.float32)},
        uns={"layout": str(layout)},
    )


FORMS = ["raw", "compact"]


class Round:
    """A store and its oracle. `log` lists the actions, to help to explain a failure."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = np.random.default_rng(seed)
        self.directory, self.store, self.cache = directory, directory / "store.zarr", directory / "cache"
        self.log: list[str] = []
        self.oracle = random_anndata(self.rng)

    def run(self) -> None:
        """Converts, then runs random actions. Raises AssertionError for a wrong value."""
        self.convert()
        actions = [self.read, self.read, self.take, self.damage_store, self.damage_mirror, self.killed_reader]
        for action in self.rng.choice(np.array(actions, object), 6, p=[0.3, 0.2, 0.1, 0.2, 0.15, 0.05]):
            action()

    def note(self, **facts: Any) -> None:
        self.log.append(", ".join(f"{name}={value!r}" for name, value in facts.items()))

    # --- Writing

    def convert(self) -> None:
        """Converts. Some conversions fail at a random object, and are then resumed or repeated."""
        rng = self.rng
        source: Any = self.oracle
        kind = str(rng.choice(["memory", "h5ad", "zarr"]))
        if kind != "memory":
            source = self.directory / f"source.{kind}"
            write = source_writer(self.oracle, kind)
            write(source, convert_strings_to_categoricals=False)
        options = zl.ConvertOptions(
            chunk_rows=int(rng.integers(1, 9)),
            shard_size=int(rng.choice([512, 4096, 65536])),
            codec=str(rng.choice(["lz4", "zstd", "pcodec", "none"])),
            preserve_dtype=bool(rng.random() < 0.3),
            shuffle_seed=int(rng.integers(9)) if rng.random() < 0.4 else None,
            window_bytes=int(rng.choice([1000, 4096, 100_000])),
        )
        self.note(source=kind, options=options, shape=self.oracle.shape, dtype=self.oracle.X.dtype)
        resume = False
        if rng.random() < 0.4:
            survives = int(rng.integers(0, 60))
            with contextlib.suppress(ZloaderError):
                destination = FailingDestination(Location(url=str(self.store)), survives=survives, fail=disk_full)
                convert_to(destination, source, options=options)
            resume = kind != "memory" and bool(rng.random() < 0.5)
            self.note(failed_after=survives, resume=resume)
        zl.convert(source, self.store, options=options, overwrite=True, resume=resume, progress=False)
        found = zl.open_dataset(self.store).obs().index
        assert sorted(found) == sorted(self.oracle.obs_names), "rows are missing or unexpected"

    # --- Reading

    def open(self) -> zl.Dataset:
        """Opens the dataset with a cache of any form, sometimes a small one, or without."""
        most = [None, 400_000][int(self.rng.random() < 0.3)]
        form = str(self.rng.choice(FORMS))
        cache = zl.Cache(self.cache, max_bytes=most, form=form) if self.rng.random() < 0.7 else None
        self.note(cache=cache or "none")
        return zl.open_dataset(self.store, cache=cache)

    def read(self) -> None:
        """An epoch of a Loader with random options, sometimes of a view, sometimes interrupted and resumed."""
        rng, dataset = self.rng, self.open()
        if rng.random() < 0.3 and dataset.n_obs > 2:
            dataset = dataset.where(np.sort(rng.choice(dataset.n_obs, dataset.n_obs // 2, replace=False)))
        genes = rng.permutation(dataset.n_vars)[: rng.integers(1, dataset.n_vars + 1)] if rng.random() < 0.3 else None
        batch_size, fetch_factor = int(rng.integers(1, 70)), int(rng.integers(1, 9))
        block_size = int(rng.integers(1, batch_size * fetch_factor + 1))
        shuffled = [zl.BlockShuffling(block_size), zl.MixtureOfScanners(3, block_size=block_size)]
        samplings = [None, zl.Streaming(), *shuffled]
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "fetch_factor": fetch_factor,
            "sampling": samplings[int(rng.integers(4))],
            "x": str(rng.choice(["X", "layers/twice"])),
            "obs": ["label", "text", "number", "maybe"],
            "obsm": ["X_pca"],
            "layout": str(rng.choice(LAYOUTS)),
            "dtype": str(rng.choice(["float32", "float64"])),
            "seed": int(rng.integers(99)),
            "rank": 0,
            "world_size": 1,
        }
        if options["layout"] == "packed":
            options["dtype"] = None  # the stored ones
        self.note(**options, genes=genes, rows=dataset.n_obs)
        fetching = {"threads": int(rng.integers(1, 4)), "prefetch": int(rng.integers(1, 4))}
        options["options"] = fetch_options(memory="16MiB", **fetching)
        dataset = dataset if genes is None else dataset[:, genes]
        loader = zl.Loader(dataset, **options)
        stop = int(rng.integers(0, len(loader))) if rng.random() < 0.3 else len(loader)
        seen = [self.check(dataset, minibatch, options) for minibatch in itertools.islice(loader, stop)]
        if stop < len(loader):
            self.note(resumed_at=stop)
            resumed = zl.Loader(dataset, **options)
            resumed.load_state_dict(loader.state_dict())
            seen += [self.check(dataset, minibatch, options) for minibatch in resumed]
        rows = np.sort(np.concatenate(seen))
        wanted = dataset.row_numbers if isinstance(dataset, zl.View) else np.arange(dataset.n_obs)
        np.testing.assert_array_equal(rows, np.sort(wanted))

    def check(self, dataset: zl.Dataset, minibatch: zl.Minibatch, options: dict[str, Any]) -> np.ndarray:
        """Compares the values of a minibatch with the oracle. Returns its row numbers."""
        rows = np.asarray(minibatch.index)
        names = dataset.whole.stores[0].names("obs")[rows]
        wanted = self.oracle[names, dataset.var_names]
        x = wanted.X if options["x"] == "X" else wanted.layers["twice"]
        found = minibatch.x.dense(torch.float64).numpy() if options["layout"] == "packed" else dense(minibatch.x)
        np.testing.assert_array_equal(found, dense(x).astype(options["dtype"] or "float64"))
        np.testing.assert_array_equal(np.asarray(minibatch.obsm["X_pca"]), wanted.obsm["X_pca"])
        np.testing.assert_array_equal(np.asarray(minibatch.obs["number"]), wanted.obs["number"])
        np.testing.assert_array_equal(
            np.asarray(minibatch.obs["maybe"], float), wanted.obs["maybe"].to_numpy(float, na_value=np.nan)
        )
        for column in ("label", "text"):
            labels = dataset.categories(column)
            codes = np.asarray(minibatch.obs[column])
            got = [None if code < 0 else labels[code] for code in codes]
            assert got == wanted.obs[column].astype(object).where(wanted.obs[column].notna(), None).tolist()
        return rows

    def take(self) -> None:
        """Takes some rows as an AnnData, in random order and with repetitions."""
        dataset = self.open()
        rows = self.rng.integers(0, dataset.n_obs, int(self.rng.integers(1, 20)))
        self.note(take=rows.tolist())
        taken = dataset.take(rows)
        wanted = self.oracle[dataset.obs().index[rows]]
        np.testing.assert_array_equal(dense(taken), dense(wanted))
        assert taken.obs["text"].astype(str).tolist() == wanted.obs["text"].astype(str).tolist()

    # --- Damage

    def damage_store(self) -> None:
        """Changes, truncates, empties or deletes an object: reading raises an error or returns the right values."""
        objects = [path for path in sorted(self.store.rglob("*")) if path.is_file() and path.name != "zarr.json"]
        path = objects[int(self.rng.integers(len(objects)))]
        before, stat = path.read_bytes(), path.stat()
        self.damage(path)
        shutil.rmtree(self.cache, ignore_errors=True)  # a mirror may contain the undamaged values
        for action in (self.read, self.take):
            try:
                action()
            except ZloaderError as error:
                self.note(refused=str(error))
        path.write_bytes(before)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        shutil.rmtree(self.cache, ignore_errors=True)

    def damage_mirror(self) -> None:
        """Changes, truncates, empties or deletes files of a mirror: reading still returns the right values."""
        files = [path for path in sorted(self.cache.rglob("*")) if path.is_file()]
        for _ in range(min(len(files), int(self.rng.integers(1, 4)))):
            path = files[int(self.rng.integers(len(files)))]
            if path.exists():
                self.damage(path)
        self.read()

    def damage(self, path: Path) -> None:
        content = bytearray(path.read_bytes())
        how = str(self.rng.choice(["flip", "truncate", "empty", "delete"]))
        self.note(damaged=str(path.relative_to(self.directory)), how=how)
        if how == "delete":
            path.unlink()
            return
        if how == "flip" and content:
            content[int(self.rng.integers(len(content)))] ^= 1 << int(self.rng.integers(8))
        path.write_bytes(content if how == "flip" else content[: len(content) // 2] if how == "truncate" else b"")

    def killed_reader(self) -> None:
        """Kills a process while it fills the mirror."""
        after = int(self.rng.integers(1, 4))
        form = str(self.rng.choice(FORMS))
        self.note(killed_after=after, form=form)
        subprocess.run([sys.executable, "-c", _KILLED, str(self.store), str(self.cache), str(after), form], check=False)
        self.read()


_KILLED = """
import os, signal, sys
import zloader as zl
dataset = zl.open_dataset(sys.argv[1], cache=zl.Cache(sys.argv[2], form=sys.argv[4]))
for number, minibatch in enumerate(zl.Loader(dataset, batch_size=16, fetch_factor=1)):
    if number == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


def source_writer(adata: ad.AnnData, kind: str) -> Any:
    return adata.write_h5ad if kind == "h5ad" else adata.write_zarr


def run_round(seed: int, directory: Path) -> None:
    """Runs one round. An error names the seed and lists the actions."""
    logger = logging.getLogger("zloader")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # damage is logged as warnings
    fuzz = Round(seed, directory)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fuzz.run()
    except Exception as error:
        actions = "\n  ".join(fuzz.log)
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\n  {actions}") from error
    finally:
        logger.setLevel(level)


def main() -> None:
    """Runs the given number of rounds, starting with the given seed."""
    first, rounds = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(first, first + rounds):
        with tempfile.TemporaryDirectory(dir=sys.argv[3] if len(sys.argv) > 3 else None) as directory:
            run_round(seed, Path(directory))
        print(f"seed {seed} passed", flush=True)


if __name__ == "__main__":
    main()
