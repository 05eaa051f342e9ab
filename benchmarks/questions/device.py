"""Minibatches on a GPU: rows/s delivered, the wait of training, GPU memory and CPU seconds, beside the naive way.

    python -m benchmarks.questions.device --work DIRECTORY [--rows 100000] [--copies 10] [--turns 3] [--seconds 1.5]

It makes its own store of synthetic counts in DIRECTORY (see synthetic.py), copies after one another, and fills its
mirror, so that all figures are of warm epochs. What DIRECTORY holds already is used again.

The sides take turns. Each turn takes minibatches for some seconds from the first one on, over as many epochs as that
needs; the waits for the first minibatch of an epoch are not counted in it, but reported. Blocks of 64 rows in fetches
of 16 384.

- delivery: minibatches are taken and dropped. "host" sides stay in the memory of the host. "naive" is CSR on the host,
  `.to("cuda")` and `.to_dense()` on the training thread. "naive, packed" is the same with packed rows.
- training: steps of AdamW in bf16 on the drug's cell line, with x as log1p, minibatches of 1 024. "small" is an MLP
  62 710-256-50 of 16 M parameters, "large" one of 51 M (62 710-768-2 048-768-50). "no loading" trains on the same
  minibatch again and again, which is the limit. The wait share is the part of the time that `next` took. Work on the
  GPU that a side leaves to the training stream, such as the naive way's, shows in rows/s only.

annbatch takes part with `preload_to_gpu=True` if it can be imported. It reads a collection of its own of one copy, in
a process of its own. "csr" is its own form there; for "dense" each minibatch is converted on the GPU.

GPU memory is what the process takes of the device at the end of a side, and the peak of torch's tensors. CPU seconds
are user + system. The last line is one JSON document; each measure is printed to stderr as it is made.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import measuring
from benchmarks.harness.measuring import program

FETCH_ROWS = 16_384
BLOCK = 64
BATCH_SIZES = (1024, 4096)
LABEL = "cell_line"
Figures = dict[str, Any]
Taken = Iterator[tuple[Any, torch.Tensor]]  # of an epoch: x and labels of each minibatch
Use = Callable[[Any, torch.Tensor], None]  # of one minibatch
MODELS = {"small": (256,), "large": (768, 2048, 768)}
DELIVERY = ("csr, host", "packed, host", "csr", "dense", "packed", "naive", "naive, packed")
TRAINING = ("no loading", "naive", "naive, packed", "dense", "packed")
RIVAL_DELIVERY, RIVAL_TRAINING = ("annbatch, csr", "annbatch, dense"), ("annbatch, dense",)


# ---- sides: epochs of (x, labels)


@dataclass(frozen=True)
class Side:
    """zloader's epochs, delivered in one of the ways."""

    store: Path
    mirror: Path
    device: Any

    def epochs(self, name: str, batch_size: int, dtype: str) -> Callable[[], Taken]:
        """A function that begins an epoch."""
        import zloader as zl

        layout = "packed" if "packed" in name else "dense" if name == "dense" else "csr"
        here = "naive" in name or "host" in name
        loader = zl.Loader(
            zl.open_dataset(self.store, cache=self.mirror),
            batch_size=batch_size,
            fetch_factor=FETCH_ROWS // batch_size,
            sampling=zl.BlockShuffling(BLOCK),
            obs=[LABEL],
            layout=layout,
            device=None if here else self.device,
        )
        wanted = getattr(torch, dtype)

        def epoch() -> Taken:
            for minibatch in loader:
                x = minibatch.x
                if name == "naive":
                    minibatch = minibatch.to(self.device)
                    x = minibatch.x.to_dense().to(wanted)
                elif name == "naive, packed":
                    minibatch = minibatch.to(self.device)
                    x = minibatch.x.dense(wanted)
                elif name == "dense":
                    x = x.to(wanted)
                yield x, minibatch.obs[LABEL]

        return epoch


@dataclass(frozen=True)
class Annbatch:
    """annbatch's epochs over its collection, set up as its README recommends (see readers.py)."""

    store: Path
    device: Any

    def epochs(self, name: str, batch_size: int, dtype: str) -> Callable[[], Taken]:
        """A function that begins an epoch."""
        import annbatch
        import anndata as ad
        import numpy as np
        import zarr

        if importlib.util.find_spec("zarrs"):
            zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})

        def load(group: zarr.Group) -> ad.AnnData:
            return ad.AnnData(X=ad.io.sparse_dataset(group["X"]), obs=ad.io.read_elem(group["obs"])[[LABEL]])

        loader = annbatch.Loader(
            chunk_size=BLOCK,
            preload_nchunks=FETCH_ROWS // BLOCK,
            batch_size=batch_size,
            shuffle=True,
            preload_to_gpu=on_gpu(self.device),
            to="torch",
            rng=np.random.default_rng(0),
        ).use_collection(annbatch.DatasetCollection(self.store), load_adata=load)
        wanted = getattr(torch, dtype)

        def epoch() -> Taken:
            for minibatch in loader:
                x = minibatch["X"]
                column = minibatch["obs"][LABEL]
                codes = np.asarray(column.cat.codes if hasattr(column, "cat") else column, np.int64)
                labels = torch.from_numpy(codes).to(self.device, non_blocking=True)
                yield (x.to_dense().to(wanted) if "dense" in name else x), labels

        return epoch


