"""Every public function and class answers an unknown keyword with the nearest one that it has."""

from __future__ import annotations

import importlib
import inspect
import pickle
from types import FunctionType, ModuleType
from typing import Any

import pytest

import zloader as zl
from zloader.common.errors import KeywordError, OptionError

# All modules of the reference, with the package that each needs.
MODULES = {
    "zloader": "zloader",
    "zloader.transforms": "zloader",
    "zloader.tokenizers": "zloader",
    "zloader.testing": "zloader",
    "zloader.ray": "ray",
    "zloader.integrations.accelerate": "accelerate",
    "zloader.integrations.lightning": "lightning",
    "zloader.integrations.scvi": "scvi",
}


def public(module: ModuleType) -> list[Any]:
    """The functions and classes that a module defines for users."""
    if hasattr(module, "__all__"):
        return [getattr(module, name) for name in module.__all__]
    return [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]


def calls(found: Any) -> list[tuple[Any, inspect.Signature]]:
    """What can be called with options: a function, or the constructor of a class and its methods with options."""
    if not inspect.isclass(found):
        return [(found, inspect.signature(found))]
    constructor = found.__init__ if isinstance(found.__init__, FunctionType) else None
    if constructor is None or getattr(found, "_is_protocol", False):  # takes no options, or is not called
        return []
    methods = [each for name, each in inspect.getmembers(found, inspect.isfunction) if not name.startswith("_")]
    signatures = {method: inspect.signature(method) for method in methods if method.__module__.startswith("zloader")}
    optional = {
        method: signature
        for method, signature in signatures.items()
        if any(each.kind is each.KEYWORD_ONLY for each in signature.parameters.values())
    }
    return [(found, inspect.signature(constructor)), *optional.items()]


# Importing Lightning takes 8 s.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name.endswith("lightning") else []) for name in MODULES]
)
def test_every_public_callable_names_the_keyword_that_was_meant(name: str) -> None:
    pytest.importorskip(MODULES[name])
    module = importlib.import_module(name)
    for found in public(module):
        assert pickle.loads(pickle.dumps(found)) is found
        for call, signature in calls(found):
            known = [each for each in signature.parameters.values() if each.name != "self"]
            if any(each.kind is each.VAR_KEYWORD for each in known):
                continue
            for option in (each.name for each in known if each.kind is not each.VAR_POSITIONAL):
                with pytest.raises(OptionError, match=rf"no option '{option}e'.+\b{option}\b"):
                    call(**{f"{option}e": 1})


@pytest.mark.parametrize(
    ("call", "keyword", "said"),
    [
        (zl.Loader, "batchsize", "Loader has no option 'batchsize'. Did you mean 'batch_size' or"),
        (zl.Loader, "num_workers", "Loader has no option 'num_workers'; it has: dataset, batch_size"),
        (zl.BlockShuffling, "drop_last", "has no option 'drop_last'; it has: block_size, indices, n_strata"),
        (zl.open_dataset, "batch_size", "has no option 'batch_size'; it has: url, cache"),
        (zl.Loader, "threads", "write options=zl.FetchOptions(threads=...)"),
        (zl.Cache, "max_gb", "Cache has no option 'max_gb'. Did you mean 'max_bytes'?"),
        (zl.convert, "chunk_rows", "write options=zl.ConvertOptions(chunk_rows=...)"),
        (zl.Dataset.split, "startify", "Dataset.split has no option 'startify'. Did you mean 'stratify'?"),
    ],
)
def test_keywords_that_users_try(call: Any, keyword: str, said: str) -> None:
    with pytest.raises(KeywordError) as raised:
        call(None, **{keyword: 1})
    assert said in str(raised.value)
    assert isinstance(raised.value, TypeError)
    assert raised.value.__cause__ is raised.value.__context__ is None


def test_other_type_errors_stay_as_they_are() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'dataset'") as raised:
        zl.Loader()
    assert not isinstance(raised.value, OptionError)

    class Own(zl.Loader):
        def __init__(self, dataset: zl.Dataset, *, own: int, **options: Any) -> None:
            super().__init__(dataset, **options)

    with pytest.raises(KeywordError, match="Did you mean 'batch_size'"):
        Own(None, own=1, batch_siz=2)


def test_signatures_docstrings_and_classes_stay() -> None:
    assert isinstance(zl.Loader, type)
    assert str(inspect.signature(zl.Loader)).startswith("(dataset: 'Dataset', *, batch_size: 'int' = 64")
    assert inspect.signature(zl.open_dataset).parameters["cache"].default is None
    assert zl.open_dataset.__doc__.startswith("Opens an AnnData Zarr store")
    assert inspect.getsource(zl.convert).startswith("@answers\ndef convert(")


@pytest.mark.slow
def test_a_function_that_was_imported_from_its_module_first_can_be_pickled(interpreter: Any) -> None:
    """In a process of its own, because zloader looks up a name once."""
    code = (
        "import pickle, zloader as zl\n"
        "from zloader.conversion.convert import convert\n"
        "from zloader.dataset.dataset import open_dataset\n"
        "for name, found in (('convert', convert), ('open_dataset', open_dataset)):\n"
        "    assert getattr(zl, name) is found\n"
        "    assert pickle.loads(pickle.dumps(found)) is found\n"
    )
    done = interpreter.run(code)
    assert done.returncode == 0, done.stderr
