"""Serve MathJax with the site: one file, copied out of a package on PyPI."""
import shutil
from importlib.metadata import files
from pathlib import Path


def copy(app, exception):
    if exception is None and app.builder.format == "html":
        packed = files("sphinx-mathjax-offline")
        source = next(f for f in packed if f.name == "tex-svg.js").locate()
        folder = Path(app.outdir, "_static", "mathjax")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / source.name)


def setup(app):
    app.connect("build-finished", copy)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
