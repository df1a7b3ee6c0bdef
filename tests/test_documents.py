"""The documents: their links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text())
    for link in links:
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in [heading.lower().replace(" ", "-") for heading in headings], link
