"""The page in a real headless Chromium: no errors, hover, zoom, keys, themes, a phone."""

import re
import shutil
import zlib
from dataclasses import replace

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

from playwright import sync_api

from aurora.reports.html import page

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
pytestmark = [
    pytest.mark.full,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"),
]
LIMIT_MS = 120_000  # of the browser's start and of each wait; a busy machine needs a part of it


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=LIMIT_MS)
        yield started
        started.close()


@pytest.fixture
def opened(browser, together, tmp_path):
    """Open the page in a window; whatever the console complains of fails the test at its end."""
    complaints, contexts = [], []

    def open_page(inputs=together, **context):
        (tmp_path / "report.html").write_text(page(inputs), encoding="utf-8")
        contexts.append(browser.new_context(**context))
        tab = contexts[-1].new_page()
        tab.set_default_timeout(LIMIT_MS)
        tab.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: complaints.append(request.url) if request.url.startswith("http") else None)
        tab.goto((tmp_path / "report.html").as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def chart(tab, name):
    figure = tab.locator(f"[data-chart={name}]")
    figure.scroll_into_view_if_needed()
    tab.wait_for_selector(f"[data-chart={name}][data-drawn]")
    return figure, figure.locator("canvas").first


def picture(canvas):
    return canvas.evaluate("canvas => canvas.toDataURL()")


CHANGED = "([name, whole]) => document.querySelector(`[data-chart=${name}] canvas`).toDataURL() !== whole"
ROWS = "([name, many]) => document.querySelectorAll(`[data-chart=${name}] .view td`).length === many"


def told(tab):
    return tab.locator("#vg-tooltip-element.visible").inner_text()


@pytest.mark.parametrize(("name", "words"), [("traffic-map", "from GPU"), ("gantt", "from GPU"), ("phases", "phase")])
def test_hover_tells_what_is_under_the_pointer(opened, name, words):
    tab = opened(viewport={"width": 1200, "height": 800})
    _, canvas = chart(tab, name)
    box, shown = canvas.bounding_box(), tab.locator("#vg-tooltip-element.visible")
    for step in range(20, 90):  # down a diagonal, until something is under the pointer
        tab.mouse.move(box["x"] + box["width"] * step / 200, box["y"] + box["height"] * step / 100)
        if shown.count():
            break
    assert words in told(tab)
    tab.mouse.move(2, 2)
    tab.wait_for_selector("#vg-tooltip-element:not(.visible)", state="attached")


def test_keys_walk_and_zoom(opened):
    tab = opened(viewport={"width": 1200, "height": 800})
    figure, canvas = chart(tab, "gantt")
    figure.locator("summary").click()
    figure.locator(".view td").first.wait_for()
    many, whole = figure.locator(".view td").count(), picture(canvas)
    figure.locator(".drawings > div").focus()
    tab.keyboard.press("+")
    tab.wait_for_function(CHANGED, arg=("gantt", whole))
    tab.keyboard.press("0")
    tab.wait_for_function(ROWS, arg=("gantt", many))
    tab.keyboard.press("ArrowRight")
    first = told(tab)
    tab.keyboard.press("ArrowDown")
    assert told(tab) != first
    assert re.findall(r"[\w.]+", tab.locator("#live").inner_text()) == re.findall(r"[\w.]+", told(tab))
    tab.keyboard.press("Escape")
    assert tab.locator("#vg-tooltip-element.visible").count() == 0


def test_wheel_drag_and_buttons_zoom_and_pan(opened):
    tab = opened(viewport={"width": 1200, "height": 800})
    figure, canvas = chart(tab, "timeline-chart")
    figure.locator("summary").click()
    figure.locator(".view td").first.wait_for()
    many, whole = figure.locator(".view td").count(), picture(canvas)
    canvas.hover(position={"x": 400, "y": 120})
    tab.keyboard.down("Control")
    tab.mouse.wheel(0, -300)
    tab.keyboard.up("Control")
    tab.wait_for_function(CHANGED, arg=("timeline-chart", whole))
    near = picture(canvas)
    box = canvas.bounding_box()
    tab.mouse.move(box["x"] + 500, box["y"] + 120)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 300, box["y"] + 60, steps=4)
    tab.mouse.up()
    tab.wait_for_function(CHANGED, arg=("timeline-chart", near))
    figure.get_by_role("button", name="show all").click()
    tab.wait_for_function(ROWS, arg=("timeline-chart", many))


def test_a_choice_moves_all_charts_that_offer_it(opened):
    tab = opened(viewport={"width": 1200, "height": 4000})
    figure, _ = chart(tab, "traffic-map")
    chart(tab, "port-loads")
    chart(tab, "gantt")
    figure.get_by_label("model", exact=True).select_option("two")
    figure.get_by_label("layer", exact=True).select_option("2")
    tab.wait_for_function(
        "document.querySelector('[data-chart=port-loads] figcaption p').textContent.startsWith('model two, all layers')"
    )
    tab.wait_for_function(
        "document.querySelector('[data-chart=gantt] figcaption p').textContent.startsWith('model two, layer 2')"
    )
    assert figure.locator("figcaption p").inner_text().startswith("model two, layer 2")


def test_the_view_as_text(opened):
    tab = opened(viewport={"width": 1200, "height": 800})
    for name, rows in (("traffic-map", 12), ("port-loads", 2), ("gantt", 1)):
        figure, _ = chart(tab, name)
        figure.locator("summary").click()
        tab.wait_for_selector(f"[data-chart={name}] .view td")
        assert figure.locator(".view tr").count() > rows


