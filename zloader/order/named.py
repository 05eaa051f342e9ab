"""The sampling that a Loader's `sampling` and `shuffle` options ask for. Pure."""

from __future__ import annotations

from zloader.common.checks import require_flag, require_one_of
from zloader.common.errors import OptionError
from zloader.order.sampling import BlockShuffling, Sampling, Streaming, default_block_size, require_sampling, stratified
from zloader.order.scanners import MixtureOfScanners

NAMES = ("block_shuffling", "streaming", "mixture_of_scanners", "random")


def sampling_of(sampling: Sampling | str | None, shuffle: bool | None, fetch_rows: int) -> Sampling:
    """A sampling given as an object or by name, or else as `shuffle` says: rows in order if False, else the default.

    Raises OptionError for an unknown name, and where `sampling` and `shuffle` contradict each other.
    """
    if shuffle is not None:
        require_flag(shuffle=shuffle)
    if sampling is None:
        sampling = "streaming" if shuffle is not None and not shuffle else "block_shuffling"
    found = _named(sampling, fetch_rows) if isinstance(sampling, str) else sampling
    require_sampling(found)
    in_order = isinstance(found, Streaming) and not found.shuffles_fetch
    if shuffle is not None and (in_order if shuffle else found.shuffles_fetch):
        raise OptionError(
            f"shuffle={shuffle} and sampling={sampling!r:.100} contradict each other: give one of them. "
            "shuffle=False is sampling='streaming'"
        )
    return found


def _named(name: str, fetch_rows: int) -> Sampling:
    require_one_of(NAMES, sampling=name)
    if name == "streaming":
        return Streaming()
    if name == "mixture_of_scanners":
        return MixtureOfScanners()
    if name == "random":
        return BlockShuffling(block_size=1)
    return stratified(default_block_size(fetch_rows))
