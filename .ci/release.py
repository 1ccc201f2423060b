# SPDX-License-Identifier: Apache-2.0
"""The steps of `make release` (CONTRIBUTING.md, Release) that are not building.

    python .ci/release.py begin 0.1.0   writes version and date into the files that have them
    python .ci/release.py tag 0.1.0     commits these files, and tags the commit
    python .ci/release.py notes 0.1.0   prints the version's part of the changelog

Nothing is published: `tag` prints the command for that.
"""

import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The version, in each file that has it.
PLACES = {
    "torch_ring/__init__.py": r'(?<=^__version__ = ")[^"]+',
    "pyproject.toml": r'(?<=^version = ")[^"]+',
    "CITATION.cff": r"(?<=^version: ).+",
    ".ci/conda/recipe.yaml": r"(?<=^  version: )\d.+",
    "README.md": r"(?<=Version )\d+\.\d+\.\d+(?: is not released)?",
}


def main():
    steps = {"begin": begin, "tag": tag, "notes": lambda version: print(notes(version))}
    step, version = (*sys.argv[1:], "", "")[:2]
    if step not in steps or not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit("which version? For example: make release VERSION=0.1.0")
    steps[step](version)


def begin(version):
    """Write the version and the date."""
    if git("status", "--porcelain", "--untracked-files=no"):
        raise SystemExit("the tree has changes: commit them, or take them back: git checkout .")
    if git("tag", "--list", f"v{version}"):
        raise SystemExit(f"there is a tag v{version} already")
    if "/OWNER/" in read("pyproject.toml"):
        raise SystemExit(
            "the project has no address yet: put the repository's owner in place of OWNER into "
            "pyproject.toml and CITATION.cff"
        )
    today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    changelog = read("CHANGELOG.md")
    heading = f"## [{version}] - unreleased\n"
    if heading not in changelog:
        raise SystemExit(f"CHANGELOG.md has no heading {heading.strip()!r}")
    texts = {"CHANGELOG.md": changelog.replace(heading, f"## [{version}] - {today}\n", 1)}
    for name, pattern in PLACES.items():
        text, count = re.subn(pattern, version, read(name), flags=re.MULTILINE)
        if count != 1:
            raise SystemExit(f"{name} has its version {count} times, not once: see PLACES")
        if name == "CITATION.cff":
            text = re.sub(r"^date-released: .*\n", "", text, flags=re.MULTILINE)
            own = f"version: {version}\n"
            text = text.replace(own, f"{own}date-released: {today}\n")
        texts[name] = text
    for name, text in texts.items():
        (ROOT / name).write_text(text, encoding="utf-8")


def tag(version):
    """Commit the version, and tag the commit with its changes."""
    git("commit", "--quiet", "--message", f"Release {version}", "CHANGELOG.md", *PLACES)
    # A line of the notes that begins with # is a heading, no comment.
    git("tag", "--annotate", "--cleanup=whitespace", f"v{version}", "--message", notes(version))
    print(f"v{version} is tagged, its files are in dist/")
    print(f"to publish: git push origin main v{version}")


def notes(version):
    """Return the version's part of the changelog."""
    part = re.search(
        rf"^(## \[{re.escape(version)}\] .*?)(?=^## |\Z)",
        read("CHANGELOG.md"),
        re.MULTILINE | re.DOTALL,
    )
    if part is None:
        raise SystemExit(f"CHANGELOG.md has no part on {version}")
    return part[1].strip()


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def git(*arguments):
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
