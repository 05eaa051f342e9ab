"""Samplings by name, and shuffle=True or False."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import counts, write_store

import zloader as zl
from zloader.common.errors import OptionError
from zloader.order.shuffling import NAMES, default_block_size, sampling_of, stratified


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("named")
    write_store(counts(103, 7), folder / "s.zarr", folder)
    return zl.open_dataset(folder / "s.zarr")


SAME = {
    "shuffle=False": ({"shuffle": False}, zl.Streaming()),
    "streaming": ({"sampling": "streaming"}, zl.Streaming()),
    "both": ({"sampling": "streaming", "shuffle": False}, zl.Streaming()),
    "numpy's False": ({"shuffle": np.False_}, zl.Streaming()),
    "None": ({}, stratified(default_block_size(32))),
    "shuffle=True": ({"shuffle": True}, stratified(default_block_size(32))),
    "block_shuffling": ({"sampling": "block_shuffling"}, stratified(default_block_size(32))),
    "mixture_of_scanners": ({"sampling": "mixture_of_scanners"}, zl.MixtureOfScanners()),
    "random": ({"sampling": "random", "shuffle": True}, zl.BlockShuffling(1)),
    "shuffled streaming": ({"sampling": zl.Streaming(shuffle=True), "shuffle": True}, zl.Streaming(shuffle=True)),
}


@pytest.mark.parametrize("options", SAME)
def test_a_name_stands_for_a_sampling(dataset, options):
    options, sampling = SAME[options]
    sizes = {"batch_size": 8, "fetch_factor": 4 if "mixture" not in str(options) else 16}
    named, given = zl.Loader(dataset, **sizes, **options), zl.Loader(dataset, **sizes, sampling=sampling)
    assert [minibatch.index.tolist() for minibatch in named] == [minibatch.index.tolist() for minibatch in given]
    if "mixture" not in str(options):
        assert named.state_dict()["sampling"] == given.state_dict()["sampling"]
    again = zl.Loader(dataset, **sizes, sampling=sampling)
    again.load_state_dict(named.state_dict())  # a state does not depend on the spelling


def test_every_name_is_tested():
    assert {*NAMES} == {options["sampling"] for options, _ in SAME.values() if options.get("sampling") in NAMES}


def test_rows_come_in_order(dataset):
    seen = [row for minibatch in zl.Loader(dataset, batch_size=10, shuffle=False) for row in minibatch.row.tolist()]
    assert seen == list(range(103))


@pytest.mark.parametrize(
    ("sampling", "shuffle", "says"),
    [
        ("Streaming", None, "sampling must be one of 'block_shuffling', 'streaming', .* not 'Streaming'"),
        ("streaming", True, "shuffle=True and sampling='streaming' contradict each other"),
        (zl.Streaming(), True, "contradict"),
        ("random", False, "shuffle=False is sampling='streaming'"),
        (zl.BlockShuffling(4), False, "contradict"),
        (zl.Streaming(shuffle=True), False, "contradict"),
        (None, 0, "shuffle must be True or False, not 0"),
        (None, "no", "shuffle must be True or False, not 'no'"),
        (zl.BlockShuffling, None, "which is a class"),
    ],
)
def test_contradictions_and_nonsense_are_refused(sampling, shuffle, says):
    with pytest.raises(OptionError, match=says):
        sampling_of(sampling, shuffle, 64)
