"""The tools that run.py compares: one module per tool, which is also run by the Python of that tool's environment.

A module may import only the standard library when it is imported. It has

- `PEER`: what the tool needs, and the ways of using it (its sides).
- `write(conversion, sources, store)`: returns a function that converts .h5ad files into the tool's store. Imports
  happen before it is returned, so that they are not timed. A tool without a store of its own has no `write`.
- `epochs(options)`: opens a store, and returns a function that starts an epoch. readers.py calls it, and its docstring
  says which options there are. A tool that is measured in conversion only has no `epochs`.

To add a tool, write such a module and add its name to MODULES.
"""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

NEWEST_MINOR = 14  # newest minor version of Python 3 to look for
MODULES = (
    "zloader",
    "anndata",
    "annloader",
    "annbatch",
    "scdataset",
    "slafdb",
    "bionemo-scdl",
    "datasets",
    "tiledbsoma-ml",
    "cell-load",
    "protoplast",
    "mosaicml-streaming",
    "litdata",
    "mappedcollection",
    "cellstream",
    "homeobox",
)
EPOCHS = ("cold_warm_local", "minibatch", "random", "first", "memory")  # scenarios that any loader can take part in
KINDS = ("zarr", "h5ad", "remote zarr", "remote h5ad")  # of stores

Request = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch that has begun.

    `size` gives the number of rows of a minibatch. `values` gives its values and `labels` the labels of its rows, both
    as arrays. They are asked for only when an epoch is checked. `statistics` is called after the last minibatch, and
    `workers_bytes`, the memory of worker processes, while they run.
    """

    minibatches: Iterator[Any]
    size: Callable[[Any], int] = len
    values: Callable[[Any], Any] | None = None
    labels: Callable[[Any], Any] | None = None
    statistics: Callable[[], Request] = dict
    workers_bytes: Callable[[], int] | None = None


Epochs = Callable[[Request], Epoch]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way of using a tool, and the scenarios in which it takes part.

    - `how`: how it is tuned, and which page of its documentation says so.
    - `format`: its store, in words.
    - `store`: the conversion that writes its store, as `rivals.py write` knows it. None: it reads the .h5ad file.
    - `options`: what `epochs` is given besides the options of the scenario.
    - `mirrored`: whether it keeps a mirror of the store on the local disk, in the directory `mirror` of its options.
    - `whole`: whether an epoch is meant to give out all rows. If not, `how` says which are left out.
    - `order`: what it shuffles, in a few words, where the scenario asks for blocks of 64 rows.
    - `reads`: the stores that others have written and that it reads where they lie: of KINDS. Those of the scenario
      `in_place` read "h5ad", too.
    """

    how: str
    format: str
    store: str | None
    scenarios: tuple[str, ...] = EPOCHS
    options: Request = field(default_factory=dict)
    mirrored: bool = False
    whole: bool = True
    order: str = "blocks of 64 cells"
    reads: tuple[str, ...] = ()

    def can_read(self, kind: str) -> bool:
        """Whether it reads a store of this kind where it lies."""
        return kind in self.reads or (kind == "h5ad" and "in_place" in self.scenarios)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What a tool needs: requirements of pip, the oldest Python that it supports, and the first that it does not.

    `packages` are the distributions whose versions are recorded, the tool's own first. `sides` are by name. A tool that
    is `light` needs nothing but zloader's own requirements, so that `run.py --tiny` can use it without an environment.
    """

    sides: Mapping[str, Side]
    packages: tuple[str, ...]
    requirements: tuple[str, ...] = ()
    least_python: tuple[int, int] = (3, 11)
    below_python: tuple[int, int] = (3, NEWEST_MINOR + 1)
    light: bool = False


def module(name: str) -> ModuleType:
    """The module of a tool."""
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")


def peer(name: str) -> Peer:
    """What a tool needs, and its sides."""
    found: Peer = module(name).PEER
    return found


def fetch_rows(options: Request) -> int:
    """The rows of a fetch: `preload_nchunks` blocks of `chunk_size` rows."""
    return int(options["chunk_size"] * options["preload_nchunks"])


def aws_variables(options: Request) -> dict[str, str]:
    """The environment variables by which AWS's client libraries find the cloud of a store, {} for a local one."""
    if "storage_options" not in options:
        return {}
    given = options["storage_options"]
    return {
        "AWS_ENDPOINT_URL": given["endpoint_url"],
        "AWS_ACCESS_KEY_ID": given["key"],
        "AWS_SECRET_ACCESS_KEY": given["secret"],
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


def workers_bytes() -> int:
    """The private memory of the processes that this one has started."""
    return sum(_private_bytes(child.pid) for child in multiprocessing.active_children())


def _private_bytes(pid: int | None) -> int:
    """The private memory of a process, none if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))
