"""The public names of the package, and the modules that are imported to show help."""

from __future__ import annotations

import ast
import importlib.util
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import counts, write_store

import zloader as zl


def run(script, *arguments):
    """Runs a script in a new process. Returns its output, parsed as JSON."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_public_names_are_importable_and_listed():
    assert {name for name in dir(zl) if not name.startswith("__")} == {*zl.__all__, *zl._FOLDERS}
    assert "__version__" in dir(zl)
    for name in zl.__all__:
        found = getattr(zl, name)
        assert found.__name__ == name
        assert getattr(sys.modules[found.__module__], name) is found
        assert pickle.loads(pickle.dumps(found)) is found


@pytest.mark.parametrize("name", zl.__all__)
def test_every_public_name_has_an_example(name):
    """The tests of each folder run them."""
    assert ">>> " in getattr(zl, name).__doc__


def test_type_checkers_see_the_public_names():
    """The imports for type checkers, the lazy lookup and `__all__` have the same names and modules."""
    tree = ast.parse(Path(zl.__file__).read_text())
    (typing_only,) = [node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    seen = {alias.name: statement.module for statement in typing_only.body for alias in statement.names}
    assert seen == zl._MODULES | dict.fromkeys(zl._FOLDERS, "zloader")
    assert sorted([*zl.__all__, *zl._FOLDERS]) == sorted([*seen, "ZloaderError"])


@pytest.mark.parametrize("folder", zl._FOLDERS)
def test_the_names_of_a_folder_are_public(folder):
    found = getattr(zl, folder)
    for name in found.__all__:
        assert ">>> " in getattr(found, name).__doc__
        assert pickle.loads(pickle.dumps(getattr(found, name))) is getattr(found, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'zloader' has no attribute 'Lodaer'"):
        _ = zl.Lodaer
    with pytest.raises(ImportError, match="Lodaer"):
        from zloader import Lodaer  # noqa: F401


def test_public_names_differ_from_folder_names():
    """Importing a folder sets an attribute of the package, which would hide a function with the same name."""
    folders = {path.name for path in Path(zl.__file__).parent.iterdir() if path.is_dir()}
    assert not folders & {*zl.__all__}


_HELP = """
import contextlib, io, json, sys
before = set(sys.modules)
import zloader.commands.cli
from typer.main import get_command
command = get_command(zloader.commands.cli.app)
pages = [[], *([name] for name in command.commands), *(["cache", name] for name in command.commands["cache"].commands)]
shown = io.StringIO()
for names in pages:
    with contextlib.redirect_stdout(shown):
        command([*names, "--help"], prog_name="zloader", standalone_mode=False)
roots = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({
    "pages": len(pages),
    "usages": shown.getvalue().count("Usage: "),
    "roots": sorted(root for root in roots - sys.stdlib_module_names if not root.startswith("_sysconfigdata")),
    "zloader": sorted(name for name in sys.modules if name.startswith("zloader.")),
}))
"""
# typer, rich and their (optional) dependencies.
LIGHT = {"annotated_doc", "annotated_types", "attr", "click", "colorama", "markdown_it", "mdurl", "pydantic",
         "pydantic_core", "pygments", "rich", "shellingham", "typer", "typing_extensions", "typing_inspection",
         "zloader"}  # fmt: skip


@pytest.mark.slow
def test_help_imports_only_small_packages():
    """For every command. Importing numpy alone would take longer than showing the help."""
    seen = run(_HELP)
    assert seen["pages"] > 10
    assert seen["usages"] == seen["pages"]
    assert set(seen["roots"]) <= LIGHT
    own = {name for name in seen["zloader"] if not name.startswith("zloader.commands")}
    assert own == {f"zloader.common{name}" for name in ("", ".errors", ".machine", ".messages", ".version")}


def test_importing_zloader_imports_only_small_packages():
    loaded = run("import json, sys, zloader; print(json.dumps(sorted(sys.modules)))")
    assert not {"anndata", "dask", "numba", "numpy", "pandas", "tensorstore", "torch", "zarr"} & set(loaded)


def test_the_import_names_wsl_on_windows():
    assert run(_WINDOWS).startswith("ImportError: zloader runs on Linux and macOS")


_WINDOWS = """
import json, sys
sys.platform = "win32"
try:
    import zloader
except ImportError as error:
    assert "WSL" in str(error)
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""

# Each script uses zloader in one way. It prints the libraries that were imported and the threads that imported them.
_RECORD = """
import json, sys, threading

LARGE = {"aiohttp", "anndata", "botocore", "dask", "h5py", "numba", "s3fs", "tensorstore", "torch"}
imported_by = {}

class Recorder:
    def find_spec(self, name, path, target=None):
        if name in LARGE:
            imported_by.setdefault(name, threading.current_thread().name)

sys.meta_path.insert(0, Recorder())
import zloader as zl
store, cache, source = sys.argv[1:]
"""
_PATHS = {
    "open": """
dataset = zl.open_dataset(store, cache=cache)
dataset.n_vars, dataset.var_names, dataset.obs(), dataset.categories("cell_type"), dataset.obsm_array("X_pca")
""",
    "train": """
dataset = zl.open_dataset(store, cache=cache)
for layout in ("csr", "dense", "scipy"):
    for minibatch in zl.Loader(dataset, obs=["cell_type", "donor", "n_counts"], obsm=["X_pca"], layout=layout):
        pass
""",
    "take": """
zl.open_dataset(store).take([3, 5])
""",
    "convert": """
zl.convert(source, cache + "/converted.zarr", progress=False)
""",
    "convert shuffled": """
zl.convert(source, cache + "/converted.zarr", progress=False, options=zl.ConvertOptions(shuffle_seed=1))
""",
}
_NEEDED = {
    "open": set(),
    "train": {"torch"},
    "take": {"anndata", "h5py", "numba"},
    "convert": {"anndata", "h5py"},
    "convert shuffled": {"anndata", "h5py", "numba"},
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A store, and the h5ad that it was made from."""
    folder = tmp_path_factory.mktemp("stored")
    adata = counts(300, 20)
    adata.obsm["X_pca"] = np.zeros((300, 3))
    write_store(adata, folder / "cells.zarr", folder)
    return folder / "cells.zarr", folder / "source.h5ad"


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path, marks=[] if path == "train" else [pytest.mark.slow]) for path in _PATHS]
)
def test_only_the_libraries_that_are_needed_are_imported(path, stored, tmp_path):
    """And by the main thread: a process forked while another thread imports a library could never import it."""
    store, source = stored
    report = "\nprint(json.dumps(imported_by))"
    imported_by = run(_RECORD + _PATHS[path] + report, store, tmp_path, source)
    # anndata imports dask if it is there, and dask imports sparse, which imports numba.
    theirs = {"dask"} | ({"numba"} if importlib.util.find_spec("sparse") else set())
    theirs = theirs & imported_by.keys() if "anndata" in _NEEDED[path] else set()
    assert imported_by.keys() == _NEEDED[path] | theirs
    assert set(imported_by.values()) <= {"MainThread"}


def test_threads_may_call_compiled_functions_first():
    """Compiling the same function, and a function that calls it, in several threads at once."""
    assert run(_FIRST_CALLS) == 8 * [list(range(50))]


_FIRST_CALLS = """
import json, threading
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from zloader.order.permutation import permute

barrier = threading.Barrier(8)

def call(key):
    barrier.wait()
    return sorted(permute(np.arange(50), 50, key).tolist())

with ThreadPoolExecutor(8) as threads:
    print(json.dumps(list(threads.map(call, range(8)))))
"""
