"""Figures that documents quote, and the data files that they are computed from."""

import re
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _tables():
    spec = spec_from_file_location("benchmark_tables", ROOT / "benchmarks" / "tables.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = _tables()


report = cache(tables.report)


def words(document):
    return " ".join((ROOT / document).read_text().split())


def said(found):
    return f"{min(found):.2f} to {max(found):.2f}"


LOOKS_MEASURED = re.compile(
    r"\d[\d.,]* ?(?:us|ms|%|GB/s|MB|KB)(?!\w)|(?<![\w.])(?<!torch )(?<!torch \()(?<!>= )\d\.\d\d(?![\w.])|"
    r"\d+ of \d+ |\d+ times"
)
