"""The linter of the style guide notices what the guide is about, and nothing else."""

from pathlib import Path

import pytest

from tests.support.scripts import load

ROOT = Path(__file__).parents[2]
prose = load(ROOT / "tools" / "prose.py")


def rules_of(source, monkeypatch, tmp_path, suffix=".py"):
    file = tmp_path / f"page{suffix}"
    file.write_text(source)
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    return [(finding.line, finding.rule) for finding in prose.check(file)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def f():\n    """Returns the extent."""\n', []),
        ('def f():\n    """What K is."""\n', [(2, "opening")]),
        ('def f():\n    """The extent."""\n', [(2, "verb")]),
        ('class C:\n    """Extents of a call."""\n', []),
        ('class C:\n    """Where tiles lie."""\n', [(2, "opening")]),
        ('def f(op):\n    """Calls.\n\n    Args:\n        op: Op to call.\n    """\n', []),
        ('def f(op):\n    """Calls.\n\n    Args:\n        op: It.\n    """\n', [(2, "entry")]),
        ('def f(op):\n    """Calls.\n\n    Args:\n        op: As for the other.\n    """\n', [(2, "entry")]),
        ("x = 1  # the tile stands behind the ring\n", [(1, "lexicon")]),
        ("x = 1  # the tile follows the ring\n", []),
        ('raise ValueError(f"nobody has {1}")\n', [(1, "lexicon")]),
        ("print('nobody')\n", []),  # data, not a message
        ("found = 1\n", [(1, "name")]),
        ("def f(asked): return asked\n", [(1, "name")]),
        (f"#{' word' * 26}.\n", [(1, "sentence")]),
        (f"#{' word' * 25}.\n", []),
    ],
)
def test_rules_of_python_files(source, expected, monkeypatch, tmp_path):
    assert rules_of(source, monkeypatch, tmp_path) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("A page.\n\nThe copy is mended.\n", [(3, "lexicon")]),
        ("```python\nmended = 1\n```\n\nA page with `mended` in code.\n", []),
        (f"- {'word ' * 40}\n", []),  # of a list
    ],
)
def test_rules_of_pages(source, expected, monkeypatch, tmp_path):
    assert rules_of(source, monkeypatch, tmp_path, ".md") == expected


def test_a_count_may_fall_and_never_rise(monkeypatch, tmp_path, capsys):
    baseline = tmp_path / "prose.json"
    found = [prose.Finding("src/overlap_gemm/api/a.py", 1, "verb", "The")] * 2
    monkeypatch.setattr(prose, "BASELINE", baseline)
    monkeypatch.setattr(prose, "findings", lambda: list(found))

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["prose.py", *arguments])
        prose.main()

    run("--update")
    run()
    found.append(found[0])
    for arguments in ((), ("--update",)):
        with pytest.raises(SystemExit, match="src/overlap_gemm/api: verb: 3, and 2 are allowed"):
            run(*arguments)
    del found[1:]
    run("--update")
    found.append(found[0])
    with pytest.raises(SystemExit, match="verb: 2, and 1 are allowed"):
        run()


def test_the_guide_gives_the_words():
    assert all(prose.lexicon().search(words) for words in ("it is said once", "behind it", "nobody"))
    assert not any(prose.lexicon().search(words) for words in ("words", "put it into a slot", "an open file"))
    assert {"found", "asked", "keeping", "near_table"} <= prose.banned_names()


@pytest.mark.parametrize(
    ("subject", "is_right"),
    [
        ("[kernels] Load row scales by TMA", True),
        ("[a, b] Pass the option", True),
        ("[kernels] Loads row scales", False),
        ("[kernels] Loaded row scales", False),
        ("kernels: load row scales", False),
    ],
)
def test_subjects_of_commits_are_imperative(subject, is_right, monkeypatch):
    class Done:
        stdout = f"{subject}\n"

    monkeypatch.setattr(prose.subprocess, "run", lambda *_, **__: Done)
    assert (prose.wrong_subjects("a..b") == []) is is_right
