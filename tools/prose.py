"""Counts, for each folder, what breaks the style guide (docs/style.md); a count may fall, never rise.

    python tools/prose.py                      # compares with tools/prose.json, as CI does
    python tools/prose.py --list src/overlap_gemm/api
    python tools/prose.py --update             # lowers the counts of tools/prose.json; raises none
    python tools/prose.py --commits main..     # checks subjects of commits instead

Texts are docstrings, comments and messages of Python files, their names, and the prose of Markdown files.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "style.md"
BASELINE = ROOT / "tools" / "prose.json"
FOLDERS = (
    "src",
    "emulator/src",
    "emulator/docs",
    "tests",
    "emulator/tests",
    "docs",
    "benchmarks",
    "tools",
    "examples",
)

LONGEST_SENTENCE = 25
"""Words."""

OPENINGS = re.compile(r"(What|Whether|Where|Who|Whose|Which|How|Of|It|That|Those|As|Likewise)\b")
"""Words that open no docstring: definitions by relative clause, pronouns without a noun."""

EMPTY_ENTRY = re.compile(
    r"^\s+\*{0,2}\w+\*{0,2}( \([^)]*\))?: (It|[Ww]hich|[Ww]hose|[Ww]here|[Ll]ikewise|As for .*|See .*)\.$",
    re.M,
)
"""Entries of arguments that make a reader look elsewhere."""


class Finding(NamedTuple):
    """A place that breaks the guide.

    Attributes:
        file: Path of the file, relative to the repository.
        line: Number of the line at which the text begins.
        rule: Name of the rule.
        text: Words that break it.
    """

    file: str
    line: int
    rule: str
    text: str


class Text(NamedTuple):
    """A piece of prose.

    Attributes:
        line: Number of the line at which it begins.
        kind: "docstring of a function", "docstring", "comment", "message" or "page".
        words: Text of it.
    """

    line: int
    kind: str
    words: str


@cache
def replaced() -> tuple[str, ...]:
    """Returns the entries of the guide's lexicon that are to be replaced, without those with a remark."""
    table = GUIDE.read_text().split("## Lexicon")[1].split("\n\n")[0].splitlines()[3:]
    cells = [cell.strip() for row in table for cell in row.strip("|").split("|")[::2]]
    return tuple(
        entry.strip() for cell in cells for entry in cell.split(",") if "(" not in cell and entry.strip()
    )


@cache
def lexicon() -> re.Pattern[str]:
    """Returns the pattern of the words that the guide replaces."""
    words = sorted((re.escape(entry) for entry in replaced() if "`" not in entry), key=len, reverse=True)
    return re.compile(rf"(?<![\w.`])({'|'.join(words)})(?![\w`])")


@cache
def banned_names() -> frozenset[str]:
    """Returns the identifiers that the guide's lexicon replaces, or its section on names lists."""
    (sentence,) = re.findall(
        r"says what is in it without its room: not (.*?)\. A boolean", GUIDE.read_text(), re.S
    )
    listed = [*re.findall(r"`(\w+)`", sentence), *(entry.strip("`") for entry in replaced() if "`" in entry)]
    return frozenset(listed)


