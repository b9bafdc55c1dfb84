"""The page in a real browser: it loads in peace, says the log's numbers, and bears a phone, the dark and a keyboard."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
from runlogs import hostile, lines, train

from pliant.apps import report, watch
from pliant.apps.report.run import LoggedClasses
from pliant.core import text as markup
from pliant.session import run_log as runlog

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
sync_api = pytest.importorskip("playwright.sync_api", reason="the page is not tested: pip install playwright")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="the page is not tested: no Chromium here. Install one (apt install chromium) or set CHROMIUM=…"
)

CONTRAST = """() => {
  const linear = (v) => v <= 10 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
  const parse = (text) => text.match(/[\\d.]+/g).map((n, i) => Number(n) * (text.startsWith("color(") && i < 3 ? 255 : 1));
  const behind = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (!e.matches(".dot") && (c.length < 4 || c[3] > 0)) return c; } };  // a dot's name stands beside it
  const out = [];
  for (const e of document.querySelectorAll("main *, header *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.closest("svg") || !e.checkVisibility()) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    out.push([(a + .05) / (b + .05), e.tagName + "." + e.className + " " + e.textContent.slice(0, 30)]);
  }
  return out.sort((x, y) => x[0] - y[0])[0];
}"""
SHADES = """() => ["v1", "v2", "v3", "v4", "v5"].map((name) => {
  const color = getComputedStyle(document.querySelector(`.cells i.${name}`)).backgroundColor;
  const [r, g, b] = color.match(/[\\d.]+/g).map(Number);
  return .2126 * r + .7152 * g + .0722 * b; })"""
WIDTHS = "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"


@dataclass
class Tab:
    """A page of a browser, with all that it complained about and asked for."""

    page: sync_api.Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


Opens = Callable[..., Tab]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "chain")


@pytest.fixture(scope="module")
def files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages to look at: one run, three runs, one run told by somebody hostile."""
    place = tmp_path_factory.mktemp("pages")
    run, bad = report.load(folder), report.load(hostile(place / "bad", folder))
    runs = {"one": [run], "three": report.named([run, run, run]), "hostile": [bad], "first": [_first_round(run)]}
    for name, shown in runs.items():
        (place / f"{name}.html").write_text(report.page(shown), encoding="utf-8")
    return {name: place / f"{name}.html" for name in runs}