def test_themes(opened):
    tab = opened(color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(ground)
    tab.get_by_role("button", name="Dark theme").click()
    dark = tab.evaluate(ground)
    assert dark != light
    tab.get_by_role("button", name="Light theme").click()
    assert tab.evaluate(ground) == light
    assert opened(color_scheme="dark").evaluate(ground) == dark


def test_text_is_legible_in_both_themes(opened):
    contrast = """() => {
      const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
      const light = (rgb) => rgb.slice(0, 3).map((part) => (part /= 255) <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
      const ground = (element) => {
        for (; element; element = element.parentElement) {
          const found = parts(getComputedStyle(element).backgroundColor);
          if (found.length < 4 || found[3] > 0) return found;
        }
      };
      return Math.min(...[...document.querySelectorAll("h1,h2,h3,p,a,dt,dd,li,th,td,caption,summary,button,label")].map((element) => {
        const [a, b] = [light(parts(getComputedStyle(element).color)), light(ground(element))].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
      }));
    }"""
    for scheme in ("light", "dark"):
        assert opened(color_scheme=scheme).evaluate(contrast) >= 4.5


def drawn_on_paper(pdf):
    """How many rectangles and texts a PDF of the page draws."""
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL)
    contents = [zlib.decompressobj().decompress(stream) for stream in streams if stream[:1] == b"x"]
    return [sum(len(re.findall(operator, content)) for content in contents) for operator in (rb"\bre\n", rb"\bT[jJ]\n")]


def test_every_chart_is_complete_on_paper(opened):
    tab = opened(viewport={"width": 390, "height": 740}, color_scheme="dark")
    whole = drawn_on_paper(tab.pdf())  # at once, before anything was scrolled to
    names = tab.locator("[data-chart]").evaluate_all("all => all.map(figure => figure.dataset.chart)")
    tab.add_style_tag(content="figure svg { visibility: hidden }")
    without = drawn_on_paper(tab.pdf())
    added = [0, 0]
    for name in names:
        style = tab.add_style_tag(content=f"[data-chart={name}] svg {{ visibility: visible }}")
        shapes, texts = (a - b for a, b in zip(drawn_on_paper(tab.pdf()), without, strict=True))
        style.evaluate("style => style.remove()")
        assert shapes >= 2, name  # rectangles: a chart of lines has few
        assert texts >= 6, name
        added = [added[0] + shapes, added[1] + texts]
    assert [a - b for a, b in zip(whole, without, strict=True)] == added


def test_paper_is_light_and_hides_nothing(opened):
    tab = opened(color_scheme="dark")
    closed = "document.querySelectorAll('details:not([open])').length"
    before = tab.evaluate(closed), tab.evaluate("document.documentElement.dataset.theme || ''")
    assert before[0] > 0
    tab.emulate_media(media="print", color_scheme="dark")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.evaluate(closed) == 0
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.evaluate("getComputedStyle(document.querySelector('figure')).backgroundColor") == "rgb(255, 255, 255)"
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert (tab.evaluate(closed), tab.evaluate("document.documentElement.dataset.theme || ''")) == before


def test_the_timeline_opens_on_the_measurement_and_shows_one_rank(opened, alone):
    tab = opened(inputs=alone, viewport={"width": 1200, "height": 800})
    figure, canvas = chart(tab, "timeline-chart")
    assert figure.locator("figcaption p").inner_text().startswith("trace b.npz, kind measured")
    whole = canvas.bounding_box()["height"]
    figure.get_by_label("show", exact=True).select_option("rank 2")
    assert canvas.bounding_box()["height"] < whole / 2
    figure.locator(".drawings > div").focus()
    tab.keyboard.press("ArrowRight")
    assert "2 computes" in told(tab)


def test_nodes_are_offered_where_there_are_several(opened, alone):
    nodes = tuple(replace(gpu, node=rank // 2) for rank, gpu in enumerate(alone.plan.cluster.gpus))
    two = replace(alone, plan=replace(alone.plan, cluster=replace(alone.plan.cluster, gpus=nodes)))
    tab = opened(inputs=two, viewport={"width": 1200, "height": 800})
    figure, _ = chart(tab, "gantt")
    ranks = [f"rank {rank}" for rank in range(4)]
    offered = figure.get_by_label("show", exact=True).locator("option").all_inner_texts()
    assert offered == ["all that send", "all that receive", "node 0", "node 1", *ranks]
    figure.get_by_label("show", exact=True).select_option("node 1")
    figure.locator(".drawings > div").focus()
    tab.keyboard.press("ArrowRight")
    assert re.search(r"port\s+[23] ", told(tab))


def test_a_large_plan_fits_a_phone(opened, large):
    tab = opened(inputs=large, viewport={"width": 390, "height": 740}, has_touch=True, is_mobile=True)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    cut = "[...document.querySelectorAll('.drawings > div')].filter(box => box.scrollWidth > box.clientWidth).length"
    assert tab.evaluate(cut) == 0


def test_a_phone_scrolls_down_only(opened):
    tab = opened(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True, device_scale_factor=2)
    for name in tab.locator("[data-chart]").evaluate_all("all => all.map(figure => figure.dataset.chart)"):
        chart(tab, name)
    assert tab.evaluate("document.documentElement.scrollWidth") == 360
    widest = "Math.max(...[...document.querySelectorAll('figure, table, dl > div')].filter(e => !e.closest('[role=region]')).map(e => e.getBoundingClientRect().right))"
    assert tab.evaluate(widest) <= 360
