"""Visit every page of a built documentation in a headless browser: browser.py SITE CHROMIUM.

Each page is loaded once, at the width of a desktop, and then narrowed to that of a phone. Problems
are printed as page, width, what is wrong. Any problem makes the exit status 1. Four browsers share
the pages: on two cores they need two thirds of one browser's time.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import Page, TimeoutError, sync_playwright

WIDTHS = (1280, 390)
BROWSERS = 4

# What was not drawn: text outside of code that still looks like TeX, a table, an include or a
# docstring's markup, a formula that MathJax could not read or did not touch, an image that is not
# there.
UNDRAWN = r"""async () => {
  await document.fonts.ready;
  await window.MathJax?.startup?.promise;
  const problems = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    if (node.parentElement.closest("code, pre, script, style, mjx-container")) continue;
    const found =
      node.data.match(/\\([([{]|[a-zA-Z]+(?![a-zA-Z0-9]))|\$\$|--8<--|::$|={8}|^\|.*\|$/m);
    if (found) problems.push(`raw text "${node.data.trim().slice(0, 60)}"`);
  }
  for (const x of document.querySelectorAll(".arithmatex:not(:has(mjx-container))"))
    problems.push(`a formula that was not drawn: ${x.textContent.slice(0, 60)}`);
  for (const x of document.querySelectorAll("mjx-container"))
    if (/\\/.test(x.textContent) || x.querySelector("[data-mjx-error]"))
      problems.push(`a formula with an error: ${x.textContent.slice(0, 60)}`);
  for (const x of document.querySelectorAll("article blockquote blockquote"))
    problems.push(`a doctest as a quotation: ${x.textContent.trim().slice(0, 60)}`);
  for (const x of document.images)
    if (!x.complete || x.naturalWidth === 0) problems.push(`no image: ${x.src}`);
  return problems;
}"""

# A formula that is smaller than MathJax made it, and what sticks out of the page, or is cut off. A
# box that scrolls may hold more than fits. The theme lets such a box reach 16 px over the text's
# edge.
OVERFLOW = r"""() => {
  const MARGIN = 16;
  const root = document.documentElement, width = root.clientWidth, problems = [];
  if (root.scrollWidth > width) problems.push(`the page is ${root.scrollWidth} px wide`);
  const name = (x) => `<${x.localName} class="${x.getAttribute("class") ?? ""}"> ` +
    `"${x.textContent.trim().replace(/\s+/g, " ").slice(0, 40)}"`;
  const held = (x) => {
    for (let y = x.parentElement; y && !y.matches("article"); y = y.parentElement)
      if (y.matches("mjx-container, svg") || /auto|scroll/.test(getComputedStyle(y).overflowX))
        return true;
    return false;
  };
  for (const x of document.querySelectorAll("mjx-container > svg")) {
    const drawn = x.getBoundingClientRect().width, whole = x.width.baseVal.value;
    const sizes = `${Math.round(whole)} px has ${Math.round(drawn)}`;
    if (x.checkVisibility() && drawn < whole - 1)
      problems.push(`a formula of ${sizes}: ${name(x.closest("td, li, p, div"))}`);
  }
  const article = document.querySelector("article");
  const edge = article ? article.getBoundingClientRect().right + MARGIN : width;
  for (const x of article?.querySelectorAll("*") ?? []) {
    const box = x.getBoundingClientRect(), style = getComputedStyle(x);
    if (box.width <= 1 || style.visibility === "hidden" || held(x)) continue;
    if (box.right > edge)
      problems.push(`${Math.round(box.right - edge)} px too wide: ${name(x)}`);
    else if (/hidden|clip/.test(style.overflowX) && x.scrollWidth > x.clientWidth + 1)
      problems.push(`${x.scrollWidth - x.clientWidth} px cut off: ${name(x)}`);
  }
  return problems.slice(0, 5);
}"""

# A dark page swallows black ink on no background. More than a tenth of the ink is a problem.
DARK = r"""() => [...document.querySelectorAll("article img")].flatMap((image) => {
  const hidden = !image.naturalWidth || !image.getClientRects().length;
  if (hidden || image.src.endsWith("#only-dark")) return [];
  const [w, h] = [image.naturalWidth, image.naturalHeight];
  const pen = new OffscreenCanvas(w, h).getContext("2d");
  pen.drawImage(image, 0, 0);
  const { data } = pen.getImageData(0, 0, w, h);
  let ink = 0, black = 0;
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] > 128) {
      ink += 1;
      black += Math.max(data[i], data[i + 1], data[i + 2]) < 64;
    }
  const clear = data[3] < 255;
  return clear && black > ink / 10 ? [`black on dark pages: ${image.src}`] : [];
})"""


def visit(page: Page, url: str, host: str) -> list[str]:
    """Every problem of one page."""
    problems: list[str] = []

    def asked(request) -> None:
        if not request.url.startswith((host, "data:", "blob:")):
            problems.append(f"asks another host: {request.url}")

    def answer(response) -> None:
        if response.status >= 400:
            problems.append(f"status {response.status}: {response.url}")

    def said(message) -> None:
        if message.type in ("error", "warning"):
            problems.append(f"console: {message.text}")

    listeners = {
        "request": asked,
        "response": answer,
        "console": said,
        "pageerror": lambda error: problems.append(f"script: {error}"),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        if width == WIDTHS[0]:
            page.goto(url)
            problems += page.evaluate(UNDRAWN)
        problems += [f"at {width} px: {x}" for x in page.evaluate(OVERFLOW)]
    if page.query_selector("article img"):
        page.emulate_media(color_scheme="dark")
        page.reload()
        try:
            page.wait_for_selector("body[data-md-color-scheme=slate]")
            problems += page.evaluate(DARK)
        except TimeoutError:
            problems.append("no dark mode")
        page.emulate_media(color_scheme="light")
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    return [*dict.fromkeys(problems)]  # a page with images is loaded twice


SEARCHES = {
    "SGHMC": "",
    "choose kernel": "choosing.html",
    "warmup": "step_size.html",
    "dataloader": "how_to/data.html",
    "diagnose flagged": "how_to/flagged.html",
    "marketing mix": "how_to/marketing_mix.html",
    "new data": "how_to/new_rows.html",
    "pymc": "how_to/from_pymc.html",
    "cite": "about.html",
    "nnx": "how_to/modules.html",
}
"""What readers type, and the page that must be among the first three answers; "" is any."""


def search(page: Page, address: str) -> list[str]:
    """The search box has to find pages, with nothing but the site's own index."""
    problems = []
    page.set_viewport_size({"width": WIDTHS[0], "height": 900})
    for words, wanted in SEARCHES.items():
        page.goto(address)
        box = page.get_by_role("textbox", name="Search")
        box.fill(words)
        for _ in range(20):
            box.press("End")  # the page may not have listened yet when the box was filled
            try:
                page.wait_for_selector(".md-search-result__item", timeout=500)
                break
            except TimeoutError:
                continue
        else:
            problems.append(f"search for {words!r} finds nothing")
            continue
        links = page.query_selector_all(".md-search-result__item > a")
        found = [link.get_attribute("href").partition("?")[0] for link in links[:3]]
        if not any(wanted in link for link in found):
            problems.append(f"search for {words!r} finds {found}")
    return problems


