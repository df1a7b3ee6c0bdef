"""Write the tables of docs/api.md from the code. Run from anywhere."""

import sys
from pathlib import Path

from chairlift.api.description import page_with_tables
from chairlift.api.protocols import all_routes

PAGE = Path(__file__).parent.parent / "docs" / "api.md"

if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(), all_routes()))
    sys.stdout.write(f"written to {PAGE}\n")
