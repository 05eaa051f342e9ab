"""The commands for caches: `warm`, and `cache ls`, `cache verify` and `cache clear`.

Only `warm` opens a store. The others read only the cache directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.styled import Styled

from zloader.commands import output
from zloader.commands.command import KEYS, EndedError, app, takes_flags
from zloader.commands.flags import Access, Json, Matrices, Url, names_in
from zloader.common.errors import CacheError, OptionError
from zloader.common.messages import size

if TYPE_CHECKING:
    from zloader.caching.directory import MirrorEntry
    from zloader.caching.inspection import MirrorInspection
    from zloader.dataset.warm import Warmed

# ---- warm


@dataclass(frozen=True, kw_only=True)
class WarmFlags:
    """The flags of `warm`."""

    url: Url
    cache: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Cache directory.", show_default=False),
    ]
    x: Matrices = None
    max_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Disk space limit of all mirrors in DIR together.", show_default="no limit"),
    ] = None
    min_free: Annotated[str, typer.Option(metavar="SIZE", help="Disk space to leave free.")] = "0"
    cache_form: Annotated[
        str,
        typer.Option(metavar="FORM", help="How to keep values: raw, or compact (40 % of the space)."),
    ] = "raw"
    genes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep only the genes named in a file, one per line.",
            show_default="all genes",
        ),
    ] = None
    access: Access = field(default_factory=Access)
    as_json: Json = False


@app.command(epilog=KEYS)
@takes_flags
def warm(flags: WarmFlags) -> None:
    """Download a store into the cache before training, so that the first epoch is warm.

    Cached chunks are not read again. After Ctrl-C or a crash, run the same command to continue.
    """
    from zloader.access.location import location_of
    from zloader.common.options import Cache
    from zloader.common.progress import progress_bars
    from zloader.dataset.dataset import open_dataset
    from zloader.dataset.warm import warm as warm_dataset

    x = tuple(flags.x or ("X",))
    cache = Cache(
        directory=flags.cache, max_bytes=flags.max_bytes, min_free_bytes=flags.min_free, form=flags.cache_form
    )
    genes = None if flags.genes is None else names_in(flags.genes)
    settings = {"url": location_of(flags.url, None).url, "cache": cache.directory}
    latest: Warmed | None = None
    try:
        with progress_bars(shown=True, unit="bytes") as bars:
            advance = bars.add("warming", None)

            def on_progress(progress: Warmed) -> None:
                nonlocal latest
                advance(progress.bytes_held - (latest.bytes_held if latest else 0), progress.bytes_in_all)
                latest = progress

            dataset = open_dataset(flags.url, cache=cache, storage_options=flags.access.storage_options)
            if genes is not None:
                dataset = dataset[:, genes]
            done = warm_dataset(dataset, x=x, on_progress=on_progress)
    except (KeyboardInterrupt, EndedError):
        if latest is not None:
            _show_warmed(settings, latest, as_json=flags.as_json)
        typer.echo("downloaded chunks stay in the cache: run the same command to continue", err=True)
        raise
    _show_warmed(settings, done, as_json=flags.as_json)
    if done.chunks_held < done.chunks:
        typer.echo("the cache is full: every epoch will read the missing chunks from the store", err=True)


def _show_warmed(settings: dict[str, Any], warmed: Warmed, *, as_json: bool) -> None:
    document = {**settings, **dataclasses.asdict(warmed), "whole": warmed.chunks_held == warmed.chunks}
    rate = warmed.bytes_read / warmed.elapsed_s if warmed.elapsed_s else 0.0
    text = (
        f"{settings['url']}: {warmed.chunks_held:,} of {warmed.chunks:,} chunks are in {settings['cache']}, "
        f"{size(warmed.bytes_held)} ({warmed.share:.0%}); {warmed.gets:,} GETs read {size(warmed.bytes_read)} in "
        f"{warmed.elapsed_s:.1f} s, {size(rate)}/s"
    )
    output.print_result(document, lambda console: console.print(text), as_json=as_json)


# ---- cache

_cache = typer.Typer(no_args_is_help=True)
app.add_typer(_cache, name="cache", help="List, verify and delete cached mirrors.")

_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Cache directory.", show_default=False)]


@dataclass(frozen=True, kw_only=True)
class CacheFlags:
    """The flags of `cache ls` and `cache verify`."""

    directory: _Directory
    as_json: Json = False


def _mirrors(directory: Path) -> tuple[Path, list[MirrorEntry]]:
    """The path of a cache, and its mirrors."""
    from zloader.caching.directory import mirrors, require_cache

    cache = directory.absolute()
    require_cache(cache)
    return cache, mirrors(cache)


def _document(entry: MirrorEntry, inspection: MirrorInspection | None = None) -> dict[str, Any]:
    return dataclasses.asdict(entry) | ({} if inspection is None else dataclasses.asdict(inspection))


@_cache.command()
@takes_flags
def ls(flags: CacheFlags) -> None:
    """List the mirrors in a cache, in eviction order."""
    from zloader.caching.inspection import inspect_mirror

    place, entries = _mirrors(flags.directory)
    found = [(entry, inspect_mirror(entry)) for entry in entries]
    on_disk = sum(entry.allocated_bytes for entry, _ in found)
    mirrors = [_document(entry, inspection) for entry, inspection in found]
    document = {"cache": place, "allocated_bytes": on_disk, "mirrors": mirrors}
    output.print_result(document, functools.partial(_show_mirrors, found=found), as_json=flags.as_json)


@_cache.command()
@takes_flags
def verify(flags: CacheFlags) -> None:
    """Compare everything in a cache with its checksums.

    Damaged data is dropped, and read from the store again when it is needed. Exits with 1 if anything is damaged.
    """
    from zloader.caching.inspection import inspect_mirror
    from zloader.caching.inspection import verify as verify_mirror
    from zloader.common.progress import progress_bars

    place, entries = _mirrors(flags.directory)
    in_all = sum(each.bytes_held + each.kept_bytes for each in map(inspect_mirror, entries))
    done = 0
    problems: dict[Path, list[str]] = {}
    with progress_bars(shown=True, unit="bytes") as bars:
        advance = bars.add("verifying", in_all)

        def on_bytes(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            advance(n_bytes)

        for entry in entries:
            problems[entry.directory] = verify_mirror(entry.directory, on_bytes)
    ok = not any(problems.values())
    mirrors = [_document(entry) | {"problems": problems[entry.directory]} for entry in entries]
    document = {"cache": place, "bytes_compared": done, "ok": ok, "mirrors": mirrors}

    def show_problems(console: Console) -> None:
        for entry in entries:
            for problem in problems[entry.directory]:
                console.print(f"{entry.url}: {problem}")
        n_problems = sum(map(len, problems.values()))
        advice = "; damaged data will be read from the store again" if n_problems else ""
        console.print(f"mirrors: {len(entries)}, compared: {size(done)}, problems: {n_problems}{advice}")

    output.print_result(document, show_problems, as_json=flags.as_json)
    if not ok:
        raise typer.Exit(1)


@dataclass(kw_only=True)
class _Cleared:
    """Result of `clear`: deleted mirrors, mirrors in use, and files left in place because zloader did not make them."""

    cache: Path
    deleted: list[MirrorEntry] = field(default_factory=list)
    in_use: list[MirrorEntry] = field(default_factory=list)
    stayed: list[Path] = field(default_factory=list)

    @property
    def freed_bytes(self) -> int:
        return sum(entry.allocated_bytes for entry in self.deleted)

    def show(self, console: Console) -> None:
        for entry in self.deleted:
            console.print(f"deleted: {entry.url}, {size(entry.allocated_bytes)} in {entry.directory}")
        for entry in self.in_use:
            console.print(f"in use, not deleted: {entry.url} in {entry.directory}")
        for path in self.stayed:
            console.print(f"not made by zloader, not deleted: {path}")
        console.print(f"mirrors deleted: {len(self.deleted)}, {size(self.freed_bytes)}")


@dataclass(frozen=True, kw_only=True)
class ClearFlags:
    """The flags of `cache clear`."""

    directory: _Directory
    stale: Annotated[
        bool,
        typer.Option(
            "--stale", help="Delete only mirrors of stores that have changed since, and of older versions of zloader."
        ),
    ] = False
    url: Annotated[str | None, typer.Option(metavar="URL", help="Delete only mirrors of this store.")] = None
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False
    as_json: Json = False


@_cache.command()
@takes_flags
def clear(flags: ClearFlags) -> None:
    """Delete mirrors that are not in use. Files that zloader did not make stay."""
    from zloader.access.location import location_of
    from zloader.caching.directory import drop

    location = None if flags.url is None else location_of(flags.url, None)
    addresses = location and {location.url, location.address}  # the mirror of several stores lists all their URLs
    place, entries = _mirrors(flags.directory)
    entries = [entry for entry in entries if not addresses or entry.url in addresses]
    if location is not None and not entries:
        raise CacheError(f"there is no mirror of {location.url} in {place}: 'zloader cache ls' lists the mirrors")
    entries = [entry for entry in entries if entry.stale or not flags.stale]
    if entries and not flags.yes:
        _ask(entries)
    cleared = _Cleared(cache=place)
    try:
        for entry in entries:
            try:
                dropped = drop(entry.directory)
            except FileNotFoundError:  # another process has deleted it
                dropped = True
            (cleared.deleted if dropped else cleared.in_use).append(entry)
            with contextlib.suppress(FileNotFoundError):
                cleared.stayed += sorted(entry.directory.iterdir()) if dropped else []
    except OSError as error:
        raise CacheError(f"cannot delete: {error}. Run this command as the user who made the cache") from error
    document = dataclasses.asdict(cleared) | {"freed_bytes": cleared.freed_bytes}
    output.print_result(document, cleared.show, as_json=flags.as_json)


def _ask(entries: Sequence[MirrorEntry]) -> None:
    if not sys.stdin.isatty():
        raise OptionError(f"mirrors to delete: {len(entries)}. Add --yes, because there is no terminal to confirm on")
    for entry in entries:
        output.console(stderr=True).print(f"{entry.url}: {size(entry.allocated_bytes)} in {entry.directory}")
    on_disk = size(sum(entry.allocated_bytes for entry in entries))
    typer.confirm(f"Delete these mirrors ({on_disk})?", abort=True, err=True)


def _show_mirrors(console: Console, found: Sequence[tuple[MirrorEntry, MirrorInspection]]) -> None:
    """The mirrors of a cache with their sizes, their panels of genes, and the totals."""
    table = output.new_table("mirror", ">cached", ">share", ">on disk", "last used", "")
    table.columns[0].overflow = "fold"
    for entry, inspection in found:
        lines = [entry.directory.name, *_panels(inspection)]
        mirror = Group(entry.url, *(Styled(line, "dim") for line in lines))
        share = f"{inspection.share:.0%}" if inspection.bytes_in_all else ""
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_s))
        sizes = (size(inspection.bytes_held), share, size(entry.allocated_bytes))
        table.add_row(mirror, *sizes, used, "stale" if entry.stale else "")
    held_bytes, in_all = (
        sum(getattr(inspection, name) for _, inspection in found) for name in ("bytes_held", "bytes_in_all")
    )
    on_disk = size(sum(entry.allocated_bytes for entry, _ in found))
    share = f"{held_bytes / in_all:.0%}" if in_all else ""
    table.add_row(f"mirrors: {len(found)}", size(held_bytes), share, on_disk, "", "", style="bold")
    console.print(table)


def _panels(inspection: MirrorInspection) -> list[str]:
    """A line for each panel of genes that a mirror keeps."""
    from zloader.storage.row_blocks import PANEL

    held = {name: array for name, array in inspection.arrays.items() if PANEL in name}
    return [f"{name}: {size(array.bytes_held)}, {array.share:.0%}" for name, array in held.items()]