def texts_of_python(source: str, tree: ast.Module) -> Iterator[Text]:
    """Yields docstrings, comments and messages of exceptions of a file, whose tree is parsed."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            documented = ast.get_docstring(node)
            if documented:
                is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                yield Text(
                    node.body[0].lineno, "docstring of a function" if is_function else "docstring", documented
                )
        elif isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield Text(part.lineno, "message", part.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], "comment", token.string.lstrip("# "))


def names_of_python(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of arguments, variables and functions that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def texts_of_markdown(source: str) -> Iterator[Text]:
    """Yields paragraphs without code."""
    plain = re.sub(r"```.*?```|<!--.*?-->", lambda block: "\n" * block[0].count("\n"), source, flags=re.S)
    line = 1
    for paragraph in plain.split("\n\n"):
        yield Text(line, "page", paragraph)
        line += paragraph.count("\n") + 2


def sentences(words: str) -> Iterator[str]:
    """Yields the sentences of prose; lists, tables and headings end one."""
    prose = re.sub(r"^\s*([-|#>]|\d+\.).*$", "\n\n", words, flags=re.M)
    for block in re.split(r"\n\s*\n", prose):
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(block.split()))


def check(file: Path) -> Iterator[Finding]:
    """Yields what breaks the guide in a file."""
    if file == GUIDE:
        return
    name, source = file.relative_to(ROOT).as_posix(), file.read_text()
    tree = ast.parse(source) if file.suffix == ".py" else None
    for text in texts_of_markdown(source) if tree is None else texts_of_python(source, tree):
        for match in lexicon().finditer(text.words):
            yield Finding(name, text.line, "lexicon", match[1])
        if text.kind.startswith("docstring"):
            first = text.words.split(maxsplit=1)[0]
            if OPENINGS.match(text.words):
                yield Finding(name, text.line, "opening", first)
            elif text.kind == "docstring of a function" and not re.fullmatch(r"[A-Z][a-z-]+s[.,:]?", first):
                yield Finding(name, text.line, "verb", first)
            for match in EMPTY_ENTRY.finditer(text.words):
                yield Finding(name, text.line, "entry", match[0].strip())
        if text.kind != "message":
            for sentence in sentences(text.words):
                if len(sentence.split()) > LONGEST_SENTENCE:
                    yield Finding(name, text.line, "sentence", sentence[:60])
    if tree is not None:
        for line, identifier in names_of_python(tree):
            if identifier in banned_names():
                yield Finding(name, line, "name", identifier)


def findings() -> list[Finding]:
    """Returns what breaks the guide in all files of `FOLDERS` and in the repository's first pages."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.*")]
    texts = {file for file in [*files, *ROOT.glob("*.md")] if file.suffix in (".py", ".md")}
    return [finding for file in sorted(texts) for finding in check(file)]


def folder_of(file: str) -> str:
    """Returns the folder under which a file is counted: a package, or a top-level folder."""
    parts = file.split("/")[:-1]
    depth = {"src": 3, "emulator": 4}.get(parts[0] if parts else "", 2)
    return "/".join(parts[:depth]) or "."


def counts(listed: list[Finding]) -> dict[str, dict[str, int]]:
    """Returns the number of findings by folder and rule."""
    tally = Counter((folder_of(finding.file), finding.rule) for finding in listed)
    table: dict[str, dict[str, int]] = {}
    for (folder, rule), number in sorted(tally.items()):
        table.setdefault(folder, {})[rule] = number
    return table


def wrong_subjects(commits: str) -> list[str]:
    """Returns what is wrong with the subjects of a range of commits."""
    log = subprocess.run(
        ["git", "log", "--format=%s", commits], cwd=ROOT, capture_output=True, text=True, check=True
    )
    wrong = []
    for subject in log.stdout.splitlines():
        match = re.fullmatch(r"\[[\w, /]+\] ([A-Z][\w-]*).*", subject)
        if match is None or re.search(r"(?<!s)(s|ed|ing)$", match[1]):
            wrong.append(f"not [area] and an imperative: {subject}")
    return wrong


def main() -> None:
    """Runs the command line that the module describes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", metavar="FOLDER", help="print the findings in files whose path begins so")
    parser.add_argument("--update", action="store_true", help="lower the counts")
    parser.add_argument("--commits", metavar="RANGE", help="check subjects of commits instead")
    arguments = parser.parse_args()
    if arguments.commits:
        wrong = wrong_subjects(arguments.commits)
        sys.exit("\n".join(wrong) or None)
    listed = findings()
    if arguments.list is not None:
        for finding in listed:
            if finding.file.startswith(arguments.list):
                print(f"{finding.file}:{finding.line}: {finding.rule}: {finding.text}")
        return
    now = counts(listed)
    allowed = json.loads(BASELINE.read_text()) if BASELINE.exists() else now
    more = [
        f"{folder}: {rule}: {number}, and {allowed.get(folder, {}).get(rule, 0)} are allowed"
        for folder, rules in now.items()
        for rule, number in rules.items()
        if number > allowed.get(folder, {}).get(rule, 0)
    ]
    if arguments.update:
        least = {
            folder: {rule: min(number, now.get(folder, {}).get(rule, 0)) for rule, number in rules.items()}
            for folder, rules in allowed.items()
        }
        kept = {folder: {rule: n for rule, n in rules.items() if n} for folder, rules in least.items()}
        BASELINE.write_text(
            json.dumps({folder: rules for folder, rules in kept.items() if rules}, indent=1) + "\n"
        )
    if more:
        sys.exit(
            "\n".join(
                [*more, "python tools/prose.py --list FOLDER names the places; docs/style.md has the rules"]
            )
        )


if __name__ == "__main__":
    main()
