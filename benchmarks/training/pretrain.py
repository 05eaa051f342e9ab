"""A pre-training run: a transformer like scGPT learns masked values, from tokens streamed from S3.

    python -m benchmarks.training.pretrain [--size tiny] [--work DIRECTORY] [--report FILE.html]
    python -m benchmarks.training.pretrain --store s3://bucket/cells.zarr --vocabulary vocab.json \\
        --cache /nvme/zloader --size 51m --batch-size 240 --tokens 1024 --device cuda --compile --checkpoint run.pt

The model reads `zl.Loader(tokens=zl.tokenizers.ScGPT(...))`: the bins of a row's genes. Some of them are masked on the
device. It predicts these; the loss is their mean squared error, as shares of the bins. Sizes are in
pretraining/model.py, and the parameters are counted and printed.

Rows: without --store, an atlas is made in which genes follow programmes (programmes.py), converted, and put into a
simulated S3 on 127.0.0.1 (cloud.py; --disk reads files instead). The first epoch reads it cold and fills a mirror; the
others read the mirror.

Ranks: --ranks N starts N processes on this machine (gloo, or NCCL with --device cuda). Under torchrun, each process is
a rank; --store is needed then. --ray-tasks N makes minibatches in N tasks of Ray instead of in the training
process.

Held-out rows, split off by seed, are masked in the same places after every epoch. The baseline predicts the mean of
each gene, from all values seen in training. For the atlas, oracles say how much can be predicted at all
(pretraining/oracle.py).

Checkpoints: with --checkpoint FILE, the run goes on from that file if it exists, and saves itself there. A run that was
killed ends with the same minibatches, losses and model as one that was not. The options and the store must be the same.

Figures, for each epoch: rows/s and tokens/s (padding does not count), the share of the time that steps waited for
minibatches, processor seconds of all ranks, reads, and MFU: FLOPs per second over the peak of the device, by the
model's own matrix products, and by the usual 6 FLOPs per parameter and token, embeddings included. (fast-scgpt states
37 % on an H100 with 12 FLOPs, which is 18.5 % with 6.) A peak that is neither given nor known is measured as the
fastest matrix product. "rows/s alone" are those of steps on random tokens, before training: the limit without loading.
On a CPU, the model and the loader share the cores.

The exit status is 1 if the held-out loss is not below the baseline. With --json, the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import zloader as zl
from benchmarks.data import programmes
from benchmarks.harness.cloud import Cloud, LinkSpeed, cloud
from benchmarks.harness.measuring import Figures, in_new_process, table
from benchmarks.training.pretraining import checkpoint
from benchmarks.training.pretraining import page as pretraining_page
from benchmarks.training.pretraining.model import SHAPES
from benchmarks.training.pretraining.oracle import oracle_losses
from benchmarks.training.pretraining.ranks import Ranks, joined, of_torchrun, spawned
from benchmarks.training.pretraining.run import Training
from benchmarks.training.pretraining.settings import Settings, Source
from zloader.commands.output import require_writable


def store_name(atlas: programmes.Atlas) -> str:
    """The name of its store says all about an atlas."""
    return "-".join(f"{size}{name}" for name, size in vars(atlas).items()) + ".zarr"


def convert_atlas(store: Path, atlas: programmes.Atlas) -> None:
    """Writes the atlas as a store, which is there as a whole or not at all."""
    store.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=store.parent.parent) as folder:
        programmes.write(Path(folder) / "atlas.h5ad", atlas)
        zl.convert(Path(folder) / "atlas.h5ad", Path(folder) / "atlas.zarr", progress=False)
        (Path(folder) / "atlas.zarr").rename(store)


@contextlib.contextmanager
def source_of(options: argparse.Namespace, atlas: programmes.Atlas) -> Iterator[tuple[Source, Cloud | None]]:
    """The rows of the run, and the simulated S3 that has them."""
    if options.store is not None:
        yield Source(url=options.store, cache=options.cache, vocabulary=options.vocabulary), None
        return
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = work.absolute() / "root" / "bucket" / store_name(atlas)
        if not store.exists():
            in_new_process(convert_atlas, store, atlas)  # whose memory does not count
        cache = options.cache or str(work / "mirror")
        if options.disk:
            yield Source(url=str(store), cache=cache, atlas=atlas), None
            return
        running = stack.enter_context(cloud(store.parent.parent, LinkSpeed(total_mbps=options.total_mbps)))
        url, access = f"s3://{store.parent.name}/{store.name}", running.storage_options()
        yield Source(url=url, storage_options=access, cache=cache, atlas=atlas), running


def run_rank(
    settings: Settings, source: Source, threads: int | None, out: Path, ranks: Ranks, rendezvous: Path | None = None
) -> None:
    """One rank of the run. The first one writes the figures to a file."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // here))
    with joined(ranks, settings.device, rendezvous):
        figures = Training(settings, source, ranks).train()
        if ranks.first:
            out.write_text(json.dumps(figures))


