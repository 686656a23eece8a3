"""Makes docs/report.png, the README's picture of the report: `make screenshot`.

Trains the default config unless the name of a run folder is given.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from minigen.report.page import write_report
from minigen.training.config import Config
from minigen.training.folder import RunFolder
from minigen.training.run import Run

PICTURE = Path(__file__).parent / "report.png"
FIELDS = {
    "prompt": "Once a crow",
    "temperature": "0.8",
    "top_k": "10",
    "top_p": "0.85",
    "length": "70",
}
WIDTH, HEIGHT = 1000, 900


def _trained(folder: Path) -> Path:
    for _ in RunFolder.create(folder, Run(Config.load("fables"))).steps():
        pass
    return folder


def main() -> None:
    """Open the report, fill in a policy and take the picture from the top to the draw."""
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(sys.argv[1]) if len(sys.argv) > 1 else _trained(Path(temporary) / "fables")
        page_file = write_report(run, Path(temporary) / "report.html")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"),
                args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
            )
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            page.goto(page_file.as_uri())
            for name, value in FIELDS.items():
                page.fill(f"#{name}", value)
            page.wait_for_function("document.getElementById('text').ariaBusy !== 'true'")
            for place in range(3, 60):  # the first later token that greedy would not have taken
                page.fill("#place", str(place))
                if not page.locator("#bars tr.drawn .greedy").count():
                    break
            page.evaluate("document.activeElement.blur()")
            page.add_style_tag(content="nav { display: none !important; }")
            page.evaluate("scrollTo(0, 0)")
            box = page.locator("#draw-words").bounding_box()
            assert box
            clip = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + 16}
            page.screenshot(path=PICTURE, full_page=True, clip=clip)
            browser.close()
    print(PICTURE)


if __name__ == "__main__":
    main()
