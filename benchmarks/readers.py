"""One side of read.py, warm.py or disk.py: a process that reads a store, one epoch per line of JSON on standard input.

    python benchmarks/readers.py zloader '{"store": ..., "chunk_size": 64, "preload_nchunks": 256, "obs": "plate"}'

It answers each line with a line of JSON: seconds, rows, first_minibatch_s (since the request), after_s (the time after
the first fetch) and waited_s (how much of that the consumer waited), CPU seconds, page faults, bytes read from disk,
and resident bytes before the epoch and at the peak. Between requests it idles. The request `{"started": true}` runs no
epoch: its answer has the CPU seconds and page faults since the process started. Other requests may contain:

- `work_s`: seconds that the consumer works on every minibatch. It sleeps, like a process whose GPU is busy.
- `stalls`, `stall_s`: the minibatches after which the consumer stalls, and for how many seconds.
- `rows`, `most_s`: the epoch stops after this many rows, or with the first minibatch after this many seconds.
- `mirror`: a directory, or null for no mirror. The epoch then includes opening the store.
- `drop`: a directory whose files are dropped from the page cache before and after the epoch.

Minibatches have 64 rows, or `batch_size`, with X as CSR and one obs column. Each side returns its cheapest form.
annbatch returns scipy matrices with int32 indices (torch tensors if its environment has torch) and a DataFrame.
zloader returns its default: torch CSR with int32 indices, and row numbers. zloader also accepts a `mirror` for the
loader that it keeps between epochs, another `layout`, `genes` to select, and `tokens`: the tokenizer whose tokens it
returns instead of X, by name. Its vocabulary has all genes. With `set_size` it yields sets with controls.

annbatch is set up as its README recommends, with the fastest settings that were found: a custom load function that
reads one obs column; on disk the zarrs pipeline with its default number of threads; on S3 obstore with zarr's own
pipeline and 64 concurrent requests. (zarrs reads four objects at a time, which is 4 times slower. The default of 10
requests is half as fast, and 256 are no faster.)

"plain" reads exactly the bytes that zloader's epochs read from a mirror, with as many threads: the bytes of each block
in the given `way` (see ranges.py), or all files from start to end if the way is "sequential". Linux only.

rival_readers.py has the code of "cell-load" and "slafdb".
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rival_readers import cell_load, slaf

Request = dict[str, Any]
Epoch = Callable[[Request], tuple[Iterator[int], Callable[[], Request]]]
_BATCH_SIZE = 64
_REQUESTS = 64


def zloader(options: Request) -> Epoch:
    """Epochs of zl.Loader: of one loader for all requests, or of a new one if the request names a mirror."""
    import torch

    import zloader as zl

    torch.set_num_threads(1)

    def opened(mirror: str | None) -> zl.Loader:
        dataset = zl.open_dataset(options["store"], cache=mirror, storage_options=options.get("storage_options"))
        rows = _sets(dataset, options["set_size"]) if "set_size" in options else {"dataset": dataset}
        return zl.Loader(
            batch_size=_batch_size(options),
            fetch_factor=_fetch_rows(options) // _batch_size(options),
            **{"sampling": zl.BlockShuffling(options["chunk_size"]), **rows},
            obs=[options["obs"]] if "obs" in options else [],
            **{name: options[name] for name in ("layout", "genes") if name in options},
            **({"x": None, "tokens": tokenizer(options["tokens"], dataset)} if "tokens" in options else {}),
        )

    kept = opened(options.get("mirror"))

    def epoch(request: Request) -> tuple[Iterator[int], Callable[[], Request]]:
        began = time.perf_counter()
        loader = opened(request["mirror"]) if "mirror" in request else kept
        opened_s = time.perf_counter() - began

        def statistics() -> Request:
            counted = loader.statistics()
            names = ("epoch", "gets", "bytes_read", "chunks_decoded", "most_in_flight_bytes", "decode_s", "gather_s")
            names += ("bytes_from_mirror",)
            return {"opened_s": opened_s, **{name: getattr(counted, name) for name in names}}

        return map(len, loader), statistics

    return epoch


def _sets(dataset: Any, set_size: int) -> Request:
    """The treated rows of a screen (see screens.py) in sets of one cell line and drug, each row with a control."""
    import zloader as zl

    return {
        "dataset": dataset.where("drug != 'DMSO'"),
        "sampling": zl.CellSets(["cell_line", "drug"], set_size=set_size),
        "controls": zl.MatchedControls(dataset.where("drug == 'DMSO'"), match="cell_line"),
    }


def tokenizer(name: str, dataset: Any) -> Any:
    """A tokenizer of 2 048 tokens per row that knows every gene."""
    import numpy as np

    import zloader as zl

    special = {"<pad>": 0, "<mask>": 1, "<cls>": 2, "<eos>": 3}
    names = dataset.var_names.tolist()
    vocabulary = special | {gene: len(special) + number for number, gene in enumerate(names)}
    if name.startswith("scGPT"):
        return zl.tokenizers.ScGPT(vocabulary, max_length=2048)
    medians = dict(zip(names, np.random.default_rng(0).lognormal(0, 1, len(names)).tolist(), strict=True))
    masked = zl.tokenizers.Masked(0.15) if "masked" in name else None
    return zl.tokenizers.Geneformer(vocabulary, medians, max_length=2048, masked=masked)


def annbatch(options: Request) -> Epoch:
    """Epochs of annbatch's Loader over a collection."""
    import annbatch
    import anndata as ad
    import numpy as np
    import zarr

    where: Any = options["store"]
    if "storage_options" in options:
        from obstore.store import S3Store

        zarr.config.set({"async.concurrency": _REQUESTS})
        bucket, prefix = where.removeprefix("s3://").split("/", 1)
        given = options["storage_options"]
        store = S3Store(
            bucket,
            prefix=prefix,
            endpoint=given["endpoint_url"],
            access_key_id=given["key"],
            secret_access_key=given["secret"],
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        where = zarr.open_group(zarr.storage.ObjectStore(store, read_only=True), mode="r")
    else:
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})

    def load(group: zarr.Group) -> ad.AnnData:
        obs = ad.io.read_elem(group["obs"])
        return ad.AnnData(X=ad.io.sparse_dataset(group["X"]), obs=obs[[options["obs"]]])

    loader = annbatch.Loader(
        chunk_size=options["chunk_size"],
        preload_nchunks=options["preload_nchunks"],
        batch_size=_batch_size(options),
        shuffle=True,
        preload_to_gpu=False,
        to="torch" if importlib.util.find_spec("torch") else None,
        rng=np.random.default_rng(0),
    ).use_collection(annbatch.DatasetCollection(where), load_adata=load)
    return lambda _: ((minibatch["X"].shape[0] for minibatch in loader), dict)


