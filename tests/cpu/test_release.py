"""What a release needs: files, metadata, links that hold on an index; `tools/release.py` builds it."""

import datetime
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.scripts import load

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://example.org/us/overlap_gemm"
release = load(ROOT / "tools" / "release.py")
PLACES = release.PLACES


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """The last commit's files, as they are built."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git: a release is built from a commit")
    folder = tmp_path_factory.mktemp("release") / "source"
    release.stage(folder, REPOSITORY, "0.1.0")
    return folder


def test_all_distributions_have_one_version_and_the_changelog_has_it():
    (version,) = {release.version_of(ROOT, name) for name in release.PACKAGES}
    text = (ROOT / "CHANGELOG.md").read_text()
    today = datetime.date(2026, 1, 2)
    if f"## {version} (" not in text:  # not released yet
        assert f"## {version} (2026-01-02)\n" in release.dated(text, version, today)
    with pytest.raises(ValueError, match=re.escape("no heading '## Unreleased (7.7.7)'")):
        release.dated(text, "7.7.7", today)


def test_links_become_urls_in_the_repository():
    text = "[a](docs/a.md#b) ![p](docs/p.png) [c](#here) [d](https://d.org/e) [f](../LICENSE)"
    assert release.absolute_links(text, Path("emulator"), REPOSITORY, "v1") == (
        f"[a]({REPOSITORY}/blob/v1/emulator/docs/a.md#b) ![p]({REPOSITORY}/raw/v1/emulator/docs/p.png) "
        f"[c](#here) [d](https://d.org/e) [f]({REPOSITORY}/blob/v1/LICENSE)"
    )


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_link_of_a_staged_readme_is_a_url_of_a_file_that_exists(staged, place):
    text = (staged / place / "README.md").read_text()
    targets = [match["target"] for match in release.LINK.finditer(text)]
    own = [target for target in targets if target.startswith(REPOSITORY)]
    assert own, "a README links to its documentation"
    for target in targets:
        assert target.startswith(("https://", "#")), target
    for target in own:
        kind, revision, path = target.removeprefix(f"{REPOSITORY}/").partition("#")[0].split("/", 2)
        assert (staged / path).exists() and revision == "v0.1.0" and kind in ("blob", "raw"), target


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_staged_metadata_has_urls_and_says_what_the_distribution_is(staged, place):
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((staged / place / "pyproject.toml").read_text())["project"]
    assert project["urls"].keys() >= {"Source", "Issues", "Documentation", "Changelog", "Security"}
    for url in project["urls"].values():
        path = url.removeprefix(REPOSITORY).removeprefix("/blob/v0.1.0/")
        assert path in ("", "/issues") or (staged / path).exists(), url
    for field in (
        "description",
        "readme",
        "license",
        "requires-python",
        "authors",
        "keywords",
        "classifiers",
    ):
        assert project[field], field
    assert (staged / place / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("package", release.PACKAGES.values(), ids=str)
def test_packages_say_that_they_are_typed(package):
    assert (ROOT / package / "py.typed").exists()
    place = max(
        (place for place in PLACES if package.is_relative_to(place)), key=lambda place: len(place.parts)
    )
    assert "Typing :: Typed" in (ROOT / place / "pyproject.toml").read_text()


def test_what_a_company_asks_for_is_there():
    for file in ("SECURITY.md", "CONTRIBUTING.md", "docs/stability.md", ".github/PULL_REQUEST_TEMPLATE.md"):
        assert (ROOT / file).read_text().strip(), file
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) >= 3
    for form in forms:
        text = yaml.safe_load(form.read_text())
        assert form.name == "config.yml" or {"name", "description", "body"} <= text.keys(), form


def test_a_public_name_that_goes_warns_users_of_scripts():
    """As docs/stability.md promises: Python shows no DeprecationWarning of a library to its users."""
    for file in (ROOT / "src").rglob("*.py"):
        assert "DeprecationWarning" not in file.read_text(), file


def test_the_sums_are_those_of_the_files(tmp_path):
    (tmp_path / "a.whl").write_bytes(b"1")
    (tmp_path / "b.tar.gz").write_bytes(b"2")
    release.write_sums(tmp_path)
    release.write_sums(tmp_path)  # again: not of itself
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("OK") == 2, done
    (tmp_path / "a.whl").write_bytes(b"3")
    assert subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path, capture_output=True).returncode


def test_the_trial_program_runs_here(tmp_path):
    """What each new environment runs with the installed wheel."""
    trial = tmp_path / "trial.py"
    trial.write_text(release.TRIAL)
    done = subprocess.run([sys.executable, trial], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "(64, 48)" in done.stdout, done
