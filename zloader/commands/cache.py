"""The commands about caches: fill a mirror ahead, see what is in a cache, check it, and delete from it.

Only `warm` opens a store; the others look at nothing but the cache directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zloader.commands import terminal
from zloader.commands.command import (
    KEYS,
    Anonymous,
    Debug,
    EndedError,
    Endpoint,
    Json,
    Profile,
    Region,
    Url,
    app,
    print_json,
    storage_options,
)
from zloader.commands.report import size
from zloader.common.errors import CacheError, OptionError

if TYPE_CHECKING:
    from zloader.caching.directory import MirrorEntry
    from zloader.caching.inspection import MirrorInspection
    from zloader.dataset.warm import Warmed

# ---- warm


@app.command(epilog=KEYS)
def warm(  # noqa: PLR0913 - one parameter a flag
    url: Url,
    cache: Annotated[Path, typer.Option(metavar="DIR", help="The directory that keeps mirrors.", show_default=False)],
    x: Annotated[
        list[str] | None,
        typer.Option("--x", metavar="NAME", help="A matrix: X, layers/NAME, raw/X. May be repeated.", show_default="X"),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most that all mirrors in DIR take on disk.", show_default="no limit"),
    ] = None,
    min_free: Annotated[str, typer.Option(metavar="SIZE", help="What stays free on the disk.")] = "0",
    limit: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Most to read per second, such as 50MB.", show_default="no limit"),
    ] = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anon: Anonymous = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fill the mirror of a store ahead of training, so that the first epoch is a warm one.

    What is there already is not read again: after Ctrl-C or a crash, the same command goes on.
    """
    from zloader.common.checks import parse_size, require_count
    from zloader.common.options import Cache
    from zloader.common.progress import byte_bar
    from zloader.dataset.dataset import open_dataset
    from zloader.dataset.warm import warm as warm_dataset

    bytes_per_s = None
    if limit is not None:
        bytes_per_s = parse_size(limit.removesuffix("/s"))
        require_count(limit=bytes_per_s)
    kept = Cache(directory=cache, max_bytes=max_bytes, min_free_bytes=min_free)
    access = storage_options(endpoint_url, region, profile, anon)
    asked = {"url": url, "cache": kept.directory}
    seen: list[Warmed] = []
    try:
        with byte_bar("warming") as show:

            def on_progress(now: Warmed) -> None:
                seen[:] = [now]
                show(now.bytes_held, now.bytes_in_all)

            dataset = open_dataset(url, cache=kept, storage_options=access)
            done = warm_dataset(dataset, x=tuple(x or ("X",)), bytes_per_s=bytes_per_s, on_progress=on_progress)
    except (KeyboardInterrupt, EndedError):
        for now in seen:
            _show_warmed(asked, now, as_json=as_json)
        typer.echo("what was brought stays: the same command goes on from there", err=True)
        raise
    _show_warmed(asked, done, as_json=as_json)
    if done.chunks_held < done.chunks:
        typer.echo("the cache may not grow further: what is not there is read from the store each time", err=True)


def _show_warmed(asked: dict[str, Any], seen: Warmed, *, as_json: bool) -> None:
    if as_json:
        print_json({**asked, **dataclasses.asdict(seen), "whole": seen.chunks_held == seen.chunks})
        return
    share = seen.bytes_held / seen.bytes_in_all if seen.bytes_in_all else 1.0
    rate = seen.bytes_read / seen.elapsed_s if seen.elapsed_s else 0.0
    terminal.console().print(
        f"{asked['url']}: {seen.chunks_held:,} of {seen.chunks:,} chunks are in {asked['cache']}, "
        f"{size(seen.bytes_held)} ({share:.0%}); {seen.gets:,} GETs read {size(seen.bytes_read)} in "
        f"{seen.elapsed_s:.1f} s, {size(rate)}/s",
        soft_wrap=True,
    )


# ---- cache

_cache = typer.Typer(no_args_is_help=True)
app.add_typer(_cache, name="cache", help="See what is in a cache, check it, delete from it.")

_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The cache.", show_default=False)]


def _mirrors(directory: Path) -> list[MirrorEntry]:
    from zloader.caching.directory import mirrors, require_cache

    require_cache(directory)
    return mirrors(directory.absolute())


def _document(entry: MirrorEntry, held: MirrorInspection | None = None) -> dict[str, Any]:
    found = dataclasses.asdict(entry)
    if held is not None:
        found |= {name: getattr(held, name) for name in ("chunks", "chunks_held", "bytes_in_all", "bytes_held")}
        found |= dataclasses.asdict(held)
    return found


@_cache.command()
def ls(directory: _Directory, as_json: Json = False, debug: Debug = False) -> None:
    """List the mirrors in a cache, in the order in which they would make room."""
    from zloader.caching.inspection import held

    found = [(entry, held(entry)) for entry in _mirrors(directory)]
    if as_json:
        on_disk = sum(entry.allocated_bytes for entry, _ in found)
        mirrors = [_document(entry, held) for entry, held in found]
        print_json({"cache": directory.absolute(), "allocated_bytes": on_disk, "mirrors": mirrors})
    else:
        terminal.show_mirrors(terminal.console(), found)