def oracles(settings: Settings, source: Source) -> dict[str, float]:
    """The losses of the oracles on the held-out rows; none for a store of which nothing is known."""
    if source.atlas is None:
        return {}
    training = Training(settings, source, Ranks())
    truth = programmes.truth_of(source.atlas)
    return oracle_losses(training.held_out, training.tokenizer, truth, share=settings.masked)


def document_of(settings: Settings, source: Source, figures: Figures, extra: Figures) -> Figures:
    """Everything about a run, for JSON and the page."""
    held_out = figures["epochs"][-1]["held_out"] if figures["epochs"] else {}
    on_gpu = settings.device.startswith("cuda")
    return {
        "settings": vars(settings),
        "store": source.url,
        "shape": vars(SHAPES[settings.size]),
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {len(os.sched_getaffinity(0))} cores",
        "load": os.getloadavg(),
        "torch": torch.__version__,
        "held_out": held_out | extra.pop("oracles"),
        **extra,
        **figures,
    }


def print_run(document: Figures) -> None:
    """Prints the figures of each epoch, and what the model has learned."""
    costs, ranks = document["costs"], document["ranks"]
    print(
        f"{document['settings']['size']}: {costs['parameters']:,} parameters, {costs['embedding_parameters']:,} for "
        f"genes; {document['device']}, {ranks} ranks; peak {document['peak_flops'] / 1e12:.3g} TFLOP/s "
        f"({document['peak_is']}); {document['rows_per_s_alone']:,.0f} rows/s alone"
    )
    lines = [["epoch", "from", "rows/s", "tokens/s", "waited", "first wait s", "CPU s", "GETs", "MB read", "MFU",
              "MFU, 6 N", "loss", "held-out"]]  # fmt: skip
    for epoch in document["epochs"]:
        rates = [f"{epoch['rows_per_s']:,.0f}", f"{epoch['tokens_per_s']:,.0f}", f"{epoch['wait_share']:.1%}"]
        reads = [f"{epoch['first_wait_s']:.2f}", f"{epoch['cpu_s']:.1f}", f"{epoch['gets']:,.0f}"]
        shares = [f"{epoch['bytes_read'] / 1e6:,.1f}", f"{epoch['mfu']:.1%}", f"{epoch['mfu_six_n']:.1%}"]
        losses = [f"{epoch['loss']:.5f}", f"{epoch['held_out']['model']:.5f}"]
        lines.append([str(epoch["epoch"]), epoch["source"], *rates, *reads, *shares, *losses])
    table(lines)
    print(pretraining_page.learned(document))
    memory = f"peak memory {document['peak_bytes'] / 1e6:,.0f} MB"
    if "gpu_peak_bytes" in document:
        memory += f", of the GPU {document['gpu_peak_bytes'] / 1e6:,.0f} MB"
    since = f" since step {document['resumed_at_step']:,}" if document["resumed_at_step"] else ""
    print(f"{document['wall_s']:,.0f} s, {document['cpu_s']:,.0f} processor seconds{since}, {memory}")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Settings()
    model = parser.add_argument_group("model and training")
    model.add_argument("--size", choices=list(SHAPES), default=defaults.size)
    for name in ("batch_size", "fetch_factor", "tokens", "epochs", "warmup", "seed", "held_out"):
        model.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name), metavar="N")
    model.add_argument("--masked", type=float, default=defaults.masked, metavar="SHARE")
    model.add_argument("--rate", type=float, default=defaults.rate, help="the highest learning rate")
    model.add_argument("--steps", type=int, metavar="N", help="end after N steps, in the middle of the run")
    model.add_argument("--device", choices=["cpu", "cuda"], default=defaults.device)
    model.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="autocast; default: on a GPU")
    model.add_argument("--compile", action="store_true", help="torch.compile")
    model.add_argument("--peak-tflops", type=float, help="peak of one device; default: known or measured")
    model.add_argument("--threads", type=int, metavar="N", help="threads of torch per rank; default: cores / ranks")
    model.add_argument("--checkpoint", metavar="FILE", help="go on from this file, and save there")
    model.add_argument("--checkpoint-steps", type=int, default=defaults.checkpoint_steps, metavar="N")
    ways = parser.add_argument_group("processes")
    ways.add_argument("--ranks", type=int, default=1, metavar="N")
    ways.add_argument("--ray-tasks", type=int, default=0, metavar="N", help="make minibatches on Ray")
    ways.add_argument("--ray-address", help="of a cluster; default: a new one on this machine")
    rows = parser.add_argument_group("rows")
    rows.add_argument("--store", help="a store, instead of an atlas that is made")
    rows.add_argument("--vocabulary", help="JSON file of token ids; default: all genes of the store")
    rows.add_argument("--cache", help="directory of the mirror")
    rows.add_argument("--work", type=Path, help="directory for the atlas and its mirror; default: a temporary one")
    rows.add_argument("--disk", action="store_true", help="read the atlas from disk instead of from a simulated S3")
    rows.add_argument("--total-mbps", type=float, default=LinkSpeed.total_mbps, help="of the simulated S3")
    for name, default in vars(programmes.Atlas()).items():
        if name != "seed":
            rows.add_argument(f"--{name}", type=int, default=default, metavar="N")
    rows.add_argument("--atlas-seed", type=int, default=0, metavar="N")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write a page")
    parser.add_argument("--json", action="store_true", help="print one JSON document as the last line")
    return parser


