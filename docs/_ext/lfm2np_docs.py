"""The Sphinx extension of these pages: writes what is generated, and shows docstrings as they stand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import docstrings
import generated
from docutils import nodes
from run_pages import CHECKOUT
from sphinx import addnodes
from sphinx.domains.python import PythonDomain
from sphinx.util import logging

from lfm2np.errors import RequestError
from lfm2np.teaching.lab.static.build import write_static

logger = logging.getLogger(__name__)


def write_pages(app: Any) -> None:
    """Generated pages lie in folders `generated`, which git ignores; a page that is as it was is not touched."""
    if not app.config.lfm2np_generated:
        return
    wanted = {Path(app.srcdir, name): text for name, text in generated.pages().items()}
    for old in Path(app.srcdir).glob("*/generated/*"):
        if old not in wanted:
            old.unlink()
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def repo(role: str, raw: str, text: str, line: int, inliner: Any, *_: Any) -> tuple[list[Any], list[Any]]:
    """{repo}`lfm2np/truth/reference.py`: a file of the repository, which must be there."""
    if (CHECKOUT / text).exists():
        return [nodes.literal(raw, text)], []
    message = inliner.reporter.warning(f"{text}: there is no such file in the repository", line=line)
    return [inliner.problematic(raw, raw, message)], [message]


def write_laboratory(app: Any, problem: Exception | None) -> None:
    """The laboratory that computes in the browser, beside the pages."""
    if problem is not None or app.builder.format != "html" or not app.config.lfm2np_laboratory:
        return
    try:
        write_static(Path(app.outdir, "lab"), None, lambda what, done, count: None)
    except RequestError as refused:
        logger.warning("%s; -D lfm2np_laboratory=0 builds the pages without it", refused)


def laboratory(role: str, raw: str, text: str, line: int, inliner: Any, *_: Any) -> tuple[list[Any], list[Any]]:
    """{lab}`lab/index.html`: a link to a page of it, from a page that is in a folder."""
    return [nodes.reference(raw, text, refuri=f"../{text}", internal=True)], []


class IndexedPython(PythonDomain):
    """Sphinx compares each short name of a signature with the names of all objects, which takes minutes. Here only with
    those that end with the same part, which are all that it could match."""

    by_last_part: Mapping[str, dict[str, Any]] | None = None  # as soon as all pages are read

    def find_obj(self, env: Any, modname: Any, classname: Any, name: str, type: Any, searchmode: int = 0) -> Any:
        every = self.data["objects"]
        if self.by_last_part is not None:
            self.data["objects"] = self.by_last_part.get(last_part(name.removesuffix("()")), {})
        try:
            return super().find_obj(env, modname, classname, name, type, searchmode)
        finally:
            self.data["objects"] = every


def last_part(name: str) -> str:
    return name.rpartition(".")[2]


def index_names(app: Any, env: Any) -> None:
    python = env.get_domain("py")
    python.by_last_part = defaultdict(dict)
    for name, thing in python.objects.items():
        python.by_last_part[last_part(name)][name] = thing


def titles(contents: nodes.bullet_list) -> nodes.bullet_list:
    """A page's table of contents with its title alone and what lies below it, as Sphinx leaves it (titles_only)."""
    contents = contents.deepcopy()
    for entry in contents:
        if len(entry) > 1:
            below = list(entry.findall(addnodes.toctree))
            entry[1:] = [nodes.bullet_list("", *below)] if below else []
    return contents


def light_navigation(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """The tree at the side of each page is made of all pages' tables of contents, of which only titles stay: hundreds
    of functions and classes would be copied for each page."""
    env, toctree = app.env, context.get("toctree")
    if toctree is None:
        return
    if not hasattr(app, "lfm2np_titles"):
        app.lfm2np_titles = {name: titles(contents) for name, contents in env.tocs.items()}

    def of_titles(**options: Any) -> Any:
        whole = env.tocs
        env.tocs = app.lfm2np_titles if options.get("titles_only") else whole
        try:
            return toctree(**options)
        finally:
            env.tocs = whole

    context["toctree"] = of_titles


def setup(app: Any) -> dict[str, bool]:
    app.add_domain(IndexedPython, override=True)
    app.add_config_value("lfm2np_generated", True, "env", bool)
    app.add_config_value("lfm2np_laboratory", True, "html", bool)
    app.connect("builder-inited", write_pages)
    app.connect("env-updated", index_names)
    app.connect("html-page-context", light_navigation, priority=400)  # before the theme, which draws the tree
    app.connect("build-finished", write_laboratory)
    app.connect("autodoc-process-docstring", docstrings.process)
    app.connect("autodoc-process-signature", docstrings.process_signature)
    app.add_role("repo", repo)
    app.add_role("lab", laboratory)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
