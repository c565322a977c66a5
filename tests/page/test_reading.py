"""The page can be used by everyone, and by hand and eye at any size."""

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

import fleet
from shown import BLOCK, ROW, engine, heading

PHONE = {"width": 360, "height": 740}
SERIOUS = ("serious", "critical")


def findings(page):
    """What axe finds of the two worst kinds, in words."""
    found = Axe().run(page).response["violations"]
    return [
        f"{fault['id']} ({fault['impact']}): {fault['help']}: {node['target']}"
        for fault in found
        if fault["impact"] in SERIOUS
        for node in fault["nodes"]
    ]


def troubled_fleet(start, register):
    """One engine with a missing and an unreachable rank, one that serves."""
    server = start("prefill-a", "prefill-b")
    ranks = register(server, "prefill-a", BLOCK, without=[(0, 0, 1, 1)])
    register(server, "prefill-b", ROW)
    ranks[(1, 0, 2, 1)].close()
    return server


def test_axe_finds_nothing_serious(start, register, open_page):
    server = troubled_fleet(start, register)
    for scheme in ["light", "dark"]:
        page = open_page(server, color_scheme=scheme)
        expect(page.locator(".grid .cell.unreachable").first).to_be_visible()
        assert findings(page) == [], scheme
        server.pause()
        expect(page.get_by_role("alert")).to_contain_text("does not answer")
        assert findings(page) == [], f"{scheme}, not connected"
        server.resume()


def test_every_part_is_reached_with_the_keyboard(start, register, open_page):
    server = troubled_fleet(start, register)
    page = open_page(server)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the engines")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.press("Tab")
    row = page.get_by_role("button", name="prefill-a")
    expect(row).to_be_focused()
    outline = row.evaluate("shown => getComputedStyle(shown).outlineStyle")
    assert outline == "solid", "the focus is seen"
    for _press in range(2):
        before = row.get_attribute("aria-expanded")
        page.keyboard.press("Enter")
        expect(row).not_to_have_attribute("aria-expanded", before)
        expect(row).to_be_focused()
    page.keyboard.press("/")
    page.keyboard.type("prefill-b")
    expect(page.locator("li.engine")).to_have_count(1)
    expect(page.locator("#filter-result")).to_contain_text("1 of 2 engines matches")
    page.keyboard.press("Escape")
    expect(page.locator("li.engine")).to_have_count(2)


def test_focus_stays_while_the_page_changes(start, register, open_page):
    server = start("prefill-a")
    register(server, "prefill-a", ROW, without=[(0, 0, 0, 0)])
    page = open_page(server)
    row = page.get_by_role("button", name="prefill-a")
    row.focus()
    register(server, "prefill-a", ROW, only=[(0, 0, 0, 0)])
    expect(heading(page)).to_have_text("The only engine serves.")
    expect(row).to_be_focused()


def test_a_screen_reader_hears_the_sentence_and_no_clock(start, register, open_page):
    server = troubled_fleet(start, register)
    page = open_page(server)
    expect(heading(page)).to_contain_text("does not answer")
    for landmark in ["banner", "main", "contentinfo"]:
        expect(page.get_by_role(landmark)).to_have_count(1)
    expect(page.get_by_role("status").filter(has=heading(page))).to_be_visible()
    said = page.evaluate(
        """() => new Promise((resolve) => {
          let said = 0;
          let ticks = 0;
          const options = { childList: true, subtree: true, characterData: true };
          new MutationObserver(() => { said += 1; })
            .observe(document.getElementById("sentence"), options);
          new MutationObserver(() => { if ((ticks += 1) === 4) resolve(said); })
            .observe(document.getElementById("engine-groups"), options);
        })"""
    )
    # The clocks of the rows tick each second; the sentence, which is read aloud, does not change.
    assert said == 0


def test_dark_is_dark_and_light_is_light(start, open_page):
    server = start("prefill-a")
    for scheme, is_dark in [("dark", True), ("light", False)]:
        page = open_page(server, color_scheme=scheme)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))
        assert (brightness < 3 * 64) == is_dark, (scheme, colour)


def test_fits_a_phone(start, register, open_page):
    server = troubled_fleet(start, register)
    page = open_page(server, viewport=PHONE)
    expect(page.locator(".grid .cell.missing").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert findings(page) == []


def test_nothing_moves_for_those_who_want_none(start, register, open_page):
    server = troubled_fleet(start, register)
    page = open_page(server, reduced_motion="reduce")
    moving = page.evaluate(
        """() => [...document.querySelectorAll("*")]
          .flatMap((shown) => [null, "::before", "::after"]
            .map((part) => getComputedStyle(shown, part)))
          .filter((style) => style.animationName !== "none" || style.transitionDuration !== "0s")
          .length"""
    )
    assert moving == 0


def test_a_thousand_engines_stay_quick(start, open_page):
    names = [f"engine-{number:04}" for number in range(1000)]
    server = start(*names, probe=False)
    for number, name in enumerate(names):
        body = fleet.route_body((0, 0, 0, 0), (1, 1, 2 if number == 517 else 1, 1), 40000)
        assert server.put(name, "/route", body) == 200
    page = open_page(server)
    expect(heading(page)).to_contain_text("999 of 1,000 engines serve. engine-0517 has not served")
    expect(page.locator("li.engine").first).to_contain_text("engine-0517")
    assert page.locator("li.engine").count() < 100, "the rest waits behind a button"
    page.get_by_role("button", name="of the other").click()
    expect(page.locator("li.engine")).to_have_count(251)
    slowest = page.evaluate(
        """async () => {
          const filter = document.getElementById("filter");
          let slowest = 0;
          for (const text of ["e", "engine-0", "engine-01", "nothing", "serving", ""]) {
            const begun = performance.now();
            filter.value = text;
            filter.dispatchEvent(new Event("input"));
            await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
            slowest = Math.max(slowest, performance.now() - begun);
          }
          return slowest;
        }"""
    )
    print(f"the slowest keystroke in the filter of 1,000 engines took {slowest:.0f} ms")
    assert slowest < 400
    page.get_by_role("searchbox").fill("engine-0999")
    expect(page.locator("li.engine")).to_have_count(1)
    expect(engine(page, "engine-0999")).to_be_visible()
