"""Parts of the rows for machines: every row once, the same rows in every epoch, other numbers of ranks, resuming."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from pathlib import Path

import numpy as np
import pytest
from helpers import check_seen_once, counts, write_store
from hypothesis import given
from hypothesis import strategies as st

import zloader as zl
from zloader.common.errors import OptionError
from zloader.order.parts import DealtParts
from zloader.order.plan import Plan
from zloader.order.ranks import RankPlacement
from zloader.order.resume import resumed
from zloader.testing import assert_resumes_anywhere

N_ROWS = 1501
ADATA = counts(N_ROWS, 20)
SIZES = {"batch_size": 4, "fetch_factor": 2, "sampling": zl.BlockShuffling(3)}
SAMPLINGS = [zl.Streaming(), zl.BlockShuffling(3), zl.BlockShuffling(2, n_strata=8)]
SAMPLINGS += [zl.MixtureOfScanners(3, block_size=2)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    write_store(ADATA, folder / "counts.zarr", folder)
    return folder / "counts.zarr"


def rows_of(plan: Plan) -> list[int]:
    """The rows of a rank, minibatch by minibatch, none of which may be empty."""
    found = []
    for fetch in plan.fetches():
        assert (np.diff(fetch.cuts) > 0).all()
        found += fetch.rows[fetch.order].tolist()
    return found


def ranks_of(plan: Plan) -> list[Plan]:
    return [dataclasses.replace(plan, rank=rank) for rank in range(plan.world_size)]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of several machines."""
    machines, local = draw(st.sampled_from([1, 2, 3, 4, 6, 12])), draw(st.integers(1, 3))
    n_rows = draw(st.integers(machines * local, 60) | st.integers(machines * local, 3000))
    place = RankPlacement(rank=0, world_size=machines * local, machines=machines)
    return Plan(
        dataset_rows=n_rows,
        sampling=place.keep_to_parts(draw(st.sampled_from(SAMPLINGS)), n_rows),
        batch_size=draw(st.integers(2, 9)),
        fetch_factor=draw(st.integers(2, 4)),
        seed=draw(st.integers(0, 5)),
        epoch=draw(st.integers(0, 5)),
        world_size=machines * local,
        machines=machines,
        drop_last=draw(st.booleans()),
    )


@pytest.mark.slow
@given(plan=plans())
def test_every_row_comes_once_and_every_rank_has_as_many_minibatches(plan):
    made = [rows_of(rank) for rank in ranks_of(plan)]
    often = np.bincount(np.concatenate([np.array(rows, np.int64) for rows in made]), minlength=plan.dataset_rows)
    if plan.drop_last:
        assert often.max(initial=0) <= 1
        assert (often == 0).sum() < plan.world_size * plan.batch_size
    else:
        assert (often == 1).all()
        assert max(map(len, made)) - min(map(len, made)) <= 1
    for rank in ranks_of(plan):
        assert sum(len(fetch.cuts) - 1 for fetch in rank.fetches()) == plan.n_minibatches


@given(plan=plans(), epoch=st.integers(0, 9))
def test_a_machine_has_the_same_rows_in_every_epoch(plan, epoch):
    sampling = plan.sampling
    if not isinstance(sampling, DealtParts):
        return
    of = {"dataset_rows": plan.n_rows, "seed": plan.seed}
    first, other = (sampling.rows(0, plan.n_rows, **of, epoch=each) for each in (0, epoch))
    # np.array_split gives the first machines a row more, too
    for one, again in zip(*(np.array_split(rows, plan.machines) for rows in (first, other)), strict=True):
        np.testing.assert_array_equal(np.sort(one), np.sort(again))
    np.testing.assert_array_equal(np.sort(first), np.arange(plan.n_rows))


def parts_of(n_rows: int, machines: int) -> list[set[int]]:
    """The rows of each machine."""
    sampling = DealtParts(sampling=zl.Streaming(), n_obs=n_rows, machines=machines)
    order = sampling.rows(0, n_rows, dataset_rows=n_rows, seed=3, epoch=0)
    return [set(rows.tolist()) for rows in np.array_split(order, machines)]


