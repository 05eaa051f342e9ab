"""The order of an epoch is the same with every NumPy version and on every machine, so that saved runs can be resumed.

Changing these values breaks every saved run, so it needs a very good reason.
"""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from zloader.dataset.views import RowSet
from zloader.order.cell_sets import CellSets
from zloader.order.shuffling import BlockShuffling, MixtureOfScanners, Streaming
from zloader.order.weighted import BlockWeightedSampling, ClassBalancedSampling, Mixture
from zloader.selecting.columns import as_numbers

pytestmark = pytest.mark.any_version

N_ROWS = 1000
ODD = np.arange(1, N_ROWS, 2)
WEIGHTS = (np.arange(N_ROWS) % 7).astype(np.float32)
WEIGHTS[::50] = 60
LABELS = ["b" if row % 11 else "a" for row in range(N_ROWS)]

# The rows of group n are those whose remainder by 3 is n.
TABLE = SimpleNamespace(
    n_obs=N_ROWS,
    rows_of=lambda number: RowSet.of(np.arange(N_ROWS) % 3 == number),
    obs_column=lambda name: as_numbers(name, LABELS),
)

SAMPLINGS = {
    "streaming": Streaming(),
    "streaming indices": Streaming(indices=ODD[::-1]),
    "blocks of 1": BlockShuffling(block_size=1),
    "blocks of 12": BlockShuffling(block_size=12),
    "blocks in strata": BlockShuffling(block_size=12, n_strata=9),
    "single rows in strata": BlockShuffling(block_size=1, n_strata=64),
    "blocks of indices": BlockShuffling(block_size=12, indices=ODD),
    "scanners": MixtureOfScanners(n_scanners=7, block_size=5),
    "scanners of indices": MixtureOfScanners(n_scanners=16, block_size=64, indices=ODD),
    "weights": BlockWeightedSampling(WEIGHTS, block_size=6),
    "weights of rows": BlockWeightedSampling(WEIGHTS, block_size=1, total_size=3000),
    "few by weight": BlockWeightedSampling(np.repeat([1.0, 0, 3, 2], 250), block_size=6, total_size=60),
    "once by weight": BlockWeightedSampling(WEIGHTS + 9, block_size=6, total_size=180, replace=False),
    "classes": ClassBalancedSampling(LABELS, block_size=8),
    "mixture": Mixture({"a": (0, 0.7), "b": (1, 0.2), "c": (2, 0.1)}, block_size=12),
    "sets": CellSets("label", 7),
    "balanced sets": CellSets("label", 7, weights="balanced"),
    "classes once": ClassBalancedSampling(LABELS, block_size=8, total_size=150, replace=False),
}
# Per sampling, seed and epoch: the first 16 rows, and the crc32 of all rows as little-endian int64.
GOLDEN = {
    ("streaming", 0, 0): ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], 619770717),
    ("streaming", 7, 3): ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], 619770717),
    ("streaming indices", 0, 0): (
        [999, 997, 995, 993, 991, 989, 987, 985, 983, 981, 979, 977, 975, 973, 971, 969],
        2312848935,
    ),
    ("streaming indices", 7, 3): (
        [999, 997, 995, 993, 991, 989, 987, 985, 983, 981, 979, 977, 975, 973, 971, 969],
        2312848935,
    ),
    ("blocks of 1", 0, 0): (
        [595, 344, 314, 319, 142, 985, 463, 219, 810, 120, 220, 338, 184, 860, 182, 295],
        2952244281,
    ),
    ("blocks of 1", 7, 3): ([5, 196, 214, 732, 620, 820, 503, 475, 567, 455, 402, 653, 388, 367, 38, 486], 261232413),
    ("blocks of 12", 0, 0): (
        [712, 713, 714, 715, 716, 717, 718, 719, 720, 721, 722, 723, 552, 553, 554, 555],
        2338701564,
    ),
    ("blocks of 12", 7, 3): (
        [204, 205, 206, 207, 208, 209, 210, 211, 212, 213, 214, 215, 288, 289, 290, 291],
        1345137901,
    ),
    ("blocks in strata", 0, 0): (
        [604, 605, 606, 607, 608, 609, 610, 611, 612, 613, 614, 615, 24, 25, 26, 27],
        4279412342,
    ),
    ("blocks in strata", 7, 3): ([84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94, 95, 468, 469, 470, 471], 1145088249),
    ("single rows in strata", 0, 0): (
        [474, 82, 710, 326, 435, 886, 727, 167, 545, 993, 610, 245, 348, 941, 830, 126],
        2059217501,
    ),
    ("single rows in strata", 7, 3): (
        [528, 893, 409, 130, 619, 704, 299, 987, 481, 827, 341, 64, 684, 788, 195, 7],
        1366342900,
    ),
    ("blocks of indices", 0, 0): (
        [785, 787, 789, 791, 793, 795, 797, 799, 801, 803, 805, 807, 833, 835, 837, 839],
        2168518658,
    ),
    ("blocks of indices", 7, 3): (
        [625, 627, 629, 631, 633, 635, 637, 639, 641, 643, 645, 647, 145, 147, 149, 151],
        2900430113,
    ),
    ("scanners", 0, 0): ([908, 909, 910, 911, 912, 194, 195, 196, 197, 198, 765, 766, 767, 768, 769, 51], 363614848),
    ("scanners", 7, 3): ([331, 332, 333, 334, 335, 760, 761, 762, 763, 764, 45, 46, 47, 48, 49, 188], 2855409485),
    ("scanners of indices", 0, 0): (
        [301, 303, 305, 307, 309, 311, 313, 315, 317, 319, 321, 323, 325, 327, 329, 331],
        3531467375,
    ),
    ("scanners of indices", 7, 3): (
        [247, 249, 251, 253, 255, 257, 259, 261, 263, 265, 267, 269, 271, 273, 275, 277],
        1488537644,
    ),
    ("weights", 0, 0): ([398, 404, 431, 450, 464, 489, 750, 775, 800, 807, 832, 850, 206, 230, 250, 264], 3475008041),
    ("weights", 7, 3): ([950, 0, 20, 46, 53, 76, 209, 236, 250, 269, 293, 302, 200, 222, 249, 256], 961178779),
    ("weights of rows", 0, 0): (
        [948, 418, 926, 167, 690, 482, 926, 867, 326, 934, 704, 941, 129, 228, 293, 800],
        103657207,
    ),
    ("weights of rows", 7, 3): (
        [500, 306, 767, 759, 216, 220, 19, 824, 324, 293, 873, 230, 150, 858, 193, 962],
        580981276,
    ),
    ("few by weight", 0, 0): (
        [626, 627, 628, 629, 630, 631, 956, 957, 959, 960, 962, 963, 759, 761, 762, 764],
        317555865,
    ),
    ("few by weight", 7, 3): (
        [572, 573, 574, 575, 576, 577, 752, 753, 755, 756, 758, 760, 174, 199, 224, 249],
        2236193548,
    ),
    ("once by weight", 0, 0): ([35, 41, 47, 50, 54, 61, 600, 605, 611, 617, 623, 629, 200, 205, 210, 216], 1572969973),
    ("once by weight", 7, 3): (
        [600, 603, 608, 615, 621, 627, 933, 939, 945, 950, 953, 958, 433, 439, 445, 450],
        309309306,
    ),
    ("classes", 0, 0): ([779, 785, 792, 803, 810, 816, 825, 836, 638, 648, 653, 660, 671, 679, 685, 693], 721032144),
    ("classes", 7, 3): ([99, 107, 113, 121, 132, 138, 144, 154, 110, 118, 124, 132, 143, 149, 155, 165], 2562125141),
    ("classes once", 0, 0): ([0, 10, 13, 22, 28, 33, 44, 47, 536, 539, 550, 554, 561, 570, 573, 583], 1720078072),
    ("classes once", 7, 3): (
        [572, 581, 584, 594, 600, 605, 615, 618, 946, 954, 957, 968, 973, 979, 988, 991],
        649286486,
    ),
    ("mixture", 0, 0): ([873, 877, 882, 885, 889, 894, 897, 901, 906, 909, 913, 918, 288, 292, 297, 300], 2119702161),
    ("mixture", 7, 3): ([18, 21, 25, 30, 33, 37, 42, 45, 49, 54, 57, 61, 571, 576, 579, 583], 3146750673),
    ("sets", 0, 0): ([430, 118, 959, 709, 982, 588, 617, 643, 360, 123, 229, 965, 17, 500, 831, 931], 4155558853),
    ("sets", 7, 3): ([59, 414, 38, 18, 544, 303, 819, 897, 47, 984, 475, 4, 54, 655, 690, 450], 2056701975),
    ("balanced sets", 0, 0): (
        [430, 118, 959, 709, 982, 588, 617, 643, 360, 123, 229, 965, 17, 500, 831, 931],
        1149960061,
    ),
    ("balanced sets", 7, 3): (
        [968, 572, 121, 594, 264, 198, 858, 166, 675, 799, 15, 48, 189, 34, 759, 649],
        3144167035,
    ),
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (7, 3)])
def test_golden_orders(name, seed, epoch):
    order = SAMPLINGS[name].order(TABLE, 7, 7)
    rows = order.rows(0, order.n_rows, seed=seed, epoch=epoch)
    assert (rows[:16].tolist(), zlib.crc32(rows.astype("<i8").tobytes())) == GOLDEN[name, seed, epoch]
