"""Pictures of the built book: python tests/screenshots.py OUTDIR [PAGE...]

A page is named as in _toc.yml (nbs/01_scores); without one, all are taken, each
wide and narrow, light and dark.
"""
import sys
from pathlib import Path

from test_book import SITE, browser_path, pages, serve
from playwright.sync_api import sync_playwright

SIZES = {"wide": 1280, "narrow": 390}


def main(folder, *names):
    Path(folder).mkdir(parents=True, exist_ok=True)
    with sync_playwright() as p, serve(SITE) as base:
        browser = p.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        for size, width in SIZES.items():
            for scheme in ("light", "dark"):
                tab = browser.new_page(
                    viewport={"width": width, "height": 900}, color_scheme=scheme
                )
                for name in names or pages():
                    tab.goto(f"{base}/{name}.html", wait_until="load")
                    tab.wait_for_timeout(300)
                    file = f"{name.replace('/', '-')}-{size}-{scheme}.png"
                    tab.screenshot(path=Path(folder, file), full_page=True)
                    print(Path(folder, file))
                tab.close()
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
