"""What some tests need beside Python: a browser, a C++ compiler.

Tests carry the marker ``browser`` or ``cxx``. Where the thing is missing they are left out, and the run says how many
and what to install. With ``--need-all``, as CI calls it, and with ``-m browser`` or ``-m cxx``, which ask for them, the
run ends with exit code 3 instead.
"""

import os
import shutil
from collections.abc import Callable

import pytest


def find_browser() -> str | None:
    """A Chromium to drive: that of GOLDENS_BROWSER, of the system, or the one that playwright has downloaded."""
    if os.environ.get("GOLDENS_BROWSER"):
        return os.environ["GOLDENS_BROWSER"]
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name):
            return shutil.which(name)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if os.path.exists(path) else None


def find_cxx() -> str | None:
    """A C++ compiler: that of CXX, or of the system."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


NEEDS: dict[str, tuple[Callable[[], str | None], str]] = {
    "browser": (find_browser, "Chromium: apt-get install chromium, or playwright install --with-deps chromium"),
    "cxx": (find_cxx, "a C++ compiler: apt-get install g++"),
}
PREFIX = "needs "


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--need-all", action="store_true", help="fail where a test's browser or C++ compiler is missing, skip nothing"
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker, (_, what) in NEEDS.items():
        config.addinivalue_line("markers", f"{marker}: needs {what}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, (find, what) in NEEDS.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if not marked or find():
            continue
        if config.getoption("--need-all") or config.option.markexpr == marker:
            pytest.exit(f"{len(marked)} tests need {what}", returncode=3)
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=PREFIX + what))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = [r.longrepr[2] for r in terminalreporter.stats.get("skipped", []) if isinstance(r.longrepr, tuple)]
    for _, what in NEEDS.values():
        count = sum(PREFIX + what in reason for reason in reasons)
        if count:
            terminalreporter.write_line(f"left out: {count} of the tests, for want of {what}", yellow=True)
