"""The whole path with random data, options, kills and damage, against an oracle: `fuzzing.py` has the round.

ZLOADER_FUZZ_ROUNDS=1000 makes it about an hour instead of a minute; the seeds are then others at every run.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
from fuzzing import run_round

ROUNDS = int(os.environ.get("ZLOADER_FUZZ_ROUNDS", "0"))
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))]


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_ever_silently_wrong(tmp_path: Path, seed: int) -> None:
    run_round(seed, tmp_path)


@pytest.mark.skipif(not ROUNDS, reason="ZLOADER_FUZZ_ROUNDS says how many more rounds to run")
def test_more_rounds(tmp_path: Path) -> None:
    first = secrets.randbelow(1 << 40)
    for seed in range(first, first + ROUNDS):
        directory = tmp_path / str(seed)
        directory.mkdir()
        run_round(seed, directory)
