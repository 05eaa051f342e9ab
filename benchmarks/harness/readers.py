"""One side of read.py, warm.py or disk.py: a process that reads a store, one epoch per line of JSON on standard input.

    python -m benchmarks.harness.readers zloader '{"store": ..., "chunk_size": 64, "preload_nchunks": 256}'

The first argument is the name of a tool (a module of peers/, which has the settings of its loader) or "plain". Each
line is answered with a line of JSON: seconds, rows, whether the epoch ended, first_minibatch_s (since the request),
after_s (the time after the first fetch) and waited_s (how much of that the consumer waited), CPU seconds including
those of ended worker processes, page faults, bytes read from disk, resident bytes before the epoch and
at the peak, and the most private memory of its workers (looked at every half second, for which the clock stands still).
began_at, first_at and ended_at are readings of the clock that all processes of a machine share.
Between requests it idles. The request `{"started": true}` runs no epoch: its answer has the CPU seconds and page faults
since the process started. Other requests may contain:

- `work_s`: seconds that the consumer works on every minibatch. It sleeps, like a process whose GPU is busy.
- `stalls`, `stall_s`: the minibatches after which the consumer stalls, and for how many seconds.
- `rows`, `most_s`: the epoch stops after this many rows, or when a minibatch comes later than this many seconds after
  the first one. That minibatch does not count, and the wait for it counts only towards the waiting of a consumer that
  works. Otherwise a tool would be charged for a whole fetch and credited with its first minibatch.
- `check`: adds the sum of all values, and the mean label entropy of full minibatches, if the tool gives them.
- `mirror`: a directory, or null for no mirror. The epoch then includes opening the store. zloader only.
- `drop`: a directory whose files are dropped from the page cache before and after the epoch.

The options that every tool knows are `store`, `batch_size` (64), `obs` (the column of labels), and the sizes of blocks
and fetches, `chunk_size` and `preload_nchunks`. Each tool returns its cheapest form. zloader also accepts a `mirror`
for the loader that it keeps between epochs, the `form` of that mirror (see zl.Cache), another `layout`, and `tokens`:
the tokenizer whose tokens it returns instead of X, by name. Its vocabulary has all genes. With `set_size` it yields
sets with controls, and with `replayed`, a file of row numbers, the rows of another loader's epoch in their order;
annbatch writes that file if it gets its path as `recorded`. `genes` are the positions of the genes, ascending, of which
minibatches consist; zloader, annbatch, scDataset and the AnnData in memory know it.

"plain" reads exactly the bytes that zloader's epochs read from a mirror, with as many threads: the bytes of each block
in the given `way` (see ranges.py), or all of the file from start to end if the way is "sequential". Linux only.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.compare.peers import Epoch, Epochs, Request, fetch_rows, module
from benchmarks.harness.measuring import die_with_parent

_BATCH_SIZE = 64
_SAMPLE_S = 0.5  # between looks at the memory of worker processes


def plain(options: Request) -> Epochs:
    """Plain reads of the bytes that zloader's epochs read from a full mirror. The ranges are computed beforehand."""
    import zloader as zl
    from benchmarks.harness import ranges

    rows = fetch_rows(options)
    loader = zl.Loader(
        zl.open_dataset(options["store"], cache=options["mirror"]),
        fetch_factor=rows // zl.Loader.batch_size,
        sampling=zl.BlockShuffling(options["chunk_size"]),
    )
    way, threads = options["way"], loader.options.threads
    numbers = itertools.count()

    def planned() -> ranges.Ranges:
        found = ranges.mirrored(loader, Path(options["mirror"]), epoch=next(numbers))
        ranges.unmap_pages(Path(options["mirror"]))  # or else the other sides cannot drop the file
        return ranges.sequential(found.path, threads) if way == "sequential" else found

    coming: list[ranges.Ranges] = []  # planned before the first epoch, which is not measured, and after each one

    def epoch(_: Request) -> Epoch:
        def read_all() -> Iterator[int]:
            now = coming.pop() if coming else planned()
            with ranges.reading("pread" if way == "sequential" else way, now, threads) as read:
                read()
            yield loader.dataset.n_obs

        def statistics() -> Request:
            coming.append(planned())
            return {}

        return Epoch(minibatches=read_all(), size=int, statistics=statistics)

    return epoch