def on_gpu(device: Any) -> bool:
    """Whether a device is a CUDA GPU; otherwise this run only tries the script."""
    return str(device).startswith("cuda")


def synchronize(device: Any) -> None:
    if on_gpu(device):
        torch.cuda.synchronize()


# ---- measuring


def consumer(model_name: str | None, device: Any, genes: int) -> Use:
    """The work done with each minibatch: none, or a training step."""
    if model_name is None:
        return lambda x, labels: None
    sizes = [genes, *MODELS[model_name], 50]
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for width, following in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(width, following, device=device), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu(device))
    kind = "cuda" if on_gpu(device) else "cpu"

    def step(x: Any, labels: torch.Tensor) -> None:
        if not isinstance(x, torch.Tensor):
            x = x.dense(torch.bfloat16)
        with torch.autocast(kind, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(torch.log1p(x)), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def measured(epoch: Callable[[], Taken], use: Use, seconds: float, device: Any) -> Figures:
    """Figures of the minibatches that are taken in some seconds."""
    rows = minibatches = 0
    counted_s = waited_s = 0.0
    firsts = []
    if on_gpu(device):
        torch.cuda.reset_peak_memory_stats()
    cpu = time.process_time()
    whole = time.perf_counter()
    while counted_s < seconds:
        began = time.perf_counter()
        taken = epoch()
        x, labels = next(taken)  # of the fetch that the epoch has to wait for
        synchronize(device)
        first = time.perf_counter()
        firsts.append(first - began)
        use(x, labels)
        while True:
            asked = time.perf_counter()
            following = next(taken, None)
            now = time.perf_counter()
            waited_s += now - asked
            if following is None:
                break
            x, labels = following
            del following
            use(x, labels)
            rows += len(labels)
            minibatches += 1
            if counted_s + now - first >= seconds:
                break
        synchronize(device)
        counted_s += time.perf_counter() - first
        taken.close()
    whole = time.perf_counter() - whole
    spent = time.process_time() - cpu
    figures = {
        "rows_per_s": rows / counted_s,
        "rows": rows,
        "minibatches": minibatches,
        "wait_share": waited_s / counted_s,
        "first_s": statistics.median(firsts),
        "cpu_s_per_million_rows": 1e6 * spent / max(1, rows + labels.numel() * len(firsts)),
        "cores_busy": spent / whole,
    }
    if on_gpu(device):
        free, total = torch.cuda.mem_get_info()
        figures |= {"gpu_used_mb": (total - free) / 1e6, "torch_peak_mb": torch.cuda.max_memory_allocated() / 1e6}
    return figures


def again(epoch: Callable[[], Taken]) -> Callable[[], Taken]:
    """The first minibatch of an epoch, for ever."""
    first = epoch()
    x, labels = next(first)
    first.close()

    def endless() -> Taken:
        while True:
            yield x, labels

    return endless


def run(side: Any, request: Figures, genes: int) -> Figures:
    """Answers one request: the figures of one side in one turn."""
    name, model = request["side"], request["model"]
    epoch = side.epochs("dense" if name == "no loading" else name, request["batch_size"], request["dtype"])
    if name == "no loading":
        epoch = again(epoch)
    use = consumer(model, side.device, genes)
    if model is not None:
        with contextlib.closing(epoch()) as warmup:
            use(*next(warmup))
    if on_gpu(side.device):
        torch.cuda.empty_cache()
    figures = measured(epoch, use, request["seconds"], side.device)
    del epoch, use
    if on_gpu(side.device):
        torch.cuda.empty_cache()
    return figures


# ---- preparation


def prepare(work: Path, rows: int, copies: int, genes: int) -> tuple[Path, Path]:
    """The store and its filled mirror."""
    import zloader as zl
    from benchmarks.data import synthetic

    work.mkdir(parents=True, exist_ok=True)
    source, store, mirror = work / "counts.h5ad", work / "counts.zarr", work / "mirror"
    if not store.exists():
        told("generated", synthetic.generate(source, rows=rows, genes=genes))
        told("converted", synthetic.convert(source, store, copies=copies))
    began = time.perf_counter()
    loader = zl.Loader(zl.open_dataset(store, cache=mirror), batch_size=4096, fetch_factor=4, layout="packed")
    n_rows = sum(map(len, loader))
    told("mirror", {"rows": n_rows, "seconds": round(time.perf_counter() - began, 1)})
    return store, mirror


def told(what: str, figures: Figures) -> None:
    """Prints figures as they are made, so that a run that is cut short has shown them."""
    print(what, json.dumps(figures), file=sys.stderr, flush=True)


@contextlib.contextmanager
def annbatch_process(work: Path, device: str, genes: int) -> Iterator[Callable[[Figures], Figures] | None]:
    """Runs annbatch's sides in a process of their own; None if annbatch cannot be imported or its store not be made."""
    if importlib.util.find_spec("annbatch") is None or not (work / "counts.h5ad").exists():
        yield None
        return
    store = work / "annbatch"
    if not store.exists():
        conversion = "annbatch-shuffled" + ("-zarrs" if importlib.util.find_spec("zarrs") else "")
        command = program("compare.rivals", "write", conversion, work / "counts.h5ad", store)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            yield None
            return
        told("annbatch converted", json.loads(done.stdout))
    command = program("questions.device", "--annbatch-store", store, "--device", device, "--genes", genes)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(request: Figures) -> Figures:
            print(json.dumps(request), file=process.stdin, flush=True)
            answer = process.stdout.readline()
            if not answer:
                raise OSError(f"annbatch's process ended with {process.wait()}")
            return json.loads(answer)

        yield ask
        process.stdin.close()


def answer_requests(store: Path, device: Any, genes: int) -> None:
    """The process of annbatch's sides: a line of JSON for each line of standard input."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # output of libraries goes to stderr
        side = Annbatch(store, device)
        for line in sys.stdin:
            print(json.dumps(run(side, json.loads(line), genes)), file=answers, flush=True)


# ---- the whole


def requests(seconds: float, *, rival: bool) -> list[Figures]:
    """The measures of one turn."""
    delivery, training = [*DELIVERY, *RIVAL_DELIVERY * rival], [*TRAINING, *RIVAL_TRAINING * rival]
    found = [
        {"side": side, "batch_size": batch_size, "model": None, "dtype": "float32", "seconds": seconds}
        for batch_size in BATCH_SIZES
        for side in delivery
    ]
    return found + [
        {"side": side, "batch_size": 1024, "model": model, "dtype": "bfloat16", "seconds": seconds}
        for model in MODELS
        for side in training
    ]


def key_of(request: Figures) -> str:
    what = f"{request['model']} model" if request["model"] else "delivery"
    return f"{what}, {request['batch_size']}: {request['side']}"


def show(runs: dict[str, list[Figures]]) -> None:
    """Prints a table of medians."""
    keys = ("wait_share", "first_s", "cpu_s_per_million_rows", "cores_busy", "gpu_used_mb", "torch_peak_mb")
    lines = [["", "rows/s", "(range)", *keys]]
    for name, figures in runs.items():
        rates = sorted(each["rows_per_s"] for each in figures)
        cells = [name, f"{statistics.median(rates):,.0f}", f"({rates[0]:,.0f} to {rates[-1]:,.0f})"]
        lines.append([*cells, *(f"{measuring.median(figures, key):,.2f}" if key in figures[0] else "" for key in keys)])
    measuring.table(lines)


def versions() -> Figures:
    found = {"torch": torch.__version__, "cores": len(os.sched_getaffinity(0))}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    for package in ("annbatch", "cupy-cuda13x", "zarrs", "numpy", "numba"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def main() -> None:
    """Measures, and prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="directory for the store and its mirror (14 GB for a million rows)")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--copies", type=int, default=10)
    parser.add_argument("--genes", type=int, default=62_710)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--budget", type=float, default=330, help="seconds after which no further turn begins")
    parser.add_argument("--device", default="cuda", help="'cpu' only tries the script")
    parser.add_argument("--only", default="", help="only the measures whose names this expression matches")
    parser.add_argument("--annbatch-store", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.annbatch_store:
        answer_requests(options.annbatch_store, options.device, options.genes)
        return
    if options.work is None:
        parser.error("--work is needed")
    began = time.perf_counter()
    store, mirror = prepare(options.work, options.rows, options.copies, options.genes)
    side = Side(store, mirror, options.device)
    runs: dict[str, list[Figures]] = {}
    wanted = any(
        re.search(options.only, key_of(each)) for each in requests(0, rival=True) if "annbatch" in each["side"]
    )
    beside = annbatch_process(options.work, options.device, options.genes) if wanted else contextlib.nullcontext(None)
    with beside as rival:
        for turn in range(options.turns):
            if turn and time.perf_counter() - began > options.budget:
                break
            for request in requests(options.seconds, rival=rival is not None):
                name = key_of(request)
                if not re.search(options.only, name):
                    continue
                try:
                    asked = rival if request["side"].startswith("annbatch") else None
                    figures = asked(request) if asked else run(side, request, options.genes)
                except (RuntimeError, OSError, AttributeError) as error:  # a side that fails does not end the others
                    told(f"{name} failed:", {"error": f"{type(error).__name__}: {error}"[:500]})
                    continue
                runs.setdefault(name, []).append(figures)
                told(f"turn {turn} {name}", figures)
    show(runs)
    print(json.dumps({"versions": versions(), "rows": options.rows * options.copies, "runs": runs}))


if __name__ == "__main__":
    main()