def usable(parser: argparse.ArgumentParser, options: argparse.Namespace, torchrun: Ranks | None) -> None:
    """Exits if options do not fit together."""
    for name in ("batch_size", "fetch_factor", "tokens", "epochs", "held_out", "checkpoint_steps", "ranks"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be at least 1, not {options.steps}")
    for name in ("rate", "peak_tflops", "total_mbps"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be a number above 0, not {value:g}")
    for name in ("warmup", "ray_tasks", "seed", "atlas_seed"):
        if getattr(options, name) < 0:
            parser.error(f"--{name.replace('_', '-')} must be at least 0, not {getattr(options, name)}")
    for name in ("rows", "genes", "programmes", "types"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(options, name)}")
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads must be at least 1, not {options.threads}")
    if not 0 < options.masked < 1:
        parser.error(f"--masked must be between 0 and 1, not {options.masked}")
    if torchrun is not None and (options.store is None or options.ranks > 1):
        parser.error("under torchrun, give --store, and leave out --ranks")
    if options.checkpoint and options.store is None and options.work is None:
        parser.error("with --checkpoint, give --work or --store, so that the rows are still there later")
    if options.ray_tasks and options.ranks > 1 and options.ray_address is None:
        parser.error("with --ranks, start Ray first (ray start --head), and give --ray-address auto")
    if options.checkpoint:
        checkpoint.require_writable(Path(options.checkpoint))
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch finds no GPU: leave out --device cuda")


def main() -> None:
    parser = arguments()
    options = parser.parse_args()
    torchrun = of_torchrun()
    usable(parser, options, torchrun)
    try:
        require_writable(options.report)
        run(options, torchrun)
    except zl.ZloaderError as error:
        sys.exit(f"error: {error}")


def run(options: argparse.Namespace, torchrun: Ranks | None) -> None:
    """Trains, and prints and writes the figures. Exits with 1 if the model has learned less than the means."""
    known = {name: value for name, value in vars(options).items() if name in Settings.__dataclass_fields__}
    if known["bf16"] is None:
        known["bf16"] = options.device.startswith("cuda")
    settings = Settings(**known)
    atlas = programmes.Atlas(
        rows=options.rows, genes=options.genes, programmes=options.programmes, types=options.types,
        seed=options.atlas_seed,
    )  # fmt: skip
    extra: Figures = {"ranks": torchrun.size if torchrun else options.ranks}
    with source_of(options, atlas) as (source, server), tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        train = partial(run_rank, settings, source, options.threads, out)
        if torchrun is not None:
            train(torchrun)
        elif options.ranks > 1:
            spawned(train, options.ranks)
        else:
            train(Ranks())
        if torchrun is not None and not torchrun.first:
            return
        if server is not None:
            extra["server"] = server.stats()
        extra["oracles"] = oracles(settings, source)
        document = document_of(settings, source, json.loads(out.read_text()), extra)
    print_run(document)
    if options.report:
        pretraining_page.report(document, sys.argv[1:]).write(options.report)
        print(options.report)
    if options.json:
        print(json.dumps(document))
    held_out: dict[str, Any] = document["held_out"]
    sys.exit(0 if held_out["model"] < held_out["mean of each gene"] else 1)


if __name__ == "__main__":
    main()