class Checked:
    """What one epoch gave out: the sum of all values, and the mean label entropy of its full minibatches, in bits."""

    def __init__(self, given: Epoch, batch_size: int) -> None:
        self._given, self._batch_size = given, batch_size
        self._total, self._entropies = 0.0, list[float]()

    def size(self, minibatch: Any) -> int:
        """The rows of a minibatch, whose values and labels are counted."""
        import numpy as np

        rows = self._given.size(minibatch)
        if self._given.values:
            self._total += float(np.asarray(self._given.values(minibatch)).sum(dtype=np.float64))
        if self._given.labels and rows == self._batch_size:
            _, counts = np.unique(np.asarray(self._given.labels(minibatch)), return_counts=True)
            self._entropies.append(float(-(counts / rows * np.log2(counts / rows)).sum()))
        return rows

    def figures(self) -> Request:
        """The sum, if the side gives its values, and the entropy, if it gives labels."""
        total = {"total": self._total} if self._given.values else {}
        entropies = self._entropies
        return total | ({"entropy": sum(entropies) / len(entropies)} if entropies else {})


def measured(epoch: Epochs, request: Request, *, first_fetch: int, batch_size: int = _BATCH_SIZE) -> Request:
    """The figures of one epoch. Waiting is counted after the first `first_fetch` minibatches."""
    dropped = request.get("drop")
    if dropped:
        _drop(dropped)
    before_bytes, device = _reset_peak(), device_bytes()
    before, children, began = _usage(), _usage(of=resource.RUSAGE_CHILDREN), time.perf_counter()
    given = epoch(request)
    checked = Checked(given, batch_size) if request.get("check") else None
    # map() frees each minibatch before it asks for the next one
    sizes = map(checked.size if checked else given.size, given.minibatches)
    rows, waits, first, after, ended = 0, [], 0.0, began, False
    workers_bytes, looked, looking_s = 0, began, 0.0
    stalls = set(request.get("stalls", ()))
    while True:
        asked = time.perf_counter() if waits else began
        size = next(sizes, None)
        now = time.perf_counter()
        ended = size is None
        late = not ended and bool(waits) and now - first > request.get("most_s", math.inf)
        if late and "work_s" not in request:
            now = asked
            break
        waits.append(now - asked)
        first = first or now
        if len(waits) == first_fetch:
            after = now
        if ended or late:
            break
        rows += size
        if given.workers_bytes and (len(waits) == 1 or now - looked > _SAMPLE_S):
            workers_bytes = max(workers_bytes, given.workers_bytes())
            looked = time.perf_counter()
            looking_s += looked - now
        if rows >= request.get("rows", math.inf):
            break
        if "work_s" in request:
            time.sleep(request["work_s"])
        if len(waits) in stalls:
            time.sleep(request["stall_s"])
    found = {**given.statistics(), **(checked.figures() if checked else {})}
    del sizes, given, checked  # ends the workers of an epoch that was cut short
    usage, device = _usage(), device_bytes() - device
    in_children = _usage(of=resource.RUSAGE_CHILDREN)
    if dropped:
        _drop(dropped)
    return {
        "seconds": now - began - looking_s,
        "began_at": began,
        "first_at": first,
        "ended_at": now,
        "rows": rows,
        "ended": ended,
        "first_minibatch_s": waits[0],
        "waited_s": sum(waits[first_fetch:]),
        "after_s": now - after,
        "user_s": usage.ru_utime - before.ru_utime + in_children.ru_utime - children.ru_utime,
        "system_s": usage.ru_stime - before.ru_stime + in_children.ru_stime - children.ru_stime,
        "faults": usage.ru_minflt + usage.ru_majflt - before.ru_minflt - before.ru_majflt,
        "major_faults": usage.ru_majflt - before.ru_majflt,
        "device_bytes": device,
        "before_bytes": before_bytes,
        "peak_bytes": _resident_bytes("VmHWM"),
        "workers_bytes": workers_bytes,
        **found,
    }


def _usage(of: int = resource.RUSAGE_SELF) -> resource.struct_rusage:
    return resource.getrusage(of)


def started() -> Request:
    """The CPU seconds (with those of ended workers), page faults and peak memory of the process so far."""
    usage, in_children = _usage(), _usage(of=resource.RUSAGE_CHILDREN)
    return {
        "user_s": usage.ru_utime + in_children.ru_utime,
        "system_s": usage.ru_stime + in_children.ru_stime,
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
    from benchmarks.harness import ranges

    ranges.unmap_pages(Path(directory))
    ranges.drop([path for path in Path(directory).rglob("*") if path.is_file()])


def main() -> None:
    """Answers one line at a time until standard input ends."""
    side, options = sys.argv[1], {"batch_size": _BATCH_SIZE, **json.loads(sys.argv[2])}
    die_with_parent()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # output of libraries goes to stderr
        epoch = plain(options) if side == "plain" else module(side).epochs(options)
        sizes = {
            "first_fetch": max(1, fetch_rows(options) // options["batch_size"]),
            "batch_size": options["batch_size"],
        }
        for line in sys.stdin:
            request = json.loads(line)
            answer = started() if request.get("started") else measured(epoch, request, **sizes)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
