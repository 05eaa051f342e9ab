"""What left zloader before its first release, and what to do instead: one line each, for whoever still uses it."""

from __future__ import annotations

_STORES = "zl.open_dataset([...]) opens several stores as one; zl.convert([...], ...) writes them as one store"
_MORE_CELLS = "convert the new cells to a second store, and open both as one: zl.open_dataset([...])"
_SOURCE = "an object with n_obs, obs, var and rows(start, stop) is a source of zl.convert: see docs/howto/own_format.md"
_PART = "give each machine a part of its own, whose mirror is then the only copy: see docs/many_machines.md"
_SIZES = "the defaults mix to within 0.01 bits of random; zl.quality measures other sizes"

# Names of modules, options of functions, such as "Loader(genes=)", and commands, such as "zloader append".
_ADVICE = {
    "zloader.AppendReport": _MORE_CELLS,
    "zloader.append": _MORE_CELLS,
    "zloader.Indexed": _STORES,
    "zloader.index": _STORES,
    "zloader.Soma": _SOURCE,
    "zloader.Suggestion": _SIZES,
    "zloader.suggest": _SIZES,
    "zloader.log1p_normalize": "use transforms=[zl.transforms.LogNormalize(1e4)]",
    "zloader.transforms.Binarize": "of counts, zl.transforms.Clip(0, 1) makes the same",
    "zloader.tokenizers.Masked": "mask tokens on the device: see docs/tokens.md",
    "zloader.ray.Collate": "iterate over zr.stream(loader), or over a zl.Loader in each worker: see docs/ray.md",
    "zloader.ray.read": "iterate over zr.stream(loader), or over a zl.Loader in each worker: see docs/ray.md",
    "zloader.ray.SharedCache": _PART,
    "zloader.ray.cache": _PART,
    "zloader.ray.keepers": _PART,
    "Loader(genes=)": "give the Loader a view: zl.Loader(dataset[:, genes])",
    "Loader(fetch_transform=)": "batch_transform is a function of your own that gets each minibatch",
    "Loader(obs_names=)": "dataset.names_of(minibatch.row) are the names of its rows",
    "Loader(remainder=)": "drop_last=True drops a minibatch that is not full",
    "Loader(parts=)": "locality='machine' has one part per machine",
    "Loader(redeal=)": "locality='machine' keeps the part of a machine in all epochs",
    "warm(bytes_per_s=)": "zloader does not limit the rate; a limit of the network, such as tc's, does",
    "Dataset.split(hold_out=)": "dataset.where(...) makes a view of rows to hold out: see docs/sets.md",
    "Dataset.split(controls=)": "split the controls and the other rows by themselves, and unite them: see docs/sets.md",
    "zloader append": _MORE_CELLS,
    "zloader index": _STORES,
    "zloader bill": "the repository has its arithmetic: python -m benchmarks.training.bill",
    "zloader quality": "in Python, zl.quality(...) measures how well rows mix, and notebook 03 draws a grid of sizes",
    "zloader genes": "in Python, dataset.highly_variable_genes(...) chooses them",
}


def absent(module: str, name: str) -> AttributeError:
    """The error for a name that a module does not have, with the advice for one that it once had."""
    advice = _ADVICE.get(f"{module}.{name}")
    return AttributeError(f"module {module!r} has no attribute {name!r}" + (f": {advice}" if advice else ""))


def advice_for_option(function: str, option: str) -> str | None:
    """The advice for an option that a function once had, such as "genes" of "Loader"."""
    return _ADVICE.get(f"{function}({option}=)")


def advice_for_command(name: str) -> str | None:
    """The advice for a command that the program once had."""
    return _ADVICE.get(f"zloader {name}")
