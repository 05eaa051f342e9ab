"""Settings of the site. Build it from the root of the repository, with its pages where they are:

    sphinx-build -W -c docs . build/site

The source directory is the whole repository, so a link from one page to another is the same here and on a web site that
shows the repository.
"""

import importlib.util
import sys
from pathlib import Path

import anndata  # noqa: F401 - before pyarrow may be mocked, which pandas looks at

import zloader

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "extensions"))

project = "zloader"
author = "the zloader developers"
copyright = author
release = zloader.__version__

root_doc = "docs/index"
include_patterns = [
    "docs/*.md", "docs/**/*.md", "notebooks/*.ipynb", "benchmarks/*.md", "zloader/data/README.md",
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "RELEASING.md", "SECURITY.md", "CODE_OF_CONDUCT.md",
]  # fmt: skip
exclude_patterns = [".*", "build", "dist", "tests", "**/__pycache__"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "cli_reference",
    "docstrings",
    "unbroken",
]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
nb_execution_mode = "off"  # tests/test_notebooks.py runs the notebooks, and their outputs are committed

# Docstrings name code in single back-quotes.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autosummary_generate = False
python_maximum_signature_line_length = 88
# The reference builds without the packages of extras that are not installed.
autodoc_mock_imports = [
    name
    for name in ("accelerate", "lightning", "pyarrow", "ray", "scvi", "transformers")
    if importlib.util.find_spec(name) is None
]

# Small tables of the names that the reference mentions, so that no build needs the network.
intersphinx_mapping = {
    name: (url, str(HERE / "inventories" / f"{name}.txt"))
    for name, url in (
        ("anndata", "https://anndata.readthedocs.io/en/stable/"),
        ("torch", "https://docs.pytorch.org/docs/stable/"),
        ("zarr", "https://zarr.readthedocs.io/en/stable/"),
    )
}

html_theme = "sphinx_book_theme"
html_title = "zloader"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("search.js", {"defer": "defer"})]
templates_path = ["_templates"]
html_additional_pages = {"index": "to_start.html"}
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "show_navbar_depth": 1,
    "use_download_button": False,
    "use_fullscreen_button": False,
    # Wide tables take the place of the list of sections, which that page has at its top.
    "secondary_sidebar_items": {"**": ["page-toc"], "docs/benchmarks": []},
}
copybutton_exclude = ".linenos, .gp, .go"