def _first_round(run: report.Run) -> report.Run:
    """The same run while it trains, in its first round, with one step that took a thousand times as long."""
    first = run.chosen[0]
    slow = replace(first.steps[1], seconds=1000 * (first.steps[1].seconds or 1.0))
    chosen = replace(first, steps=(first.steps[0], slow, first.steps[2]))
    classes = LoggedClasses("validation split", ("cat", "dog"), {(0, 0): 3, (0, 1): 1, (1, 0): 3, (1, 1): 1})
    return replace(run, chosen=(chosen,), ended=False, total_steps=12, began=(100.0, 0), written=103.0, by_class=(classes,))


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_tab(browser: sync_api.Browser) -> Iterator[Opens]:
    """Opens an address; in the end, whatever was opened must have loaded in peace."""
    tabs: list[Tab] = []

    def open_(address: str, width: int = 1100, dark: bool = False) -> Tab:
        scheme = "dark" if dark else "light"
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        tab = Tab(page)
        page.on(
            "console", lambda message: tab.complaints.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        page.on("dialog", lambda dialog: tab.complaints.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: tab.requests.append(request.url))
        page.goto(address)
        tabs.append(tab)
        return tab

    yield open_
    for tab in tabs:
        assert tab.complaints == []
        tab.page.close()


@pytest.mark.parametrize("name", ["one", "three", "hostile"])
def test_it_loads_in_peace_and_asks_the_network_for_nothing(open_tab: Opens, files: dict[str, Path], name: str) -> None:
    tab = open_tab(files[name].as_uri())
    tab.page.wait_for_timeout(100)
    assert tab.requests == [files[name].as_uri()] and tab.complaints == []
    assert tab.page.locator("script").count() == 1 and tab.page.locator("main script, main img, main iframe").count() == 0


def test_the_map_has_a_cell_per_unit_and_round(open_tab: Opens, files: dict[str, Path], folder: Path) -> None:
    page, told = open_tab(files["one"].as_uri()).page, lines(folder / "run.jsonl")
    rounds = {line["round"]: line for line in told if line["event"] == "round"}
    units = next(line for line in told if line["event"] == "start")["units"]
    assert page.locator(".map tbody tr").count() == len(units) and page.locator(".map thead th").count() == len(rounds) + 1
    shown = page.evaluate(
        "() => [...document.querySelectorAll('.map tbody tr')].map(r => [r.cells[0].textContent, "
        "[...r.cells].slice(1).map(c => [Number(c.dataset.value), c.dataset.state])])"
    )
    assert [name for name, _ in shown] == list(reversed(units))
    for name, cells in shown:
        for (value, state), line in zip(cells, rounds.values(), strict=True):
            assert value == line["values"][name]
            assert (state == "chosen") == (name in [unit["name"] for unit in line["units"]])


def test_hovering_a_cell_shows_its_value_and_cost(open_tab: Opens, files: dict[str, Path], folder: Path) -> None:
    page, run = open_tab(files["one"].as_uri()).page, report.load(folder)
    tip = page.locator("#tip")
    assert not tip.is_visible()
    for row, column in ((0, 0), (4, 2)):
        unit, round = run.units[row], run.rounds[column]
        cell = page.locator(".map tbody tr").nth(row).locator("td").nth(column)
        cell.hover()
        text, cost = tip.inner_text().replace("\xa0", " "), run.start.costs[unit]
        assert tip.is_visible() and unit in text and f"round {round.number}" in text
        assert float(text.split("value: ")[1].split()[0]) == pytest.approx(round.value(unit), rel=1e-3)
        assert markup.seconds(cost.seconds) in text and markup.size(cost.bytes) in text
        box = tip.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 1100
    page.locator("h3").first.hover()
    assert not tip.is_visible()


def test_the_map_can_be_walked_by_keyboard(open_tab: Opens, files: dict[str, Path], folder: Path) -> None:
    page, run = open_tab(files["one"].as_uri()).page, report.load(folder)
    where = (
        "() => { const c = document.activeElement; return c.closest('.map') ? [c.parentElement.rowIndex, c.cellIndex] : null; }"
    )
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(where):
            break
    assert page.evaluate(where) == [1, 1] and page.locator("#tip").is_visible()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    assert page.evaluate(where) == [3, 2] and run.units[2] in page.locator("#tip").inner_text()
    page.keyboard.press("End")
    assert page.evaluate(where) == [3, len(run.rounds)]
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()
    page.keyboard.press("Tab")  # the whole map is one stop
    assert page.evaluate(where) is None


def test_a_run_in_its_first_round_shows_progress_fills_the_map_and_marks_slow_steps(
    open_tab: Opens, files: dict[str, Path]
) -> None:
    for width in (1100, 400):
        page = open_tab(files["first"].as_uri(), width).page
        assert page.locator(".progress").inner_text() == "step 3 of 12 (25%), 9 s left"
        assert page.locator("progress").evaluate("each => each.value") == 0.25
        frame, cell = page.locator(".frame").bounding_box(), page.locator(".map tbody td").first.bounding_box()
        assert frame is not None and cell is not None and page.locator(".map thead th").count() == 2
        assert cell["x"] + cell["width"] > frame["x"] + frame["width"] - 20 and cell["width"] > frame["width"] / 3
        mark, field_ = page.locator(".field .above"), page.locator(".promises .field").first.bounding_box()
        box = mark.bounding_box()
        assert mark.count() == 1 and box is not None and field_ is not None and abs(box["y"] + box["height"] - field_["y"]) < 1
        assert "slower, up to" in page.locator(".promises .legend").first.inner_text()
        assert page.locator(".confusion td").all_inner_texts() == ["3", "1", "3", "1"]
        assert page.locator(".roofline .unit").count() == 4  # every dot has its name


def test_runs_are_drawn_over_each_other(open_tab: Opens, files: dict[str, Path]) -> None:
    page = open_tab(files["three"].as_uri()).page
    charts = page.locator(".curves .chart")
    assert charts.count() == 3 and [charts.nth(0).locator(f"svg .run{i}").count() for i in range(4)] == [1 + 1, 2, 2, 0]
    colours = page.evaluate("() => [0, 1, 2].map(i => getComputedStyle(document.querySelector(`.curves .run${i}`)).stroke)")
    assert len(set(colours)) == 3


@pytest.mark.parametrize("name", ["one", "three", "hostile", "first"])
@pytest.mark.parametrize("width", [400, 320])
def test_nothing_is_wider_than_a_phone(open_tab: Opens, files: dict[str, Path], name: str, width: int) -> None:
    page = open_tab(files[name].as_uri(), width).page
    page.evaluate("() => document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    wide, screen = page.evaluate(WIDTHS)
    assert wide <= screen == width
    small = page.evaluate(
        "() => Math.min(...[...document.querySelectorAll('main *')].filter(e => e.innerText?.trim() && !e.children.length && "
        "e.checkVisibility() && !e.closest('svg')).map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert small >= 11


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_is_legible_and_shades_are_in_order(open_tab: Opens, files: dict[str, Path], dark: bool) -> None:
    for name in ("first", "three"):
        page = open_tab(files[name].as_uri(), dark=dark).page
        page.evaluate("() => document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        ratio, where = page.evaluate(CONTRAST)
        assert ratio >= 4.5, where
    shades = page.evaluate(SHADES)
    assert shades == sorted(shades, reverse=not dark)  # by lightness alone, so by every eye
    assert all(abs(a - b) > 15 for a, b in pairwise(shades))


def test_light_and_dark_follow_the_system_until_the_button_is_pressed(open_tab: Opens, files: dict[str, Path]) -> None:
    background = "() => getComputedStyle(document.body).backgroundColor"
    page = open_tab(files["one"].as_uri(), dark=True).page
    dark = page.evaluate(background)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(background)
    assert dark != light
    page.get_by_role("button", name="Show in dark colours").click()
    assert page.evaluate(background) == dark
    page.get_by_role("button", name="Show in light colours").click()
    assert page.evaluate(background) == light


def test_every_figure_has_a_name_and_a_table_behind_it(open_tab: Opens, files: dict[str, Path]) -> None:
    page = open_tab(files["one"].as_uri()).page
    names = page.eval_on_selector_all("[role=img]", "all => all.map((each) => each.getAttribute('aria-label'))")
    assert len(names) >= 6 and all(names)
    assert page.locator("details.numbers table caption").count() >= 6
    levels = page.eval_on_selector_all("h1, h2, h3, h4", "all => all.map((each) => Number(each.tagName[1]))")
    assert levels[0] == 1 and all(b <= a + 1 for a, b in pairwise(levels))
    assert page.locator("table th:not([scope])").count() == 0


def test_a_watched_page_follows_the_run(open_tab: Opens, tmp_path: Path) -> None:
    run = train(tmp_path / "live", 4)
    with watch.server(run) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        tab = open_tab(watch.address(server))
        page = tab.page
        page.locator(".map td").nth(3).focus()
        page.locator("details").first.evaluate("each => { each.open = true; }")
        runlog.append(run / "run.jsonl", [{"event": "step", "step": 5, "round": 1, "loss": 0.123, "seconds": 0.01}])
        page.wait_for_function("() => document.getElementById('pulse').textContent === 'live, step 5'", timeout=10_000)
        assert page.locator("details").first.evaluate("each => each.open") and page.locator(".map td:focus").count() == 1
        assert "0.123" in page.locator("main").text_content()
        assert all(url.startswith(watch.address(server)) for url in tab.requests)
        server.shutdown()
        thread.join()
    page.close()
