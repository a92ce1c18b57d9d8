"""Pages name files that exist, headings that are there, and the README stays short."""

import re
from pathlib import Path

import pytest

from tests.programs import ROOT

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
SOURCES = [path for folder in ("ssd", "fused", "persistent", "experiments", "tests", "examples")
           for path in sorted(ROOT.glob(f"{folder}/**/*.py")) if path.name not in ("test_docs.py", "test_readme.py")]
_FOLDERS = "ssd|fused|persistent|experiments|tests|tools|docs|examples"
_HISTORY = "\n## History\n"  # of a page of the log: names there are those of their time


def read_present(page: Path) -> str:
    """The text without history, code blocks, and tables that are written from rows."""
    text = page.read_text().partition(_HISTORY)[0]
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def find_paths(text: str) -> set[str]:
    """Files and folders of this tree in backticks: `fused/forward.py`, `ssd/kernels/`, not `ssd/configs/<gpu>.json`."""
    found = re.findall(rf"`((?:{_FOLDERS})/[\w./-]*)`", text)
    return {path for path in found if not path.endswith("...")}


def find_links(text: str) -> set[str]:
    """Targets of Markdown's links and pictures, but for addresses."""
    return {target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target} - {""}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page):
    text = read_present(page)
    missing = {path for path in find_paths(text) if not (ROOT / path).exists()}
    missing |= {link for link in find_links(page.read_text()) if not (page.parent / link).exists()}
    assert not missing


def test_what_finds_paths_finds_them():
    text = "see `fused/forward.py`, `ssd/` and `ssd/configs/<gpu>.json`; [log](log/a.md#b), [x](https://y.z/a.md)"
    assert find_paths(text) == {"fused/forward.py", "ssd/"} and find_links(text) == {"log/a.md"}


def test_pages_and_headings_that_code_cites_exist():
    for source in SOURCES:
        for page, heading in re.findall(r'(docs/[\w/-]+\.md)(?:[,:]\s+"([^"]+)")?', source.read_text()):
            assert (ROOT / page).exists(), f"{source}: {page}"
            words = " ".join((ROOT / page).read_text().split())
            title = " ".join((heading or "").split())
            assert not title or f"# {title}" in words or f"**{title}" in words, f"{source}: {page}, {heading}"


def test_the_readme_is_short():
    lines = README.read_text().splitlines()
    assert len(lines) <= 200
    assert not [line for line in lines if len(line) > 160 and not line.startswith("|")]


def test_the_log_has_a_line_for_each_page():
    index = (ROOT / "docs/log/README.md").read_text()
    pages = {page.name for page in (ROOT / "docs/log").glob("*.md")} - {"README.md"}
    assert set(re.findall(r"^\| \[[\w.-]+\]\(([\w.-]+)\)", index, re.M)) == pages


def test_pages_of_the_log_begin_with_the_present():
    for page in (ROOT / "docs/log").glob("*.md"):
        if page.name != "README.md":
            title, state, binds = page.read_text().split("\n\n")[:3]
            assert title.startswith("# ") and state.startswith("**State.**"), page
            assert binds.startswith("**What ") or state.count("**") > 2 or page.name == "sanitizer.md", page
            assert _HISTORY in page.read_text(), page
