"""What several machines read from a bucket together: each with a mirror of its own, with `zr.cache`, and with parts.

    python -m benchmarks.scale.shared STORE [--machines 4] [--epochs 3] [--ways own shared parts] [--mbps 400]
    python -m benchmarks.scale.shared STORE --kill    # a machine dies in the middle of the first epoch
    python -m benchmarks.scale.shared STORE --late    # one begins when the others have read half of the first epoch

STORE is an AnnData Zarr store on a local disk, which the simulated S3 of the other benchmarks serves. A machine is a
process with a cache directory of its own. All of them, the server and Ray share this computer, so rows/s say little,
and bytes are those that other machines would see. `read` is what the bucket has sent, in bytes of the store's matrix;
`sent` is what machines have sent to one another in an epoch, in the same unit; "CPU" is the processor time of the
machines with their keepers per 100 000 rows of the last epoch. With `--kill`, the rows of the machine that died are
missing, of course, and the others have to go on. The last line is one JSON document. Needs Ray: pip install ".[ray]".
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import zloader as zl
from benchmarks.harness.cloud import Cloud, LinkSpeed, cloud
from benchmarks.harness.measuring import importing, program, table

BATCH_SIZE, SEED = 64, 7


def machine(options: argparse.Namespace) -> None:
    """Runs the epochs of one machine, and prints what it has read after each."""
    logging.basicConfig(format=f"machine {options.machine}: %(message)s")
    logging.getLogger("zloader").setLevel(logging.INFO)
    place = {"rank": options.machine, "world_size": options.machines}
    if options.way == "shared":
        import ray

        import zloader.ray as zr

        ray.init(address=options.address, namespace="bench", log_to_driver=False)
        cache: Any = zr.cache(options.cache, machines=options.machines - options.late)
    else:
        cache = options.cache
    if options.way == "parts":
        place |= {"locality": "machine", "local_world_size": 1}
    storage = {"key": "any", "secret": "any", "endpoint_url": options.endpoint}
    dataset = zl.open_dataset(options.url, cache=cache, storage_options=storage)
    loader = zl.Loader(dataset, batch_size=BATCH_SIZE, seed=SEED, options=zl.FetchOptions(threads=1), **place)
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for _ in range(options.epochs):
        input()  # all machines begin an epoch together
        digest, cpu_s = hashlib.sha256(), time.process_time()
        for number, minibatch in enumerate(loader):
            if number % 50 == 0:
                print(json.dumps({"rows": loader.statistics().rows}), flush=True)
            digest.update(minibatch.index.numpy().tobytes())
            digest.update(minibatch.x.values().numpy().tobytes())
        figures = loader.statistics().flat() | {"digest": digest.hexdigest(), "cpu_s": time.process_time() - cpu_s}
        if options.way == "shared":
            figures["keepers"] = zr.keepers(cache)
        print(json.dumps({"epoch": figures}, default=str), flush=True)


class Machine:
    """The process of a machine."""

    def __init__(self, number: int, options: argparse.Namespace, way: str, cloud: Cloud, cache: Path, ray: str) -> None:
        self.number = number
        words = ["--machine", number, "--way", way, "--endpoint", cloud.endpoint, "--cache", cache, "--address", ray]
        words += [
            "--machines",
            options.machines,
            "--epochs",
            options.epochs,
            "--url",
            f"s3://{options.store.parent.name}/{options.store.name}",
        ]
        command = program("scale.shared", "-", *words, *(["--late"] if options.late else []))
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=importing(), start_new_session=True
        )

    def begin(self) -> None:
        """Lets it begin an epoch."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def wait(self, name: str, least: int = 0) -> Any:
        """The next value that it prints under a name; with `least`, the first that is not smaller. None if it died."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = json.loads(line)
            if name in found and (not least or found[name] >= least):
                return found[name]
        return None

    def kill(self) -> None:
        """Ends it, as a machine that loses power."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run(options: argparse.Namespace, way: str, served: Cloud, folder: Path, ray_address: str) -> dict[str, Any]:
    """Runs all machines, and returns the figures of each epoch."""
    n_rows = zl.open_dataset(options.store).n_obs
    started: list[Machine] = []

    def start(number: int) -> Machine:
        begun = Machine(number, options, way, served, folder / f"{way}{number}", ray_address)
        begun.wait("pid")
        started.append(begun)
        return begun

    try:
        machines = [start(number) for number in range(options.machines - options.late)]
        served.reset()
        found: dict[str, Any] = {"bytes_read": [], "gets": [], "seconds": [], "machines": []}
        for epoch in range(options.epochs):
            began = time.perf_counter()
            for each in machines:
                each.begin()
            if epoch == 0 and (options.kill or options.late):
                machines[0].wait("rows", n_rows // options.machines // 2)
                if options.kill:
                    machines.pop().kill()
                else:
                    machines.append(start(options.machines - 1))
                    machines[-1].begin()
            found["machines"].append([each.wait("epoch") for each in machines])
            found["seconds"].append(time.perf_counter() - began)
            served_now = served.stats()
            found["bytes_read"].append(served_now["bytes_out"])
            found["gets"].append(served_now["GET"])
        return found
    finally:
        for each in started:
            each.kill()


def main() -> None:
    """Measures, and prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=("own", "shared", "parts"), default=["own", "shared", "parts"])
    parser.add_argument("--mbps", type=float, default=400.0, help="of the simulated bucket, for all machines together")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--late", action="store_true")
    for name in ("way", "endpoint", "cache", "address", "url"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--machine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.machine is not None:
        machine(options)
        return
    options.store = options.store.absolute()
    import ray

    dataset = zl.open_dataset(options.store)
    matrix_bytes = sum(
        path.stat().st_size
        for name in ("data", "indices")
        for path in options.store.glob(f"X/{name}/**/*")
        if path.is_file()
    )
    folder = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    found: dict[str, Any] = {}
    try:
        context = ray.init(include_dashboard=False, log_to_driver=False, _temp_dir=str(folder / "r"), num_cpus=2)
        with cloud(options.store.parent.parent, LinkSpeed(total_mbps=options.mbps)) as served:
            for way in options.ways:
                found[way] = run(options, way, served, folder, context.address_info["gcs_address"])
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    rows = []
    for way, figures in found.items():
        of_epochs = figures["machines"]
        rows_read = [sum(each["rows"] for each in epoch if each) for epoch in of_epochs]
        sent = [sum(each["bytes_from_peers"] for each in epoch if each) / matrix_bytes for epoch in of_epochs]
        rows.append(
            [
                way,
                " ".join(f"{each / matrix_bytes:.3f}" for each in figures["bytes_read"]),
                " ".join(f"{each:.2f}" for each in sent),
                " ".join(f"{each:,}" for each in rows_read),
                " ".join(f"{each:,.0f}" for each in figures["gets"]),
                " ".join(f"{count / each:,.0f}" for count, each in zip(rows_read, figures["seconds"], strict=True)),
            ]
        )
    print(f"{dataset.n_obs:,} rows, {matrix_bytes / 1e6:,.0f} MB of X, {options.machines} machines")
    table([["way", "read", "sent", "rows", "GETs", "rows/s"], *rows])
    print(json.dumps({"matrix_bytes": matrix_bytes, "ways": found}))


if __name__ == "__main__":
    main()
