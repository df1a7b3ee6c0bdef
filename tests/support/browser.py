"""A real browser."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
DEADLINE_S = 20.0
DESKTOP, PHONE = (1440, 900), (390, 844)

# The contrast of two custom properties, as WCAG 2 defines it. A canvas brings whatever notation a colour has to bytes.
_CONTRAST = """(([a, b]) => {
  const probe = document.body.appendChild(document.createElement("i"));
  const context = document.createElement("canvas").getContext("2d");
  const luminance = (name) => {
    probe.style.color = `var(${name})`;
    context.fillStyle = getComputedStyle(probe).color;
    context.fillRect(0, 0, 1, 1);
    const [red, green, blue] = [...context.getImageData(0, 0, 1, 1).data].map((byte) => byte / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const [dark, light] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  probe.remove();
  return (light + 0.05) / (dark + 0.05);
})(arguments)"""


class Page:
    """One tab, and what a person would do in it."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def open(self, url: str, size: tuple[int, int] = DESKTOP, **media: str) -> None:
        """Loads an address. `media`: features that the system has, such as `prefers_color_scheme="dark"`."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self._driver.get(url)

    def run(self, script: str, *args: Any) -> Any:
        """The value of an expression in JavaScript; `arguments` holds the others."""
        return self._driver.execute_script(f"return {script}", *args)

    def text(self, selector: str) -> str:
        return str(self.run("document.querySelector(arguments[0]).innerText", selector))

    def count(self, selector: str) -> int:
        return int(self.run("document.querySelectorAll(arguments[0]).length", selector))

    def is_visible(self, selector: str) -> bool:
        return bool(self.run("document.querySelector(arguments[0]).checkVisibility()", selector))

    def contrast(self, one: str, other: str) -> float:
        """The contrast ratio of two colours, which are named by their custom properties: 1 to 21."""
        return float(self.run(_CONTRAST, one, other))

    @contextmanager
    def beginning_with(self, script: str) -> Iterator[None]:
        """Runs the script in each page that is opened meanwhile, before the page's own."""
        added = self._driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
        try:
            yield
        finally:
            self._driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)

    def forget(self) -> None:
        """Leaves the page, and empties what the browser has kept for it."""
        self.run("location.protocol === 'http:' && [localStorage.clear(), sessionStorage.clear()]")
        self.open("about:blank")

    def picture(self, path: Path) -> None:
        """Writes what is seen as a PNG file."""
        self._driver.save_screenshot(str(path))

    def click(self, selector: str) -> None:
        self._driver.find_element("css selector", selector).click()

    def click_last(self, selector: str, text: str) -> None:
        """Clicks the last of the elements with this text."""
        element = self.run(
            "[...document.querySelectorAll(arguments[0])].findLast((each) => each.innerText === arguments[1])",
            selector,
            text,
        )
        assert element is not None, f"no {selector} says {text!r}"
        element.click()

    def type(self, selector: str, text: str) -> None:
        """The keys of `selenium.webdriver.Keys` are characters as well."""
        self._driver.find_element("css selector", selector).send_keys(text)

    def press(self, key: str) -> None:
        """On whatever has the focus."""
        self._driver.switch_to.active_element.send_keys(key)

    def wait_for(self, script: str, *args: Any) -> None:
        """Until the expression is true. Asks often, since what is awaited may not last."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.run(script, *args):
            assert time.monotonic() < deadline, f"not so: {script}; the page: {self.run('document.body.innerText')}"

    def wait_for_text(self, selector: str, text: str) -> None:
        """Until the element's text holds this."""
        self.wait_for("document.querySelector(arguments[0])?.innerText.includes(arguments[1])", selector, text)

    def complaints(self) -> list[str]:
        """Errors of scripts and refusals by the page's policy since the last call. What servers answer is no error."""
        entries = self._driver.get_log("browser")
        return [str(entry["message"]) for entry in entries if entry["source"] != "network"]


@contextmanager
def browsing() -> Iterator[Page]:
    """A fresh browser; skips the test where there is none."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("there is no chromium with chromedriver here (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    # Chromium's own sandbox refuses to run as root, which containers are.
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield Page(browser)
    finally:
        browser.quit()
