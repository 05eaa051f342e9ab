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

_CHOICE = "What goes in"
_LAYOUT = "How it is stored"
_NAMES = "Names with commas between, or none"


@app.command(epilog=KEYS)
def convert(  # noqa: PLR0913 - one parameter a flag
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC...",
            help=".h5ad, AnnData Zarr, annbatch collection, 10x .h5 or .mtx directory: paths, URLs, globs.",
            show_default=False,
        ),
    ],
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="Where to: local path or s3://BUCKET/KEY.", show_default=False)
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the store that is there.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted conversion after its last whole shard.")
    ] = False,
    x: Annotated[
        str, typer.Option("--x", metavar="NAME", help="What becomes X: X, layers/NAME, raw/X.", rich_help_panel=_CHOICE)
    ] = "X",
    layers: Annotated[
        str | None, typer.Option(metavar="A,B", help=f"Layers. {_NAMES}.", show_default="all", rich_help_panel=_CHOICE)
    ] = None,
    obsm: Annotated[
        str | None,
        typer.Option(metavar="A,B", help=f"Parts of obsm. {_NAMES}.", show_default="all", rich_help_panel=_CHOICE),
    ] = None,
    obs: Annotated[
        str | None,
        typer.Option(metavar="A,B", help=f"obs columns. {_NAMES}.", show_default="all", rich_help_panel=_CHOICE),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw/--no-raw", help="Keep raw.", rich_help_panel=_CHOICE)] = True,
    join: Annotated[
        str | None,
        typer.Option(help="Genes of several sources: inner (shared ones) or outer (all).", rich_help_panel=_CHOICE),
    ] = None,
    genes: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Exactly the genes in this file, one a line.", rich_help_panel=_CHOICE),
    ] = None,
    gene_column: Annotated[
        str | None, typer.Option(help="var column that names the genes, e.g. Ensembl ids.", rich_help_panel=_CHOICE)
    ] = None,
    source_column: Annotated[
        str | None, typer.Option(help="obs column to add: which source a row came from.", rich_help_panel=_CHOICE)
    ] = None,
    unique_obs_names: Annotated[
        bool, typer.Option("--unique-obs-names", help="Number obs names that come twice.", rich_help_panel=_CHOICE)
    ] = False,
    chunk_rows: Annotated[
        int | None,
        typer.Option(help="Rows' worth of values in a chunk, about.", show_default="32", rich_help_panel=_LAYOUT),
    ] = None,
    shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Most in one object, uncompressed.", show_default="256MiB", rich_help_panel=_LAYOUT
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(help="lz4, zstd (smaller, slower) or none.", show_default="lz4", rich_help_panel=_LAYOUT),
    ] = None,
    preserve_dtype: Annotated[
        bool,
        typer.Option(
            "--preserve-dtype", help="Keep dtypes, also where smaller ones would do.", rich_help_panel=_LAYOUT
        ),
    ] = False,
    shuffle_seed: Annotated[
        int | None,
        typer.Option("--shuffle", metavar="SEED", help="Shuffle rows, by this seed.", rich_help_panel=_LAYOUT),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most memory to use.", show_default="1GiB", rich_help_panel=_LAYOUT),
    ] = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anon: Anonymous = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write one or many AnnData as one sharded AnnData Zarr store."""
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
    """The names of an option such as `a,b`; none of them for `none`."""
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
    typer.Argument(metavar="SRC...", help="Sources as convert takes them: paths, URLs, globs.", show_default=False),
]
_Memory = Annotated[str, typer.Option(metavar="SIZE", help="Most memory to use.")]


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
    """Add the rows of other AnnData to a store that convert wrote."""
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
        typer.Option(metavar="SRC", help="Also compare every value with what it was made from. May be repeated."),
    ] = None,
    memory: _Memory = "1GiB",
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anon: Anonymous = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Read all of a store, check every checksum, row and shape, and name what is wrong. The status is 1 if any is."""
    from zloader.conversion.verify import verify as verify_store

    access = storage_options(endpoint_url, region, profile, anon)
    seen = verify_store(url, against=against or None, storage_options=access, memory=memory)
    if as_json:
        print_json(dataclasses.asdict(seen) | {"ok": seen.ok})
    else:
        terminal.show_verification(terminal.console(), seen)
    if not seen.ok:
        raise typer.Exit(1)
