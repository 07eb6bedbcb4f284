"""The report in a real browser, as its readers see it: on phone, tablet and desk, light and dark, without scripts.

Needs Chromium and Playwright. Where they are missing the tests are skipped, unless REQUIRE_BROWSER is set, as it is in
continuous integration.
"""

import os
import re
import shutil
import threading

import pytest

import synthetic_sweep as synthetic
from explicit_dropout.lab.report import build, write_report
from explicit_dropout.lab.report.serving import LiveReport, Server
from explicit_dropout.lab.store import Store

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
try:
    from playwright.sync_api import sync_playwright
except ImportError:
    sync_playwright = None
MISSING = [
    name
    for name, found in (("the browser Chromium", CHROMIUM), ("the package playwright", sync_playwright))
    if not found
]
if MISSING:
    said = f"{' and '.join(MISSING)} not found"
    if os.environ.get("REQUIRE_BROWSER"):
        raise RuntimeError(said)
    pytest.skip(said, allow_module_level=True)

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SIZES = {"phone": (360, 740), "tablet": (768, 1000), "desk": (1400, 900)}

# The contrast (WCAG 2) of every visible piece of text with what is behind it: in heat maps, the rectangle of its cell.
CONTRAST = """
() => {
  const parse = (colour) => {
    const parts = colour.match(/[\\d.]+/g).map(Number);
    return parts.length > 3 ? parts : [...parts, 1];
  };
  const over = (top, bottom) => [0, 1, 2].map((i) => top[3] * top[i] + (1 - top[3]) * bottom[i]).concat(1);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      if (at.matches("g.cell")) layers.push(parse(getComputedStyle(at.querySelector("rect")).fill));
      if (at instanceof HTMLElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    }
    return layers.reverse().reduce((bottom, top) => over(top, bottom), [255, 255, 255, 1]);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || !element.checkVisibility()) continue;
    if (["STYLE", "SCRIPT", "title"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const ground = behind(element);
    const ink = over(parse(element instanceof SVGElement ? style.fill : style.color), ground);
    const [a, b] = [luminance(ink.slice(0, 3)), luminance(ground.slice(0, 3))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([contrast, node.data.trim().slice(0, 40), String(element.getAttribute("class"))]);
  }
  return found;
}
"""

