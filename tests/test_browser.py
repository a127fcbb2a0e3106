"""The page in a real browser: it draws, answers mouse and keyboard, and keeps to itself.

Needs Debian's `chromium` (or another Chromium or Chrome on the path) and playwright; skipped where
there is none. The accessibility check needs axe-core, which `make test` fetches.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest

from howlinear.report import draw, page, read_runs
from reports import CONTROL, HOSTILE, planted_run

api = pytest.importorskip("playwright.sync_api")
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
AXE = Path(sys.prefix) / "axe.min.js"
QUIET = "--disable-quic --no-first-run --disable-background-networking --disable-component-update"
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as play:
        flags = [*QUIET.split(), "--disable-sync", "--no-sandbox"]  # of pages that we wrote
        browser = play.chromium.launch(executable_path=BROWSER, args=flags)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of one run of 30 blocks; of two runs, the second named to do harm; of two small runs."""
    folder = tmp_path_factory.mktemp("pages")
    one = planted_run(folder / "one")
    data = json.loads((one / "profile.json").read_text())
    data["blocks"][5]["kind"] = "first-position only"
    (one / "profile.json").write_text(json.dumps(data))
    two = planted_run(folder / "two", model=HOSTILE, notes=[CONTROL])
    data = json.loads((two / "profile.json").read_text())
    data["blocks"][3]["path"] = CONTROL + HOSTILE
    (two / "profile.json").write_text(json.dumps(data))
    few = [planted_run(folder / name, blocks=3) for name in ("a", "b", "c")]
    for name, given in (("one", [one]), ("both", [one, two]), ("few", few[:2]), ("three", few)):
        runs = read_runs(given)
        (folder / f"{name}.html").write_text(page(runs, draw(runs)), encoding="utf-8")
    return folder


@pytest.fixture
def visit(browser, pages):
    """Open a page; at the end it has said nothing on the console and asked for nothing."""
    heard, contexts = [], []

    def opened(name="one", width=1280, **options):
        viewport = {"width": width, "height": 800}
        contexts.append(browser.new_context(viewport=viewport, **options))
        tab = contexts[-1].new_page()
        tab.on("console", lambda message: heard.append(message.text))
        tab.on("pageerror", lambda error: heard.append(str(error)))
        tab.on("dialog", lambda dialog: heard.append(dialog.message))
        tab.on("request", lambda request: heard.append(request.url))
        place = f"file://{pages / name}.html"
        tab.goto(place)
        assert heard.pop(0) == place  # the page itself is heard, so others would be
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert heard == []


def column(tab, n):
    return tab.locator("#blocks tbody:not([hidden])").evaluate_all(
        f"""bodies => bodies.map(({{rows}}) => rows[0].cells[{n}])
        .map((cell) => cell.dataset.v ?? cell.innerText)"""
    )


def test_sorting_by_mouse_and_by_keyboard(visit):
    tab = visit()
    assert column(tab, 0) == [str(i) for i in range(30)]
    heading = tab.locator("#blocks th", has_text="R2 ± se")
    heading.get_by_role("button").click()
    values = [float(v) for v in column(tab, 2)]
    assert values == sorted(values)
    assert heading.get_attribute("aria-sort") == "ascending"
    tab.keyboard.press("Enter")  # the button that was clicked has the focus
    values = [float(v) for v in column(tab, 2)]
    assert values == sorted(values, reverse=True)
    tab.locator("#blocks th", has_text="verdict").get_by_role("button").focus()
    tab.keyboard.press("Space")
    places = [int(v) for v in column(tab, 1)]  # safe first
    assert places == sorted(places)
    assert len(set(places)) > 1
    assert heading.get_attribute("aria-sort") is None


