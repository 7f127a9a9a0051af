"""Builds a release as it would be uploaded, installs and tries it; uploads nothing.

    python tools/release.py --repository https://example.org/us/overlap_gemm --python python3.13

The distributions are `overlap-gemm`, `cute-emulator` and `overlap-gemm-tools`. They are built from a copy of
the last commit, not from the working tree. In the copy, README files have absolute links, and the metadata
have the project's URLs. The wheels are installed into a new environment of each `--python` and tried there.
`--out` then has wheels, source distributions, `SHA256SUMS` and a bill of materials (CycloneDX) of each
environment.

`--tag` makes the release's commit first: it dates CHANGELOG.md and tags it. The upload is printed as a
command.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]

PACKAGES = {
    "overlap-gemm": Path("src/overlap_gemm"),
    "cute-emulator": Path("emulator/src/cute_emulator"),
    "overlap-gemm-tools": Path("tools/overlap_gemm_tools"),
}
"""Packages of the distributions."""

PLACES = (Path(), Path("emulator"), Path("tools"))
"""Folders of the distributions in the repository."""

TOOLS = ("build>=1.3", "twine>=6", "cyclonedx-bom>=7")
"""Packages of the environment that builds and checks."""

UNRELEASED = "## Unreleased ({version})"
"""Heading of CHANGELOG.md for what the next release contains."""

LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def version_of(source: Path, distribution: str) -> str:
    """Returns the version that a distribution's package states."""
    text = (source / PACKAGES[distribution] / "__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(version)


def absolute_links(text: str, folder: Path, repository: str, revision: str) -> str:
    """Returns a README whose relative links and pictures are URLs in the repository at a revision.

    Args:
        text: Markdown.
        folder: Folder of the README in the repository.
        repository: URL of the repository, without a trailing slash.
        revision: Tag or commit.
    """

    def absolute(match: re.Match[str]) -> str:
        target = match["target"]
        if "://" in target or target.startswith(("#", "mailto:")):
            return match[0]
        kind = "raw" if match["picture"] else "blob"
        path, separator, anchor = target.partition("#")
        place = Path(*_without_parents((folder / path).parts)).as_posix()
        url = f"{repository}/{kind}/{revision}/{place}{separator}{anchor}"
        return f"{match['picture']}[{match['text']}]({url})"

    return LINK.sub(absolute, text)


def _without_parents(parts: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for part in parts:
        if part == "..":
            kept.pop()
        else:
            kept.append(part)
    return kept


def with_urls(pyproject: str, repository: str, revision: str) -> str:
    """Returns a pyproject.toml that has the project's URLs as well."""
    urls = {
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Documentation": f"{repository}/blob/{revision}/docs/index.md",
        "Changelog": f"{repository}/blob/{revision}/CHANGELOG.md",
        "Security": f"{repository}/blob/{revision}/SECURITY.md",
    }
    table = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    return f"{pyproject.rstrip()}\n\n[project.urls]\n{table}"


def dated(changelog: str, version: str, date: datetime.date) -> str:
    """Returns CHANGELOG.md with the unreleased section as that of a version.

    Raises:
        ValueError: It has no unreleased section of this version.
    """
    heading = UNRELEASED.format(version=version)
    if heading not in changelog:
        raise ValueError(f"CHANGELOG.md has no heading {heading!r}")
    return changelog.replace(heading, f"## {version} ({date.isoformat()})", 1)


def stage(folder: Path, repository: str, version: str) -> None:
    """Writes the last commit's files into a folder, with URLs and absolute links."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    for place in PLACES:
        project, readme = folder / place / "pyproject.toml", folder / place / "README.md"
        project.write_text(with_urls(project.read_text(), repository, f"v{version}"))
        readme.write_text(absolute_links(readme.read_text(), place, repository, f"v{version}"))


def make_environment(folder: Path, python: str, *packages: str) -> Path:
    """Makes a virtual environment with packages; returns its Python."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    interpreter = folder / "bin" / "python"
    if packages:
        install(interpreter, *packages)
    return interpreter


def install(python: Path, *arguments: str) -> None:
    """Runs pip."""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *arguments], check=True)


