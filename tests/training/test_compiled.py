"""torch.compile of a training step: which layouts it takes, and how often it compiles."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch
from helpers import counts, write_store
from test_readme import doc, fenced

import zloader as zl

pytestmark = pytest.mark.slow  # importing torch's compiler takes seconds
SIZES: dict[str, Any] = {"batch_size": 16, "fetch_factor": 3, "sampling": zl.BlockShuffling(4)}
HAS_COMPILER = any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> zl.Dataset:
    folder = tmp_path_factory.mktemp("compiled")
    write_store(counts(70, 20), folder / "counts.zarr", folder)  # the last of 5 minibatches is smaller
    return zl.open_dataset(folder / "counts.zarr")


@pytest.mark.long
@pytest.mark.skipif(not HAS_COMPILER, reason="torch.compile needs a C++ compiler")
def test_the_step_of_the_page_trains_as_it_does_uncompiled(
    dataset: zl.Dataset, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    labelled, weights = dataset.where("cell_type in ['a', 'b', 'c']"), []
    for code in (fenced(doc("trainers"), "compile"), fenced(doc("trainers"), "compile").replace("@torch.compile", "#")):
        torch.manual_seed(0)
        model = torch.nn.Linear(20, 4)
        names = {"zl": zl, "torch": torch, "dataset": labelled, "model": model}
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=1e-4)
        exec(compile(code, "trainers.md", "exec"), names)
        weights.append(model.weight.detach())
    torch.testing.assert_close(*weights)


def graphs(step: Any, loader: zl.Loader) -> int:
    """Compiles a step without a C++ compiler, compares its results, and returns how often it was compiled."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    for minibatch in loader:
        torch.testing.assert_close(compiled(minibatch), step(minibatch))
    return counters["stats"]["unique_graphs"]


def test_a_smaller_minibatch_compiles_the_step_again(dataset: zl.Dataset) -> None:
    layer = torch.nn.Linear(20, 3)
    for options, n_graphs in (({}, 2), ({"drop_last": True}, 1)):
        loader = zl.Loader(dataset, layout="dense", **options, **SIZES)
        assert graphs(lambda minibatch: layer(minibatch.x), loader) == n_graphs


def test_tokens_of_constant_length_compile_it_once(dataset: zl.Dataset) -> None:
    vocabulary = {"<pad>": 0, "<cls>": 1} | {name: 2 + number for number, name in enumerate(dataset.var_names)}
    tokenizer = zl.tokenizers.ScGPT(vocabulary, max_length=24, pad_to=24)
    loader = zl.Loader(dataset, x=None, tokens=tokenizer, drop_last=True, **SIZES)
    embedding = torch.nn.Embedding(22, 4)
    assert graphs(lambda minibatch: embedding(minibatch.tokens["input_ids"]), loader) == 1


def test_packed_rows_are_converted_in_a_compiled_step(dataset: zl.Dataset) -> None:
    loader = zl.Loader(dataset, layout="packed", drop_last=True, **SIZES)
    assert graphs(lambda minibatch: minibatch.x.dense().sum(dim=1), loader) <= 2
    assert graphs(lambda minibatch: minibatch.x.padded(16)[1].sum(dim=1), loader) <= 2


def test_csr_is_not_compiled(dataset: zl.Dataset) -> None:
    layer = torch.nn.Linear(20, 3)
    with pytest.raises(RuntimeError, match="does not support sparse Tensors"):
        graphs(lambda minibatch: minibatch.x @ layer.weight.T, zl.Loader(dataset, **SIZES))
