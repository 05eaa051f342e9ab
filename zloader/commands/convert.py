"""The commands that write and check stores: convert, append, verify."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from zloader.commands import terminal
from zloader.commands.command import (
    KEYS,
    Anonymous,
    Debug,
    Endpoint,
    Json,
    Profile,
    Region,
    Url,
    app,
    print_json,
    storage_options,
)
from zloader.common.errors import OptionError

_CHOICE = "What to store"
_LAYOUT = "How to store it"
_NAMES = "Comma-separated names, or none"


@app.command(epilog=KEYS)
def convert(  # noqa: PLR0913 - one parameter a flag
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC...",
            help="Paths, URLs or globs of .h5ad, AnnData Zarr, annbatch collections, 10x .h5 or .mtx directories.",
            show_default=False,
        ),
    ],
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="Store to write: a local path or s3://BUCKET/KEY.", show_default=False)
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing store at DEST.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted conversion after its last complete shard.")
    ] = False,
    x: Annotated[
        str,
        typer.Option(
            "--x", metavar="NAME", help="Matrix to store as X: X, layers/NAME or raw/X.", rich_help_panel=_CHOICE
        ),
    ] = "X",
    layers: Annotated[
        str | None,
        typer.Option(metavar="A,B", help=f"Layers to store. {_NAMES}.", show_default="all", rich_help_panel=_CHOICE),
    ] = None,
    obsm: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help=f"obsm elements to store. {_NAMES}.", show_default="all", rich_help_panel=_CHOICE
        ),
    ] = None,
    obs: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help=f"obs columns to store. {_NAMES}.", show_default="all", rich_help_panel=_CHOICE
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw/--no-raw", help="Store raw.", rich_help_panel=_CHOICE)] = True,
    join: Annotated[
        str | None,
        typer.Option(help="Genes of several sources: inner (shared genes) or outer (all).", rich_help_panel=_CHOICE),
    ] = None,
    genes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Store exactly the genes in this file, one per line.", rich_help_panel=_CHOICE
        ),
    ] = None,
    gene_column: Annotated[
        str | None,
        typer.Option(help="var column that identifies genes, for example Ensembl IDs.", rich_help_panel=_CHOICE),
    ] = None,
    source_column: Annotated[
        str | None, typer.Option(help="obs column to add with the source of each row.", rich_help_panel=_CHOICE)
    ] = None,
    unique_obs_names: Annotated[
        bool,
        typer.Option("--unique-obs-names", help="Append a number to repeated obs names.", rich_help_panel=_CHOICE),
    ] = False,
    chunk_rows: Annotated[
        int | None,
        typer.Option(help="Approximate rows per chunk.", show_default="16", rich_help_panel=_LAYOUT),
    ] = None,
    shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Largest shard (stored object), before compression.",
            show_default="256MiB",
            rich_help_panel=_LAYOUT,
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            help="lz4, zstd or pcodec (smaller, slower) or none.", show_default="lz4", rich_help_panel=_LAYOUT
        ),
    ] = None,
    preserve_dtype: Annotated[
        bool,
        typer.Option(
            "--preserve-dtype",
            help="Keep the source dtypes, even where smaller ones hold every value.",
            rich_help_panel=_LAYOUT,
        ),
    ] = False,
    shuffle_seed: Annotated[
        int | None,
        typer.Option("--shuffle", metavar="SEED", help="Shuffle the rows with this seed.", rich_help_panel=_LAYOUT),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory limit of the whole process.", show_default="1GiB", rich_help_panel=_LAYOUT
        ),
    ] = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anon: Anonymous = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Convert one or more AnnData sources into one sharded AnnData Zarr store."""
    from zloader.conversion.convert import convert as convert_sources
    from zloader.conversion.joining.content import Selection
    from zloader.conversion.writing.encode import ConvertOptions

    given = {
        "chunk_rows": chunk_rows,
        "shard_size": shard_size,
        "codec": codec,
        "preserve_dtype": preserve_dtype,
        "memory": memory,
        "shuffle_seed": shuffle_seed,
    }
    select = Selection(
        x=x,
        layers=_listed(layers),
        obsm=_listed(obsm),
        obs=_listed(obs),
        raw=raw,
        join=join,
        genes=None if genes is None else _lines(genes),
        gene_column=gene_column,
        source_column=source_column,
        unique_obs_names=unique_obs_names,
    )
    done = convert_sources(
        sources,
        dest,
        select=select,
        storage_options=storage_options(endpoint_url, region, profile, anon),
        overwrite=overwrite,
        resume=resume,
        options=ConvertOptions(**{name: value for name, value in given.items() if value is not None}),  # type: ignore[arg-type]
    )
    if as_json:
        print_json(dataclasses.asdict(done))
    else:
        terminal.show_conversion(terminal.console(), done)


def _listed(names: str | None) -> list[str] | None:
    """Splits `a,b` into names; `none` gives an empty list."""
    if names is None:
        return None
    return [] if names == "none" else [name.strip() for name in names.split(",") if name.strip()]


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read genes from {path}: {error}") from error


_Sources = Annotated[
    list[str],
    typer.Argument(metavar="SRC...", help="Sources, as for convert: paths, URLs or globs.", show_default=False),
]
_Memory = Annotated[str, typer.Option(metavar="SIZE", help="Memory limit of the whole process.")]


@app.command(epilog=KEYS)
def append(  # noqa: PLR0913 - one parameter a flag
    url: Url,
    sources: _Sources,
    memory: _Memory = "1GiB",
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anon: Anonymous = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Append the rows of other AnnData sources to a store written by convert."""
    from zloader.conversion.append import append as append_sources

    access = storage_options(endpoint_url, region, profile, anon)
    done = append_sources(url, sources, storage_options=access, memory=memory)
    if as_json:
        print_json(dataclasses.asdict(done))
    else:
        terminal.show_append(terminal.console(), done)


@app.command(epilog=KEYS)
def verify(  # noqa: PLR0913 - one parameter a flag
    url: Url,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="SRC", help="Also compare every value with this source. Repeat for several sources."),
    ] = None,
    memory: _Memory = "1GiB",
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anon: Anonymous = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check every checksum, row and shape of a store, and list the problems.

    Reads the whole store. Exits with 1 if there are problems.
    """
    from zloader.conversion.verify import verify as verify_store

    access = storage_options(endpoint_url, region, profile, anon)
    verified = verify_store(url, against=against or None, storage_options=access, memory=memory)
    if as_json:
        print_json(dataclasses.asdict(verified) | {"ok": verified.ok})
    else:
        terminal.show_verification(terminal.console(), verified)
    if not verified.ok:
        raise typer.Exit(1)
