"""The report page in a real browser: drawn, read, clicked, zoomed, narrow, dark, under attack."""

from __future__ import annotations

import json
import math
import re
import time

import pytest
from browser import start_browser, why_no_browser
from ranks import PATIENCE_S
from report_runs import SPIKE, config_of, record, two_runs, write_run

from mcp_parallel.cli.main import main

ATTACK = (
    "</script><script>window.attacked = 1</script><img src=x onerror='window.attacked = 2'>"
    "<!--<script x"  # without an escape of "<" the rest of the page would be data
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    if why_no_browser():
        pytest.skip(why_no_browser())
    driver = start_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of both runs, whose page is at ``path``."""
    root = tmp_path_factory.mktemp("runs")
    folders = two_runs(root)
    assert main(["report", *map(str, folders), "--out", str(root / "report.html")]) == 0
    read = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in folders
    ]
    return {"path": root / "report.html", "rows": read}


@pytest.fixture
def page(driver, rows):
    """A fresh look at the page of two runs."""
    driver.get(rows["path"].as_uri())
    settled(driver)
    yield driver
    assert not faults(driver)


def faults(driver):
    return [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def find(page, selector):
    return page.find_element("css selector", selector)


def count(page, selector):
    return page.execute_script("return document.querySelectorAll(arguments[0]).length", selector)


def settled(page):
    """Let the frame that was asked for be drawn."""
    page.execute_async_script(
        "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
    )


def wait_until(page, condition):
    """For what is drawn some frames later, however long a busy machine takes over a frame."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        settled(page)


def come_near(page, selector):
    """What is far from the window is not drawn yet."""
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", find(page, selector))
    settled(page)


def point_at(page, selector, part, *, down=False, up=False, y=0.5):
    """Move the pointer over a plot, to ``part`` of the way between its axes."""
    from selenium.webdriver import ActionChains

    plot = find(page, selector)
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    left, right = 58, plot.size["width"] - 14
    x = left + part * (right - left) - plot.size["width"] / 2
    chain = ActionChains(page, duration=20).move_to_element_with_offset(
        plot, round(x), round((y - 0.5) * plot.size["height"])
    )
    if down:
        chain = chain.click_and_hold()
    if up:
        chain = chain.release()
    chain.perform()
    settled(page)


LOSS = 'figure[data-field="loss"] .plot'


def heights(page, selector):
    """y pixels of each point of the first line of a chart."""
    path = find(page, selector).get_attribute("d")
    return [float(y) for _, y in re.findall(r"[ML]([-\d.]+),([-\d.]+)", path)]


def test_everything_is_drawn_from_one_file(page, rows):
    fields = page.execute_script(
        "return [...document.querySelectorAll('figure')].map((one) => one.dataset.field)"
    )
    written = {name for run in rows["rows"] for row in run for name in row}
    dashed = {"val_loss", "grad_norm_clipped"}  # in the charts of loss and grad_norm
    assert set(fields) == written - {"step", "tokens"} - dashed
    for field in fields:
        selector = f'figure[data-field="{field}"]'
        page.execute_script(f"document.querySelector('{selector}').scrollIntoView()")
        settled(page)
        marks = f"{selector} path.line, {selector} .plot rect[rx]"
        assert count(page, marks) > 0, field
    assert count(page, ".timeline g.cell") == 2 * 4 * 2 * 3  # ranks, micro-batches, stages, F I W
    assert count(page, ".rank") == 4 + 2
    assert count(page, ".verdict-line") == 2
    assert "blocks.2.mlp.w2 made a NaN" in find(page, ".verdict-line.error").text
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_a_map_over_the_run_has_a_colour_for_each_value(page):
    come_near(page, 'figure[data-field="update_ratio_by_layer"]')
    colors = page.execute_script(
        """const figure = document.querySelector('figure[data-field="update_ratio_by_layer"]');
        const canvas = figure.querySelector("canvas");
        const [x, rows] = [canvas.width * 0.9, 7];
        return [...Array(rows).keys()].map((k) => canvas.getContext("2d")
          .getImageData(x, (k + 0.5) * canvas.height / rows, 1, 1).data.join());"""
    )
    assert len(set(colors)) == 7
    assert all(color.endswith(",255") for color in colors)


def test_hover_reads_the_values_of_both_runs(page, rows):
    point_at(page, LOSS, (20 - 1) / (60 - 1))
    text = find(page, f"{LOSS} + .readout").text
    assert "Step 20" in text
    for run in rows["rows"]:
        assert f"{run[19]['loss']:.5g}" in text
        assert f"{run[19]['val_loss']:.5g}" in text
    # The other charts near the window have the cursor at the same place.
    assert count(page, ".cursor circle") > 4


def test_keys_read_zoom_and_reset(page, rows):
    plot = find(page, LOSS)
    plot.send_keys("\ue014\ue014")  # arrow right: the first point, then the next
    settled(page)
    said = find(page, "#said").get_attribute("textContent")
    assert said.startswith("Step 2: dp2tp2 ")
    assert f"{rows['rows'][0][1]['loss']:.5g}" in said
    before = len(heights(page, f"{LOSS} path.line"))
    plot.send_keys("+")
    assert len(heights(page, f"{LOSS} path.line")) < before
    plot.send_keys("0")
    assert len(heights(page, f"{LOSS} path.line")) == before


def test_a_run_is_hidden_and_shown_again(page):
    chip = find(page, "#runs .chip:nth-child(2)")
    lines = count(page, f"{LOSS} path.line")
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    assert count(page, f"{LOSS} path.line") == lines / 2
    assert count(page, ".card.off") == 1
    chip.click()
    assert count(page, f"{LOSS} path.line") == lines


def test_a_drag_zooms_every_chart_and_all_resets(page):
    labels = (
        "return [...document.querySelectorAll(arguments[0] + ' .axes text[text-anchor=middle]')]"
        ".map((one) => Number(one.textContent)).filter(Number.isFinite)"
    )
    rate = 'figure[data-field="lr"] .plot'
    whole = page.execute_script(labels, rate)
    point_at(page, LOSS, 0.25, down=True)
    point_at(page, LOSS, 0.5, up=True)
    low, high = 1 + 59 * 0.25, 1 + 59 * 0.5
    for selector in (LOSS, rate):
        shown = page.execute_script(labels, selector)
        assert shown
        # A pixel is 59 / 330 steps of this width; the pointer moves by whole ones.
        assert all(low - 0.5 < step < high + 0.5 for step in shown)
    assert max(whole) > high
    find(page, "#reset").click()
    assert page.execute_script(labels, rate) == whole


@pytest.mark.parametrize("is_log", [False, True])
def test_heights_follow_the_scale(page, rows, is_log):
    if is_log:
        find(page, 'figure[data-field="loss"] .small').click()
    ys = heights(page, f"{LOSS} path.line")
    values = [row["loss"] for row in rows["rows"][0]]
    scaled = [math.log(value) for value in values] if is_log else values
    pixels = (ys[-1] - ys[0]) / (scaled[-1] - scaled[0])
    for y, value in zip(ys, scaled, strict=True):
        # Each y is rounded to 0.05 pixels, and so are the two that make the scale.
        assert abs(ys[0] + (value - scaled[0]) * pixels - y) < 0.2


def test_smoothing_is_the_exponential_mean(page, rows):
    page.execute_script(
        """const slider = document.getElementById("smoothing");
        slider.value = 90; slider.dispatchEvent(new Event("input"));"""
    )
    assert count(page, f"{LOSS} path.raw") == 4  # the lines as they are stay, pale
    point_at(page, LOSS, (60 - 1) / (60 - 1))
    mean = mass = 0.0
    for row in rows["rows"][0]:
        mean, mass = 0.9 * mean + 0.1 * row["loss"], 0.9 * mass + 0.1
    assert f"{mean / mass:.5g}" in find(page, f"{LOSS} + .readout").text


def test_other_axes_and_the_step_of_a_verdict(page):
    find(page, "#controls .group button:nth-child(2)").click()
    point_at(page, LOSS, 1.0)
    assert "Tokens 122.88 k" in find(page, f"{LOSS} + .readout").text
    find(page, "#controls .group button:nth-child(1)").click()
    find(page, ".verdict-line.warning button").click()
    settled(page)
    labels = page.execute_script(
        f"return [...document.querySelectorAll('{LOSS} .axes text[text-anchor=middle]')]"
        ".map((one) => Number(one.textContent))"
    )
    width = 0.06 * 59
    assert labels
    assert all(31 - width <= step <= 31 + width for step in labels)


def test_dark_and_light(page):
    ground = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert min(page.execute_script(ground)) > 200
    find(page, "#theme").click()
    assert max(page.execute_script(ground)) < 60
    find(page, "#theme").click()
    assert min(page.execute_script(ground)) > 200
    # Without a choice the page follows the system.
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
    page.refresh()
    assert max(page.execute_script(ground)) < 60
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [], "media": "print"})
    assert min(page.execute_script(ground)) == 255
    assert not find(page, "#controls").is_displayed()
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.fixture
def phone(driver):
    size = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield driver
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_phone_scrolls_in_one_direction(phone, page):
    assert page.execute_script("return innerWidth") == 360
    assert page.execute_script("return document.documentElement.scrollWidth") == 360
    beyond = page.execute_script(
        """return [...document.querySelectorAll("main *")]
          .filter((one) => !one.closest(".scroll, .timeline, .readout, .unseen"))
          .filter((one) => one.getBoundingClientRect().right > 360.5)
          .map((one) => one.outerHTML.slice(0, 80))"""
    )
    assert beyond == []


