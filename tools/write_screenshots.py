"""Make the pictures of the page, docs/page-desktop-*.png: a talk with SmolLM2 beside a batch at work.

python -m tools.write_screenshots

Needs Chromium (`make packages`). Takes a minute; run it on an idle machine, since the pictures show speeds.
"""

import subprocess
import sys
import time
from pathlib import Path

from tests.support.browser import Page, browsing
from tests.support.server_process import SERVE, running

DOCS = Path(__file__).parent.parent / "docs"
SLOTS = 12
MEMORY = 400 * 10**6  # 17,000 tokens: two thirds of what the slots could hold
TALK = ("What is the capital of France?", "Write a Python function that checks whether a word is a palindrome.")
# Questions that share a long beginning, of different lengths, a few fewer than there are slots.
CROWD = (
    *("--concurrency", "9", "--num-requests", "400", "--prefix-tokens", "512", "--prompt-tokens", "uniform:20,600"),
    *("--output-tokens", "uniform:40,400", "--warmup", "0"),
)


def main() -> None:
    """Talks to the model while others do, and takes a picture in light and in dark colours."""
    model = ("smollm2", "--max-batch-size", str(SLOTS), "--max-seq-len", "2048", "--kv-cache-memory-bytes", str(MEMORY))
    with running(SERVE, *model, is_forked=False) as server, browsing() as page:
        page.open(server.url, prefers_color_scheme="light")
        page.wait_for_text("#link", "live")
        bench = [sys.executable, "-m", "chairlift", "bench", "--url", server.url, *CROWD]
        page.click("#settings summary")
        page.type("[name=temperature]", "0")
        page.click("#settings summary")
        ask(page, TALK[0])
        with subprocess.Popen(bench, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as crowd:
            try:
                ask(page, TALK[1])
                wait(page, f"parseInt(document.querySelector('#batch-summary').innerText) >= {3 * SLOTS}")
                page.picture(DOCS / "page-desktop-light.png")
                page.click("#theme")
                page.click("#message")
                page.picture(DOCS / "page-desktop-dark.png")
            finally:
                crowd.kill()


def ask(page: Page, question: str) -> None:
    """Sends a question, and waits for the end of the answer."""
    page.type("#message", question)
    page.click("#send")
    wait(page, "document.querySelector('#send').checkVisibility()")


def wait(page: Page, script: str) -> None:
    """Until an expression in JavaScript is true."""
    while not page.run(script):
        time.sleep(0.1)


if __name__ == "__main__":
    main()
