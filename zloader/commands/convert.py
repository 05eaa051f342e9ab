"""The commands that write and check stores: convert and verify."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from zloader.commands import output
from zloader.commands.command import KEYS, app, takes_flags
from zloader.commands.flags import Access, GenesBy, Json, Url, genes_by_of, names_in
from zloader.common.messages import size

if TYPE_CHECKING:
    from zloader.conversion.convert import ConversionReport
    from zloader.conversion.encode import ConvertOptions
    from zloader.conversion.selection import Selection
    from zloader.conversion.verify import Verification


_choice = functools.partial(typer.Option, rich_help_panel="What to store")
_layout = functools.partial(typer.Option, rich_help_panel="How to store it")
_of_parquet = functools.partial(typer.Option, rich_help_panel="Sources in Parquet")
_NAMES = "Comma-separated names, or none"


@dataclass(frozen=True, kw_only=True)
class ParquetFlags:
    """The options of `zl.Parquet`."""

    gene_metadata: Annotated[str | None, _of_parquet(metavar="FILE", help="Parquet file with a row for each gene.")] = (
        None
    )
    lists: Annotated[
        str | None,
        _of_parquet(
            metavar="GENES,VALUES",
            help="Columns of lists: ids or names of genes, and values.",
            show_default="genes,expressions",
        ),
    ] = None
    gene_id: Annotated[
        str | None,
        _of_parquet(metavar="NAME", help="Column of --gene-metadata with the ids or names.", show_default="token_id"),
    ] = None
    obs_names: Annotated[
        str | None, _of_parquet(metavar="NAME", help="Column with the names of cells.", show_default="numbers")
    ] = None

    def given_to(self, sources: list[str]) -> list[Any]:
        """The sources, in Parquet if any of these options is given."""
        lists = None if self.lists is None else tuple(name.strip() for name in self.lists.split(","))
        given: dict[str, Any] = vars(self) | {"lists": lists}
        if not any(value is not None for value in given.values()):
            return list(sources)
        from zloader.conversion.parquet import Parquet

        return [Parquet(source, **given) for source in sources]


@dataclass(frozen=True, kw_only=True)
class ConvertFlags:
    """The flags, and the options of `zl.convert` that they stand for."""

    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC...",
            help="Paths, URLs or globs of .h5ad, .h5mu, AnnData or MuData Zarr, annbatch collections, Parquet files.",
            show_default=False,
        ),
    ]
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="Store to write: a local path or s3://BUCKET/KEY.", show_default=False)
    ]
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing store at DEST.")] = False
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue an interrupted conversion after its last complete shard; do nothing if it has finished.",
        ),
    ] = False
    x: Annotated[str, _choice("--x", metavar="NAME", help="Matrix to store as X: X, layers/NAME or raw/X.")] = "X"
    layers: Annotated[str | None, _choice(metavar="A,B", help=f"Layers to store. {_NAMES}.", show_default="all")] = None
    obsm: Annotated[
        str | None, _choice(metavar="A,B", help=f"obsm elements to store. {_NAMES}.", show_default="all")
    ] = None
    obs: Annotated[str | None, _choice(metavar="A,B", help=f"obs columns to store. {_NAMES}.", show_default="all")] = (
        None
    )
    raw: Annotated[bool, _choice("--raw/--no-raw", help="Store raw.")] = True
    join: Annotated[str | None, _choice(help="Genes of several sources: inner (shared genes) or outer (all).")] = None
    genes: Annotated[
        Path | None, _choice(metavar="FILE", help="Store exactly the genes in this file, one per line.")
    ] = None
    genes_by: GenesBy = None
    source_column: Annotated[str | None, _choice(help="obs column to add with the source of each row.")] = None
    unique_obs_names: Annotated[bool, _choice("--unique-obs-names", help="Append a number to repeated obs names.")] = (
        False
    )
    chunk_rows: Annotated[int | None, _layout(help="Approximate rows per chunk.", show_default="16")] = None
    shard_size: Annotated[
        str | None,
        _layout(metavar="SIZE", help="Largest shard (stored object), before compression.", show_default="256MiB"),
    ] = None
    codec: Annotated[str | None, _layout(help="lz4, zstd or pcodec (smaller, slower) or none.", show_default="lz4")] = (
        None
    )
    preserve_dtype: Annotated[
        bool,
        _layout("--preserve-dtype", help="Keep the source dtypes, even where smaller ones hold every value."),
    ] = False
    shuffle_seed: Annotated[
        int | None, _layout("--shuffle", metavar="SEED", help="Shuffle the rows with this seed.")
    ] = None
    memory: Annotated[
        str | None, _layout(metavar="SIZE", help="Memory limit of the whole process.", show_default="1GiB")
    ] = None
    parquet: ParquetFlags = field(default_factory=ParquetFlags)
    access: Access = field(default_factory=Access)
    as_json: Json = False

    @property
    def selection(self) -> Selection:
        """The parts of the sources. Raises OptionError if a file of genes cannot be read."""
        from zloader.conversion.selection import Selection

        return Selection(
            x=self.x,
            layers=_listed(self.layers),
            obsm=_listed(self.obsm),
            obs=_listed(self.obs),
            raw=self.raw,
            join=self.join,
            genes=None if self.genes is None else names_in(self.genes),
            genes_by=genes_by_of(self.genes_by),
            source_column=self.source_column,
            unique_obs_names=self.unique_obs_names,
        )

    @property
    def options(self) -> ConvertOptions:
        """How they are stored. What is not given has the default of `zl.ConvertOptions`."""
        from zloader.conversion.encode import ConvertOptions

        names = ("chunk_rows", "shard_size", "codec", "preserve_dtype", "memory", "shuffle_seed")
        given: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        return ConvertOptions(**given)


def _listed(names: str | None) -> list[str] | None:
    """Splits `a,b` into names; `none` gives an empty list."""
    if names is None:
        return None
    return [] if names == "none" else [name.strip() for name in names.split(",") if name.strip()]


@app.command(epilog=KEYS)
@takes_flags
def convert(flags: ConvertFlags) -> None:
    """Convert one or more AnnData or MuData sources into one sharded Zarr store."""
    from zloader.conversion.convert import convert as convert_sources

    done = convert_sources(
        flags.parquet.given_to(flags.sources),
        flags.dest,
        select=flags.selection,
        storage_options=flags.access.storage_options,
        overwrite=flags.overwrite,
        resume=flags.resume,
        options=flags.options,
    )
    show = functools.partial(_show_conversion, done=done)
    output.print_result(dataclasses.asdict(done), show, as_json=flags.as_json)


@dataclass(frozen=True, kw_only=True)
class VerifyFlags:
    """The flags of `verify`."""

    url: Url
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="SRC", help="Also compare every value with this source. Repeat for several sources."),
    ] = None
    genes_by: GenesBy = None
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory limit of the whole process.")] = "1GiB"
    parquet: ParquetFlags = field(default_factory=ParquetFlags)
    access: Access = field(default_factory=Access)
    as_json: Json = False


@app.command(epilog=KEYS)
@takes_flags
def verify(flags: VerifyFlags) -> None:
    """Check every checksum, row and shape of a store, and list the problems.

    Reads the whole store. Exits with 1 if there are problems.
    """
    from zloader.conversion.verify import verify as verify_store

    verified = verify_store(
        flags.url,
        against=flags.parquet.given_to(flags.against or []) or None,
        genes_by=genes_by_of(flags.genes_by),
        storage_options=flags.access.storage_options,
        memory=flags.memory,
    )
    show = functools.partial(_show_verification, verified=verified)
    output.print_result(dataclasses.asdict(verified) | {"ok": verified.ok}, show, as_json=flags.as_json)
    if not verified.ok:
        raise typer.Exit(1)


def _show_conversion(console: Console, done: ConversionReport) -> None:
    converted = f"converted {size(done.bytes_in)} to {size(done.bytes_out)} of Zarr in {done.seconds:.1f} s"
    if done.already_complete:
        converted = "already complete, converted from the same sources with the same options"
    console.print(f"{done.rows:,} rows x {done.genes:,} genes, {done.values:,} values: {converted}")
    for name, change in done.dtypes_changed.items():
        console.print(f"  {name}: {change}, without loss")
    for name, rows in done.rows_made_canonical.items():
        console.print(f"  {name}: {rows:,} rows sorted by gene or with repeated genes summed")
    if done.dropped:
        console.print(f"  left out, because sources cannot be joined on it: {', '.join(done.dropped)}")
    console.print(f"written to {done.destination}")


def _show_verification(console: Console, verified: Verification) -> None:
    for problem in verified.problems:
        console.print(f"{problem.where}: {problem.what}")
    compared = f", and every value equals {', '.join(verified.against)}" if verified.against and verified.ok else ""
    console.print(
        f"{verified.url}: {verified.rows:,} rows x {verified.genes:,} genes; read {verified.values:,} values in "
        f"{verified.chunks:,} chunks of {verified.objects:,} objects ({size(verified.bytes_read)}) in "
        f"{verified.seconds:.1f} s: "
        + (f"no problems{compared}" if verified.ok else f"problems: {len(verified.problems)}"),
    )
