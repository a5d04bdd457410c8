"""Sphinx: python -m sphinx -W --keep-going -b html docs docs/_build/html"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]
os.environ["COLUMNS"] = "88"  # of the help texts of the command line

import lfm2np  # noqa: E402

project = "lfm2np"
version = release = lfm2np.__version__
copyright = "the authors of lfm2np, Apache License 2.0"
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "lfm2np_docs"]
exclude_patterns = ["_build", "_ext"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
nitpicky = True  # a {py:obj} that is not in the reference is an error; types in signatures are no such promise
suppress_warnings = ["ref.python"]  # a short name in a signature that several rooms have: it links to one of them
nitpick_ignore_regex = [("py:(class|data|exc|func|meth|attr)", ".*")]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"Array": "Array"}  # as the source writes it
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False

copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"

html_theme = "furo"
html_title = f"lfm2np {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # it would be fetched, which no browser does from disk
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