def visit_all(names: list[str], host: str, site: Path, chromium: str) -> dict[str, list[str]]:
    """The problems of each of these pages."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        page = browser.new_page(color_scheme="light")
        problems = {name: visit(page, host + name, host) for name in names}
        if "index.html" in problems:
            problems["index.html"] += search(page, host)
            page.goto("about:blank")
            problems["index.html"] += search(page, (site / "index.html").as_uri())
        browser.close()
    return problems


def main() -> None:
    """Serve the site to nobody else, visit it, print what is wrong."""
    site, chromium = Path(sys.argv[1]).resolve(), sys.argv[2]

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"http://127.0.0.1:{server.server_port}/"
    names = sorted(x.relative_to(site).as_posix() for x in site.rglob("*.html"))
    if not names:
        sys.exit(f"no pages in {site}")
    checks: dict[str, list[str]] = {}
    with ThreadPoolExecutor(BROWSERS) as pool:
        shares = [names[i::BROWSERS] for i in range(BROWSERS)]
        for problems in pool.map(
            partial(visit_all, host=host, site=site, chromium=chromium), shares
        ):
            checks |= problems
    for name in names:
        for problem in checks[name]:
            print(f"{name}: {problem}")
    found = sum(map(len, checks.values()))
    print(f"{len(names)} pages at {' and '.join(map(str, WIDTHS))} px: {found} problems")
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