# Elements whose text or drawing is wider than they are, or outside the window; a page scrolls long
# tables of numbers in their own frame.
OVERFLOWING = """() => [...document.querySelectorAll("body *")].filter((e) => {
  const box = e.getBoundingClientRect();
  if (!box.width || e.closest(".offscreen, .numbers, svg")) return false;
  const cut = e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline";
  return cut && e.clientWidth > 0 || box.right > innerWidth + 1 || box.left < -1;
}).map((e) => e.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("width", [400, 1280, 1920])
@pytest.mark.parametrize("name", ["one", "both"])
def test_nothing_is_cut_at_any_width(visit, name, width):
    tab = visit(name, width=width)
    tab.locator("#open-all").click()
    assert tab.evaluate(OVERFLOWING) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    drawn = tab.locator(".plot svg:visible")
    assert drawn.count() == tab.locator(".plot").count()
    small = "els => Math.min(...els.map(e => e.getBoundingClientRect().height))"
    assert drawn.locator("text.small").first.evaluate_all(small) >= 9  # letters that can be read


def test_what_is_cut_is_found(visit):
    tab = visit(width=400)
    tab.evaluate("document.querySelector('h1').style.whiteSpace = 'nowrap'")
    tab.evaluate("document.querySelector('h1').textContent = 'wide '.repeat(40)")
    assert any("wide" in element for element in tab.evaluate(OVERFLOWING))


@pytest.mark.parametrize("width", [400, 1280])
def test_the_answer_is_seen_without_scrolling_and_leads_to_the_block(visit, width):
    tab = visit(width=width)
    cells = tab.locator(".strip a")
    assert cells.count() == 30
    assert tab.locator(".answer").bounding_box()["y"] < 800
    body = tab.locator("#block-0-7")
    assert not body.locator(".more").is_visible()
    tab.get_by_label("Find").fill("layers.3.")  # hides block 7
    cells.nth(7).click()
    assert body.locator(".more").is_visible()
    assert 0 < body.bounding_box()["y"] < 800
    focused = "document.activeElement.getAttribute('aria-controls')"
    assert tab.evaluate(focused) == "more-0-7"
    tab.keyboard.press("Enter")
    assert not body.locator(".more").is_visible()
    cells.nth(9).focus()
    tab.keyboard.press("Enter")
    api.expect(tab.locator("#block-0-9 .opener")).to_be_focused()
    assert tab.locator("#block-0-9 .more").is_visible()


def test_blocks_are_cards_on_a_phone_and_can_be_sorted(visit):
    tab = visit(width=400)
    first, second = (tab.locator(f"#block-0-{i}").bounding_box() for i in (0, 1))
    assert first["x"] == second["x"]
    assert second["y"] > first["y"] + first["height"]
    tab.get_by_label("Sort by").select_option("R2 ± se")
    values = [float(v) for v in column(tab, 2)]
    assert values == sorted(values)


def test_citation_and_commands_are_copied(visit):
    tab = visit(permissions=["clipboard-read", "clipboard-write"])
    for name, text in (("commands-0", "howlinear profile planted"), ("citation", "2606.19379")):
        button = tab.locator(f"[data-of={name}]")
        button.click()
        # not wait_for_function, which polls by eval, and the page's policy refuses that
        api.expect(button).to_have_text("Copied")
        assert text in tab.evaluate("navigator.clipboard.readText()")


def test_a_third_run_is_switched_like_the_others(visit):
    tab = visit("three")
    seen = "marks => marks.filter(m => getComputedStyle(m).display !== 'none').length"
    shown = [tab.locator(f"#profile svg .r{i}.main") for i in range(3)]
    tab.get_by_label("c", exact=True).uncheck()
    counts = [s.evaluate_all(seen) for s in shown]
    assert counts[0] == counts[1] > 3
    assert counts[2] == 0
    assert tab.locator("#count").inner_text() == "6 of 6 blocks"


def test_filtering_by_word_and_verdict(visit):
    tab = visit()
    tab.get_by_label("Find").fill("layers.7")
    assert column(tab, 0) == ["7"]
    assert tab.locator("#count").inner_text() == "1 of 30 blocks"
    tab.get_by_label("Find").fill("sink")
    assert column(tab, 0) == ["5"]
    tab.get_by_label("Find").fill("no such block")
    assert column(tab, 0) == []
    tab.get_by_label("Find").fill("")
    tab.locator("#word").select_option("safe with units")
    assert column(tab, 0) == ["2"]


def test_runs_are_switched_by_mouse_and_by_keyboard(visit):
    tab = visit("both")
    first, second = (tab.locator(f"#profile svg .r{i}:not(.scalar)") for i in (0, 1))
    assert first.first.is_visible()
    assert second.first.is_visible()
    tab.get_by_label("one", exact=True).click()
    assert not first.first.is_visible()
    assert not tab.locator("#blocks .r0").is_visible()
    assert not tab.locator(".strip.r0").is_visible()
    assert second.first.is_visible()
    tab.get_by_label("two", exact=True).focus()
    tab.keyboard.press("Space")
    assert not second.first.is_visible()
    tab.get_by_label("one", exact=True).click()
    assert first.first.is_visible()
    scalar = tab.locator("#profile svg .r0.scalar")
    assert not scalar.first.is_visible()  # of several runs, shown when asked for
    tab.get_by_label("one scalar mean").check()
    assert scalar.first.is_visible()


@pytest.mark.parametrize("scripting", [True, False])
def test_the_spectrum_is_of_the_block_that_is_chosen(visit, scripting):
    tab = visit(java_script_enabled=scripting)
    shown = tab.locator("#spectra svg polyline.c0")
    assert [shown.nth(i).is_visible() for i in range(4)] == [True, False, False, False]
    tab.locator("#spectra label", has_text="1").first.click()
    assert [shown.nth(i).is_visible() for i in range(4)] == [False, True, False, False]
    tab.keyboard.press("ArrowRight")
    assert [shown.nth(i).is_visible() for i in range(4)] == [False, False, True, False]


def test_values_are_shown_on_hovering_and_by_arrow_keys(visit):
    tab = visit()
    tip = tab.locator("#tip")
    assert not tip.is_visible()
    dot = tab.locator("#profile .broad circle.main[data-about*='block 5:']")
    box = dot.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2 + 4, box["y"] + box["height"] / 2 + 4)  # near it
    assert tip.inner_text().startswith("one, block 5: R2 0.8")
    tab.mouse.move(5, 5)
    assert not tip.is_visible()
    tab.locator("#kinds .plot").focus()
    tab.keyboard.press("ArrowRight")
    first = tip.inner_text()
    tab.keyboard.press("ArrowRight")
    assert "effective rank" in first
    assert tip.inner_text() not in ("", first)
    assert tab.locator("#said").inner_text() == tip.inner_text()
    tab.keyboard.press("Escape")
    assert not tip.is_visible()


def test_everything_is_there_without_scripting(visit):
    tab = visit(java_script_enabled=False)
    assert tab.locator("section > figure svg:visible").count() == 7
    assert tab.locator("#blocks tr.more:visible").count() == 30
    assert not tab.locator("#find").is_visible()  # what needs scripting does not pretend
    tab.locator("#profile summary").click()
    assert tab.locator("#profile details td").first.is_visible()
    tab.get_by_label("one scalar mean").check()
    assert tab.locator("#profile svg .r0.scalar").first.is_visible()


def test_strange_names_are_shown_as_text(visit):
    tab = visit("both")
    assert HOSTILE in tab.locator("h1").inner_text()
    assert tab.locator("#blocks .r1 code").nth(3).inner_text() == (
        f"to\\x1b[31mken\\u202e\\x00\\ud800{HOSTILE}"
    )
    numbers = tab.locator("#numbers").text_content()
    assert json.loads(numbers)["runs"][1]["model"]["id"] == HOSTILE


def test_the_policy_stops_what_is_slipped_in(browser, pages):
    """The negative control: with such a script in the page, the browser refuses and says so."""
    text = (pages / "one.html").read_text()
    bad = "<script>document.title = 'taken'</script><img src='http://127.0.0.1:9/x'>"
    (pages / "bad.html").write_text(text.replace("<main>", f"<main>{bad}"))
    tab = browser.new_page()
    heard = []
    tab.on("console", lambda message: heard.append(message.text))
    tab.goto(f"file://{pages}/bad.html")
    assert tab.title() == "How linear is planted?"
    assert len([text for text in heard if "Content Security Policy" in text]) == 2
    tab.close()


def test_numbers_are_saved(visit):
    tab = visit()
    with tab.expect_download() as waiting:
        tab.get_by_role("button", name="Save the numbers").click()
    saved = json.loads(Path(waiting.value.path()).read_text())
    assert len(saved["runs"][0]["blocks"]) == 30


def test_on_paper(visit):
    tab = visit()
    tab.emulate_media(media="print", color_scheme="dark")
    assert not tab.locator("#find").is_visible()
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == "rgb(255, 255, 255)"  # whatever the screen was
    assert tab.locator("#blocks tbody tr.more").last.is_visible()


@pytest.mark.parametrize(("name", "scheme"), [("one", "dark"), ("few", "light")])
def test_accessibility(browser, pages, name, scheme):
    if not AXE.exists():
        pytest.skip("no axe-core: make test fetches it")
    context = browser.new_context(
        color_scheme=scheme, bypass_csp=True
    )  # axe is no part of the page
    tab = context.new_page()
    tab.goto(f"file://{pages / name}.html")
    if name == "few":  # thousands of cells take minutes, and are all alike
        tab.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    tab.add_script_tag(path=AXE)
    found = tab.evaluate("axe.run()")
    context.close()
    assert len(found["passes"]) > 20
    serious = [v for v in found["violations"] if v["impact"] in ("serious", "critical")]
    assert [(v["id"], v["nodes"][0]["html"][:200]) for v in serious] == []


def test_the_accessibility_check_would_notice(browser):
    if not AXE.exists():
        pytest.skip("no axe-core: make test fetches it")
    tab = browser.new_page()
    tab.set_content(
        "<html><body><p style='color:#ddd;background:#fff'>pale</p><input></body></html>"
    )
    tab.add_script_tag(path=AXE)
    found = {v["id"] for v in tab.evaluate("axe.run()")["violations"]}
    tab.close()
    assert {"color-contrast", "label"} <= found
