"""Keys of epilogues: they differ if anything differs that the functions read."""

import functools
import types

import pytest
import torch

from overlap_gemm import epilogue, epilogues
from overlap_gemm.epilogues import relu, silu, sources

SETTINGS = types.ModuleType("settings")
SETTINGS.inner = types.ModuleType("settings.inner")
FACTOR = 1.0
ONE = torch.ones(1)


def _of_nested(x):
    def scaled(value):
        return value * FACTOR

    return scaled(x)


def _of_a_comprehension(x):
    return sum([x * FACTOR for _ in range(2)])


def _of_a_module(x):
    return x * SETTINGS.WEIGHT


def _of_an_inner_module(x):
    return x * SETTINGS.inner.WEIGHT


def _of_modules_and_functions(x):
    return _of_a_module(x) * SETTINGS.FIRST


@pytest.mark.parametrize("function", [_of_nested, _of_a_comprehension])
def test_keys_follow_constants_of_functions_in_the_function(monkeypatch, function):
    before = epilogue(function).key
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert epilogue(function).key != before


@pytest.mark.parametrize(
    ("function", "module"),
    [
        (_of_a_module, SETTINGS),
        (_of_an_inner_module, SETTINGS.inner),
        (_of_modules_and_functions, SETTINGS),
    ],
)
def test_keys_follow_constants_and_functions_of_modules(monkeypatch, function, module):
    monkeypatch.setattr(SETTINGS, "FIRST", 1.0, raising=False)
    keys = []
    for value in (1.0, 2.0):
        monkeypatch.setattr(module, "WEIGHT", value, raising=False)
        keys.append(epilogue(function).key)
    assert keys[0] != keys[1]


def test_keys_follow_which_of_the_functions_is_called_again():
    def made(first, second, third):
        @epilogue(pairs=True)
        def of_three(gate, up):
            return first(gate) * second(up) + third(gate)

        return of_three

    of_default = [made(relu, silu, third).key for third in (relu, silu)]
    assert of_default[0] != of_default[1]
    assert made(relu, silu, silu) is made(relu, silu, silu)


def test_keys_follow_the_source_of_a_wrapper():
    def wrapping(wrapper):
        return epilogue(functools.wraps(silu)(wrapper))

    def twice(x):
        return 2.0 * silu(x)

    def halved(x):
        return 0.5 * silu(x)

    assert wrapping(twice).key != wrapping(halved).key


def test_keys_do_not_contain_addresses():
    def made():
        def default(x):
            return x + 1.0

        def applied(x, function=default, *, other=default):
            return function(x) * other(x)

        @epilogue
        def of_a_default(x):
            return applied(x)

        return of_a_default

    assert made() is made()


def test_keys_follow_modules_and_defaults_of_the_gradient(monkeypatch):
    def key_with(factor, weight):
        monkeypatch.setattr(SETTINGS, "WEIGHT", weight, raising=False)

        def gradient_of(gradients, _outputs, _inputs, factor=factor, *, kept=ONE):
            return (torch.mul(gradients[0], factor * SETTINGS.WEIGHT) * kept,)

        @epilogue(gradient=gradient_of)
        def doubled(x):
            return 2.0 * x

        return doubled.key

    keys = [key_with(*values) for values in ((1.0, 1.0), (1.0, 2.0), (2.0, 1.0), (1.0, 1.0))]
    assert len(set(keys)) == 3 and keys[0] == keys[3]


def test_a_gradient_may_use_any_function_of_installed_packages():
    def declared_with(file):
        values = {}
        exec(compile("factor = lambda gradient: 2.0 * gradient", file, "exec"), values)
        factor = values["factor"]

        def gradient_of(gradients, _outputs, _inputs):
            return (factor(gradients[0]),)

        @epilogue(gradient=gradient_of)
        def doubled(x):
            return 2.0 * x

        return doubled

    assert all(declared_with(f"{folder}/package/module.py") for folder in sources.INSTALLED)
    with pytest.raises(TypeError, match="define functions with def, not with lambda"):
        declared_with("module.py")


def test_keys_follow_functions_of_the_gradient():
    def key_with(factor):
        def scaled(gradient, again=False):
            return scaled(gradient) if again else factor(gradient)

        def gradient_of(gradients, _outputs, _inputs):
            return (scaled(gradients[0]),)

        @epilogue(gradient=gradient_of)
        def doubled(x):
            return 2.0 * x

        return doubled.key

    def two(gradient):
        return 2.0 * gradient

    def half(gradient):
        return torch.mul(gradient, 0.5)

    assert key_with(two) != key_with(half) and key_with(two) == key_with(two)


def test_keys_follow_constants_of_the_gradient():
    def made(limit):
        def limited(gradients, _outputs, _inputs):
            return (gradients[0].clamp(-limit, limit),)

        @epilogue(gradient=limited)
        def doubled(x):
            return 2.0 * x

        return doubled

    assert made(1.0) is made(1.0)
    assert made(1.0).key != made(2.0).key


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor

    def method(self, x):
        return x * self.factor


@pytest.mark.parametrize(
    "function",
    [Scaled(2.0), Scaled(2.0).method, functools.partial(silu), abs],
    ids=["object", "method", "partial", "builtin"],
)
def test_functions_that_hold_values_are_refused(function):
    with pytest.raises(TypeError, match="define functions with def; got a "):
        epilogue(function)


def test_a_global_with_the_name_of_a_method_is_not_read(monkeypatch):
    def of_methods(x):
        return epilogues.exp(x).sqrt()

    monkeypatch.setitem(globals(), "sqrt", {})
    assert epilogue(of_methods).name == "of_methods"
