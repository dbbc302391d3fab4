"""What pyproject.toml can't say: README and the project's URLs as an index shows them.

SPLITPPO_FILES is the address of the repository's files at this version, such as
https://HOST/OWNER/NAME/blob/v0.1.0. The release's workflow sets it, and an sdist records it as the
URL of the documentation, where the program's messages find it, too. README's links to files lead
there. Without an address they become plain text: an index has none of these files.
"""

import os
import re
from email import message_from_string
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
INDEX = "/docs/README.md"
TO_FILE = re.compile(r"\[([^]]+)\]\((?!https?://|#)([^)]+)\)")


def find_files() -> str:
    """SPLITPPO_FILES, or what it was when this sdist was built; or ""."""
    record = ROOT / "PKG-INFO"
    if not record.is_file():
        return os.environ.get("SPLITPPO_FILES", "")
    urls = message_from_string(record.read_text(encoding="utf-8")).get_all("Project-URL", [])
    pages = [url.split(", ")[1] for url in urls if url.startswith("Documentation, ")]
    return pages[0].removesuffix(INDEX) if pages else ""


def for_index(readme: str, files: str) -> str:
    """README with links to `files`, or with no link to a file."""
    return TO_FILE.sub(rf"[\1]({files}/\2)" if files else r"\1", readme)


def urls_of(files: str) -> dict[str, str]:
    return {
        "Source": files.partition("/blob/")[0],
        "Documentation": f"{files}{INDEX}",
        "Changelog": f"{files}/CHANGELOG.md",
    }


files = find_files()
setup(
    long_description=for_index((ROOT / "README.md").read_text(encoding="utf-8"), files),
    long_description_content_type="text/markdown",
    project_urls=urls_of(files) if files else {},
)
