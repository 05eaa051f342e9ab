"""Dictionaries are read from dicts and JSON, never unpickled, and matched with the genes of a dataset."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from tokenizing import SPECIAL, gene_names

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
    "list": ([1, 2], "token_dictionary must be a dict, or the path of a JSON file with one, not list"),
    "empty": ({}, "token_dictionary is empty"),
    "number as a name": ({5: 6}, "token_dictionary must have names as keys .strings., but it has 5"),
    "flag": ({"A": True}, r"token_dictionary\['A'\] must be a whole number from 0 to 2\*\*31 - 1, not True"),
    "negative": ({"A": -1}, "must be a whole number from 0 .*, not -1"),
    "large": ({"A": 2**31}, "must be a whole number from 0 .*, not 2147483648"),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_wrong_token_dictionaries_are_refused(given, message):
    with pytest.raises(OptionError, match=message):
        Geneformer(given, MEDIANS)


@pytest.mark.parametrize("median", [0, -1.5, float("nan"), float("inf"), True, "1", None])
def test_wrong_medians_are_refused(median):
    with pytest.raises(OptionError, match=r"gene_medians\['ENSG00000111640'\] must be a number above 0, not"):
        Geneformer(TOKENS, MEDIANS | {"ENSG00000111640": median})


def test_wrong_json_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("{'A': 1}")
    (tmp_path / "b.json").write_text("[1]")
    with pytest.raises(OptionError, match=r"vocabulary: .*a.json is not a JSON file: Expecting property name"):
        zl.tokenizers.ScGPT(tmp_path / "a.json")
    with pytest.raises(OptionError, match="vocabulary must be a dict, or the path of a JSON file with one, not list"):
        zl.tokenizers.ScGPT(tmp_path / "b.json")


def test_numbers_of_numpy_are_numbers():
    tokens = {name: np.int64(token) for name, token in TOKENS.items()}
    geneformer = Geneformer(tokens, {name: np.float32(1.5) for name in MEDIANS})
    assert geneformer.token_dictionary == TOKENS
    assert json.dumps(geneformer.gene_medians)


def refusal(names, **options):
    with pytest.raises(OptionError) as caught:
        Geneformer(TOKENS, MEDIANS).bind(gene_names(names, **options))
    return str(caught.value)


def test_a_vocabulary_that_shares_no_gene_is_refused_with_counts_and_near_names():
    message = refusal(["GAPDH", "ACTB", None])
    assert message.startswith(
        "none of the 3 genes of X of cells.zarr is among the 2 genes of token_dictionary: var_names has names such as "
        "'GAPDH', 'ACTB', and token_dictionary such as 'ENSG00000111640', 'ENSG00000075624'. "
    )
    columns = {"var_names": ["GAPDH", "ACTB"], "score": [1, 2], "ensembl_id": ["ENSG00000111640", "ensg00000075624"]}
    message = refusal(["GAPDH", "ACTB"], other_names=lambda: columns)
    assert message.endswith("ensembl_id has 2 names that token_dictionary knows: give genes_by='ensembl_id'")
    columns = {"var_names": ["ENSG00000111640", "ACTB"]}
    assert refusal(["GAPDH", "ACTB"], other_names=lambda: columns).endswith("give genes_by=None")


def test_versions_of_ensembl_ids_are_named():
    message = refusal(["ENSG00000111640.15", "ENSG00000075624.3"])
    assert "Without the version after the dot, 2 would be: " in message


def test_the_nearest_name_is_suggested():
    assert "Did you mean 'ENSG00000111640'?" in refusal(["ENSGO0000111640"])
