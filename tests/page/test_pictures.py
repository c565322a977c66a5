"""Pictures of the page for people: target/page-screenshots."""

from playwright.sync_api import expect

import fleet
from shown import cells, heading, report_all

ENGINES = {
    "deepseek-v4": (8, 1, 4, 1),
    "glm-5": (1, 1, 8, 2),
    "kimi-k2": (16, 1, 1, 1),
    "qwen3.5-122b": (1, 1, 8, 1),
}


def test_pictures_of_the_fleet(start, register, open_page, screenshot):
    server = start(*ENGINES)
    ranks = {name: register(server, name, sizes) for name, sizes in ENGINES.items()}
    for name in ENGINES:
        report_all(server, name, transport="tcp" if name == "kimi-k2" else "shm")
    page = open_page(server)
    expect(heading(page)).to_have_text("All 4 engines serve.")
    page.get_by_role("button", name="deepseek-v4").click()
    expect(cells(page, "deepseek-v4", "present")).to_have_count(32)
    screenshot(page, "fleet-healthy")
    page.get_by_role("button", name="deepseek-v4").click()
    ranks["glm-5"][(0, 0, 3, 1)].close()
    removed = fleet.send(f"{server.url}v1/engines/glm-5/ranks/dp0-cp0-tp6-pp0", None, "DELETE")
    assert removed == 204
    server.drain("kimi-k2", True)
    expect(heading(page)).to_contain_text("rank tp6 pp0 is missing; rank tp3 pp1 does not answer")
    expect(heading(page)).to_contain_text("kimi-k2 drains")
    expect(cells(page, "glm-5", "unreachable")).to_have_count(1)
    screenshot(page, "rank-missing")
    dark = open_page(server, color_scheme="dark")
    expect(cells(dark, "glm-5", "unreachable")).to_have_count(1)
    screenshot(dark, "rank-missing-dark")
    phone = open_page(server, viewport={"width": 390, "height": 844}, device_scale_factor=2)
    expect(cells(phone, "glm-5", "unreachable")).to_have_count(1)
    screenshot(phone, "rank-missing-phone")
