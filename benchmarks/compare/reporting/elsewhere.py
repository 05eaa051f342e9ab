"""The words of a report on a store that was read where it lies (benchmarks/real.py): method, and what is unfair."""

from __future__ import annotations

REAL = "real"  # the preset of such a run
METHOD = (
    "Every tool runs in a process of its own, in an environment in which it was installed before the run. Nothing was "
    "installed, converted or written for it, so tools that cannot read this store where it lies are missing.",
    "The tools take turns, in a random order. Figures are medians over turns, and ratios to "
    "zloader are taken within each turn. The waiting is measured in one epoch.",
    "Each tool also gives out an epoch that is checked and not measured. A complete one must have all cells, and "
    "values with the sum that zarr or h5py read by itself, if the store is small enough for that.",
    "GETs are those that zloader counts itself. Bytes are all that this machine received during an epoch, over every "
    "network interface, also for other programs; they include what TCP and TLS add. Dollars are for GETs and egress, "
    "where the GETs are known.",
)
UNFAIR = (
    "We wrote zloader and this benchmark, and we know zloader's options best. Each other tool is set up as its "
    "documentation advises; the table of tools says how.",
    "The store is in the format that its authors chose. Some tools are faster with a store of their own.",
    "A warm epoch of zloader reads a second, decoded copy of the data on the local disk. Other tools do not need it.",
    "Of a large store, zloader reads a sample, so that its first epoch ends and the next one is warm. It consists of "
    "blocks from all over the store, so that GETs and bytes per cell are about those of a whole epoch. Other tools "
    "begin an epoch of the whole store, which ends early.",
    "Warm epochs of a local store find what they read before in memory, if it fits.",
    "The speed of a shared network and bucket varies from minute to minute. Trust ratios more than speeds.",
)
