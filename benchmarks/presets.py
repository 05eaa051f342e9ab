"""The sizes of a run of run.py: `--quick`, `--full`, and `--quick --tiny`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The sizes of a run.

    - `turns` are those of the scenarios that `more_turns` does not name.
    - A peer takes part in no further turns of a case once it has used `peer_s` seconds for it.
    - `most_s` ends a measured epoch early, `check_s` a checked one, and `deadline_s` a process that does not answer.
    - A run that is not `thorough` takes one side of each tool, and one data set for each scenario.
    """

    rows: int
    genes: int
    turns: int
    more_turns: Mapping[str, int]
    peer_s: float
    most_s: float
    check_s: float
    deadline_s: float
    fetch_rows: int
    blocks: Sequence[int]
    factors: Sequence[int]
    batch_sizes: Sequence[int]
    tokenizers: Sequence[str]
    scaling: Sequence[int]
    metadata: Sequence[int]
    processes: Sequence[int]
    screen: Mapping[str, int]
    link_bytes: int
    thorough: bool = True

    def turns_of(self, scenario: str) -> range:
        """The numbers of the turns of a scenario."""
        return range(1, 1 + self.more_turns.get(scenario, self.turns))


QUICK = Preset(
    rows=50_000,
    genes=62_710,
    turns=2,
    more_turns=dict.fromkeys(("cold_warm_local", "cold_warm_cloud", "order", "minibatch"), 3),
    peer_s=40,
    most_s=2,
    check_s=10,
    deadline_s=120,
    fetch_rows=16_384,
    blocks=(4, 64),
    factors=(16, 256),
    batch_sizes=(64, 1024),
    tokenizers=("Geneformer", "scGPT"),
    scaling=(10_000, 100_000),
    metadata=(10_000_000,),
    processes=(1, 2, 4),
    screen={"cell_lines": 6, "drugs": 17, "genes": 2000},
    link_bytes=256 << 20,
)
FULL = Preset(
    rows=50_000,
    genes=62_710,
    turns=3,
    more_turns=dict.fromkeys(("cold_warm_local", "cold_warm_cloud", "order", "minibatch"), 5),
    peer_s=90,
    most_s=3,
    check_s=20,
    deadline_s=180,
    fetch_rows=16_384,
    blocks=(1, 4, 16, 64, 256),
    factors=(1, 4, 16, 64, 256),
    batch_sizes=(64, 256, 1024, 4096),
    tokenizers=("Geneformer", "scGPT"),
    scaling=(10_000, 100_000, 1_000_000),
    metadata=(10_000_000, 100_000_000),
    processes=(1, 2, 3, 4),
    screen={"cell_lines": 12, "drugs": 17, "genes": 2000},
    link_bytes=1 << 30,
)
TINY = Preset(
    rows=1_500,
    genes=1_000,
    turns=1,
    more_turns={},
    peer_s=60,
    most_s=5,
    check_s=30,
    deadline_s=60,
    fetch_rows=512,
    blocks=(16,),
    factors=(4,),
    batch_sizes=(256,),
    tokenizers=("Geneformer",),
    scaling=(1_000,),
    metadata=(20_000,),
    processes=(2,),
    screen={"cell_lines": 2, "drugs": 3, "genes": 50},
    link_bytes=16 << 20,
    thorough=False,
)
