"""How Sphinx builds the site: `make docs`. Nothing is fetched, and every warning is an error.

The pages are Markdown, and the docstrings reStructuredText in NumPy's style.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import bfc  # noqa: E402 - it is the checkout's

project = "bfc"
author = "the bfc authors"
release = version = bfc.__version__

extensions = [
    "sphinx.ext.autodoc",
    "numpydoc",
    "myst_parser",
    "docstrings",  # ours: links, and what the stubs say of compiled functions
    "commands",  # ours: what `--help` prints
    "drawings",  # ours: the layers, and an allocation's way
    "museum",  # ours: published reports, reproduced
]
# `name` in a docstring is a link where the name is documented, and code elsewhere.
default_role = "name"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
numpydoc_show_class_members = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# README and changelog are read where they stand: what they name lies beside the site, not in it.
highlight_language = "python"

html_theme = "furo"
html_title = f"bfc {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False  # nobody is named
html_copy_source = False