def test_texts_of_a_run_run_nothing(driver, tmp_path):
    head, _, tail = ATTACK.partition("/")
    folder = tmp_path / head / tail.replace("/", "|")
    rows = [
        {**record(step), ATTACK: 1.5, "strange_by_layer": {ATTACK: 2.0}} for step in range(1, 4)
    ]
    config = config_of(dp=2).to_yaml().replace("tiny", json.dumps(ATTACK))
    write_run(folder, rows=rows, config=config, verdicts=[{**SPIKE, "step": 2, "text": ATTACK}])
    out = tmp_path / "report.html"
    assert main(["report", str(folder), "--out", str(out)]) == 0
    driver.get(out.as_uri())
    settled(driver)
    assert driver.execute_script("return window.attacked") is None
    assert count(driver, "img") == 0
    assert count(driver, "script") == 2
    assert find(driver, ".verdict-line .text").text == ATTACK
    cells = [one.text for one in driver.find_elements("css selector", ".config td")]
    assert ATTACK in cells
    # A second wall: the page's policy would not run a script that got in.
    driver.execute_script(
        """const added = document.createElement("script");
        added.textContent = "window.attacked = 3"; document.body.append(added);"""
    )
    assert driver.execute_script("return window.attacked") is None
    assert all("Content Security Policy" in entry["message"] for entry in faults(driver))


