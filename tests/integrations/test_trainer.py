"""The Trainer of docs/huggingface.md runs as it stands, resumes bit for bit, and evaluates every row once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from helpers import counts
from test_readme import doc, fenced
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

import zloader as zl

N_ROWS = 150  # 120 of them to train on, in 8 minibatches


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The names of the page's code, which has run."""
    adata = counts(N_ROWS, 40)
    adata.obs["cell_type"] = ["T", "B", "NK"] * 50
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trainer"))
        zl.convert(adata, "pbmc.zarr", progress=False)
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(fenced(doc("huggingface"), "trainer"), names)
        exec(fenced(doc("huggingface"), "training"), names)
        forget()
        yield SimpleNamespace(**names)


def forget() -> None:
    """Accelerators share their state."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    forget()


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    sizes = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16, "num_train_epochs": 2}
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    return TrainingArguments(str(folder), ignore_data_skip=True, **(sizes | quiet | options))


def trainer_of(page: Any, folder: Path, **options: Any) -> Trainer:
    torch.manual_seed(0)
    return page.LoaderTrainer(
        page.Classifier(40, 3),
        arguments(folder, **options),
        train_dataset=page.load(page.train),
        eval_dataset=page.load(page.validation, shuffle=False),
        callbacks=[page.KeepPosition()],
    )


def test_the_page_trains_and_keeps_positions(page: Any) -> None:
    assert page.trainer.state.global_step == 16
    assert len([*Path("run").glob("checkpoint-*/loader.json")]) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulated", "every", "evaluated"),
    [(1, 4, {}), (2, 1, {"eval_strategy": "steps", "eval_steps": 3})],
    ids=["each minibatch", "two at a time"],
)
def test_it_resumes_bit_for_bit(page: Any, tmp_path: Path, accumulated: int, every: int, evaluated: Any) -> None:
    options = {"gradient_accumulation_steps": accumulated, "save_steps": every} | evaluated
    whole = trainer_of(page, tmp_path, **options)
    whole.train()
    steps = 16 // accumulated
    assert whole.state.global_step == steps
    for step in range(every, steps, every if every > 1 else 3):  # within an epoch, and between two
        resumed = trainer_of(page, tmp_path, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumed.state.global_step == steps
        for name, value in whole.model.state_dict().items():
            assert torch.equal(value, resumed.model.state_dict()[name]), f"after step {step}"


def test_evaluation_counts_every_row_once(page: Any, tmp_path: Path) -> None:
    """The last minibatch has 14 rows of 16."""
    trainer = trainer_of(page, tmp_path)
    model, rows = trainer.model, page.validation.take(np.arange(30))
    labels = torch.from_numpy(page.validation.obs_column("cell_type").values).long()
    with torch.no_grad():
        wanted = model(torch.from_numpy(rows.X.toarray()).float(), labels)
    predicted = trainer.predict(page.load(page.validation, shuffle=False))
    np.testing.assert_allclose(predicted.predictions, wanted["logits"], rtol=1e-5)
    np.testing.assert_array_equal(predicted.label_ids, labels)
    np.testing.assert_allclose(trainer.evaluate()["eval_loss"], float(wanted["loss"]), rtol=1e-5)


def test_the_model_gets_the_fields_of_a_minibatch(page: Any, tmp_path: Path) -> None:
    class Model(page.Classifier):
        def forward(self, x: torch.Tensor, obs: dict[str, torch.Tensor], **rest: Any) -> dict[str, torch.Tensor]:
            assert set(rest) == {"row", "index", "obsm"}
            return super().forward(x.to_dense(), obs["cell_type"])

    loader = zl.Loader(page.train, obs=["cell_type"])
    page.LoaderTrainer(Model(40, 3), arguments(tmp_path, max_steps=2), train_dataset=loader).train()


@pytest.mark.slow  # imports a model of transformers
def test_tokens_train_a_masked_language_model(page: Any, tmp_path: Path) -> None:
    names = {name: 4 + number for number, name in enumerate(page.dataset.var_names)}
    vocabulary = {"<pad>": 0, "<mask>": 1, "<cls>": 2, "<eos>": 3} | names
    tokenizer = zl.tokenizers.Geneformer(vocabulary, dict.fromkeys(names, 1.0), version="v2")

    def masked(minibatch: zl.Minibatch) -> dict[str, torch.Tensor]:
        ids = minibatch.tokens["input_ids"]
        chosen = (torch.rand(ids.shape) < 0.15) & (ids > 3)
        return {name: minibatch.tokens[name] for name in ("input_ids", "attention_mask")} | {
            "input_ids": ids.masked_fill(chosen, 1),
            "labels": ids.masked_fill(~chosen, -100),
        }

    loader = zl.Loader(page.train, batch_size=16, tokens=tokenizer, x=None, batch_transform=masked)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForMaskedLM(BertConfig(vocab_size=len(vocabulary), **sizes))
    assert model(**next(iter(loader))).loss.item() > 0
    done = page.LoaderTrainer(model, arguments(tmp_path, max_steps=2), train_dataset=loader).train()
    assert 0 < done.training_loss < 10


def test_a_trainer_alone_would_batch_minibatches_again(page: Any, tmp_path: Path) -> None:
    loader = page.load(page.train, drop_last=True)
    for kind, shape in ((Trainer, (7, 16, 40)), (page.LoaderTrainer, (16, 40))):
        trainer = kind(page.Classifier(40, 3), arguments(tmp_path), train_dataset=loader)
        assert next(iter(trainer.get_train_dataloader()))["x"].shape == shape
