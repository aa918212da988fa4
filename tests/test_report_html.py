"""The HTML report: escaped, bounded, self-contained, and looked at in a real browser on phone and desktop."""

import base64
import hashlib
import re
from dataclasses import replace

import pytest

from tests import planted
from tests.needs import find_browser
from tools import report
from tools.report.html import FAILURES, TABLE_ROWS, to_html

HOSTILE = "<script>alert('1')</script>&\"x\""


@pytest.fixture(scope="module")
def page():
    """A report with a fault in warp 3, NaN and inf, a missing output, a hostile and a long name, and changes."""
    name = "a_candidate_with_a_name_that_does_not_fit_on_any_phone." * 4
    results = [
        planted.run(planted.CASE, planted.warp(3)),
        planted.run("fmha/d64-causal-n64-normal", planted.special, candidate=name),
        planted.run("fmha/d64-n64-zeros", planted.missing, candidate=HOSTILE),
        planted.run("attn_res/nb1-t2-half-nan"),
        planted.run("attn_res/nb1-t1-replace-w0-final-eps1e-05-1e-06-aux2-small-s634"),
    ]
    return to_html(results, "Planted faults", report.against(results, report.to_json(results[:2])))


def test_is_one_file_without_network_and_runs_its_own_script_alone(page):
    assert not re.search(r"<link|<img|\bsrc=|\bhref=\"[^#]|url\(|@import|https?://", page)
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page


def test_names_the_place_the_bits_and_the_command(page):
    assert "all 512 come from tile 0, batch 0, warp 3" in page
    assert "<code>goldens verify --case fmha/d64-n64-normal</code>" in page
    assert re.search(r"<code>0x7fc0</code> nan", page)
    assert re.search(r"<code>0xff80</code> -inf", page)
    assert "missing: the candidate returned no such output" in page


def test_escapes_what_is_not_its_own(page):
    assert "alert(" in page
    assert page.count("<script>") == 1
    hostile = replace(planted.run(planted.CASE), note=HOSTILE)
    text = to_html([hostile], HOSTILE)
    assert text.count("<script>") == 1
    assert text.count("&lt;script&gt;") >= 3  # title, heading, note


def test_all_passed():
    page = to_html([planted.run(planted.CASE)], "Good")
    assert "all passed" in page
    assert 'id="failures"' not in page
    assert "FAIL" not in page
    assert 'id="changes"' not in page


def test_nothing_changed_is_said():
    result = planted.run(planted.CASE)
    assert "Nothing changed." in to_html([result], "Good", [])


def test_nothing_judged_is_said():
    page = to_html([], "Empty")
    assert "nothing was judged" in page
    assert "all passed" not in page


def test_thousands_of_failures_are_bounded_and_counted():
    failed = planted.run(planted.CASE, planted.warp(1))
    page = to_html([planted.run(planted.CASE)] * 500 + [failed] * 2000, "Many")
    assert f"{FAILURES} of 4,000 failing verdicts are shown" in page
    assert page.count('class="card fail"') == FAILURES
    assert f"{TABLE_ROWS:,} of 2,500 rows are shown, failures first" in page
    assert "2000 of 2500 fail" in page
    assert len(page) < 6e6


def test_every_number_of_a_part_has_its_square(page):
    strip = re.search(r'aria-label="failing elements by warp">(.*?)</svg>', page, re.DOTALL)[1]
    assert re.findall(r"<title>(.*?)</title>", strip) == ["warp 0: 0", "warp 1: 0", "warp 2: 0", "warp 3: 512"]
    lanes = re.search(r'aria-label="failing elements by lane">(.*?)</svg>', page, re.DOTALL)[1]
    assert len(re.findall("<title>", lanes)) == 32


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        yield browser
        browser.close()


# Width in CSS pixels of each element that sticks out of the page; of a wide table, its scrolling box counts.
OVERFLOWING = """() => [...document.querySelectorAll('body *')]
    .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
    .map(e => e.tagName + ' ' + e.textContent.slice(0, 40))"""
CONTRAST = """() => {
    const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => { v /= 255;
        return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126*r + 0.7152*g + 0.0722*b; };
    const back = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
        if (!c.endsWith(', 0)')) return c; } return 'rgb(255, 255, 255)'; };
    return Math.min(...[...document.querySelectorAll('h1, h2, h3, h4, p, td, dt, dd, code, .badge')]
        .filter(e => e.textContent.trim()).map(e => { const a = light(getComputedStyle(e).color), b = light(back(e));
            return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); })); }"""
