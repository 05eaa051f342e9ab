"""One side of read.py: a process that goes through a store, one epoch for each line of JSON on its standard input.

    python benchmarks/readers.py zloader '{"store": ..., "chunk_size": 64, "preload_nchunks": 256, "obs": "plate"}'

It answers each with a line of JSON: seconds, rows, first_minibatch_s (from asking for an epoch), waited_s and after_s
(what the consumer waited of the time after the first fetch), CPU seconds, and resident bytes before and at the peak.
In between it idles. What a line may ask for: `work_s`, what the consumer does with every minibatch (it sleeps, as one
does whose GPU works); `stalls` of `stall_s`; and `mirror`, a directory: the epoch then begins with opening the store.

Minibatches have 64 rows: X as CSR and one obs column. Each side gives what is cheapest for it: annbatch scipy matrices
with int32 indices and a DataFrame (torch tensors where its environment has torch); zloader its default, torch CSR with
int64 indices, and row numbers besides.

annbatch is set up as its README says, and as it was fastest: custom loading of one obs column; from disk the zarrs
pipeline with its default number of threads; from S3 obstore below zarr's own pipeline (zarrs reads objects four
at a time, 4 times as slowly) with 64 requests at once (default 10: half as fast; 256: no faster). Linux only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Request = dict[str, Any]
Epoch = Callable[[Request], tuple[Iterator[int], Callable[[], Request]]]
BATCH_SIZE = 64
_REQUESTS = 64


def zloader(options: Request) -> Epoch:
    """Epochs of zl.Loader, told apart by whether a mirror is asked for."""
    import torch

    import zloader as zl

    torch.set_num_threads(1)

    def opened(mirror: str | None) -> zl.Loader:
        dataset = zl.open_dataset(options["store"], cache=mirror, storage_options=options.get("storage_options"))
        sampling, rows = zl.BlockShuffling(options["chunk_size"]), options["chunk_size"] * options["preload_nchunks"]
        columns = [options["obs"]] if "obs" in options else []
        return zl.Loader(
            dataset, batch_size=BATCH_SIZE, fetch_factor=rows // BATCH_SIZE, sampling=sampling, obs=columns
        )

    unmirrored = opened(None)

    def epoch(request: Request) -> tuple[Iterator[int], Callable[[], Request]]:
        began = time.perf_counter()
        loader = opened(request["mirror"]) if "mirror" in request else unmirrored
        opened_s = time.perf_counter() - began

        def statistics() -> Request:
            counted = loader.statistics()
            names = ("epoch", "gets", "bytes_read", "chunks_decoded", "most_in_flight_bytes", "decode_s", "gather_s")
            return {"opened_s": opened_s, **{name: getattr(counted, name) for name in names}}

        return map(len, loader), statistics

    return epoch


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
        batch_size=BATCH_SIZE,
        shuffle=True,
        preload_to_gpu=False,
        to="torch" if importlib.util.find_spec("torch") else None,
        rng=np.random.default_rng(0),
    ).use_collection(annbatch.DatasetCollection(where), load_adata=load)
    return lambda _: ((minibatch["X"].shape[0] for minibatch in loader), dict)


def measured(epoch: Epoch, request: Request, *, first_fetch: int) -> Request:
    """The figures of one epoch, whose first `first_fetch` minibatches do not count for waiting."""
    before_bytes = _reset_peak()
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
        if size is None:
            break
        rows += size
        if "work_s" in request:
            time.sleep(request["work_s"])
        if len(waits) in stalls:
            time.sleep(request["stall_s"])
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": now - began,
        "rows": rows,
        "first_minibatch_s": waits[0],
        "waited_s": sum(waits[first_fetch:]),
        "after_s": now - after,
        "user_s": usage.ru_utime - before.ru_utime,
        "system_s": usage.ru_stime - before.ru_stime,
        "before_bytes": before_bytes,
        "peak_bytes": _resident_bytes("VmHWM"),
        **statistics(),
    }


def _reset_peak() -> int:
    """Makes the kernel count the peak anew; gives the resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident_bytes("VmRSS")


def _resident_bytes(what: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(what)).split()[1]) * 1024


def main() -> None:
    """Answers line after line until standard input ends."""
    what, options = sys.argv[1], json.loads(sys.argv[2])
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # whatever a library prints is no answer
        epoch = {"zloader": zloader, "annbatch": annbatch}[what](options)
        first_fetch = options["chunk_size"] * options["preload_nchunks"] // BATCH_SIZE
        for line in sys.stdin:
            print(json.dumps(measured(epoch, json.loads(line), first_fetch=first_fetch)), file=answers, flush=True)


if __name__ == "__main__":
    main()
