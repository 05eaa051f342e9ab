"""What bounds the speed of an epoch, decided from measured numbers alone, and said in plain words.

The first rule that the numbers meet decides. If they meet none, the advice is that it is not clear.

1. step: the loop hardly waited, not even for its first minibatch, and the simulated steps account for its time.
2. loop: the same, but its thread was busy making tensors.
3. link: bytes arrived nearly as fast as the link, or the disk of a local store, delivers them without any decoding.
4. decoding, processor: nearly all cores were busy, mostly with decoding or also with other work.
5. busy: the same, but other programs used the cores.
6. start: half of the epoch was the wait for its first minibatch, or a fifth of it was and the loop hardly waited later.
7. waiting: the loop waited, and so little work was done that no thread can have been busy all the time.

The system keeps files that were used lately in memory. So only bytes that the kernel has read from a disk count as the
bytes that arrived from the disk of a local store.

A thread that decodes may lose its core to another one, so `decode_s` can exceed the processor time of decoding. It only
tells decoding and gathering apart once the processor is known to be busy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zloader.common.messages import size

_COUNTED_S = 0.2  # the system counts the time of all programs in hundredths of a second
_LITTLE_WAITING, _MUCH_WAITING = 0.05, 0.5
_LONG_START, _MOSTLY_START = 0.2, 0.5  # of an epoch
_FROM_MEMORY = 0.5  # of the bytes of a local store, from which its disk hardly matters
_MOST = 0.8  # share of a limit from which it is said to bind: rates over an epoch include its slower start
_IMPOSSIBLE = 1.1  # times the link's speed; more shows that the link is faster than it is thought to be
_ALIKE = 1.1  # ratio of speeds below which a difference may be noise


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What was measured of an epoch. Times are in seconds.

    `elapsed_s` is from the first request for a minibatch to the last minibatch. Of these, `wait_s` were waiting, and of
    those, `first_wait_s` for the first minibatch, which came after `first_minibatch_s`. `cpu_s` is the processor time
    of all threads, `loop_cpu_s` that of the loop's thread; `decode_s` and `gather_s` are sums over
    threads. `stepped_s` is the time that steps of `step_s` took. `link_bytes_per_s` is the speed of the link, or of the
    disk of a `local` store; None if it is not known. `disk_bytes` were read from any disk, and `machine_busy` is the
    share of the time of all cores that all programs used; None if the system does not tell. `cached`: whether there is
    a mirror.
    """

    kind: str
    rows: float
    minibatches: float
    elapsed_s: float
    first_minibatch_s: float
    wait_s: float
    first_wait_s: float
    step_s: float
    stepped_s: float
    bytes_read: float
    gets: float
    local: bool
    link_bytes_per_s: float | None
    link_stated: bool
    cores: int
    cpu_s: float
    loop_cpu_s: float
    decode_s: float
    gather_s: float
    disk_bytes: float | None = None
    machine_busy: float | None = None
    cached: bool = False

    @property
    def rows_per_s(self) -> float:
        """Rows per second of the epoch."""
        return self.rows / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Stored bytes that arrived per second over the link, or from the disk of a local store."""
        return self._arrived / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def _arrived(self) -> float:
        if not self.local or self.disk_bytes is None:
            return self.bytes_read
        return min(self.disk_bytes, self.bytes_read)  # the kernel reads whole pages, and may read ahead

    @property
    def from_memory(self) -> float:
        """The share of the bytes of a local store that was in memory already; 0 if that is not known."""
        return 1 - self._arrived / self.bytes_read if self.bytes_read else 0.0

    @property
    def steady_s(self) -> float:
        """The time after the first minibatch."""
        return max(0.0, self.elapsed_s - self.first_minibatch_s)

    @property
    def starting(self) -> float:
        """The share of the time until the first minibatch."""
        return min(1.0, self.first_minibatch_s / self.elapsed_s) if self.elapsed_s else 1.0

    @property
    def waiting(self) -> float:
        """The share of the time after the first minibatch that the loop waited."""
        return (self.wait_s - self.first_wait_s) / self.steady_s if self.steady_s else 1.0

    @property
    def stepping(self) -> float:
        """The share of the time after the first minibatch that the simulated steps took."""
        after_first_s = self.stepped_s * (1 - 1 / self.minibatches) if self.minibatches else 0.0  # not the last step
        return min(1.0, after_first_s / self.steady_s) if self.steady_s else 0.0

    @property
    def keeps_up(self) -> bool:
        """Whether the loop hardly waited, from beginning to end."""
        return self.waiting <= _LITTLE_WAITING and self.starting <= _LONG_START

    @property
    def processor(self) -> float:
        """The share of the cores' time that the process used."""
        return self.cpu_s / (self.elapsed_s * self.cores) if self.elapsed_s else 0.0

    @property
    def looping(self) -> float:
        """The share of the time that the loop's thread used a core."""
        return self.loop_cpu_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def idle(self) -> bool:
        """Whether the threads together were not even busy enough for one of them to be busy all the time."""
        return self.cpu_s < _MOST * self.elapsed_s

    @property
    def of_link(self) -> float | None:
        """The share of the link's speed at which bytes arrived; None if either is not known."""
        return self.bytes_per_s / self.link_bytes_per_s if self.link_bytes_per_s and self.bytes_read else None

    @property
    def ceilings(self) -> Mapping[str, float]:
        """Rows per second that each part alone allows, as far as they were measured or stated.

        A speed below that of the epoch is no limit and left out: on a busy machine, decoding seems slower than it is.
        """
        found = {}
        if self.link_bytes_per_s and self.bytes_read:
            found["the disk" if self.local else "the link"] = self.rows * self.link_bytes_per_s / self.bytes_read
        if self.decode_s and self.bytes_read:
            found["decoding on all cores"] = self.rows * self.cores / self.decode_s
        if self.step_s and self.minibatches:
            found["your step"] = self.rows / (self.minibatches * self.step_s)
        return {name: ceiling for name, ceiling in found.items() if ceiling >= self.rows_per_s}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What bounds an epoch, and in `text` why.

    `bound` is `step`, `loop`, `link`, `decoding`, `processor`, `busy`, `start`, `waiting` or `unclear`.
    """

    bound: str
    text: str


def advise(pace: Pace) -> Advice:
    """Decides what bounds an epoch. Pure arithmetic on the figures."""
    for rule in (_step, _loop, _link, _processor, _busy, _start, _waiting):
        found = rule(pace)
        if found is not None:
            return found
    return _unclear(pace)


def _step(pace: Pace) -> Advice | None:
    if not pace.keeps_up or pace.stepping < _MOST:
        return None
    return Advice(
        bound="step",
        text=f"Your step bounds you: nothing to gain here. After the first minibatch, steps of {1000 * pace.step_s:g} "
        f"ms took {pace.stepping:.0%} of the time, and the loop waited {pace.waiting:.0%} of it.",
    )


def _loop(pace: Pace) -> Advice | None:
    if not pace.keeps_up or pace.looping < _MOST:
        return None
    return Advice(
        bound="loop",
        text="The thread of the training loop bounds you: it hardly waited for minibatches "
        f"({pace.waiting:.0%} of the time), and was busy {pace.looping:.0%} of the time with making tensors of them. "
        "Fewer, larger minibatches (--batch-size) cost it less.",
    )


def _link(pace: Pace) -> Advice | None:
    share, link = pace.of_link, pace.link_bytes_per_s
    if share is None or link is None or not _MOST <= share <= _IMPOSSIBLE:
        return None
    name, limit = ("disk", "reads") if pace.local else ("link", "delivers")
    known = f"that the {name} {limit} as you say" if pace.link_stated else f"that the {name} delivered without decoding"
    both = " The processor is nearly as busy, so a faster one alone, or a faster link alone, would help little."
    return Advice(
        bound="link",
        text=f"The {name} bounds you: bytes arrived at {size(pace.bytes_per_s)}/s, {share:.0%} of the {size(link)}/s "
        f"{known}.{both if pace.processor >= _MOST else ''} " + _fewer_bytes(pace),
    )


def _fewer_bytes(pace: Pace) -> str:
    """What to do about a bound on reading."""
    if pace.kind != "cold":
        return "A mirror that holds the whole store would spare these reads."
    mirror = "The mirror" if pace.cached else "A mirror on a fast local disk (--cache)"
    return f"{mirror} spares later epochs these reads."


def _processor(pace: Pace) -> Advice | None:
    if pace.processor < _MOST:
        return None
    busy = f"{pace.processor:.0%} of {pace.cores} core{'s' if pace.cores > 1 else ''} were in use"
    decoding = pace.decode_s / (pace.decode_s + pace.gather_s) if pace.decode_s else 0.0
    if decoding > 0.5 and pace.decode_s > pace.cpu_s / 2:
        return Advice(
            bound="decoding",
            text=f"Decoding bounds you: {busy}, and of the threads' work {decoding:.0%} was decoding. More cores would "
            "help, and epochs that find rows in a mirror (--cache) do not decode.",
        )
    return Advice(
        bound="processor",
        text=f"The processor bounds you: {busy}, without decoding being most of it. More cores would help, and so "
        "might larger minibatches (--batch-size).",
    )


def _busy(pace: Pace) -> Advice | None:
    if pace.machine_busy is None or pace.machine_busy < _MOST or pace.elapsed_s < _COUNTED_S:
        return None
    return Advice(
        bound="busy",
        text=f"Other programs bound you: the cores of this machine were busy {pace.machine_busy:.0%} of the time, and "
        f"this process used {pace.processor:.0%} of {pace.cores} core{'s' if pace.cores > 1 else ''}. Measure again "
        "when they have ended.",
    )


def _start(pace: Pace) -> Advice | None:
    if pace.starting < _MOSTLY_START and (pace.starting <= _LONG_START or pace.waiting > _LITTLE_WAITING):
        return None
    return Advice(
        bound="start",
        text=f"The start bounds you: the first minibatch came after {pace.first_minibatch_s:.2f} of "
        f"{pace.elapsed_s:.2f} s. Smaller fetches (--fetch-factor) begin earlier, and in a longer epoch the start "
        "matters less.",
    )


def _waiting(pace: Pace) -> Advice | None:
    """Reads, or writes of the mirror, that take long although neither their rate nor any work is a limit."""
    share = pace.of_link
    if pace.waiting <= _MUCH_WAITING or not pace.idle:
        return None
    waited = f"the loop waited {pace.waiting:.0%} of the time after the first minibatch, while the threads together " \
        f"used {pace.cpu_s / pace.elapsed_s:.0%} of one core"  # fmt: skip
    if not pace.bytes_read:
        if not pace.disk_bytes:
            return None
        return Advice(
            bound="waiting",
            text=f"The disk with the mirror bounds you: {waited}, and {size(pace.disk_bytes / pace.elapsed_s)}/s were "
            "read from it. A faster disk helps, and so does memory in which the system can keep the mirror. Compact "
            'rows, as zl.Cache(form="compact") keeps them, take 0.4 of the bytes of raw ones.',
        )
    if share is None or share > _MOST or not pace.gets or pace.from_memory > _FROM_MEMORY:
        return None
    name = "disk" if pace.local else "link"
    return Advice(
        bound="waiting",
        text=f"Waiting for reads bounds you: {waited}, and {share:.0%} of the {name} was in use. A read had "
        f"{size(pace.bytes_read / pace.gets)}. Larger blocks (--block-size) make larger reads, and more memory "
        "(--memory) or larger fetches (--fetch-factor) allow more of them at once."
        + (" The disk of the mirror may also be slow to write." if pace.cached else ""),
    )


def _unclear(pace: Pace) -> Advice:
    """Says which limits the epoch did not reach."""
    found = [f"the loop waited {pace.waiting:.0%} of the time after the first minibatch"]
    found.append(f"{pace.processor:.0%} of the processor was in use")
    share, hint = pace.of_link, ""
    name = "disk" if pace.local else "link"
    if share is not None and share > _IMPOSSIBLE:
        found.append(f"bytes arrived at {size(pace.bytes_per_s)}/s, {share:.1f} times as fast as the {name} should be")
        hint = f" The {name} is faster than --link-speed says." if pace.link_stated else ""
    elif share is not None:
        found.append(f"{share:.0%} of the {name} was in use")
        if not pace.local and pace.waiting > _MUCH_WAITING:
            hint = " More bytes in flight (--memory) or larger blocks (--block-size) might help."
        if pace.from_memory > _FROM_MEMORY:
            hint = f" {pace.from_memory:.0%} of the bytes were in memory already, where the system keeps used files."
    elif pace.bytes_read:
        hint = f" The speed of the {name} was not measured: --link-speed states it."
    return Advice(bound="unclear", text=f"Not clear what bounds you: {', '.join(found)}.{hint}")


def compare(paces: Mapping[str, Pace]) -> Sequence[str]:
    """Cold against warm epochs."""
    cold, warm = paces.get("cold"), paces.get("warm")
    if cold is None or warm is None:
        return []
    speeds = f"{warm.rows_per_s:,.0f} rows/s against {cold.rows_per_s:,.0f}"
    ratio = warm.rows_per_s / cold.rows_per_s
    if ratio >= _ALIKE:
        return [f"Warm epochs are {ratio:.1f} times as fast as cold ones: {speeds}."]
    if ratio <= 1 / _ALIKE:
        return [f"Warm epochs are slower than cold ones here: {speeds}."]
    return [f"Warm epochs are about as fast as cold ones: {speeds}."]
