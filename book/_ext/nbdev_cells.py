"""Show an nbdev notebook to its readers.

The `#|` directives at the top of a code cell are instructions, not code. They
are taken out, and carried out:

    #| default_exp, #| hide       the cell is left out
    #| export, #| exports         the cell is marked as part of the package
    #| hide_input, #| hide_output the code, or its output, is folded
    #| label: fig-name            the cell's picture is a figure: its name,
    #| fig-cap: ...               its caption (may hold mathematics, citations)
    #| fig-alt: ...               and its text for those who cannot see it

A directive given again continues the one before it.
"""
import base64
import io
import json
import re

from PIL import Image
from sphinx.util import logging

LOG = logging.getLogger(__name__)

DIRECTIVE = re.compile(r"#\s*\|\s*(?P<name>[\w-]+):?\s*(?P<text>.*?)\s*$")
LEFT_OUT = {"default_exp", "hide"}
TAGS = {
    "export": "nbdev-export",
    "exports": "nbdev-export",
    "exporti": "nbdev-export",
    "hide_input": "hide-input",
    "hide_output": "hide-output",
}


def split(source):
    """The directives at the top of a cell, as a dict, and the code below them."""
    lines, directives = source.splitlines(), {}
    while lines and (found := DIRECTIVE.match(lines[0])):
        name, text = found["name"], found["text"]
        directives[name] = f"{directives.get(name, '')} {text}".strip()
        lines.pop(0)
    return directives, "\n".join(lines).strip("\n")


def figure(directives):
    """What makes MyST-NB take a cell's picture for a numbered figure."""
    if "label" not in directives:
        return {}
    for needed in ("fig-cap", "fig-alt"):
        if needed not in directives:
            raise ValueError(f"figure {directives['label']} has no {needed}")
    return {
        "figure": {"name": directives["label"], "caption": directives["fig-cap"]},
        "image": {"alt": directives["fig-alt"]},
        "code_prompt_show": "Show the plotting code",
        "code_prompt_hide": "Hide the plotting code",
    }


def width(outputs):
    """How wide the cell's picture is in CSS pixels: as drawn, 96 to the inch."""
    for output in outputs:
        if png := output.get("data", {}).get("image/png"):
            image = Image.open(io.BytesIO(base64.b64decode("".join(png))))
            dpi = image.info.get("dpi", (96, 96))[0]
            return {"width": f"{round(96 * image.width / dpi)}px"}
    return {}


def shown(cell):
    """A code cell as readers see it, or None if they do not."""
    directives, code = split("".join(cell["source"]))
    if LEFT_OUT & directives.keys() or not (code or cell["outputs"]):
        return None
    meta = dict(cell["metadata"])
    tags = [tag for name, tag in TAGS.items() if name in directives]
    meta["tags"] = meta.get("tags", []) + tags
    mystnb = figure(directives)
    mystnb["image"] = mystnb.get("image", {}) | width(cell["outputs"])
    meta["mystnb"] = mystnb
    return {**cell, "source": code, "metadata": meta}


def on_source_read(app, docname, source):
    if str(app.env.doc2path(docname)).endswith(".ipynb"):
        nb = json.loads(source[0])
        for cell in nb["cells"]:
            if any(o["output_type"] == "error" for o in cell.get("outputs", [])):
                LOG.warning("cell %s of %s raised an error", cell.get("id"), docname)
        cells = (shown(c) if c["cell_type"] == "code" else c for c in nb["cells"])
        nb["cells"] = [c for c in cells if c is not None]
        source[0] = json.dumps(nb)


def name_module(app, pagename, templatename, context, doctree):
    """Tell the style sheet which module the page's marked cells are exported to."""
    path = str(app.env.doc2path(pagename))
    if doctree is not None and path.endswith(".ipynb"):
        with open(path, encoding="utf-8") as file:
            found = re.search(r"#\s*\|\s*default_exp\s+([\w.]+)", file.read())
        if found:
            style = f"<style>:root{{--fl-module:'flashlit.{found[1]}'}}</style>"
            context["metatags"] = context.get("metatags", "") + style


def setup(app):
    app.connect("source-read", on_source_read)
    app.connect("html-page-context", name_module)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
