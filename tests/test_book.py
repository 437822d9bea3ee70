"""Every page of the built book, in a real browser."""
import contextlib
import functools
import json
import os
import re
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from flashlit.draw import COLORS

ROOT = Path(__file__).parents[1]
SITE = ROOT / "_site/_build/html"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def pages():
    """Page names in the order of the table of contents."""
    def files(node):
        if isinstance(node, dict):
            for key, value in node.items():
                yield from [value] if key in ("root", "file") else files(value)
        elif isinstance(node, list):
            for value in node:
                yield from files(value)

    return list(files(yaml.safe_load((ROOT / "_toc.yml").read_text())))


def browser_path():
    names = filter(None, (os.environ.get("CHROMIUM"), *BROWSERS))
    return next(filter(None, map(shutil.which, names)), None)


@contextlib.contextmanager
def serve(folder):
    """Serve a folder on a free port of the loopback interface."""
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def source(page):
    """What an author wrote on a page that a reader sees."""
    path = next(p for p in ROOT.glob(f"{page}.*") if p.suffix in (".ipynb", ".md"))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells)


def need(condition, reason):
    """Skip for the reason given, or fail where a browser is required."""
    if not condition:
        strict = os.environ.get("FLASHLIT_NEED_BROWSER") == "1"
        (pytest.fail if strict else pytest.skip)(reason)


@pytest.fixture(scope="session")
def browser():
    need(SITE.is_dir(), "the book is not built: run `make book`")
    need(browser_path(), f"no browser found among {', '.join(BROWSERS)}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=browser_path(), args=ARGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def base(browser):
    with serve(SITE) as address:
        yield address


@pytest.fixture
def tab(browser):
    """A tab that keeps what went wrong in it, and what it asked for."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.faults, tab.asked = [], []
    tab.on("console", lambda m: m.type == "error" and tab.faults.append(m.text))
    tab.on("pageerror", lambda e: tab.faults.append(str(e)))
    tab.on("requestfailed", lambda r: tab.faults.append(f"failed: {r.url}"))
    tab.on("response", lambda r: r.status >= 400 and tab.faults.append(f"{r.status}: {r.url}"))
    tab.on("request", lambda r: tab.asked.append(r.url))
    yield tab
    tab.close()


def ready(tab):
    """Wait until MathJax, if the page has it, has set its last equation."""
    tab.evaluate("() => window.MathJax ? MathJax.startup.promise : null")


def outside(tab, base):
    return [u for u in tab.asked if not u.startswith((base, "data:", "blob:"))]


# The text of the page proper, without code and mathematics.
SHOWN = """() => {
  const main = document.querySelector("article").cloneNode(true);
  main.querySelectorAll("pre, code, mjx-container, script, style").forEach(e => e.remove());
  return main.textContent;
}"""
IMAGES = """() => [...document.querySelectorAll("article img")].map(i => ({
  src: i.getAttribute("src"), alt: i.alt, width: i.naturalWidth,
  fits: i.getBoundingClientRect().right <= i.closest("section").getBoundingClientRect().right + 1,
  drawn: i.closest(".cell_output") !== null,
  number: i.closest("figure")?.querySelector(".caption-number")?.textContent ?? "",
}))"""
# What sticks out to the right, if the page can be scrolled sideways.
OVERFLOW = """() => {
  const root = document.documentElement;
  const wide = e => e.getBoundingClientRect().right > root.clientWidth + 1;
  return root.scrollWidth <= root.clientWidth ? [] :
    [...document.querySelectorAll("body *")].filter(wide).map(e => e.outerHTML.slice(0, 90));
}"""
# Equations that are cut at their right edge.
CUT = """() => [...document.querySelectorAll("article mjx-container[display=true]")]
  .filter(e => e.scrollWidth > e.clientWidth + 1)
  .map(e => `${e.scrollWidth} in ${e.clientWidth}: ` + e.parentElement.id)"""
LEAK = r"#\s*\|\s*(export|hide|label|fig-|default_exp)"
BAD_MATH = "article mjx-container :is([data-mml-node=merror], [fill=red])"


def has_math(text):
    return re.search(r"\$[^$\n]+\$|\$\$", re.sub(r"`[^`]*`", "", text))


@pytest.mark.parametrize("page", pages())
def test_page(tab, base, page):
    tab.goto(f"{base}/{page}.html", wait_until="load")
    assert outside(tab, base) == []
    ready(tab)
    written, shown = source(page), tab.evaluate(SHOWN)
    assert tab.faults == []

    if has_math(written):
        assert tab.locator("article mjx-container").count() > 0
    assert tab.locator(BAD_MATH).count() == 0
    assert not re.search(r"\$\$|\\\(|\\\[", shown)
    assert not re.search(LEAK, tab.locator("article").text_content())

    images = tab.evaluate(IMAGES)
    for image in images:
        assert image["width"] > 0, f"not decoded: {image}"
        assert image["fits"], f"wider than the text: {image}"
        alt = image["alt"].strip()
        assert alt and not alt.endswith(".png"), f"no alternative text: {image}"
        assert image["number"] or not image["drawn"], f"not a numbered figure: {image}"
    labels = set(re.findall(r"#\s*\|\s*label:\s*(fig-[\w-]+)", written))
    assert sum(image["drawn"] for image in images) == len(labels)

    for width in (1280, 390):
        for scheme in ("light", "dark"):
            tab.set_viewport_size({"width": width, "height": 900})
            tab.evaluate("s => document.documentElement.dataset.theme = s", scheme)
            assert tab.evaluate(OVERFLOW) == [], f"wider than {width} px ({scheme})"
        assert tab.evaluate(CUT) == [], f"equations cut at {width} px"

    for solution in tab.locator("article .solution").all():
        text = solution.locator("section").first
        assert not text.is_visible(), "a solution is open"
        solution.locator(".admonition-title, summary").first.click()
        text.wait_for(state="visible", timeout=2000)


def test_style(tab, base):
    """Exported code has its rule, and the notation page the colours of the package."""
    tab.goto(f"{base}/nbs/01_scores.html", wait_until="load")
    rule = "e => getComputedStyle(e).borderLeftWidth"
    exported = tab.locator(".tag_nbdev-export div.cell_input").first
    assert exported.evaluate(rule) == "4px"

    tab.goto(f"{base}/book/notation.html", wait_until="load")
    shade = "e => getComputedStyle(e).backgroundColor"
    shown = [e.evaluate(shade) for e in tab.locator(".fl-swatch").all()]
    rgb = [tuple(bytes.fromhex(c[1:])) for c in COLORS.values()]
    assert sorted(shown) == sorted(f"rgb{x}" for x in rgb)


def test_every_page_is_listed():
    written = [*ROOT.glob("nbs/*.ipynb"), *ROOT.glob("book/*.md")]
    names = {str(p.relative_to(ROOT).with_suffix("")) for p in written}
    assert names == set(pages())


def test_from_a_file(tab, browser):
    """The book can be read without a server."""
    page = pages()[1]
    tab.goto((SITE / f"{page}.html").as_uri(), wait_until="load")
    ready(tab)
    assert tab.faults == []
    assert outside(tab, "file://") == []
    assert tab.locator("article mjx-container").count() > 0


def test_search(tab, base):
    tab.goto(f"{base}/search.html?q=notation", wait_until="load")
    tab.wait_for_selector("#search-results li a", timeout=10_000)
    assert tab.faults == []
