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
    elapsed_s=10.0,
    first_minibatch_s=0.5,
    wait_s=9.5,
    first_wait_s=0.4,
    stepped_s=0.0,
    bytes_read=400e6,
    link_bytes_per_s=400e6,
    cores=2,
    cpu_s=10.0,
    decode_s=6.0,
    gather_s=1.0,
)
WARM = dataclasses.replace(COLD, kind="warm", bytes_read=0, decode_s=0.0, gather_s=3.0)
STEPPING = {"stepped_s": 9.4, "wait_s": 0.5}

CASES = [
    ("a step that hides loading", COLD, STEPPING, "step", "Your step bounds you, and a faster loader would not help"),
    ("a step, although the link is full", COLD, STEPPING | {"bytes_read": 3.9e9}, "step", "waited 1% of the time"),
    ("a step that waits, for the link", COLD, {"stepped_s": 5.0, "wait_s": 4.5, "bytes_read": 4e9}, "link", ""),
    ("no waiting and no steps", WARM, {"wait_s": 0.5}, "loop", "The thread of your loop bounds you"),
    ("a full link", COLD, {"bytes_read": 3.8e9}, "link", "bytes arrived at 380 MB/s of 400 MB/s"),
    ("a full link and a busy processor", COLD, {"bytes_read": 3.8e9, "cpu_s": 18.0}, "link", "The link bounds you"),
    ("decoding on all cores", COLD, {"cpu_s": 18.0, "decode_s": 14.0}, "decoding", "90% of 2 cores were in use"),
    ("a busy processor that gathers", WARM, {"cpu_s": 18.0, "gather_s": 12.0}, "processor", "The processor bounds"),
    ("a busy processor, with little of it decoding", COLD, {"cpu_s": 18.0, "decode_s": 5.0}, "processor", "90% of 2"),
    ("one core", WARM, {"cores": 1}, "processor", "100% of 1 core were in use"),
    ("most of it start-up", COLD, {"elapsed_s": 3.0, "first_minibatch_s": 2.9, "cpu_s": 1.0}, "start", "2.90 of 3.00"),
    ("idle threads and a link that is not full", COLD, {"cpu_s": 3.0}, "reads", "15% of 2 cores were in use, and 10%"),
    ("idle threads that read from a disk", WARM, {"cpu_s": 3.0, "disk_bytes": 7e9}, "disk", "700 MB/s came from it"),
    ("idle threads and a mirror in memory", WARM, {"cpu_s": 3.0, "disk_bytes": 0.0}, "unclear", "No single part"),
    ("a link that nobody measured", COLD, {"cpu_s": 3.0, "link_bytes_per_s": None}, "unclear", "No single part"),
    (
        "nothing is used up",
        COLD,
        {},
        "unclear",
        "minibatch, 50% of 2 cores were",
    ),
    ("no time at all", COLD, {"elapsed_s": 0.0, "first_minibatch_s": 0.0}, "start", "after 0.00 of 0.00 s"),
]


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
        elapsed_s=SECONDS,
        first_minibatch_s=SECONDS,
        wait_s=SECONDS,
        first_wait_s=SECONDS,
        stepped_s=SECONDS,
        bytes_read=st.integers(0, 10**13),
        link_bytes_per_s=st.none() | st.integers(1, 10**11),
        cores=st.integers(1, 256),
        cpu_s=SECONDS,
        decode_s=SECONDS,
        gather_s=SECONDS,
        disk_bytes=st.none() | st.integers(0, 10**13),
    )
)
def test_it_never_claims_what_the_figures_do_not_show(pace):
    advice = advise(pace)
    assert advice.text.endswith(".")
    after_first_s = pace.elapsed_s - pace.first_minibatch_s
    if advice.bound == "link":
        assert pace.bytes_read / pace.elapsed_s >= 0.79 * pace.link_bytes_per_s
    if advice.bound in ("decoding", "processor"):
        assert pace.cpu_s >= 0.79 * pace.elapsed_s * pace.cores
    if advice.bound == "decoding":
        assert pace.decode_s >= pace.gather_s
    if advice.bound == "step":
        assert pace.stepped_s >= 0.79 * after_first_s
    if advice.bound in ("step", "loop"):
        assert pace.wait_s - pace.first_wait_s <= 0.051 * after_first_s
    if advice.bound in ("reads", "disk"):
        assert pace.cpu_s <= 0.81 * pace.elapsed_s
        assert pace.wait_s - pace.first_wait_s >= 0.49 * after_first_s or after_first_s <= 0


@pytest.mark.parametrize(
    ("cold_s", "warm_s", "said"),
    [
        (40, 10, ["Warm epochs are 4.0 times as fast as cold ones: 10,000 rows/s against 2,500."]),
        (10, 10.5, ["Warm epochs are about as fast as cold ones here: 9,524 rows/s against 10,000."]),
        (10, 20, ["Warm epochs are slower than cold ones here: 5,000 rows/s against 10,000."]),
    ],
)
def test_cold_against_warm(cold_s, warm_s, said):
    paces = {"cold": dataclasses.replace(COLD, elapsed_s=cold_s), "warm": dataclasses.replace(WARM, elapsed_s=warm_s)}
    assert compare(paces) == said
    assert compare({"cold": COLD}) == []
