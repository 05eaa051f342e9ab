"""The whole pipeline with random data, options, kills and damage, against an oracle. `fuzzing.py` implements a round.

ZLOADER_FUZZ_ROUNDS=1000 extends the run from a minute to about an hour, with different seeds in every run.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
from fuzzing import run_round

ROUNDS = int(os.environ.get("ZLOADER_FUZZ_ROUNDS", "0"))
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_values_are_right_or_an_error_is_raised(tmp_path: Path, seed: int) -> None:
    run_round(seed, tmp_path)


@pytest.mark.skipif(not ROUNDS, reason="set ZLOADER_FUZZ_ROUNDS to the number of additional rounds")
def test_more_rounds(tmp_path: Path) -> None:
    first = secrets.randbelow(1 << 40)
    for seed in range(first, first + ROUNDS):
        directory = tmp_path / str(seed)
        directory.mkdir()
        run_round(seed, directory)