def plain(options: Request) -> Epoch:
    """Plain reads of the bytes that zloader's epochs read from a full mirror. The ranges are computed beforehand."""
    import ranges

    import zloader as zl

    rows = _fetch_rows(options)
    loader = zl.Loader(
        zl.open_dataset(options["store"], cache=options["mirror"]),
        fetch_factor=rows // zl.Loader.batch_size,
        sampling=zl.BlockShuffling(options["chunk_size"]),
    )
    way, threads = options["way"], loader.options.threads
    numbers = itertools.count()

    def planned() -> list[ranges.Ranges]:
        files = ranges.mirrored(loader, Path(options["mirror"]), epoch=next(numbers))
        return [ranges.sequential(each.path, threads) for each in files] if way == "sequential" else files

    files = planned()

    def epoch(_: Request) -> tuple[Iterator[int], Callable[[], Request]]:
        def read_all() -> Iterator[int]:
            for each in files:
                with ranges.reading("pread" if way == "sequential" else way, each, threads) as read:
                    read()
            yield loader.dataset.n_obs

        def statistics() -> Request:
            files[:] = planned()
            return {}

        return read_all(), statistics

    return epoch


def _batch_size(options: Request) -> int:
    return int(options.get("batch_size", _BATCH_SIZE))


def _fetch_rows(options: Request) -> int:
    return int(options["chunk_size"] * options["preload_nchunks"])


def measured(epoch: Epoch, request: Request, *, first_fetch: int) -> Request:
    """The figures of one epoch. Waiting is counted after the first `first_fetch` minibatches."""
    dropped = request.get("drop")
    if dropped:
        _drop(dropped)
    before_bytes, device = _reset_peak(), device_bytes()
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    sizes, statistics = epoch(request)
    rows, waits, after = 0, [], began
    stalls = set(request.get("stalls", ()))
    while True:
        asked = time.perf_counter() if waits else began
        size = next(sizes, None)
        now = time.perf_counter()
        waits.append(now - asked)
        if len(waits) == first_fetch:
            after = now
        if size is None or rows == request.get("rows"):
            break
        rows += size
        if now - began > request.get("most_s", now):
            break
        if "work_s" in request:
            time.sleep(request["work_s"])
        if len(waits) in stalls:
            time.sleep(request["stall_s"])
    usage = resource.getrusage(resource.RUSAGE_SELF)
    device = device_bytes() - device
    if dropped:
        _drop(dropped)
    return {
        "seconds": now - began,
        "rows": rows,
        "first_minibatch_s": waits[0],
        "waited_s": sum(waits[first_fetch:]),
        "after_s": now - after,
        "user_s": usage.ru_utime - before.ru_utime,
        "system_s": usage.ru_stime - before.ru_stime,
        "faults": usage.ru_minflt + usage.ru_majflt - before.ru_minflt - before.ru_majflt,
        "major_faults": usage.ru_majflt - before.ru_majflt,
        "device_bytes": device,
        "before_bytes": before_bytes,
        "peak_bytes": _resident_bytes("VmHWM"),
        **statistics(),
    }


def started() -> Request:
    """The CPU seconds, page faults and peak memory of the process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "user_s": usage.ru_utime,
        "system_s": usage.ru_stime,
        "faults": usage.ru_minflt + usage.ru_majflt,
        "major_faults": usage.ru_majflt,
        "peak_bytes": _resident_bytes("VmHWM"),
    }


def _reset_peak() -> int:
    """Resets the peak of the resident set. Returns the resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident_bytes("VmRSS")


def _resident_bytes(field: str) -> int:
    return _counted("/proc/self/status", field) * 1024


def device_bytes() -> int:
    """Bytes that the kernel has read from disk for this process."""
    return _counted("/proc/self/io", "read_bytes")


def _counted(path: str, field: str) -> int:
    lines = Path(path).read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def _drop(directory: str) -> None:
    """Unmaps the pages of a directory's files and drops the files from the page cache."""
    import ranges

    ranges.unmap_pages(Path(directory))
    ranges.drop([path for path in Path(directory).rglob("*") if path.is_file()])


def main() -> None:
    """Answers one line at a time until standard input ends."""
    side, options = sys.argv[1], json.loads(sys.argv[2])
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # output of libraries goes to stderr
        sides = {"zloader": zloader, "annbatch": annbatch, "plain": plain, "cell-load": cell_load, "slafdb": slaf}
        epoch = sides[side](options)
        first_fetch = max(1, _fetch_rows(options) // _batch_size(options))
        for line in sys.stdin:
            request = json.loads(line)
            answer = started() if request.get("started") else measured(epoch, request, first_fetch=first_fetch)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
