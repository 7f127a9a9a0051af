"""Numbers in the environment: with units, and refused with the rule."""

from unittest import mock

import pytest

from overlap_gemm.backends import group_measurements
from overlap_gemm.integrations import sglang, torch_symm_mem, vllm
from overlap_gemm.runtime import agree, environment
from overlap_gemm.runtime.compile_cache import cache_folder

NAME = "OVERLAP_GEMM_ANYTHING"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("8589934592", 1 << 33),
        ("8GB", 8 * 10**9),
        ("8 GiB", 8 << 30),
        ("8g", 8 * 10**9),
        ("1.5 gib", 3 << 29),
        ("500 MB", 500 * 10**6),
        ("64KiB", 1 << 16),
        (" 0 ", 0),
        ("12b", 12),
        ("1TiB", 1 << 40),
        ("2TB", 2 * 10**12),
        ("3MiB", 3 << 20),
    ],
)
def test_sizes(monkeypatch, text, found):
    monkeypatch.setenv(NAME, text)
    assert environment.nbytes(NAME, 7) == found


@pytest.mark.parametrize("text", ["", "much", "-1", "8 Gibit", "GB", "8GBs", "1e9", "8,5GB", "0x10", "8 G B"])
def test_what_is_no_size_is_refused_with_the_rule(monkeypatch, text):
    monkeypatch.setenv(NAME, text)
    with pytest.raises(ValueError, match=rf"{NAME} must be a number of bytes, .* 8GiB .*; got '{text}'"):
        environment.nbytes(NAME, 7)


def test_what_is_not_set_is_the_default(monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    assert (environment.nbytes(NAME, 7), environment.count(NAME, "SMs")) == (7, 0)
    assert environment.seconds(NAME) is None
    assert environment.choice(NAME, ("a", "b")) == "a"


@pytest.mark.parametrize(("text", "found"), [("0", 0.0), ("1.5", 1.5), ("1e3", 1000.0)])
def test_seconds(monkeypatch, text, found):
    monkeypatch.setenv(NAME, text)
    assert environment.seconds(NAME) == found


@pytest.mark.parametrize("text", ["", "soon", "-1", "inf", "nan", "1e10"])
def test_what_are_no_seconds_is_refused_with_the_rule(monkeypatch, text):
    monkeypatch.setenv(NAME, text)
    with pytest.raises(
        ValueError, match=rf"{NAME} must be a number of seconds, 0 for no limit; got '{text}'"
    ):
        environment.seconds(NAME)


@pytest.mark.parametrize("text", ["", "many", "-1", "1.5"])
def test_what_is_no_count_is_refused_with_the_rule(monkeypatch, text):
    monkeypatch.setenv(NAME, text)
    with pytest.raises(ValueError, match=rf"{NAME} must be a number of SMs; got '{text}'"):
        environment.count(NAME, "SMs")


def test_choices(monkeypatch):
    monkeypatch.setenv(NAME, "b")
    assert environment.choice(NAME, ("a", "b")) == "b"
    monkeypatch.setenv(NAME, "c")
    with pytest.raises(ValueError, match=f"{NAME} must be a or b; got 'c'"):
        environment.choice(NAME, ("a", "b"))


def uses_plugin(plugin):
    """Returns whether a plug-in's entry point registers it."""
    with mock.patch.object(plugin, "_register") as used, mock.patch.object(torch_symm_mem, "install_once"):
        plugin.register()
    return used.called


@pytest.mark.parametrize(
    ("variable", "read", "values"),
    [
        ("OVERLAP_GEMM_CHECK", agree.checking, {"1": True, "0": False, None: False}),
        ("OVERLAP_GEMM_CACHE", lambda: cache_folder() is not None, {"1": True, "0": False, None: True}),
        ("OVERLAP_GEMM_VLLM", lambda: uses_plugin(vllm), {"1": True, "0": False, None: False}),
        ("OVERLAP_GEMM_SGLANG", lambda: uses_plugin(sglang), {"1": True, "0": False, None: False}),
        ("OVERLAP_GEMM_AUTOTUNE_SECONDS", group_measurements._seconds, {"0.5": 0.5, "0": 0.0, None: 60.0}),
    ],
)
def test_variables_of_the_documentation(variable, read, values, monkeypatch):
    for text, value in values.items():
        monkeypatch.setattr(agree, "_checking", None)
        monkeypatch.delenv(variable, raising=False)
        if text is not None:
            monkeypatch.setenv(variable, text)
        assert read() == value
    monkeypatch.setattr(agree, "_checking", None)
    monkeypatch.setenv(variable, "yes")
    with pytest.raises(ValueError, match=f"{variable} must be .*; got 'yes'"):
        read()
