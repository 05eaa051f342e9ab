"""The processes of a pre-training run: ranks of torch.distributed, tasks of Ray, and their processor seconds."""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

import zloader as zl

# Ray reads these when it is imported. It then listens on 127.0.0.1 only.
_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_OBJECT_STORE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among the ranks of a run. `local` is its number on this machine, that is of its GPU."""

    rank: int = 0
    size: int = 1
    local: int = 0

    @property
    def first(self) -> bool:
        """Whether this rank prints and saves."""
        return self.rank == 0

    def sums(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sums over all ranks."""
        if self.size > 1:
            torch.distributed.all_reduce(numbers)
        return numbers


@contextlib.contextmanager
def joined(ranks: Ranks, device: str, rendezvous: Path | None = None) -> Iterator[Ranks]:
    """Joins the ranks: with NCCL on GPUs, else with gloo. Without a `rendezvous` file, as torchrun says."""
    if ranks.size == 1:
        yield ranks
        return
    where: dict[str, Any] = {}
    if rendezvous is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        where = {"init_method": f"file://{rendezvous}", "rank": ranks.rank, "world_size": ranks.size}
    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo", **where)
    try:
        yield ranks
    finally:
        torch.distributed.destroy_process_group()


def of_torchrun() -> Ranks | None:
    """The rank that torchrun gave this process, if it started it."""
    names = {"rank": "RANK", "size": "WORLD_SIZE", "local": "LOCAL_RANK"}
    if not all(name in os.environ for name in names.values()):
        return None
    return Ranks(**{field: int(os.environ[name]) for field, name in names.items()})


def spawned(run: Callable[[Ranks, Path], None], size: int) -> None:
    """Calls `run` in `size` processes on this machine, with a file by which they find each other."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(_spawned, (run, size, Path(folder) / "rendezvous"), nprocs=size)
        except torch.multiprocessing.ProcessExitedException as error:
            raise SystemExit(f"{error}; it has said why above") from error


def _spawned(rank: int, run: Callable[[Ranks, Path], None], size: int, rendezvous: Path) -> None:
    run(Ranks(rank=rank, size=size, local=rank), rendezvous)


@contextlib.contextmanager
def streamed(loader: zl.Loader, tasks: int, address: str | None) -> Iterator[Any]:
    """The minibatches of a loader: its own, or made by tasks of Ray, here or on the cluster at `address`."""
    if tasks == 0:
        yield loader
        return
    os.environ |= {name: value for name, value in _RAY.items() if name not in os.environ}
    import ray

    import zloader.ray as zr

    new = {"num_cpus": tasks, "object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
    ray.init(address=address, log_to_driver=False, **({} if address else new))
    try:
        yield zr.stream(loader, tasks=tasks)
    finally:
        ray.shutdown()


# ---- processor time and memory


def ray_cpu_s() -> float:
    """User and system seconds of Ray's processes below this one that live now."""
    return sum(seconds for command, seconds in _descendants(os.getpid()) if b"ray" in command)


def _descendants(pid: int) -> Iterator[tuple[bytes, float]]:
    """The command line and the processor seconds of each process that this one has started, or that those have."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                ticks = int(fields[11]) + int(fields[12])
                yield Path(f"/proc/{child}/cmdline").read_bytes(), ticks / os.sysconf("SC_CLK_TCK")
                yield from _descendants(child)


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gpu_bytes(device: torch.device) -> dict[str, int]:
    """The peak of torch's tensors on a GPU, and of what its allocator has reserved. Empty without a GPU."""
    if device.type != "cuda":
        return {}
    return {
        "gpu_peak_bytes": torch.cuda.max_memory_allocated(device),
        "gpu_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }
