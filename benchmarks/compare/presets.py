"""The sizes of a run of run.py: `--quick`, `--full`, and `--quick --tiny`.

Most of a run is spent on starting processes, and on the first minibatches of slow peers. The times that run.py gives
are for all peers on two cores that do nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

QUOTED = ("cold_warm_local", "cold_warm_cloud", "in_place", "random", "minibatch", "first")  # in the README


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The sizes of a run.

    - `turns`: those of scenarios that `other_turns` does not name, and of all scenarios over data that are not
      synthetic.
    - `peer_s`: a peer takes part in no further turns of a case once it has used so many seconds for it.
    - `most_s` ends a measured epoch early, `check_s` a checked one, both counted from the first minibatch. `deadline_s`
      ends a process that does not answer.
    - `main_sides`: only the first side of each tool takes part. Over data that are not synthetic that is always so.
    - `panel_genes`: the number of genes in the scenario `panel`.
    - `one_data`: scenarios with two data sets take only the real one.
    """

    rows: int
    genes: int
    turns: int
    other_turns: Mapping[str, int] = field(default_factory=dict)
    peer_s: float
    most_s: float
    check_s: float
    deadline_s: float
    fetch_rows: int
    blocks: Sequence[int]
    factors: Sequence[int]
    batch_sizes: Sequence[int]
    panel_genes: int
    tokenizers: Sequence[str]
    scaling: Sequence[int]
    metadata: Sequence[int]
    processes: Sequence[int]
    screen: Mapping[str, int]
    link_bytes: int
    compressions: Sequence[str] = ("none", "gzip", "lzf")
    main_sides: bool = False
    one_data: bool = False

    def turns_of(self, scenario: str, data: str = "synthetic") -> range:
        """The numbers of the turns of a scenario."""
        count = self.other_turns.get(scenario, self.turns) if data == "synthetic" else self.turns
        return range(1, 1 + count)


QUICK = Preset(
    rows=20_000,
    genes=62_710,
    turns=2,
    other_turns={"conversion": 1, "memory": 1, "first": 1, "minibatch": 1, "panel": 1},
    peer_s=40,
    most_s=1.5,
    check_s=6,
    deadline_s=120,
    fetch_rows=4_096,
    blocks=(4, 64),
    factors=(16, 64),
    batch_sizes=(64, 1024),
    panel_genes=2000,
    tokenizers=("Geneformer", "scGPT"),
    scaling=(10_000, 100_000),
    metadata=(10_000_000,),
    processes=(1, 2),
    screen={"cell_lines": 6, "drugs": 17, "genes": 2000},
    link_bytes=256 << 20,
    main_sides=True,
)
FULL = Preset(
    rows=50_000,
    genes=62_710,
    turns=3,
    other_turns={"memory": 1, **dict.fromkeys(QUOTED, 5)},
    peer_s=45,
    most_s=3,
    check_s=10,
    deadline_s=180,
    fetch_rows=16_384,
    blocks=(4, 64),
    factors=(16, 256),
    batch_sizes=(64, 1024),
    panel_genes=2000,
    tokenizers=("Geneformer", "scGPT"),
    scaling=(10_000, 100_000),
    metadata=(10_000_000, 100_000_000),
    processes=(1, 2, 4),
    screen={"cell_lines": 12, "drugs": 17, "genes": 2000},
    link_bytes=1 << 30,
)
TINY = Preset(
    rows=1_500,
    genes=1_000,
    turns=1,
    peer_s=60,
    most_s=5,
    check_s=30,
    deadline_s=60,
    fetch_rows=512,
    blocks=(16,),
    factors=(4,),
    batch_sizes=(256,),
    panel_genes=200,
    tokenizers=("Geneformer",),
    scaling=(1_000,),
    metadata=(20_000,),
    processes=(2,),
    screen={"cell_lines": 2, "drugs": 3, "genes": 50},
    link_bytes=16 << 20,
    main_sides=True,
    one_data=True,
)
