"""What a conversion was made from: it identifies a store that is finished, and one that can be resumed."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from zloader.common.errors import StoreError, StoreExistsError
from zloader.conversion.joining.selection import Selection
from zloader.conversion.sources.inputs import Input
from zloader.conversion.writing.destination import Destination
from zloader.conversion.writing.encode import CHUNK_FORM, ConvertOptions


class ConversionRecord:
    """The sources, the selection and the options of a conversion."""

    def __init__(self, inputs: Sequence[Input], select: Selection, options: ConvertOptions) -> None:
        self._inputs, self._select, self._options = inputs, select, options

    def identity(self) -> dict[str, Any]:
        """Everything that determines the bytes of the store, as plain JSON types."""
        options = dataclasses.asdict(dataclasses.replace(self._options, order=None))
        del options["memory"], options["window_bytes"], options["order"]
        if self._options.order is not None:
            options["order"] = hashlib.sha256(np.asarray(self._options.order).tobytes()).hexdigest()[:32]
        renamed = [json.dumps(source.genes_by, sort_keys=True) for source in self._inputs]
        whole = {
            "version": importlib.metadata.version("zloader"),
            "chunk_form": CHUNK_FORM,
            "sources": [source.identity() | {"label": source.label} for source in self._inputs],
            "select": self._select.plain([_digest(by) for by in renamed] if set(renamed) != {"null"} else None),
            "options": options,
        }
        plain: dict[str, Any] = json.loads(json.dumps(whole, default=list))
        return plain

    def record(self) -> dict[str, str]:
        """A hash of each part of the identity that does not depend on the version of zloader."""
        identity = self.identity()
        return {part: _digest(json.dumps(identity[part])) for part in ("sources", "select", "options")}

    def results_of(self, destination: Destination) -> dict[str, Any] | None:
        """The results of this conversion if it has finished at the destination, None if there is no finished one.

        Raises StoreExistsError if it was another one.
        """
        finished = destination.finished()
        if not finished:
            return None
        differing = [part for part, digest in self.record().items() if finished.get("record", {}).get(part) != digest]
        if differing:
            raise StoreExistsError(
                f"there is already a store at {destination.location.url}, made by another conversion: "
                f"{', '.join(differing)} differ. Pass overwrite=True (--overwrite) to replace it"
            )
        results: dict[str, Any] = finished["results"]
        return results

    def journal_to_resume(self, destination: Destination) -> dict[str, Any] | None:
        """The journal of an interrupted run of this conversion, or None. Raises StoreError if it was another one."""
        journal = destination.journal()
        if journal is None:
            return None
        before, now = journal["identity"], self.identity()
        differing = [part for part in now if before.get(part) != now[part]]
        if differing:
            raise StoreError(
                f"cannot resume at {destination.location.url}, because a different conversion was interrupted there: "
                f"{', '.join(differing)} differ ({_difference(before.get(differing[0]), now[differing[0]])}). Repeat "
                "the original arguments, or convert again without --resume"
            )
        return journal


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _difference(before: Any, now: Any) -> str:
    """Describes the first difference between two JSON documents."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in now:
            if before.get(key) != now[key]:
                return f"{key}: {_difference(before.get(key), now[key])}"
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return next(_difference(a, b) for a, b in zip(before, now, strict=True) if a != b)
    return f"was {before!r}, now {now!r}"
