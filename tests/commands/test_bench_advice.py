"""What `zloader bench` says about the figures that it measured: a table of cases, and what it must not say."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zloader.commands.bench_advice import Pace, advise, compare

pytestmark = pytest.mark.any_version

# A cold epoch over S3 of 10 s: a tenth of the link, half of two cores, and nearly all of its time spent waiting.
COLD = Pace(
    kind="cold",
    rows=100_000,
    minibatches=1_600,
    elapsed_s=10.0,
    first_minibatch_s=0.5,
    wait_s=9.5,
    first_wait_s=0.4,
    step_s=0.0,
    stepped_s=0.0,
    bytes_read=400e6,
    gets=2_000,
    local=False,
    link_bytes_per_s=400e6,
    link_stated=False,
    cores=2,
    cpu_s=10.0,
    loop_cpu_s=1.0,
    decode_s=6.0,
    gather_s=1.0,
)
WARM = dataclasses.replace(COLD, kind="warm", bytes_read=0, gets=0, decode_s=0.0, gather_s=3.0)


def with_steps(waiting: float, step_ms: float = 5.0) -> dict[str, float]:
    """An epoch with steps, of which the loop waited a share after the first minibatch."""
    steps_s = 1_600 * step_ms / 1000
    elapsed_s = 0.5 + steps_s / (1 - waiting)
    return {
        "step_s": step_ms / 1000,
        "stepped_s": steps_s,
        "elapsed_s": elapsed_s,
        "wait_s": 0.4 + waiting * (elapsed_s - 0.5),
    }


CASES = [
    ("most of it start-up", COLD, {"elapsed_s": 3.0, "first_minibatch_s": 2.9, "cpu_s": 1.0}, "start",
     "The start bounds you: the first minibatch came after 2.90 of 3.00 s. Smaller fetches (--fetch-factor) begin"),
    ("one minibatch", WARM, {"minibatches": 1, "elapsed_s": 0.01, "first_minibatch_s": 0.01, "wait_s": 0.01,
                             "first_wait_s": 0.01, "cpu_s": 0.01}, "start", "came after 0.01 of 0.01 s"),
    ("too short to tell whether others were busy", WARM, {"elapsed_s": 0.1, "first_minibatch_s": 0.01,
     "cpu_s": 0.01, "machine_busy": 1.0}, "unclear", ""),
    ("a step that hides loading", COLD, with_steps(0.02), "step",
     "Your step bounds you: nothing to gain here. After the first minibatch, steps of 5 ms took 98% of the time, and "
     "the loop waited 2% of it."),
    ("a warm step that hides loading", WARM, with_steps(0.0), "step", "Your step bounds you: nothing to gain here."),
    ("a step, although the link is full", COLD, with_steps(0.03) | {"bytes_read": 3.3e9}, "step", "Your step"),
    ("a step that waits, for the link", COLD, with_steps(0.4) | {"bytes_read": 5e9}, "link", "The link bounds you:"),
    ("a step that waits, for nothing known", COLD, with_steps(0.4), "unclear", "the loop waited 40% of the time"),
    ("no waiting, but the steps are too short to account for it", COLD, with_steps(0.0) | {"stepped_s": 0.8},
     "unclear", "Not clear what bounds you: the loop waited 0% of the time after the first minibatch"),
    ("a loop that makes tensors all the time", WARM, {"wait_s": 0.5, "loop_cpu_s": 9.5}, "loop",
     "The thread of the training loop bounds you: it hardly waited for minibatches (1% of the time), and was busy 95%"),
    ("no waiting, and an idle loop", WARM, {"wait_s": 0.5, "loop_cpu_s": 3.0}, "unclear", "Not clear"),
    ("a full link", COLD, {"bytes_read": 3.8e9}, "link",
     "The link bounds you: bytes arrived at 380 MB/s, 95% of the 400 MB/s that the link delivered without decoding. "
     "A mirror on a fast local disk (--cache) spares later epochs these reads."),
    ("a full link, and a mirror that is filled", COLD, {"bytes_read": 3.8e9, "cached": True}, "link",
     "without decoding. The mirror spares later epochs these reads."),
    ("a full link, as stated", COLD, {"bytes_read": 3.8e9, "link_stated": True}, "link",
     "that the link delivers as you say"),
    ("a full disk, as stated", COLD, {"bytes_read": 3.8e9, "link_stated": True, "local": True}, "link",
     "The disk bounds you: bytes arrived at 380 MB/s, 95% of the 400 MB/s that the disk reads as you say."),
    ("a full disk, as measured", COLD, {"bytes_read": 4e9, "disk_bytes": 3.9e9, "local": True}, "link",
     "The disk bounds you: bytes arrived at 390 MB/s, 98% of the 400 MB/s that the disk delivered without decoding."),
    ("as fast as the disk, but from memory", COLD, {"bytes_read": 4e9, "disk_bytes": 0.4e9, "local": True}, "unclear",
     "10% of the disk was in use. 90% of the bytes were in memory already, where the system keeps used files."),
    ("more from the disk than was asked for", COLD, {"bytes_read": 3.6e9, "disk_bytes": 8e9, "local": True}, "link",
     "bytes arrived at 360 MB/s, 90%"),
    ("idle threads and a link that is not full", COLD, {"cpu_s": 3.0}, "waiting",
     "Waiting for reads bounds you: the loop waited 96% of the time after the first minibatch, while the threads "
     "together used 30% of one core, and 10% of the link was in use. A read had 200 kB. Larger blocks (--block-size)"),
    ("idle threads on a busy machine", COLD, {"cpu_s": 3.0, "machine_busy": 0.93}, "busy",
     "Other programs bound you: the cores of this machine were busy 93% of the time, and this process used 15% of 2"),
    ("busy threads on a busy machine", COLD, {"cpu_s": 18.0, "machine_busy": 0.95}, "processor",
     "The processor bounds you"),
    ("idle threads on an idle machine", COLD, {"cpu_s": 3.0, "machine_busy": 0.3}, "waiting", "Waiting for reads"),
    ("idle threads and a store in memory", COLD, {"cpu_s": 3.0, "disk_bytes": 0.0, "local": True}, "unclear",
     "100% of the bytes were in memory already"),
    ("idle threads and a link that nobody measured", COLD, {"cpu_s": 3.0, "link_bytes_per_s": None}, "unclear",
     "was not measured"),
    ("idle threads that read the mirror from a disk", WARM, {"cpu_s": 3.0, "disk_bytes": 7e9}, "waiting",
     "The disk with the mirror bounds you: the loop waited 96% of the time after the first minibatch, while the "
     "threads together used 30% of one core, and 700 MB/s were read from it."),
    ("idle threads and a mirror in memory", WARM, {"cpu_s": 3.0, "disk_bytes": 0.0}, "unclear", "Not clear"),
    ("a full link and a busy processor", COLD, {"bytes_read": 3.8e9, "cpu_s": 18.0}, "link",
     "The processor is nearly as busy"),
    ("faster than the link that was stated", COLD, {"bytes_read": 8e9, "link_stated": True}, "unclear",
     "bytes arrived at 800 MB/s, 2.0 times as fast as the link should be. The link is faster than --link-speed says."),
    ("decoding on all cores", COLD, {"cpu_s": 18.0, "decode_s": 14.0, "gather_s": 2.0}, "decoding",
     "Decoding bounds you: 90% of 2 cores were in use, and of the threads' work 88% was decoding."),
    ("a busy processor that gathers", WARM, {"cpu_s": 18.0, "gather_s": 12.0}, "processor",
     "The processor bounds you: 90% of 2 cores were in use, without decoding being most of it."),
    ("a busy processor, with little of it decoding", COLD, {"cpu_s": 18.0, "decode_s": 5.0}, "processor",
     "The processor bounds you"),
    ("a link that nobody measured", COLD, {"link_bytes_per_s": None}, "unclear",
     "The speed of the link was not measured: --link-speed states it."),
    ("a disk that nobody measured", COLD, {"link_bytes_per_s": None, "local": True}, "unclear",
     "The speed of the disk was not measured"),
    ("nothing is used up", COLD, {}, "unclear",
     "Not clear what bounds you: the loop waited 96% of the time after the first minibatch, 50% of the processor was "
     "in use, 10% of the link was in use. More bytes in flight (--memory) or larger blocks (--block-size) might help."),
    ("steps after a long start", COLD, with_steps(0.0, 1.0) | {"first_minibatch_s": 1.0, "elapsed_s": 2.6,
                                                               "wait_s": 0.9, "first_wait_s": 0.9, "cpu_s": 1.0},
     "start", "The start bounds you: the first minibatch came after 1.00 of 2.60 s."),
    ("a long start and a full link", COLD, {"first_minibatch_s": 4.0, "bytes_read": 3.8e9, "wait_s": 4.0,
                                            "first_wait_s": 4.0}, "link", "The link bounds you"),
    ("nothing is used up, from the mirror", WARM, {}, "unclear", "Not clear what bounds you"),
]  # fmt: skip


@pytest.mark.parametrize(("pace", "change", "bound", "said"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_what_the_figures_show(pace, change, bound, said):
    advice = advise(dataclasses.replace(pace, **change))
    assert (advice.bound, said in advice.text) == (bound, True), advice.text


SECONDS = st.floats(0, 1e4)


@given(
    st.builds(
        Pace,
        kind=st.sampled_from(["cold", "mixed", "warm"]),
        rows=st.integers(1, 10**9),
        minibatches=st.integers(1, 10**6),
        elapsed_s=SECONDS,
        first_minibatch_s=SECONDS,
        wait_s=SECONDS,
        first_wait_s=SECONDS,
        step_s=st.floats(0, 10),
        stepped_s=SECONDS,
        bytes_read=st.integers(0, 10**13),
        gets=st.integers(0, 10**6),
        local=st.booleans(),
        link_bytes_per_s=st.none() | st.integers(1, 10**11),
        link_stated=st.booleans(),
        cores=st.integers(1, 256),
        cpu_s=SECONDS,
        loop_cpu_s=SECONDS,
        decode_s=SECONDS,
        gather_s=SECONDS,
        disk_bytes=st.none() | st.integers(0, 10**13),
        machine_busy=st.none() | st.floats(0, 1),
        cached=st.booleans(),
    )
)
def test_it_never_claims_what_the_figures_do_not_show(pace):
    advice = advise(pace)
    assert advice.text.endswith(".")
    if advice.bound == "link":
        assert pace.bytes_read / pace.elapsed_s >= 0.79 * pace.link_bytes_per_s
    if advice.bound in ("decoding", "processor"):
        assert pace.cpu_s >= 0.79 * pace.elapsed_s * pace.cores
    if advice.bound == "decoding":
        assert pace.decode_s > pace.gather_s
    if advice.bound == "step":
        assert pace.stepped_s >= 0.79 * (pace.elapsed_s - pace.first_minibatch_s)
    if advice.bound in ("step", "loop"):
        assert pace.first_minibatch_s <= 0.21 * pace.elapsed_s
    if advice.bound in ("step", "loop") or (advice.bound == "start" and pace.starting < 0.5):
        assert pace.wait_s - pace.first_wait_s <= 0.051 * (pace.elapsed_s - pace.first_minibatch_s)
    if advice.bound == "busy":
        assert pace.machine_busy >= 0.79
    if advice.bound == "waiting":
        assert pace.cpu_s <= 0.81 * pace.elapsed_s
        assert pace.wait_s - pace.first_wait_s >= 0.49 * (pace.elapsed_s - pace.first_minibatch_s)


@pytest.mark.parametrize(
    ("cold_s", "warm_s", "said"),
    [
        (40, 10, ["Warm epochs are 4.0 times as fast as cold ones: 10,000 rows/s against 2,500."]),
        (10, 10.5, ["Warm epochs are about as fast as cold ones: 9,524 rows/s against 10,000."]),
        (10, 20, ["Warm epochs are slower than cold ones here: 5,000 rows/s against 10,000."]),
    ],
)
def test_cold_against_warm(cold_s, warm_s, said):
    paces = {"cold": dataclasses.replace(COLD, elapsed_s=cold_s), "warm": dataclasses.replace(WARM, elapsed_s=warm_s)}
    assert compare(paces) == said
    assert compare({"cold": COLD}) == []


def test_limits_are_in_rows_per_second():
    pace = dataclasses.replace(COLD, step_s=0.01)
    assert pace.ceilings == pytest.approx({"the link": 100_000, "decoding on all cores": 100_000 * 2 / 6}), (
        "steps of 16 s are no limit of an epoch of 10 s"
    )
    assert "your step" in dataclasses.replace(pace, step_s=0.005).ceilings
    assert list(dataclasses.replace(WARM, link_bytes_per_s=None).ceilings) == []
    assert list(dataclasses.replace(COLD, local=True, decode_s=0).ceilings) == ["the disk"]
