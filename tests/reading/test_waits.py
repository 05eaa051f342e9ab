"""How far ahead an epoch loads."""

from __future__ import annotations

import pytest

from zloader.reading.resources import Waits

pytestmark = pytest.mark.any_version


@pytest.mark.parametrize(
    ("waited_s", "busy_s", "reads"),
    [(9.0, 1.0, True), (9.0, 9.9, True), (9.0, 10.1, False), (5.1, 0.0, True), (4.9, 0.0, False), (0.0, 0.0, False)],
    ids=["reads", "half busy", "busy", "waits mostly", "waits little", "waits never"],
)
def test_an_epoch_waits_for_reads_if_it_waits_while_threads_are_idle(waited_s, busy_s, reads):
    waits = Waits(threads=2)
    assert not waits.for_reads(began_s=0.0, now_s=100.0, busy_s=7.0)  # the first load is not judged
    assert waits.for_reads(began_s=110.0 - waited_s, now_s=110.0, busy_s=7.0 + busy_s) is reads
