"""The table of many stores that `zl.index` writes, and what its columns mean.

A row describes one store, so completely that rows of its matrices are read without opening it. All columns of zloader
are text or whole numbers, so a manifest may be Parquet or CSV, and be read, filtered, and given more columns with
pandas. Each other column is an obs column of the dataset, with one label or number for all rows of a store.

- `url`: the store. A relative one is beside the manifest, or below.
- `rows`: its rows.
- `fingerprint`: of its objects as they were listed. `stamp` is the same with the times of local files, for the mirror,
  and is empty if a change of the store could not be detected.
- `gene_set`: a hash of its genes, and `gene_names` the genes in JSON, in one row of each set, with the var column that
  they were named by.
- `layout`: what its matrices have in common with those of stores that are written alike, in JSON, and `stored` the
  rest, with its objects.
- `obs`: its obs columns and obsm arrays, in JSON.
"""

from __future__ import annotations

import io
import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from zloader.access.hub import at_commit, commit_in
from zloader.access.location import Location
from zloader.common.deferred import pd
from zloader.common.errors import FormatError, OptionError, StoreNotFoundError
from zloader.common.messages import listed

TEXTS = ("url", "fingerprint", "stamp", "gene_set", "gene_names", "layout", "stored", "obs")
COLUMNS = ("url", "rows", *TEXTS[1:])
VERSION = 1
ADVICE = "Index the stores again: zloader index URLS... -o MANIFEST --update"
_INSTALL = 'a manifest in Parquet needs pyarrow: pip install "zloader[parquet]", or write a .csv file'


def is_manifest(location: Location) -> bool:
    """Whether the path is that of a manifest, by its ending."""
    return location.path.endswith((".parquet", ".csv"))


def read_manifest(location: Location) -> pd.DataFrame:
    """The table, one row per store. Raises FormatError if it is not a manifest, and StoreNotFoundError."""
    filesystem = location.filesystem()
    with location.translated("read"):
        try:
            content = filesystem.cat_file(location.path)
        except FileNotFoundError as error:
            raise StoreNotFoundError(f"there is no manifest at {location.url}: check the path") from error
    try:
        table = _parsed(location.path, content)
    except ImportError as error:
        raise OptionError(f"{_INSTALL} ({error})") from error
    except Exception as error:  # of pyarrow or pandas, for any damaged file
        raise FormatError(f"{location.url} cannot be read as a table of stores: {error}. {ADVICE}") from error
    missing = [name for name in COLUMNS if name not in table]
    if missing:
        raise FormatError(
            f"{location.url} is not a manifest that 'zloader index' wrote: it lacks {listed(missing)}. If it has a row "
            "per cell, run 'zloader convert' on it"
        )
    for name in TEXTS:
        table[name] = table[name].fillna("").astype(object)
    rows = pd.to_numeric(table["rows"], errors="coerce")
    wrong = table.index[~(rows >= 0) | (rows != rows.round()) | (rows > 1 << 40) | (table["url"] == "")]
    if len(wrong):
        raise FormatError(f"row {wrong[0]} of {location.url} has no URL or no number of rows. {ADVICE}")
    if not len(table):
        raise FormatError(f"{location.url} lists no stores. {ADVICE}")
    return table.assign(rows=rows.astype("int64")).reset_index(drop=True)


def _parsed(path: str, content: bytes) -> pd.DataFrame:
    if path.endswith(".csv"):
        return pd.read_csv(io.BytesIO(content), dtype=dict.fromkeys(TEXTS, str))
    return pd.read_parquet(io.BytesIO(content))


def written(table: pd.DataFrame, path: str) -> bytes:
    """The content of a manifest at a path. Raises OptionError if pyarrow is missing."""
    if path.endswith(".csv"):
        return str(table.to_csv(index=False)).encode()
    content = io.BytesIO()
    try:
        table.to_parquet(content, index=False, compression="zstd")
    except ImportError as error:
        raise OptionError(f"{_INSTALL} ({error})") from error
    return content.getvalue()


def parsed(text: str, what: str, *, holds: Sequence[str] = ()) -> Any:
    """The JSON of a column, with these mappings. Raises FormatError."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise FormatError(f"{what} of the manifest cannot be read: {error}. {ADVICE}") from error
    if not isinstance(found, Mapping) or found.get("version", VERSION) != VERSION:
        raise FormatError(f"{what} of the manifest was written by another version of zloader. {ADVICE}")
    for name in holds:
        if not isinstance(found.get(name), Mapping):
            raise FormatError(f"{what} of the manifest has no {name}. {ADVICE}")
    return found


def labels_of(table: pd.DataFrame) -> list[str]:
    """The columns of labels, by name."""
    return [name for name in map(str, table.columns) if name not in COLUMNS]


def names_by_set(table: pd.DataFrame) -> dict[str, str]:
    """The text of `gene_names` of each gene set; empty if no row has it."""
    found: dict[str, str] = {}
    for gene_set, text in zip(table["gene_set"], table["gene_names"], strict=True):
        found[gene_set] = text or found.get(gene_set, "")
    return found


# ---- where the stores are


def root_and_key(manifest: Location, url: str) -> tuple[str, str]:
    """The place that a store is read from, and its key there: a bucket, a server, `/`, or the manifest's directory.

    Thousands of stores share one, so one client reads them. A repository on the Hub is one for each directory.
    """
    if "://" not in url:
        return ("/", url.lstrip("/")) if url.startswith("/") else (_parent(manifest), posixpath.normpath(url))
    location = Location(url=url)
    if location.scheme == "file":
        return "/", location.path.lstrip("/")
    scheme, _, rest = location.url.rstrip("/").partition("://")
    if scheme == "hf":
        above, _, name = rest.rpartition("/")
        return f"{scheme}://{above}", name
    authority, _, key = rest.partition("/")
    return f"{scheme}://{authority}", unquote(key) if location.is_web else key


def _parent(location: Location) -> str:
    if location.scheme == "file":
        return posixpath.dirname(location.path)
    return location.url.rstrip("/").rpartition("/")[0]


def relative(manifest: Location, location: Location) -> str:
    """The URL of a store as the manifest has it: relative if the store is beside the manifest or below.

    Not on the Hub, where writing the manifest makes another commit.
    """
    own, above = url_of(location), f"{_parent(manifest)}/"
    is_below = manifest.scheme == location.scheme and own.startswith(above)
    return own[len(above) :] if is_below and location.scheme != "hf" else own


def url_of(location: Location) -> str:
    """The absolute path or the URL of a store, without a slash at its end. On the Hub it names the commit."""
    if location.scheme == "file":
        return location.path
    url = location.url.rstrip("/")
    return at_commit(url, location.revision) if location.scheme == "hf" else url


def location_at(manifest: Location, url: str) -> Location:
    """The location at a URL, opened with the options of the manifest."""
    return replace(manifest, url=url, revision=commit_in(url) if url.startswith("hf://") else "")


def absolute(manifest: Location, url: str) -> str:
    """The URL of a store, as it is opened."""
    return url if "://" in url or url.startswith("/") else f"{_parent(manifest)}/{url}"
