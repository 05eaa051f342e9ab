"""Masked tokens: how many, which, and their labels."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizing import SPECIAL, below, csr, gene_names, words

import zloader as zl
from zloader.common.errors import OptionError

pytestmark = pytest.mark.any_version

N_GENES = 200
NAMES = [f"g{number}" for number in range(N_GENES)]
TOKENS = SPECIAL | {name: 4 + number for number, name in enumerate(NAMES)}
MEDIANS = dict.fromkeys(NAMES, 1.0)
ROWS = np.random.default_rng(0).integers(0, 5, (60, N_GENES)).astype(np.float32)


def made(kind, *, epoch=0, rows=None, **masked):
    """Tokens with and without masking."""
    rows = np.arange(len(ROWS)) if rows is None else rows
    found = []
    for mask in (zl.tokenizers.Masked(**masked), None):
        tokenizer = {
            "geneformer": lambda mask: zl.tokenizers.Geneformer(TOKENS, MEDIANS, masked=mask),
            "scgpt": lambda mask: zl.tokenizers.ScGPT(TOKENS, masked=mask),
        }[kind](mask)
        bound = tokenizer.bind(gene_names(NAMES)).at(0, epoch)
        found.append(bound.rows(csr(ROWS[rows]), rows, None).cut(0, len(rows)))
    return found


@pytest.mark.parametrize("share", [0.15, np.float16(0.5)])
def test_genes_are_masked_as_transformers_does(share):
    masked, plain = made("geneformer", share=share)
    genes = plain.attention_mask & ~np.isin(plain.input_ids, [0, 2, 3])
    chosen = masked.labels != -100
    assert not (chosen & ~genes).any()
    np.testing.assert_array_equal(masked.labels[chosen], plain.input_ids[chosen])
    np.testing.assert_array_equal(masked.input_ids[~chosen], plain.input_ids[~chosen])
    np.testing.assert_array_equal(masked.values, plain.values)
    assert masked.labels.dtype == np.int64
    ids, was, n = masked.input_ids[chosen], masked.labels[chosen], genes.sum()
    shares = {"chosen": len(ids) / n, "mask": (ids == 1).mean(), "same": (ids == was).mean()}
    for name, wanted in {"chosen": share, "mask": 0.8, "same": 0.1 + 0.1 / N_GENES}.items():
        of = n if name == "chosen" else len(ids)
        assert abs(shares[name] - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / of), name
    others = ids[(ids != 1) & (ids != was)]
    assert set(others.tolist()) <= set(range(4, 4 + N_GENES))
    assert len(set(others.tolist())) > 10


def test_the_masked_genes_are_those_of_the_random_words():
    masked, plain = made("geneformer", share=0.3, seed=5, epoch=2)
    for row in range(len(ROWS)):
        n = plain.lengths[row] - 2
        streams = [words(5, 2, stream, row, n) for stream in (11, 12, 13)]
        for place, (which, how, gene) in enumerate(zip(*streams, strict=True), 1):
            if which < int(0.3 * 2**64):
                tenth = below(how, 10)
                wanted = 1 if tenth < 8 else 4 + below(gene, N_GENES) if tenth == 8 else plain.input_ids[row, place]
                assert masked.input_ids[row, place] == wanted
                assert masked.labels[row, place] == plain.input_ids[row, place]
            else:
                assert masked.labels[row, place] == -100


def test_values_are_masked_as_scgpt_does():
    masked, plain = made("scgpt", share=0.4)
    chosen = masked.labels != -100
    assert not chosen[:, 0].any()
    assert not (chosen & ~plain.attention_mask).any()
    assert abs(chosen.sum() / plain.attention_mask[:, 1:].sum() - 0.4) < 0.03
    assert (masked.values[chosen] == -1).all()
    np.testing.assert_array_equal(masked.labels[chosen], plain.values[chosen])
    np.testing.assert_array_equal(masked.values[~chosen], plain.values[~chosen])
    np.testing.assert_array_equal(masked.input_ids, plain.input_ids)
    assert masked.labels.dtype == np.float32


@pytest.mark.parametrize("kind", ["geneformer", "scgpt"])
def test_masks_depend_on_seed_epoch_and_row_only(kind):
    whole, _ = made(kind)
    order = np.random.default_rng(1).permutation(len(ROWS))
    other, _ = made(kind, rows=order)
    width = whole.labels.shape[1]
    np.testing.assert_array_equal(other.labels[:, :width], whole.labels[order])
    for changed in ({"seed": 1}, {"epoch": 1}):
        assert (made(kind, **changed)[0].labels != whole.labels).any()


@pytest.mark.parametrize(("options", "message"), [
    ({"share": 0}, "share must be a number above 0 and below 1, not 0"),
    ({"share": 1}, "share must be a number above 0 and below 1, not 1"),
    ({"share": "some"}, "share must be a number above 0 and below 1, not 'some'"),
    ({"share": True}, "share must be a number above 0 and below 1, not True"),
    ({"share": float("nan")}, "share must be a number above 0 and below 1, not nan"),
    ({"seed": -1}, "seed must be a whole number of at least 0, not -1"),
])  # fmt: skip
def test_wrong_options_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        zl.tokenizers.Masked(**options)


def test_a_mask_token_is_needed_only_for_masking():
    tokens = {name: token for name, token in TOKENS.items() if name != "<mask>"}
    assert zl.tokenizers.Geneformer(tokens, MEDIANS).bind(gene_names(NAMES)).genes.n_known == N_GENES
    with pytest.raises(OptionError, match="token_dictionary has no '<mask>'"):
        zl.tokenizers.Geneformer(tokens, MEDIANS, masked=zl.tokenizers.Masked())