TRIAL = """
import torch, overlap_gemm
world = overlap_gemm.init(device="cpu")
torch.manual_seed(world.rank)
x, weight = torch.randn(64, 32), torch.randn(48, 32)
out = overlap_gemm.gemm_reduce_scatter(x, weight)
total = x @ weight.T
if world.size > 1:
    torch.distributed.all_reduce(total)
torch.testing.assert_close(out, total.chunk(world.size)[world.rank])
print(overlap_gemm.__version__, torch.__version__, world.size, tuple(out.shape))
overlap_gemm.finalize()
"""
"""Program that an installed wheel must run, on one rank and on two."""


def try_wheels(python: Path, wheels: Path, torch: str) -> None:
    """Installs the wheels with the indexes' ordinary packages into an environment, and runs them."""
    install(python, torch, "--find-links", str(wheels), "overlap-gemm[emulator,tools]")
    with tempfile.TemporaryDirectory() as scratch:
        trial = Path(scratch) / "trial.py"
        trial.write_text(TRIAL)
        launcher = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        commands = python.parent
        for command in (
            [str(python), str(trial)],
            [*launcher, str(trial)],
            [
                str(commands / "overlap-gemm"),
                "plan",
                "gemm_reduce_scatter",
                "8192",
                "8192",
                "8192",
                "--ranks",
                "4",
            ],
            [str(commands / "overlap-gemm"), "emulate", "--m", "256", "--world-size", "2"],
            [str(commands / "cute-emulator"), "--help"],
        ):
            print("+", *command, flush=True)
            subprocess.run(command, check=True, cwd=scratch, timeout=600)


def write_sums(folder: Path) -> None:
    """Writes SHA256SUMS of a folder's files."""
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
        for file in sorted(folder.iterdir())
        if file.name != "SHA256SUMS"
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))


def tag(version: str) -> None:
    """Dates CHANGELOG.md, commits it, and tags the commit."""
    changelog = ROOT / "CHANGELOG.md"
    changelog.write_text(dated(changelog.read_text(), version, datetime.date.today()))
    for command in (
        ["git", "commit", "--quiet", "-m", f"[release] Date {version}", "CHANGELOG.md"],
        ["git", "tag", "-a", f"v{version}", "-m", f"Version {version}"],
    ):
        subprocess.run(command, cwd=ROOT, check=True)


def main() -> None:
    """Runs the command line that the module describes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repository", required=True, help="URL under which the repository is public")
    parser.add_argument("--python", action="append", help="a Python to try the wheels with; repeatable")
    parser.add_argument("--torch", default="torch", help="requirement of torch for the trials")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "release")
    parser.add_argument("--tag", action="store_true", help="date CHANGELOG.md, commit and tag first")
    arguments = parser.parse_args()
    versions = {version_of(ROOT, distribution) for distribution in PACKAGES}
    if len(versions) > 1:
        sys.exit(f"the distributions must have one version; they have {', '.join(sorted(versions))}")
    (version,) = versions
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, check=True).stdout:
        sys.exit("the working tree has changes that are not committed")
    if arguments.tag:
        tag(version)
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        stage(source, arguments.repository.rstrip("/"), version)
        tools = make_environment(Path(scratch) / "tools", sys.executable, *TOOLS)
        for place in PLACES:
            build = [str(tools), "-m", "build", "--outdir", str(arguments.out), str(source / place)]
            subprocess.run(build, check=True)
        files = sorted(map(str, arguments.out.iterdir()))
        subprocess.run([str(tools), "-m", "twine", "check", "--strict", *files], check=True)
        for name in arguments.python or [sys.executable]:
            python = make_environment(Path(scratch) / Path(name).name, name)
            try_wheels(python, arguments.out, arguments.torch)
            bill = arguments.out / f"sbom-{Path(name).name}.cdx.json"
            describe = [str(tools), "-m", "cyclonedx_py", "environment", str(python), "-o", str(bill)]
            subprocess.run(describe, check=True)
    write_sums(arguments.out)
    print(f"\n{arguments.out}: built, checked and tried. What is left, by hand:")
    if not arguments.tag:
        print("  python tools/release.py --tag ...   # dates CHANGELOG.md, commits, tags, builds again")
    print(
        f"  git push --follow-tags && python -m twine upload {arguments.out}/*.whl {arguments.out}/*.tar.gz"
    )


if __name__ == "__main__":
    main()
