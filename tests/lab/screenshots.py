"""Makes the pictures of the page /live in docs/: on a screen and on a phone.

    python tests/lab/screenshots.py    # writes docs/live.png and docs/live_phone.png

It needs Chromium (Debian: `apt-get install chromium`), and starts the default model with four
drafts in each step. The speeds in the pictures are those of the
machine that it runs on.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/end_to_end"))
from browser import Browser, find_chromium  # noqa: E402
from running_server import RunningServer  # noqa: E402

PROMPT = "Write a short story about a lighthouse keeper."
# A fixed K, so that all machines show the same tokens. The preset's own choice of K may be 0.
DRAFTER = {
    "method": "eagle3",
    "model": str(ROOT / "configs/presets/smollm2-135m-eagle3"),
    "num_speculative_tokens": 4,
}
COLOURS = 128  # of the palette, which makes a picture a third as large
ENDED = "document.getElementById('status').textContent.startsWith('Answer complete')"


def save(browser: Browser, path: Path) -> None:
    """Write what the window shows as a PNG with a palette."""
    image = Image.open(io.BytesIO(browser.screenshot())).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size // 1024} KiB")


def chat(browser: Browser, max_tokens: int) -> None:
    """Ask, and wait until the answer and some charts are there."""
    browser.run(f"document.getElementById('max-tokens').value = {max_tokens}")
    browser.run("document.getElementById('prompt').focus()")
    browser.type(PROMPT)
    browser.press("Enter")
    browser.wait(lambda: browser.run(ENDED), "the answer ends", 180)
    time.sleep(2)
    browser.run("document.activeElement.blur()")


def main() -> None:
    """Start a server and a browser, and write both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the pictures")
    parser.add_argument("--max-tokens", type=int, default=110, help="length of the answers")
    args = parser.parse_args()
    program = find_chromium()
    if program is None:
        sys.exit("Chromium is not installed (Debian: apt-get install chromium)")
    server = RunningServer("-sc", json.dumps(DRAFTER))
    try:
        server.wait_ready()
        with Browser(program) as browser:
            browser.open(f"{server.url}/live", 1180, 900)
            chat(browser, args.max_tokens)
            marked = "document.querySelectorAll('.answers .replaced')"
            browser.hover(f"{marked}[Math.floor({marked}.length / 8)]")
            save(browser, args.out / "live.png")
            browser.resize(390, 760, "dark")
            browser.run("document.getElementById('log').scrollIntoView()")
            save(browser, args.out / "live_phone.png")
    finally:
        server.stop()


if __name__ == "__main__":
    main()