def test_a_run_without_a_step_has_a_page(driver, tmp_path):
    write_run(tmp_path / "empty", rows=[], config=config_of())
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "empty"), "--out", str(out)]) == 0
    driver.get(out.as_uri())
    assert "no step was recorded yet" in find(driver, ".card").text
    assert count(driver, "figure") == 0
    assert count(driver, ".rank") == 1
    assert not faults(driver)


def test_a_profile_is_read_by_pointer_and_keys_at_the_cursor_of_the_charts(page, rows):
    plot = 'figure[data-field="update_ratio_by_layer"] .plot'
    point_at(page, plot, (3 + 0.5) / 7)
    box = find(page, f"{plot} ~ .readout")
    newest = rows["rows"][0][59]["update_ratio_by_layer"]["blocks.2"]
    assert "blocks.2" in box.text
    assert f"{newest:.4g}" in box.text
    find(page, plot).send_keys("\ue014")
    settled(page)
    said = find(page, "#said").get_attribute("textContent")
    assert said.startswith("blocks.3: dp2tp2 ")
    find(page, LOSS).send_keys("\ue014")  # the first step: profiles show the first sample
    doc = 'figure[data-field="update_ratio_by_layer"] .doc'
    wait_until(page, lambda: "at the cursor" in find(page, doc).text)


def test_many_runs_and_long_names_leave_the_page_readable(driver, tmp_path):
    names = [f"{number}-{'long-name' * 20}" for number in range(5)] + ["short"]
    rows = [
        {**record(step), "grad_norm_by_layer": {"embed": 1.0, "head": 2.0}} for step in range(1, 4)
    ]
    for name in names:
        write_run(tmp_path / name, rows=rows, config=config_of(dp=2))
    out = tmp_path / "report.html"
    assert main(["report", *(str(tmp_path / name) for name in names), "--out", str(out)]) == 0
    driver.get(out.as_uri())
    settled(driver)
    come_near(driver, 'figure[data-field="grad_norm_by_layer"]')
    # Four runs have maps, and what a reader has to do to see the others is said.
    note = 'figure[data-field="grad_norm_by_layer"] .maps > .quiet'
    wait_until(driver, lambda: count(driver, note) == 1)
    assert find(driver, note).text == "2 more runs: hide some of these to see the maps"
    heights = driver.execute_script(
        "return [...document.querySelectorAll('.chip')].map((one) => one.offsetHeight)"
    )
    assert len(heights) == 6
    assert len(set(heights)) == 1  # of one line, as the short one
    assert find(driver, ".card h3").get_attribute("title") == names[0]
