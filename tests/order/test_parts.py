"""Parts of the rows for machines: every row once, the same rows in every epoch, other numbers of machines, resuming."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from helpers import check_seen_once, counts, write_store
from hypothesis import example, given
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
    """Plans of several machines, with a divisor of 12 of them, and 12, 24 or as many parts."""
    machines, local = draw(st.sampled_from([1, 2, 3, 4, 6, 12])), draw(st.integers(1, 3))
    parts = draw(st.sampled_from([machines, 12, 24]))
    n_rows = draw(st.integers(machines * local, 60) | st.integers(machines * local, 3000))
    redeal = draw(st.sampled_from([0.0, 0.3, 1.0]))
    place = RankPlacement(rank=0, world_size=machines * local, machines=machines, parts=parts, redeal=redeal)
    kept = draw(st.sampled_from(["keep", "pad", "drop"]))
    return Plan(
        dataset_rows=n_rows,
        sampling=place.keep_to_parts(draw(st.sampled_from(SAMPLINGS)), n_rows),
        batch_size=draw(st.integers(2, 9)),
        fetch_factor=draw(st.integers(2, 4)),
        seed=draw(st.integers(0, 5)),
        epoch=draw(st.integers(0, 5)),
        world_size=machines * local,
        machines=machines,
        drop_last=kept == "drop",
        remainder="pad" if kept == "pad" else "keep",
    )


@pytest.mark.slow
@given(plan=plans())
def test_every_row_comes_once_and_every_rank_has_as_many_minibatches(plan):
    made = [rows_of(rank) for rank in ranks_of(plan)]
    often = np.bincount(np.concatenate([np.array(rows, np.int64) for rows in made]), minlength=plan.dataset_rows)
    if plan.pads:
        assert often.min() >= 1
        assert {len(rows) for rows in made} == {plan.n_minibatches * plan.batch_size}
    elif plan.drop_last:
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
    if not isinstance(sampling, DealtParts) or sampling.redeal:
        return
    of = {"dataset_rows": plan.n_rows, "seed": plan.seed}
    first, other = (sampling.rows(0, plan.n_rows, **of, epoch=each) for each in (0, epoch))
    # np.array_split gives the first machines a row more, too
    for one, again in zip(*(np.array_split(rows, plan.machines) for rows in (first, other)), strict=True):
        np.testing.assert_array_equal(np.sort(one), np.sort(again))
    np.testing.assert_array_equal(np.sort(first), np.arange(plan.n_rows))


def parts_of(n_rows: int, machines: int, parts: int, *, redeal: float = 0.0, epoch: int = 0) -> list[set[int]]:
    """The rows of each machine."""
    sampling = DealtParts(sampling=zl.Streaming(), n_obs=n_rows, machines=machines, parts=parts, redeal=redeal)
    order = sampling.rows(0, n_rows, dataset_rows=n_rows, seed=3, epoch=epoch)
    return [set(rows.tolist()) for rows in np.array_split(order, machines)]


@given(n_rows=st.integers(24, 5000))
@example(n_rows=24)
def test_other_machines_get_whole_parts(n_rows):
    """But for fewer rows than there are parts, which are left over."""
    left_over = n_rows % 24
    by_parts = parts_of(n_rows, 24, 24)
    for machines in (1, 2, 6, 12):
        each = 24 // machines
        for machine, rows in enumerate(parts_of(n_rows, machines, 24)):
            of_parts = set().union(*by_parts[machine * each : (machine + 1) * each])
            assert {row for row in rows ^ of_parts if row < n_rows - left_over} == set()


def test_a_part_has_regions_of_all_rows():
    """Each tenth of the rows gives each of 8 parts a tenth of its rows, up to a region."""
    for rows in parts_of(100_000, 8, 8):
        tenths = np.bincount(np.array([*rows]) // 10_000, minlength=10)
        assert abs(tenths - 1250).max() <= 2 * 195
        runs = np.diff(np.flatnonzero(np.diff(np.sort([*rows])) > 1))
        assert runs.min() >= 195  # regions, two of which may touch


@pytest.mark.parametrize("redeal", [0.1, 0.5, 1.0])
def test_a_share_of_the_parts_is_dealt_anew_in_each_epoch(redeal):
    before, moved = parts_of(100_000, 8, 8, redeal=redeal), []
    for epoch in range(1, 11):
        now = parts_of(100_000, 8, 8, redeal=redeal, epoch=epoch)
        moved.append(sum(len(new - old) for new, old in zip(now, before, strict=True)) / 100_000)
        before = now
    assert np.mean(moved) == pytest.approx(redeal * 7 / 8, rel=0.1)
    assert max(moved) - min(moved) < 0.1


@pytest.mark.slow
@given(plan=plans(), first=st.floats(0, 1), second=st.floats(0, 1), data=st.data())
def test_other_ranks_and_machines_get_exactly_what_nobody_has_seen(plan, first, second, data):
    """The numbers of ranks and machines change twice in one epoch."""
    stretches, seen = [], []
    machines = [plan.machines, *(data.draw(st.sampled_from([1, 2, 3, 4, 6, 12])) for _ in range(2))]
    if isinstance(plan.sampling, DealtParts):
        machines = [number for number in machines if plan.sampling.parts % number == 0]
    locals_ = [plan.world_size // plan.machines, *(data.draw(st.integers(1, 3)) for _ in machines[1:])]
    places = [*zip(machines, locals_, [*[first, second][: len(machines) - 1], 1.0], strict=True)]
    for number, local, place in places:
        world_size = number * local
        sampling = plan.sampling
        if isinstance(sampling, DealtParts):
            sampling = dataclasses.replace(sampling, machines=number)
        if plan.n_rows < world_size:
            return
        here = dataclasses.replace(plan, world_size=world_size, machines=number, sampling=sampling)
        now, done = resumed(here, stretches)
        taken = round(place * (now.n_minibatches - done)) + done
        for rank in ranks_of(now):
            made = [fetch.rows[fetch.order[a:b]] for fetch in rank.fetches(done=done) for a, b in pairs(fetch.cuts)]
            assert len(made) == now.n_minibatches - done
            seen += [row for rows in made[: taken - done] for row in rows.tolist()]
        if stretches and (stretches[-1][0], stretches[-1][2]) == (world_size, number):
            stretches.pop()
        stretches += [(world_size, taken, number)] if taken else []
    check_seen_once(plan, seen, world_size)


def test_the_rest_of_an_epoch_may_have_fewer_rows_than_machines():
    """With padding, a machine without rows gets those of others."""
    sampling = DealtParts(sampling=zl.BlockShuffling(2), n_obs=25, machines=1, parts=4, redeal=0.0)
    plan = Plan(dataset_rows=25, sampling=sampling, batch_size=3, fetch_factor=2, remainder="pad")
    here = dataclasses.replace(plan, machines=4, world_size=4, sampling=dataclasses.replace(sampling, machines=4))
    now, _ = resumed(here, [(1, 8, 1)])
    assert now.n_rows == 1
    assert [len(rows_of(rank)) for rank in ranks_of(now)] == [3] * 4
    again, _ = resumed(dataclasses.replace(plan, machines=2, world_size=2, sampling=sampling), [(1, 8, 1), (4, 1, 4)])
    assert again.n_rows == 0


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
@pytest.mark.parametrize("remainder", ["keep", "pad"])
def test_a_machine_keeps_to_its_part(store, remainder):
    dataset = zl.open_dataset(store)
    machines, kept, orders = machines_of(dataset, 4, 2, remainder=remainder), [], []
    for _ in range(3):
        made = [[listed(loader) for loader in loaders] for loaders in machines]
        assert {len(minibatches) for loaders in made for minibatches in loaders} == {len(machines[0][0])}
        rows = [[row for minibatches in loaders for rows in minibatches for row in rows] for loaders in made]
        kept.append([set(own) for own in rows])
        assert sorted(kept[-1][0] | kept[-1][1]) == list(range(N_ROWS))
        assert not kept[-1][0] & kept[-1][1]
        assert remainder == "pad" or list(map(len, rows)) == [751, 750]
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
def test_resumes_anywhere_and_with_other_ranks_and_machines(store):
    dataset = zl.open_dataset(store)
    assert_resumes_anywhere(lambda: machines_of(dataset[:101], 4, 2)[1][0])
    for world_size, local in ((6, 3), (4, 1), (2, 2), (8, 2)):
        seen = []
        for loaders in machines_of(dataset, 4, 2, parts=8):
            for loader in loaders:
                minibatches = iter(loader)
                seen += [row for _ in range(3) for row in next(minibatches).index.tolist()]
                state = loader.state_dict()
        assert state["stretches"] == [[4, 3, 2]]
        resuming = machines_of(dataset, world_size, local, parts=8)
        for loaders in resuming:
            for loader in loaders:
                loader.load_state_dict(state)
                seen += [row for rows in listed(loader) for row in rows]
        assert sorted(seen) == list(range(N_ROWS))
        whole = [set(flat(loaders)) for loaders in resuming]  # the next epoch
        assert whole == [set(flat(loaders)) for loaders in machines_of(dataset, world_size, local, parts=8)]
    with pytest.raises(OptionError, match="parts was 8, is 2"):
        machines_of(dataset, 2, 1)[0][0].load_state_dict(state)
    with pytest.raises(OptionError, match="3 machines cannot share 8 parts"):
        machines_of(dataset, 4, 2, parts=8)[0][0].load_state_dict(state | {"stretches": [[3, 1, 3]]})


REFUSED = {
    "uneven parts": ({"parts": 3}, "3 parts cannot be divided evenly among 2 machines"),
    "no parts": ({"parts": 0}, "parts must be .* not 0"),
    "too much": ({"redeal": 1.5}, "redeal is the share of the parts"),
    "text": ({"redeal": "0.1"}, "redeal is the share of the parts"),
    "global": ({"locality": "global", "parts": 4}, "parts and redeal are for locality='machine'"),
    "global redeal": ({"locality": "global", "redeal": 0.5}, "parts and redeal are for locality='machine'"),
    "few rows": ({"world_size": 2000, "local_world_size": 1}, "1501 rows cannot be divided among 2000 machines"),
}


@pytest.mark.parametrize(("options", "says"), REFUSED.values(), ids=REFUSED)
def test_options_that_make_no_sense_are_refused(store, options, says):
    place = {"rank": 1, "world_size": 4, "local_world_size": 2, "locality": "machine"}
    with pytest.raises(OptionError, match=says):
        zl.Loader(zl.open_dataset(store), **(SIZES | place | options))