READABLE = 4.5  # the contrast that WCAG 2.1 asks of text (AA)


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_is_readable_in_a_browser(page, browser, tmp_path, width, scheme):
    file = tmp_path / "report.html"
    file.write_text(page, encoding="utf-8")
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    problems = []
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("request", lambda request: problems.append(request.url) if request.url != file.as_uri() else None)
    tab.goto(file.as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.evaluate(OVERFLOWING) == []
    assert tab.evaluate(CONTRAST) >= READABLE
    assert problems == []
    failure = tab.locator("#failure-0")
    assert failure.is_visible()
    assert "all 512 come from tile 0, batch 0, warp 3" in failure.inner_text()
    assert failure.locator("svg").count() == 7  # histogram, tensor, and the kernel's five parts
    assert all(failure.locator("svg").nth(i).bounding_box()["width"] > 20 for i in range(7))
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 24)"
    assert dark == (scheme == "dark")
    tab.close()


MANY = 30


@pytest.fixture(scope="module")
def many():
    """A report of many failures, among them one of another kernel."""
    failed = [planted.run(planted.CASE, planted.warp(n % 4)) for n in range(MANY)]
    return to_html([*failed, planted.run("attn_res/nb1-t2-half-nan", lambda outputs: outputs.clear())], "Many")


def opened(browser, tmp_path, page, width):
    file = tmp_path / "report.html"
    file.write_text(page, encoding="utf-8")
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.goto(file.as_uri())
    return tab


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
def test_many_failures_are_folded_and_nothing_sticks_out(many, browser, tmp_path, width):
    tab = opened(browser, tmp_path, many, width)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.locator("details.fail[open]").count() == 0
    pixels = tab.evaluate("document.documentElement.scrollHeight")
    assert pixels < MANY * (400 if width == 390 else 200)  # a failure in full takes about 1000
    tab.close()


@pytest.mark.browser
def test_a_link_opens_its_failure(many, browser, tmp_path):
    tab = opened(browser, tmp_path, many, 1280)
    link = tab.locator("#failures a", has_text="o against exact: 512").nth(7)
    target = link.get_attribute("href")
    link.click()
    assert tab.locator(f"{target}[open]").count() == 1
    assert tab.locator(f"{target} svg").first.is_visible()
    tab.close()


@pytest.mark.browser
def test_rows_are_found_and_sorted(many, browser, tmp_path):
    tab = opened(browser, tmp_path, many, 1280)
    tab.fill("#find", "half-nan fail")
    assert tab.locator("#failures tr[data-find]:visible").count() == 1
    tab.fill("#find", "exact d64-n64")
    assert tab.locator("#failures tr[data-find]:visible").count() == MANY
    tab.fill("#find", "exact d64-n64 half-nan")
    assert tab.locator("#failures tr[data-find]:visible").count() == 0
    tab.fill("#find", "")
    assert tab.locator("#failures tr[data-find]:visible").count() == MANY + 1
    cases = tab.locator("#cases details", has_text="fmha")
    assert cases.get_attribute("open") is not None  # looking for something opened it
    heading = cases.locator("th", has_text="error / bound")
    shares = []
    for _ in range(2):
        heading.locator("button").click()
        shares.append(cases.locator("td[data-label='error / bound']").all_inner_texts())
    numbers = [[float(text.rstrip("%")) for text in column if text not in ("", "inf%")] for column in shares]
    assert numbers[0] == sorted(numbers[0])
    assert numbers[1] == sorted(numbers[1], reverse=True)
    tab.close()


@pytest.mark.parametrize("schedule", ["k2", "any"])
def test_what_a_schedule_does_not_say_is_said_where_one_was_claimed(schedule):
    silent = planted.run(planted.CASE, planted.warp(1))
    verdicts = tuple(replace(verdict, kernel_map=None) for verdict in silent.verdicts)
    page = to_html([replace(silent, schedule=schedule, verdicts=verdicts)], "Silent")
    assert ("This schedule does not say" in page) == (schedule == "k2")
    assert ("Where in the kernel" in page) == (schedule == "k2")
