"""The commands that write and check stores: convert, append, verify."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated

import typer

from zloader.commands import terminal
from zloader.commands.command import KEYS, app, print_json, takes_flags
from zloader.commands.convert_flags import ConvertFlags
from zloader.commands.flags import Access, GenesBy, Json, Url, genes_by_of


@app.command(epilog=KEYS)
@takes_flags
def convert(flags: ConvertFlags) -> None:
    """Convert one or more AnnData sources into one sharded AnnData Zarr store."""
    from zloader.conversion.convert import convert as convert_sources

    done = convert_sources(
        flags.sources,
        flags.dest,
        select=flags.selection,
        storage_options=flags.access.storage_options,
        overwrite=flags.overwrite,
        resume=flags.resume,
        options=flags.options,
    )
    if flags.as_json:
        print_json(dataclasses.asdict(done))
    else:
        terminal.show_conversion(terminal.console(), done)


_Memory = Annotated[str, typer.Option(metavar="SIZE", help="Memory limit of the whole process.")]


@dataclass(frozen=True, kw_only=True)
class AppendFlags:
    """The flags of `append`."""

    url: Url
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SRC...", help="Sources, as for convert: paths, URLs or globs.", show_default=False),
    ]
    genes_by: GenesBy = None
    memory: _Memory = "1GiB"
    access: Access = field(default_factory=Access)
    as_json: Json = False


@app.command(epilog=KEYS)
@takes_flags
def append(flags: AppendFlags) -> None:
    """Append the rows of other AnnData sources to a store written by convert."""
    from zloader.conversion.append import append as append_sources

    access = flags.access.storage_options
    done = append_sources(
        flags.url,
        flags.sources,
        genes_by=genes_by_of(flags.genes_by),
        storage_options=access,
        memory=flags.memory,
    )
    if flags.as_json:
        print_json(dataclasses.asdict(done))
    else:
        terminal.show_append(terminal.console(), done)


@dataclass(frozen=True, kw_only=True)
class VerifyFlags:
    """The flags of `verify`."""

    url: Url
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="SRC", help="Also compare every value with this source. Repeat for several sources."),
    ] = None
    genes_by: GenesBy = None
    memory: _Memory = "1GiB"
    access: Access = field(default_factory=Access)
    as_json: Json = False


@app.command(epilog=KEYS)
@takes_flags
def verify(flags: VerifyFlags) -> None:
    """Check every checksum, row and shape of a store, and list the problems.

    Reads the whole store. Exits with 1 if there are problems.
    """
    from zloader.conversion.verify import verify as verify_store

    access = flags.access.storage_options
    verified = verify_store(
        flags.url,
        against=flags.against or None,
        genes_by=genes_by_of(flags.genes_by),
        storage_options=access,
        memory=flags.memory,
    )
    if flags.as_json:
        print_json(dataclasses.asdict(verified) | {"ok": verified.ok})
    else:
        terminal.show_verification(terminal.console(), verified)
    if not verified.ok:
        raise typer.Exit(1)