# Text of drawings that is drawn smaller than 9 pixels, or that sticks out of its drawing.
DRAWN_TEXT = """
() => [...document.querySelectorAll("svg text")].filter((t) => t.checkVisibility()).filter((text) => {
  const box = text.getBoundingClientRect(), frame = text.ownerSVGElement.getBoundingClientRect();
  const outside = box.left < frame.left - 2 || box.right > frame.right + 2 || box.bottom > frame.bottom + 3;
  return box.height < 9 || outside;
}).map((text) => text.textContent)
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A report of two experiments, one complete and one half done, as a file."""
    folder = tmp_path_factory.mktemp("report")
    store = Store(folder / "store")
    rows = (*synthetic.ROWS[:2], *synthetic.ROWS[3:5], *synthetic.ROWS[6:])
    complete = synthetic.experiment(rows, seeds=range(3), strengths=synthetic.STRENGTHS[1:], epochs=15)
    synthetic.write(store, complete.runs)
    half_store, half = synthetic.partial_store(folder / "half")
    shutil.copytree(half_store.root / "runs", store.root / "runs", dirs_exist_ok=True)
    report = build(store, [(complete, "experiments/a.py"), (half, "experiments/b.py")], name="results")
    write_report(report, folder)
    return folder, report


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser):
    """Open a page in a window of its own; messages of the console, errors and requests must be none but the page's."""
    contexts = []

    def opened(address, size="desk", scheme="light", **options):
        width, height = SIZES[size]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **options)
        contexts.append(context)
        page = context.new_page()
        page.seen, page.asked = [], []
        page.on("console", lambda message: page.seen.append(message.text))
        page.on("pageerror", lambda error: page.seen.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()


def address(pages):
    return (pages[0] / "report.html").as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_fits_its_window_and_asks_for_nothing(pages, visit, size, scheme, tmp_path):
    page = visit(address(pages), size, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    assert page.seen == []
    assert page.asked == [address(pages)]
    wide = "[...document.querySelectorAll('.scroll, .charts')].filter((b) => b.scrollWidth > b.clientWidth + 1)"
    if size == "phone":
        assert page.evaluate(f"{wide}.length") > 0  # tables scroll in boxes of their own
        assert page.evaluate(f"{wide}.every((b) => getComputedStyle(b).overflowX === 'auto')")
    else:
        assert page.evaluate(DRAWN_TEXT) == []
    folder = os.environ.get("SCREENSHOTS") or tmp_path
    shot = os.path.join(folder, f"{size}-{scheme}.png")
    page.screenshot(path=shot, full_page=True)
    assert os.path.getsize(shot) > 50_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_against_what_is_behind_it(pages, visit, scheme):
    page = visit(address(pages), "desk", scheme)
    page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    found = page.evaluate(CONTRAST)
    assert len(found) > 800
    assert [entry for entry in found if entry[0] < 4.5] == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", dark))) < 200) == (scheme == "dark")


def test_the_numbers_on_the_page_are_those_of_the_statistics(pages, visit):
    page = visit(address(pages))
    for number, part in enumerate(pages[1].parts, start=1):
        rows = page.locator(f"#e{number}-results tbody tr")
        assert rows.count() == len(part.analysis.rows)
        for i, row in enumerate(part.analysis.rows):
            cells = {cell.get_attribute("data-key"): cell.inner_text() for cell in rows.nth(i).locator("td").all()}
            assert rows.nth(i).locator(".name").inner_text() == row.name
            if row.test.n == 0:
                assert cells["test"] == row.state
                continue
            mean, sd = (float(part) for part in cells["test"].split(" ± "))
            assert mean == pytest.approx(100 * row.test.mean, abs=0.005)
            assert sd == pytest.approx(100 * row.test.sd, abs=0.005)
            assert cells["n"].split()[0] == str(row.test.n)
            if row.comparison:
                low, high = (float(b) for b in cells["difference_interval"].strip("[]").replace("−", "-").split(", "))
                expected = row.comparison.difference.interval()
                assert (low, high) == pytest.approx([100 * bound for bound in expected], abs=0.005)
                shown = float(cells["difference"].strip("▲▼\xa0").replace("−", "-"))
                assert shown == pytest.approx(100 * row.comparison.difference.mean, abs=0.005)


def test_it_works_without_scripts_and_by_keyboard(pages, visit):
    page = visit(address(pages), "desk", java_script_enabled=False)
    first, second = page.locator("#e1-grid .view").all()
    assert first.is_visible()
    assert not second.is_visible()
    page.locator("#e1-view-validation").focus()
    page.keyboard.press("ArrowRight")
    assert second.is_visible()
    assert not first.is_visible()
    details = page.locator("#e1-configurations-list")
    assert not details.locator("table").is_visible()
    details.locator("summary").press("Enter")
    assert details.locator("table").is_visible()
    page.locator("a.skip").focus()
    assert page.locator("a.skip").bounding_box()["x"] >= 0


def test_heat_maps_say_their_values_and_mark_one_choice_for_each_row(pages, visit):
    page = visit(address(pages))
    analysis = pages[1].parts[0].analysis
    shown = page.locator("#e1-grid .view-1")
    assert shown.locator("rect.chosen").count() == len(analysis.rows)
    values = shown.locator("text.value").all_text_contents()
    expected = [f"{100 * c.validation.mean:.2f}" for row in analysis.rows for c in row.configurations]
    assert sorted(values) == sorted(expected)


def test_print_is_light_and_complete(pages, visit, tmp_path):
    page = visit(address(pages), "desk", "dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(29, 30, 34)"
    assert not page.locator(".views").first.is_visible()
    page.pdf(path=tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").stat().st_size > 20_000


def test_figures_and_tables_have_names_for_those_who_cannot_see_them(pages, visit):
    page = visit(address(pages))
    table = page.get_by_role("table", name="Synthetic numbers").first
    assert table.get_by_role("rowheader").count() == len(pages[1].parts[0].analysis.rows)
    assert page.get_by_role("img", name=re.compile("explicit_v.explicit, validation accuracy")).count() >= 1
    assert page.get_by_role("heading", level=1).count() == 1


def test_the_live_page_takes_in_new_results_and_keeps_what_is_open(tmp_path, visit):
    store, made = synthetic.partial_store(tmp_path / "store")
    live = LiveReport(store.root, lambda state: build(store, [(made, "x.py")]).html(state))
    server = Server(live, port=0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        page = visit(server.address)
        assert "5 of 12 runs finished" in page.locator(".state").inner_text()
        page.locator("#e1-commands-list summary").click()
        synthetic.write(store, [run for run in made.runs if not store.folder(run).path.exists()][:2])
        page.locator(".state", has_text="7 of 12 runs finished").wait_for(timeout=15_000)
        assert page.locator("#e1-commands-list").get_attribute("open") is not None
        assert page.seen == []
        assert all(url.startswith(server.address) for url in page.asked)
        assert not any("favicon" in url for url in page.asked)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    page.wait_for_selector("#live.lost", timeout=15_000)
