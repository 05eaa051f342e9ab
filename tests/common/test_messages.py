"""The names suggested for a mistyped name, and URLs without secrets."""

from __future__ import annotations

import pytest

from zloader.common.messages import cause, nearest, reason_of, suggestion, without_secrets, without_users

pytestmark = pytest.mark.any_version

MATRICES = ["X", "raw/X", "layers/counts", "layers/spliced", "layers/unspliced"]
GENES = ["GAPDH", "MS4A1", "HLA-A", "ENSG00000111640", "ENSG00000156738.18"]


@pytest.mark.parametrize(
    ("name", "known", "wanted"),
    [
        ("counts", MATRICES, ["layers/counts"]),
        ("Counts", MATRICES, ["layers/counts"]),
        ("layers/count", MATRICES, ["layers/counts"]),
        ("layer/counts", MATRICES, ["layers/counts"]),
        ("layers/splcied", MATRICES, ["layers/spliced", "layers/unspliced"]),
        ("raw", MATRICES, ["raw/X"]),
        ("x", MATRICES, ["X", "raw/X"]),
        ("obsm/e", MATRICES, []),
        ("", MATRICES, []),
        ("gapdh", GENES, ["GAPDH"]),
        ("GAPHD", GENES, ["GAPDH"]),
        ("hla-a ", GENES, ["HLA-A"]),
        ("ENSG00000111640.15", GENES, ["ENSG00000111640"]),
        ("ENSG00000156738", GENES, ["ENSG00000156738.18"]),
        ("celltype", ["cell_type", "donor"], ["cell_type"]),
        ("pca", ["X_pca", "X_umap"], ["X_pca"]),
        ("dose", ["cell_type", "donor"], []),
        ("donor", [], []),
        ("human3", ["human1", "human4"], []),  # other donors
        ("humna4", ["human1", "human4"], ["human4"]),
        ("cell_type", ["cell_types", "cell_type1"], ["cell_types", "cell_type1"]),
    ],
)
def test_nearest_names(name: str, known: list[str], wanted: list[str]) -> None:
    assert nearest(name, known) == wanted


def test_a_suggestion_ends_a_message() -> None:
    assert suggestion("counts", MATRICES) == ". Did you mean 'layers/counts'?"
    assert suggestion("layers", MATRICES).startswith(". Did you mean 'layers/counts' or 'layers/spliced' or ")
    assert suggestion("nothing", MATRICES) == suggestion(5, MATRICES) == suggestion(None, []) == ""


def test_many_names_are_compared_by_their_beginning() -> None:
    genes = [f"ENSG{number:011}" for number in range(20_000)] + ["MS4A1"]
    assert nearest("ms4a1", genes) == ["MS4A1"]
    assert nearest("MS4B1", genes) == ["MS4A1"]
    assert nearest("ENSG00000099999", genes) == []  # nearly all begin alike


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:hush@host:80/a%20b.zarr?sig=hush#hush", "https://host:80/a%20b.zarr"),
        ("https://hush@host/a?sig=hu sh", "https://host/a"),
        ("HTTP://host/a?hush", "HTTP://host/a"),
        ("s3://me:hu@sh@bucket/a", "s3://bucket/a"),
        ("ftp://hush@host/a?token=hush", "ftp://host/a"),
        ("memory://folder/a?.h5ad", "memory://folder/a?.h5ad"),
        ("zip://a.h5ad::https://me:hush@host/b.zip?hush", "zip://a.h5ad::https://host/b.zip"),
        ("abfs://box@acme.dfs.core.windows.net/a", "abfs://box@acme.dfs.core.windows.net/a"),
        ("az://me:hush@cells/a", "az://cells/a"),
        ("hf://datasets/a/b@main/c@d", "hf://datasets/a/b@main/c@d"),
        ("/data/a@b/c?.zarr", "/data/a@b/c?.zarr"),
    ],
)
def test_urls_are_shown_without_secrets(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
    said = without_users(f"no answer from {url}, so")
    assert "me:" not in said
    assert "hush@" not in said


def test_reasons_are_said_without_secrets() -> None:
    said = reason_of(ValueError("GET https://me:hush@host/a?sig=hush failed at az://box@host/b"))
    assert said == "GET https://host/a failed at az://box@host/b"


def test_causes_are_shown_without_secrets() -> None:
    error = ValueError("no answer from https://me:hush@host/a?sig=hush, after 4 retries")
    assert str(cause(error)) == "ValueError: no answer from https://host/a after 4 retries"
    assert cause(harmless := ValueError("no answer from https://host/a")) is harmless
