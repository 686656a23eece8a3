"""Run the benchmarks and print their tables; of all, write ``benchmarks/results.md``.

Of another text than the embedded one it is ``benchmarks/results-NAME.md``.
"""

import argparse
from importlib import import_module
from pathlib import Path

from benchmarks.harness import machine
from minigen.text.corpus import FABLES

SECTIONS = ["training", "generation", "growth", "files", "corpus", "workers"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("sections", nargs="*", default=SECTIONS, help="default: all")
    parser.add_argument("--text", type=Path, default=FABLES, help="default: the embedded text")
    options = parser.parse_args()
    sections = [import_module(f"benchmarks.{name}") for name in options.sections]
    description = f"{machine()} Text: {options.text.name}."
    tables = [table for section in sections for table in section.run(options.text.read_bytes())]
    page = f"# Measured\n\n{description}\n\n" + "\n".join(map(str, tables))
    print(page)
    if options.sections == SECTIONS:
        name = "" if options.text == FABLES else f"-{options.text.stem}"
        (Path(__file__).parent / f"results{name}.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
