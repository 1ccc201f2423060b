# SPDX-License-Identifier: Apache-2.0
"""Files for contributors and releases: workflows, versions, and the steps of a release."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import ROOT

yaml = pytest.importorskip("yaml")

PLACES: dict[str, str] = runpy.run_path(str(ROOT / ".ci" / "release.py"))["PLACES"]


def test_workflows_call_targets_and_files_that_exist() -> None:
    makefile, seen = (ROOT / "Makefile").read_text(), set()
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
        for step in (step for job in jobs for step in job["steps"]):
            program, *words = shlex.split(re.sub(r"\$\{\{.*?\}\}", "", step.get("run", ":")))
            if program == "make":
                for word in words:
                    name, is_setting, _ = word.partition("=")
                    pattern = rf"^{name} \?=" if is_setting else rf"^{name}:"
                    assert re.search(pattern, makefile, re.MULTILINE), word
                seen |= {word for word in words if "=" not in word}
            if program == "python":
                assert (ROOT / words[0]).exists()
    assert seen == {"lint", "test", "test-weekly", "test-c10d", "docs", "wheels", "sdist"}


def test_wheels_of_a_release_are_for_versions_that_make_wheels_knows() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    (some,) = re.findall(r'TORCHES="(.*)"', text)
    (known,) = re.findall(r"^TORCHES \?= (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*some.split()} <= {*known.split()}


def test_all_places_have_one_version() -> None:
    found = {
        (name, match)
        for name, pattern in PLACES.items()
        for match in re.findall(pattern, (ROOT / name).read_text(), re.MULTILINE)
    }
    assert {name for name, _ in found} == PLACES.keys()
    assert len({version.partition(" ")[0] for _, version in found}) == 1


# --- a release


class Project:
    """A repository with the files of which a release changes some."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in (".ci/release.py", "CHANGELOG.md", *PLACES):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        self.git("init", "--quiet", "--initial-branch", "main")
        self.git("config", "user.name", "A maintainer")
        self.git("config", "user.email", "maintainer@example.com")
        for name in ("pyproject.toml", "CITATION.cff"):
            self.write(name, self.read(name).replace("OWNER", "someone"))
        self.git("add", ".")
        self.git("commit", "--quiet", "--message", "All")

    def git(self, *arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=self.root, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()

    def read(self, name: str) -> str:
        return (self.root / name).read_text()

    def write(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)

    def step(self, *arguments: str) -> str:
        """Return what a step of the release prints, or its error."""
        command = [sys.executable, self.root / ".ci" / "release.py", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        return ended.stdout.strip() if ended.returncode == 0 else f"error: {ended.stderr.strip()}"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_a_release_dates_and_tags_its_version(project: Project) -> None:
    heading = re.search(r"^## \[(.*)\] - unreleased$", project.read("CHANGELOG.md"), re.MULTILINE)
    assert heading is not None
    project.write(
        "CHANGELOG.md",
        project.read("CHANGELOG.md").replace(
            heading[0], f"## [9.8.7] - unreleased\n\n### Fixed\n\n- All.\n\n{heading[0]}"
        ),
    )
    project.git("commit", "--quiet", "--all", "--message", "An entry")
    assert project.step("begin", "9.8.7") == ""
    assert project.step("tag", "9.8.7").endswith("git push origin main v9.8.7")
    for name, pattern in PLACES.items():
        assert set(re.findall(pattern, project.read(name), re.MULTILINE)) == {"9.8.7"}, name
    assert re.search(r"\ndate-released: 20\d\d-\d\d-\d\d\n", project.read("CITATION.cff"))
    told = project.git("tag", "--list", "--format", "%(contents)", "v9.8.7")
    assert re.fullmatch(r"## \[9\.8\.7\] - 20\d\d-\d\d-\d\d\n\n### Fixed\n\n- All\.", told)
    assert told == project.step("notes", "9.8.7")
    assert project.git("status", "--porcelain") == ""
    assert project.git("rev-parse", "v9.8.7^{commit}") == project.git("rev-parse", "HEAD")


def test_a_release_is_refused_before_it_changes_a_file(project: Project) -> None:
    (version, *_) = re.findall(
        r"^## \[(.*)\] - unreleased$", project.read("CHANGELOG.md"), re.MULTILINE
    )
    assert "which version" in project.step("begin", "1.0")
    assert "no heading '## [9.8.7] - unreleased'" in project.step("begin", "9.8.7")
    project.git("tag", f"v{version}")
    assert "there is a tag" in project.step("begin", version)
    project.git("tag", "--delete", f"v{version}")
    for file, old, new, words in (
        (".ci/conda/recipe.yaml", "  version: ", "  versions: ", "has its version 0 times"),
        ("pyproject.toml", "someone", "OWNER", "no address"),
    ):
        text = project.read(file)
        project.write(file, text.replace(old, new))
        assert "the tree has changes" in project.step("begin", version)
        project.git("commit", "--quiet", "--all", "--message", "A change")
        assert words in project.step("begin", version)
        project.git("reset", "--quiet", "--hard", "HEAD~")
    assert project.git("status", "--porcelain") == ""


SOURCES = {".py", ".pyi", ".cc", ".h", ".inc", ".js", ".css"}


def test_each_source_file_names_its_license() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no checkout of git")
    files = [name for name in listed.stdout.split("\0") if Path(name).suffix in SOURCES]
    assert len(files) > 400
    without = [
        name
        for name in files
        if (ROOT / name).exists()  # it may be deleted, and not committed yet
        and not name.startswith("examples/minimal/")  # README.md quotes these, line by line
        and "SPDX-License-Identifier: Apache-2.0" not in (ROOT / name).read_text("utf-8")[:100]
    ]
    assert without == []
