"""Dictionaries are read from dicts and JSON, never unpickled, and matched with the genes of a dataset."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from tokenizing import SPECIAL

import zloader as zl
from zloader.common.errors import OptionError

pytestmark = pytest.mark.any_version

TOKENS = SPECIAL | {"ENSG00000111640": 7, "ENSG00000075624": 8}
MEDIANS = {"ENSG00000111640": 1.5, "ENSG00000075624": 0.5}
Geneformer = zl.tokenizers.Geneformer


@pytest.mark.parametrize("as_path", [str, lambda path: path], ids=["string", "path"])
def test_dictionaries_may_be_json_files(tmp_path, as_path):
    for name, content in (("tokens", TOKENS), ("medians", MEDIANS), ("vocab", TOKENS)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    paths = {name: as_path(tmp_path / f"{name}.json") for name in ("tokens", "medians", "vocab")}
    geneformer = Geneformer(paths["tokens"], paths["medians"])
    assert (geneformer.token_dictionary, geneformer.gene_medians) == (TOKENS, MEDIANS)
    assert zl.tokenizers.ScGPT(paths["vocab"]).vocabulary == TOKENS


class Explodes:
    def __reduce__(self):
        return pytest.fail, ("a pickle was read",)


@pytest.mark.parametrize("name", ["tokens.pkl", "tokens.pickle", "tokens.json"])
def test_pickles_are_refused_without_reading_them(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps(Explodes()))
    with pytest.raises(OptionError, match=r"token_dictionary: .*tokens.* is a pickle.*docs/tokens.md has a script"):
        Geneformer(tmp_path / name, MEDIANS)


WRONG = {
    "missing file": ("absent.json", r"token_dictionary: absent.json cannot be read: No such file"),
    "list": ([1, 2], "token_dictionary must be a dict with entries, or the path of a JSON file with one, not .1, 2"),
    "empty": ({}, "token_dictionary must be a dict with entries"),
    "number as a name": ({5: 6}, "token_dictionary must have a whole number .* for each name, not 6 for 5"),
    "flag": ({"A": True}, r"must have a whole number from 0 to 2\*\*31 - 1 for each name, not True for 'A'"),
    "negative": ({"A": -1}, "must have a whole number from 0 .*, not -1"),
    "large": ({"A": 2**31}, "must have a whole number from 0 .*, not 2147483648"),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_wrong_token_dictionaries_are_refused(given, message):
    with pytest.raises(OptionError, match=message):
        Geneformer(given, MEDIANS)


@pytest.mark.parametrize("median", [0, -1.5, float("nan"), float("inf"), True, "1", None])
def test_wrong_medians_are_refused(median):
    with pytest.raises(OptionError, match=r"gene_medians must have a number above 0 .* for 'ENSG00000111640'"):
        Geneformer(TOKENS, MEDIANS | {"ENSG00000111640": median})


def test_wrong_json_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("{'A': 1}")
    (tmp_path / "b.json").write_text("[1]")
    with pytest.raises(OptionError, match=r"vocabulary: .*a.json is not a JSON file: Expecting property name"):
        zl.tokenizers.ScGPT(tmp_path / "a.json")
    with pytest.raises(OptionError, match="vocabulary must be a dict with entries, or the path"):
        zl.tokenizers.ScGPT(tmp_path / "b.json")


def test_numbers_of_numpy_are_numbers():
    tokens = {name: np.int64(token) for name, token in TOKENS.items()}
    geneformer = Geneformer(tokens, {name: np.float32(1.5) for name in MEDIANS})
    assert geneformer.token_dictionary == TOKENS
    assert json.dumps(geneformer.gene_medians)


def test_a_vocabulary_that_shares_no_gene_is_refused_with_names_of_both():
    with pytest.raises(OptionError) as caught:
        Geneformer(TOKENS, MEDIANS).bind(["GAPDH", "ACTB", None], "X of cells.zarr")
    assert str(caught.value).startswith(
        "none of the 3 genes of X of cells.zarr is in the vocabulary: the dataset has names such as 'GAPDH', 'ACTB', "
        "None, and the vocabulary such as 'ENSG00000111640', 'ENSG00000075624'. Name genes by a var column with"
    )
