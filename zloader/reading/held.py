"""How much of a fetch the mirrors of this machine hold."""

from __future__ import annotations

from zloader.common.records import Rows
from zloader.common.shares import shares
from zloader.reading.fetch import Recipe
from zloader.storage.layout import chunks_of


def held_share(recipe: Recipe, rows: Rows) -> float:
    """The share of the chunks of some rows, in all matrices of a recipe, that need not be read from the store."""
    needed, held = 0, 0
    for number, at in shares(recipe.ends, rows):
        for parts in recipe.x.values():
            part = parts[number]
            of_part = rows[at] - (recipe.ends[number] - part.matrix.n_rows)
            starts, stops = part.matrix.elements_of(of_part, part.indptr)
            for array in part.matrix.arrays:
                chunks = chunks_of(starts, stops, array.chunk_elements)
                needed += len(chunks)
                if part.mirror is not None and array.path in part.mirror.arrays:
                    held += part.mirror.arrays[array.path].n_held(chunks)
    return held / needed if needed else 0.0
