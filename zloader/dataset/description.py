"""The repr of a dataset, in the form of AnnData's. It makes no request.

It uses the listing and the consolidated metadata, which are in memory. If the metadata of a remote store are not
consolidated, it uses those that were read before.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from zloader.common.messages import listed
from zloader.dataset.store import OpenedStore

_NAMES = 30  # of each group in HTML


def described(
    kind: str,
    stores: Sequence[OpenedStore],
    url: str,
    *,
    n_vars: int | None,
    chosen: int | None,
    panel: int | None,
    html: bool,
) -> str:
    """The repr of a dataset, or that of a view of `chosen` rows and `panel` genes. Unknown numbers are shown as `?`.

    `n_vars` is the number of joined genes, None for those of the stores. Columns of a joined var are not shown, because
    they are not known before var is read. With `html`, a paragraph and a table for notebooks, with the first names of
    each group.
    """
    head, groups = _described(kind, stores, url, n_vars, (chosen, panel))
    if not html:
        return "\n".join([head, *(f"    {group}: {', '.join(map(repr, names))}" for group, names in groups.items())])
    row = '<tr><th style="text-align: left">{}</th><td style="text-align: left">{}</td></tr>'
    rows = (row.format(group, escape(listed(names, _NAMES))) for group, names in groups.items())
    return f"<p>{escape(head)}</p><table>{''.join(rows)}</table>"


def _described(
    kind: str, stores: Sequence[OpenedStore], url: str, n_vars: int | None, chosen: tuple[int | None, int | None]
) -> tuple[str, dict[str, list[str]]]:
    """The first line, and the names in obs, var, obsm and layers."""
    try:
        head = _head(kind, stores, url, stores[0].known_length("var") if n_vars is None else n_vars, chosen)
        return head, {group: names for group, names in _groups(stores, joined=n_vars is not None).items() if names}
    except Exception:  # noqa: BLE001 - a repr must not raise, whatever the metadata hold
        return f"{kind} of {url}", {}


def _head(
    kind: str, stores: Sequence[OpenedStore], url: str, n_vars: int | None, chosen: tuple[int | None, int | None]
) -> str:
    lengths = [store.known_length("obs") for store in stores]
    known = [length for length in lengths if length is not None]
    n_rows = str(sum(known)) if len(known) == len(lengths) else "?"
    n_genes, (rows, genes) = "?" if n_vars is None else str(n_vars), chosen
    of = "" if rows is None else f"the {n_rows} rows of " if genes is None else f"the {n_rows} x {n_genes} of "
    shape = f"{n_rows if rows is None else rows} x {n_genes if genes is None else genes}"
    return f"{kind} with n_obs x n_vars = {shape} of {of}{url}"


def _groups(stores: Sequence[OpenedStore], *, joined: bool) -> dict[str, list[str]]:
    in_obs = [store.known_members("obs") for store in stores]
    return {
        "obs": [name for name in stores[0].known_columns("obs") if all(name in members for members in in_obs)],
        "var": [] if joined else stores[0].known_columns("var"),
        "obsm": sorted(set.intersection(*(store.known_members("obsm") for store in stores))),
        "mod": sorted(set.intersection(*(store.known_members("mod") for store in stores))),
        "layers": sorted(set.intersection(*(store.known_members("layers") for store in stores))),
    }
