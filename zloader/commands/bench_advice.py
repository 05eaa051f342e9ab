"""What bounds the speed of an epoch, decided from measured shares alone, and said in one plain sentence.

The first rule that the figures meet decides:

1. step, loop: the loop hardly waited, so its own thread sets the pace: the simulated steps, or making tensors.
2. link: bytes arrived nearly as fast as the link delivers them without any decoding.
3. decoding, processor: nearly all cores were busy, mostly with decoding or also with other work.
4. start, reads, disk: the loop waited for its first minibatch; or, with idle threads, for the store or for a disk.

If none does, the sentence has the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zloader.common.messages import size

_LITTLE, _HALF, _MOST = 0.05, 0.5, 0.8  # shares of a time or of a limit
_LONG_START = 0.2  # of an epoch
_ALIKE = 1.1  # ratio of speeds below which a difference may be noise


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What was measured of an epoch. Times are in seconds.

    `elapsed_s` is from the first request for a minibatch to the last minibatch. Of these, `wait_s` were waiting, and of
    those `first_wait_s` for the first minibatch, which came after `first_minibatch_s`. `stepped_s` is the time of the
    simulated steps, `cpu_s` the processor time of all threads; `decode_s` and `gather_s` are sums over threads.
    `link_bytes_per_s` is the speed of the link to the store, `disk_bytes` what was read from any disk; None if unknown.
    """

    kind: str
    rows: float
    elapsed_s: float
    first_minibatch_s: float
    wait_s: float
    first_wait_s: float
    stepped_s: float
    bytes_read: float
    cores: int
    cpu_s: float
    decode_s: float
    gather_s: float
    link_bytes_per_s: float | None = None
    disk_bytes: float | None = None

    @property
    def rows_per_s(self) -> float:
        """Rows per second of the epoch."""
        return self.rows / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def starting(self) -> float:
        """The share of the time until the first minibatch."""
        return min(1.0, self.first_minibatch_s / self.elapsed_s) if self.elapsed_s else 1.0

    @property
    def waiting(self) -> float:
        """The share of the time after the first minibatch that the loop waited."""
        steady_s = self.elapsed_s - self.first_minibatch_s
        return max(0.0, self.wait_s - self.first_wait_s) / steady_s if steady_s > 0 else 1.0

    @property
    def processor(self) -> float:
        """The share of the cores' time that the process used."""
        return self.cpu_s / (self.elapsed_s * self.cores) if self.elapsed_s else 0.0

    @property
    def of_link(self) -> float | None:
        """The share of the link's speed at which bytes arrived; None if either is not known."""
        known = self.link_bytes_per_s and self.bytes_read and self.elapsed_s
        return self.bytes_read / self.elapsed_s / self.link_bytes_per_s if known and self.link_bytes_per_s else None


@dataclass(frozen=True)
class Advice:
    """What bounds an epoch, and in `text` why.

    `bound` is `step`, `loop`, `link`, `decoding`, `processor`, `start`, `reads`, `disk` or `unclear`.
    """

    bound: str
    text: str


def advise(pace: Pace) -> Advice:
    """Decides what bounds an epoch. Pure arithmetic on the figures."""
    waited = f"the loop waited {pace.waiting:.0%} of the time after the first minibatch"
    busy = f"{pace.processor:.0%} of {pace.cores} core{'s' if pace.cores > 1 else ''} were in use"
    if pace.waiting <= _LITTLE and pace.starting <= _LONG_START:
        if pace.stepped_s >= _MOST * (pace.elapsed_s - pace.first_minibatch_s):
            return Advice("step", f"Your step bounds you, and a faster loader would not help: {waited}.")
        return Advice(
            "loop",
            f"The thread of your loop bounds you: {waited}. Fewer, larger minibatches (--batch-size) cost it less.",
        )
    link = pace.of_link
    if link is not None and pace.link_bytes_per_s and link >= _MOST:
        speeds = f"{size(pace.bytes_read / pace.elapsed_s)}/s of {size(pace.link_bytes_per_s)}/s"
        return Advice("link", f"The link bounds you: bytes arrived at {speeds}. A mirror (--cache) spares later reads.")
    if pace.processor >= _MOST:
        if pace.decode_s > max(pace.gather_s, pace.cpu_s / 2):
            return Advice(
                "decoding", f"Decoding bounds you: {busy}. Epochs that read a mirror (--cache) do not decode."
            )
        return Advice("processor", f"The processor bounds you: {busy}. Larger minibatches (--batch-size) cost less.")
    if pace.starting >= _HALF:
        came = f"the first minibatch came after {pace.first_minibatch_s:.2f} of {pace.elapsed_s:.2f} s"
        return Advice("start", f"The start bounds you: {came}. It matters less in a longer epoch.")
    if pace.waiting > _HALF and pace.cpu_s < _MOST * pace.elapsed_s:
        idle = f"{waited}, while {busy}"
        if link is not None:
            return Advice("reads", f"Waiting for reads bounds you: {idle}, and {link:.0%} of the link. Larger blocks "
                          "(--block-size) make larger reads, more memory (--memory) allows more at once.")  # fmt: skip
        if pace.disk_bytes:
            rate = f"{size(pace.disk_bytes / pace.elapsed_s)}/s came from it"
            return Advice("disk", f"The disk bounds you: {idle}, and {rate}. A faster disk or more memory helps.")
    seen = "" if link is None else f", and {link:.0%} of the link"
    return Advice("unclear", f"No single part bounds you: {waited}, {busy}{seen}.")


def compare(paces: Mapping[str, Pace]) -> list[str]:
    """A sentence about cold against warm epochs, if there are both."""
    if not {"cold", "warm"} <= paces.keys():
        return []
    cold, warm = paces["cold"].rows_per_s, paces["warm"].rows_per_s
    speeds = f"{warm:,.0f} rows/s against {cold:,.0f}"
    if warm >= _ALIKE * cold:
        return [f"Warm epochs are {warm / cold:.1f} times as fast as cold ones: {speeds}."]
    slower = "slower than" if warm <= cold / _ALIKE else "about as fast as"
    return [f"Warm epochs are {slower} cold ones here: {speeds}."]