@_cache.command()
def verify(directory: _Directory, as_json: Json = False, debug: Debug = False) -> None:
    """Compare all that a cache holds with its checksums. The status is 1 if something was damaged.

    What is damaged is forgotten, and read from the store again when it is needed.
    """
    from zloader.caching.inspection import held
    from zloader.caching.inspection import verify as verify_mirror
    from zloader.common.progress import byte_bar

    entries = _mirrors(directory)
    in_all = sum(one.bytes_held + one.kept_bytes for one in map(held, entries))
    done = 0
    problems: dict[Path, list[str]] = {}
    with byte_bar("verifying") as show:

        def on_bytes(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            show(done, in_all)

        for entry in entries:
            problems[entry.directory] = verify_mirror(entry.directory, on_bytes)
    ok = not any(problems.values())
    if as_json:
        mirrors = [_document(entry) | {"problems": problems[entry.directory]} for entry in entries]
        print_json({"cache": directory.absolute(), "bytes_compared": done, "ok": ok, "mirrors": mirrors})
    else:
        _show_problems(entries, problems, done)
    if not ok:
        raise typer.Exit(1)


def _show_problems(entries: Sequence[MirrorEntry], problems: dict[Path, list[str]], n_bytes: int) -> None:
    console = terminal.console()
    for entry in entries:
        for problem in problems[entry.directory]:
            console.print(f"{entry.url}: {problem}", soft_wrap=True)
    n_problems = sum(map(len, problems.values()))
    again = "; what was damaged will be read from the store again" if n_problems else ""
    console.print(f"mirrors: {len(entries)}, compared: {size(n_bytes)}, problems: {n_problems}{again}", soft_wrap=True)


@dataclass(kw_only=True)
class _Cleared:
    """What `clear` did: mirrors that are gone, those in use, and files that stayed since zloader did not make them."""

    cache: Path
    deleted: list[MirrorEntry] = field(default_factory=list)
    in_use: list[MirrorEntry] = field(default_factory=list)
    stayed: list[Path] = field(default_factory=list)

    @property
    def freed_bytes(self) -> int:
        return sum(entry.allocated_bytes for entry in self.deleted)


@_cache.command()
def clear(
    directory: _Directory,
    stale: Annotated[bool, typer.Option("--stale", help="Only mirrors whose store has changed since.")] = False,
    url: Annotated[str | None, typer.Option(metavar="URL", help="Only mirrors of this store.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Delete mirrors that nobody uses; with the last one, what marks the directory as a cache.

    Nothing that zloader did not make is deleted.
    """
    from zloader.access.location import Location
    from zloader.caching.directory import unmark

    asked = url and {url, Location(url=url).address}  # of several stores, a mirror has all their URLs
    entries = [entry for entry in _mirrors(directory) if not asked or entry.url in asked]
    if url is not None and not entries:
        raise CacheError(
            f"there is no mirror of {url} in {directory}: 'zloader cache ls' shows of which stores there are"
        )
    entries = [entry for entry in entries if entry.stale or not stale]
    if entries and not yes:
        _ask(entries)
    cleared = _Cleared(cache=directory.absolute())
    try:
        for entry in entries:
            _clear_one(entry, cleared)
        unmark(cleared.cache)
    except OSError as error:
        raise CacheError(f"cannot delete: {error}. Run this as who made the cache") from error
    if as_json:
        print_json(dataclasses.asdict(cleared) | {"freed_bytes": cleared.freed_bytes})
    else:
        _show_cleared(cleared)


def _ask(entries: Sequence[MirrorEntry]) -> None:
    if not sys.stdin.isatty():
        raise OptionError(f"mirrors to delete: {len(entries)}. Give --yes where nobody can be asked")
    for entry in entries:
        typer.echo(f"{entry.url}: {size(entry.allocated_bytes)} in {entry.directory}", err=True)
    on_disk = size(sum(entry.allocated_bytes for entry in entries))
    typer.confirm(f"Delete all that ({on_disk})?", abort=True, err=True)


def _clear_one(entry: MirrorEntry, cleared: _Cleared) -> None:
    from zloader.caching.directory import drop

    try:
        dropped = drop(entry.directory)
    except FileNotFoundError:  # another process was first
        dropped = True
    (cleared.deleted if dropped else cleared.in_use).append(entry)
    with contextlib.suppress(FileNotFoundError):
        cleared.stayed += [] if not dropped else sorted(entry.directory.iterdir())


def _show_cleared(cleared: _Cleared) -> None:
    console = terminal.console()
    for entry in cleared.deleted:
        console.print(f"deleted: {entry.url}, {size(entry.allocated_bytes)} in {entry.directory}", soft_wrap=True)
    for entry in cleared.in_use:
        console.print(f"in use, left alone: {entry.url} in {entry.directory}", soft_wrap=True)
    for path in cleared.stayed:
        console.print(f"left there, zloader did not make it: {path}", soft_wrap=True)
    console.print(f"mirrors deleted: {len(cleared.deleted)}, {size(cleared.freed_bytes)}", soft_wrap=True)
