"""Flags that several commands share. Each is the type of a field in the dataclass of a command."""

from __future__ import annotations

import csv
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from zloader.common.errors import OptionError

_s3_option = functools.partial(typer.Option, rich_help_panel="Access to buckets")
_loader_option = functools.partial(typer.Option, rich_help_panel="Loader options")

Url = Annotated[str, typer.Argument(metavar="URL", help="Store: a local path or s3://BUCKET/KEY.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document on stdout.")]
Matrices = Annotated[
    list[str] | None,
    typer.Option(
        "--x", metavar="NAME", help="Matrix: X, layers/NAME or raw/X. Repeat for several matrices.", show_default="X"
    ),
]
GenesBy = Annotated[
    list[str] | None,
    typer.Option(
        "--genes-by",
        metavar="COLUMN|FILE",
        help="What names the genes: a var column, or a .csv or .tsv file with names and new names, such as orthologs. "
        "Repeat for one per source; none stands for var_names.",
        show_default="var_names",
    ),
]
ObsColumns = Annotated[str, _loader_option("--obs", metavar="A,B", help="obs columns to read.", show_default="none")]
Memory = Annotated[
    str,
    _loader_option(
        "--memory",
        metavar="SIZE",
        help="Memory limit for reads, fetches and minibatches.",
        show_default="set by the machine's memory",
    ),
]
Layout = Annotated[str, _loader_option("--layout", help="csr, dense, packed or scipy.")]
Dtype = Annotated[
    str | None,
    _loader_option(
        "--dtype",
        help="float32, float64, int32 or int64. Layout packed takes none.",
        show_default="float32",
    ),
]


def words_of(given: Mapping[str, Any]) -> list[str]:
    """The words of a command line that give these flags, by their names in Python. A list repeats its flag."""
    words: list[str] = []
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, list) else [value]:
            words += [flag] if each is True else [flag, str(each)] if each else []
    return words


@dataclass(frozen=True, kw_only=True)
class Access:
    """How the command reaches a bucket."""

    endpoint_url: Annotated[str | None, _s3_option(metavar="URL", help="S3 server, if it is not AWS.")] = None
    region: Annotated[str | None, _s3_option(help="Region of the bucket.")] = None
    profile: Annotated[str | None, _s3_option(help="Profile in the AWS configuration.")] = None
    anon: Annotated[bool, _s3_option("--anon", help="Send no credentials, for public buckets.")] = False
    requester_pays: Annotated[
        bool, _s3_option("--requester-pays", help="Pay for requests and transfer, on S3 and Google Cloud.")
    ] = False
    project: Annotated[
        str | None, _s3_option(help="Google Cloud project that pays; implies --requester-pays.", metavar="PROJECT")
    ] = None

    @property
    def storage_options(self) -> dict[str, Any]:
        """The options of the scheme's file system."""
        given: dict[str, Any] = {
            "endpoint_url": self.endpoint_url,
            "profile": self.profile,
            "anon": self.anon,
            "requester_pays": self.project or self.requester_pays,
            "client_kwargs": {"region_name": self.region} if self.region else {},
        }
        return {name: value for name, value in given.items() if value}

    @property
    def words(self) -> list[str]:
        """The flags that were given, as words of a command line, for commands that a page says to try."""
        return words_of(dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class LoaderSizes:
    """The sizes of a Loader. One that is None takes the Loader's default."""

    batch_size: Annotated[int | None, _loader_option(help="Rows per minibatch.", show_default="64")] = None
    fetch_factor: Annotated[int | None, _loader_option(help="Minibatches per fetch.", show_default="256")] = None
    block_size: Annotated[
        int | None, _loader_option(help="Rows per shuffled block, at most one fetch.", show_default="64")
    ] = None

    @property
    def by_name(self) -> dict[str, int]:
        """The sizes with their defaults, by name."""
        from zloader.order.shuffling import default_block_size
        from zloader.training.loader import Loader

        batch_size = Loader.batch_size if self.batch_size is None else self.batch_size
        fetch_factor = Loader.fetch_factor if self.fetch_factor is None else self.fetch_factor
        block_size = default_block_size(batch_size * fetch_factor) if self.block_size is None else self.block_size
        return {"batch_size": batch_size, "fetch_factor": fetch_factor, "block_size": block_size}


def genes_by_of(given: list[str] | None) -> Any:
    """The genes_by for these --genes-by flags. Raises OptionError for a file that cannot be read."""
    each = [_named_by(one) for one in given or ["none"]]
    return each[0] if len(each) == 1 else each


def _named_by(given: str) -> str | dict[str, str] | None:
    path = Path(given)
    if path.suffix.lower() not in (".csv", ".tsv"):
        return None if given == "none" else given
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets begin it with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read names of genes from {path}: {error}") from error
    found: dict[str, str] = {}
    for number, row in enumerate(csv.reader(text.splitlines(), delimiter="\t" if "\t" in text else ","), start=1):
        cells = [cell.strip() for cell in row]
        if not any(cells):
            continue
        if len(cells) != 2:
            raise OptionError(f"line {number} of {path} has {len(cells)} columns: write a name and a new name per line")
        name, new = cells
        if new and found.setdefault(name, new) != new:
            raise OptionError(
                f"line {number} of {path} gives {name} the new name {new} after {found[name]}: give each gene only one"
            )
    return found


def names_in(path: Path) -> list[str]:
    """The names of genes in a file, one per line. Raises OptionError if it cannot be read."""
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read the names of genes in {path}: {error}") from error


def x_of(given: list[str] | None) -> str | list[str]:
    """The x of a Loader for these --x flags: a single name, or a list of several."""
    names = given or ["X"]
    return names[0] if len(names) == 1 else names