def test_a_part_has_regions_of_all_rows():
    """Each tenth of the rows gives each of 8 parts a tenth of its rows, up to a region."""
    for rows in parts_of(100_000, 8):
        tenths = np.bincount(np.array([*rows]) // 10_000, minlength=10)
        assert abs(tenths - 1250).max() <= 2 * 195
        runs = np.diff(np.flatnonzero(np.diff(np.sort([*rows])) > 1))
        assert runs.min() >= 195  # regions, two of which may touch


def test_the_deal_of_the_parts_is_always_the_same():
    """A resumed run must get the same parts with every later version."""
    found = {
        (n_rows, machines): zlib.crc32(np.concatenate([sorted(rows) for rows in parts_of(n_rows, machines)]).tobytes())
        for n_rows, machines in ((1501, 2), (1501, 4), (30_000, 3))
    }
    assert found == DEALT


DEALT = {(1501, 2): 1054952525, (1501, 4): 2683423384, (30_000, 3): 2784696109}


@pytest.mark.slow
@given(plan=plans(), first=st.floats(0, 1), second=st.floats(0, 1), data=st.data())
def test_other_ranks_get_exactly_what_nobody_has_seen(plan, first, second, data):
    """The number of ranks of each machine changes twice in one epoch."""
    stretches, seen = [], []
    locals_ = [plan.world_size // plan.machines, *(data.draw(st.integers(1, 3)) for _ in range(2))]
    for local, place in zip(locals_, (first, second, 1.0), strict=True):
        world_size = plan.machines * local
        if plan.n_rows < world_size:
            return
        now, done = resumed(dataclasses.replace(plan, world_size=world_size), stretches)
        taken = round(place * (now.n_minibatches - done)) + done
        for rank in ranks_of(now):
            made = [fetch.rows[fetch.order[a:b]] for fetch in rank.fetches(done=done) for a, b in pairs(fetch.cuts)]
            assert len(made) == now.n_minibatches - done
            seen += [row for rows in made[: taken - done] for row in rows.tolist()]
        if stretches and stretches[-1][0] == world_size:
            stretches.pop()
        stretches += [(world_size, taken)] if taken else []
    check_seen_once(plan, seen, world_size)


def test_the_rest_of_an_epoch_may_have_fewer_rows_than_machines():
    sampling = DealtParts(sampling=zl.BlockShuffling(2), n_obs=25, machines=4)
    plan = Plan(dataset_rows=25, sampling=sampling, batch_size=3, fetch_factor=2, machines=4, world_size=4)
    received = dataclasses.replace(plan, drop_last=True)
    assert [len(rows_of(rank)) for rank in ranks_of(received)] == [6] * 4
    now, _ = resumed(dataclasses.replace(received, world_size=8), [(4, 2)])
    assert (now.n_rows, now.n_minibatches) == (1, 0)


def pairs(cuts: np.ndarray) -> list[tuple[int, int]]:
    return [*zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)]


# ---- the loader


def machines_of(dataset, world_size, local, **options) -> list[list[zl.Loader]]:
    made = SIZES | {"x": None, "locality": "machine", "local_world_size": local} | options
    loaders = [zl.Loader(dataset, rank=rank, world_size=world_size, **made) for rank in range(world_size)]
    return [loaders[begin : begin + local] for begin in range(0, world_size, local)]


def listed(loader) -> list[list[int]]:
    return [minibatch.index.tolist() for minibatch in loader]


def flat(loaders) -> list[int]:
    return [row for loader in loaders for rows in listed(loader) for row in rows]


@pytest.mark.slow
def test_a_machine_keeps_to_its_part(store):
    dataset = zl.open_dataset(store)
    machines, kept, orders = machines_of(dataset, 4, 2), [], []
    for _ in range(3):
        made = [[listed(loader) for loader in loaders] for loaders in machines]
        assert {len(minibatches) for loaders in made for minibatches in loaders} == {len(machines[0][0])}
        rows = [[row for minibatches in loaders for rows in minibatches for row in rows] for loaders in made]
        kept.append([set(own) for own in rows])
        assert sorted(kept[-1][0] | kept[-1][1]) == list(range(N_ROWS))
        assert not kept[-1][0] & kept[-1][1]
        assert list(map(len, rows)) == [751, 750]
        orders.append(rows)
    assert kept[0] == kept[1] == kept[2]
    assert orders[0] != orders[1]


@pytest.mark.slow
def test_parts_are_all_that_a_mirror_holds(store, tmp_path):
    sizes = []
    for machine in range(2):
        dataset = zl.open_dataset(store, cache=tmp_path / f"{machine}")
        loader = machines_of(dataset, 2, 1, x="X")[machine][0]
        for _ in range(2):
            values = {
                row: x
                for minibatch in loader
                for row, x in zip(minibatch.index.tolist(), dense(minibatch), strict=True)
            }
        assert loader.statistics().gets == 0
        for row, x in values.items():
            np.testing.assert_array_equal(x, ADATA.X[row].toarray()[0])
        sizes.append(loader.statistics().bytes_from_mirror)
    everything = zl.Loader(zl.open_dataset(store, cache=tmp_path / "all"), **SIZES)
    for _ in range(2):
        list(everything)
    assert max(sizes) < 0.8 * everything.statistics().bytes_from_mirror


def dense(minibatch) -> np.ndarray:
    return minibatch.x.to_dense().numpy()


@pytest.mark.slow
def test_resumes_anywhere_and_with_other_ranks(store):
    dataset = zl.open_dataset(store)
    assert_resumes_anywhere(lambda: machines_of(dataset[:101], 4, 2)[1][0])
    for local in (1, 3):
        seen = []
        for loader in itertools.chain(*machines_of(dataset, 4, 2)):
            minibatches = iter(loader)
            seen += [row for _ in range(3) for row in next(minibatches).index.tolist()]
            state = loader.state_dict()
        resuming = machines_of(dataset, 2 * local, local)
        for loader in itertools.chain(*resuming):
            loader.load_state_dict(state)
            seen += [row for rows in listed(loader) for row in rows]
        assert sorted(seen) == list(range(N_ROWS))
        whole = [set(flat(loaders)) for loaders in resuming]  # the next epoch
        assert whole == [set(flat(loaders)) for loaders in machines_of(dataset, 2 * local, local)]


def test_states_are_those_of_earlier_versions(store):
    """With the options that they had then. A state with another value for one of them is refused."""
    loader = machines_of(zl.open_dataset(store), 4, 2)[0][0]
    minibatches = iter(loader)
    for _ in range(3):
        next(minibatches)
    state = loader.state_dict()
    place = {name: state[name] for name in ("stretches", "locality", "parts", "redeal", "remainder")}
    assert place == {
        "stretches": [[4, 3, 2]], "locality": "machine", "parts": 2, "redeal": 0.0, "remainder": "keep"
    }  # fmt: skip
    for changed, says in {
        "parts was 8, is 2": {"parts": 8},
        "redeal was 0.1, is 0.0": {"redeal": 0.1},
        "remainder was 'pad', is 'keep'": {"remainder": "pad"},
        "it is of 3 machines with parts of the rows, and there are 2": {"stretches": [[3, 1, 3]]},
        "it is of 1 machines with parts of the rows, and there are 2": {"stretches": [[3, 1]]},
        "2 machines cannot have the same number of 3 ranks": {"stretches": [[3, 1, 2]]},
    }.items():
        with pytest.raises(OptionError, match=changed):
            loader.load_state_dict(state | says)


REFUSED = {
    "few rows": ({"world_size": 2000, "local_world_size": 1}, "1501 rows cannot be divided among 2000 machines"),
}


@pytest.mark.parametrize(("options", "says"), REFUSED.values(), ids=REFUSED)
def test_options_that_make_no_sense_are_refused(store, options, says):
    place = {"rank": 1, "world_size": 4, "local_world_size": 2, "locality": "machine"}
    with pytest.raises(OptionError, match=says):
        zl.Loader(zl.open_dataset(store), **(SIZES | place | options))
