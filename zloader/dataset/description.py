"""The repr of a dataset, in the form of AnnData's. It makes no request.

It uses the listing and the consolidated metadata, which are in memory. If the metadata of a remote store are not
consolidated, it uses those that were read before.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from zloader.common.messages import listed
from zloader.dataset.store import OpenedStore

_NAMES = 30  # of each group in HTML


def described(
    kind: str,
    stores: Sequence[OpenedStore],
    url: str,
    *,
    n_vars: int | None = None,
    chosen: int | None = None,
    panel: int | None = None,
) -> str:
    """The repr of a dataset, or that of a view of `chosen` rows and `panel` genes. Unknown numbers are shown as `?`.

    `n_vars` is the number of joined genes, None for those of the stores. Columns of a joined var are not shown, because
    they are not known before var is read.
    """
    head, groups = _described(kind, stores, url, n_vars, (chosen, panel))
    return "\n".join([head, *(f"    {group}: {', '.join(map(repr, names))}" for group, names in groups.items())])


def described_html(
    kind: str,
    stores: Sequence[OpenedStore],
    url: str,
    *,
    n_vars: int | None = None,
    chosen: int | None = None,
    panel: int | None = None,
) -> str:
    """The same as a paragraph and a table of HTML, for notebooks, with the first names of each group."""
    head, groups = _described(kind, stores, url, n_vars, (chosen, panel))
    row = '<tr><th style="text-align: left">{}</th><td style="text-align: left">{}</td></tr>'
    rows = (row.format(group, escape(listed(names, _NAMES))) for group, names in groups.items())
    return f"<p>{escape(head)}</p><table>{''.join(rows)}</table>"


def _described(
    kind: str, stores: Sequence[OpenedStore], url: str, n_vars: int | None, chosen: tuple[int | None, int | None]
) -> tuple[str, dict[str, list[str]]]:
    """The first line, and the names in obs, var, obsm and layers."""
    try:
        head = _head(kind, stores, url, _length(stores[0], "var") if n_vars is None else n_vars, chosen)
        return head, {group: names for group, names in _groups(stores, joined=n_vars is not None).items() if names}
    except Exception:  # noqa: BLE001 - a repr must not raise, whatever the metadata hold
        return f"{kind} of {url}", {}


def _head(
    kind: str, stores: Sequence[OpenedStore], url: str, n_vars: int | None, chosen: tuple[int | None, int | None]
) -> str:
    lengths = [_length(store, "obs") for store in stores]
    known = [length for length in lengths if length is not None]
    n_rows = str(sum(known)) if len(known) == len(lengths) else "?"
    n_genes, (rows, genes) = "?" if n_vars is None else str(n_vars), chosen
    of = "" if rows is None else f"the {n_rows} rows of " if genes is None else f"the {n_rows} x {n_genes} of "
    shape = f"{n_rows if rows is None else rows} x {n_genes if genes is None else genes}"
    return f"{kind} with n_obs x n_vars = {shape} of {of}{url}"


def _groups(stores: Sequence[OpenedStore], *, joined: bool) -> dict[str, list[str]]:
    return {
        "obs": [name for name in _columns(stores[0], "obs") if all(name in _members(store, "obs") for store in stores)],
        "var": [] if joined else _columns(stores[0], "var"),
        "obsm": sorted(set.intersection(*(_members(store, "obsm") for store in stores))),
        "mod": sorted(set.intersection(*(_members(store, "mod") for store in stores))),
        "layers": sorted(set.intersection(*(_members(store, "layers") for store in stores))),
    }


def _columns(store: OpenedStore, frame: str) -> list[str]:
    names = getattr(_metadata(store, frame), "attributes", {}).get("column-order")
    return sorted(_members(store, frame) - {"_index"}) if names is None else list(names)


def _members(store: OpenedStore, group: str) -> set[str]:
    """The members of a group, from the listing."""
    inside = (key.removeprefix(f"{group}/") for key in store.objects if key.startswith(f"{group}/"))
    return {name.partition("/")[0] for name in inside if "/" in name}


def _length(store: OpenedStore, frame: str) -> int | None:
    """The rows of a frame, if they are known."""
    known = vars(store).get({"obs": "n_obs", "var": "n_vars"}[frame])  # a cached_property
    if known is not None:
        return int(known)
    index = getattr(_metadata(store, frame), "attributes", {}).get("_index")
    for path in (f"{frame}/{index}", f"{frame}/{index}/values", f"{frame}/{index}/codes"):
        shape = getattr(_metadata(store, path), "shape", None)
        if shape is not None:
            return int(shape[0])
    return None


def _metadata(store: OpenedStore, path: str) -> Any:
    """The metadata of a group or array, from the consolidated metadata or a local file; else None."""
    node = store.opened_root.metadata
    if node.consolidated_metadata is None:
        return store.node(path).metadata if store.location.scheme == "file" and path in store else None
    for name in path.split("/"):
        consolidated = getattr(node, "consolidated_metadata", None)
        node = None if consolidated is None else consolidated.metadata.get(name)
    return node
