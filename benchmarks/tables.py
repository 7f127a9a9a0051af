"""Tables of the data in `results/`; those of benchmarks/README.md are below comments that name them.

python benchmarks/tables.py                                          # writes the page's tables anew
python benchmarks/tables.py backends h200x2-shapes gemm_all_reduce   # prints a table
<!-- table: backends h200x2-shapes gemm_all_reduce -->     a function of this file, and arguments
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
COMMENT = re.compile(r"(<!-- table: ([^>]+) -->\n\n)(?:\|.*\n)*")
Row = dict[str, Any]


def report(name: str) -> Any:
    """Returns the content of a file of results."""
    return json.loads((FOLDER / "results" / f"{name}.json").read_text())


def table(function: str, *arguments: str) -> str:
    """Returns the Markdown of a table: function of this file, and its arguments."""
    rows = TABLES[function](*arguments)
    head, *body = (f"| {' | '.join(line)} |\n" for line in (rows[0], *(row.values() for row in rows)))
    return head + "|---" * len(rows[0]) + "|\n" + "".join(body)


def rendered(text: str) -> str:
    """Returns a page with its tables made anew."""
    return COMMENT.sub(lambda comment: comment[1] + table(*comment[2].split()), text)


def microseconds(seconds: float | None) -> str:
    """Returns a time with three digits."""
    if seconds is None:
        return "-"
    us = seconds * 1e6
    return f"{us:.0f}" if us >= 99.95 else f"{us:.1f}"


def shape(result: Row) -> str:
    """Returns M, N, K over all ranks."""
    return f"{result['m']},{result['n']},{result['k']}"


def backends(name: str, op: str) -> list[dict[str, str]]:
    """Returns times of all backends of an op, captured; `auto` relative to torch's fastest, also eagerly.

    Args:
        name: File of results.
        op: Op.
    """
    results = [result for result in report(name)["results"] if result["op"] == op]
    others = [
        other
        for other in ("torch", "torch-symm", "one-shot", "two-shot", "quack")
        if any(other in result["graph"]["seconds"] for result in results)
    ]
    return [_backends(result, others) for result in results]


def _backends(result: Row, others: Sequence[str]) -> dict[str, str]:
    graph = result["graph"]
    times = {name: microseconds(graph["seconds"].get(name)) for name in ("product", *others, "fused")}
    bound = f"{graph['ours']['fused']['of_bound']:.2f}"
    return {"M,N,K": shape(result), **times, "of bound": bound, **_auto(result)}


def _auto(result: Row) -> dict[str, str]:
    graph, auto = result["graph"], result["graph"]["ours"]["auto"]
    return {
        "auto": f"{microseconds(graph['seconds']['auto'])} ({auto['taken']})",
        "auto / best": f"{auto['against']:.2f}",
        "eagerly": f"{result['eager']['ours']['auto']['against']:.2f}",
    }


def auto(name: str, *models: str) -> list[dict[str, str]]:
    """Returns times of `auto` of all ops, without those of torch's backends.

    Args:
        name: File of results.
        *models: Texts, one of which the name of each shape contains; all shapes by default.
    """
    return [
        {"op, M,N,K": f"{result['op']} {shape(result)}", **_auto(result)}
        for result in report(name)["results"]
        if not models or any(model in result["name"] for model in models)
    ]


def promises(name: str) -> list[dict[str, str]]:
    """Returns the time of the default, and ratios to it."""
    return [
        {
            "op": result["op"],
            "M": str(result["m"]),
            "default": microseconds(result["us"]["default"] / 1e6),
            **{name: f"{ratio:.2f}" for name, ratio in result["ratio"].items() if name != "default"},
        }
        for result in report(name)["results"]
    ]


def epilogues(name: str, k: str) -> list[dict[str, str]]:
    """Returns, for calls with this K, the time of the op alone, and ratios to it with epilogues."""
    rows = []
    for result in report(name)["results"]:
        call, what = result["case"].split(": ")
        if call.endswith(f",{k}"):
            ratios = {way: f"{ratio:.2f}" for way, ratio in result["ratio"].items()}
            rows.append(
                {
                    "call": call,
                    "op": microseconds(result["us"]["op"] / 1e6),
                    "residual": ratios.get("residual", "-"),
                    "after": ratios.get("op, residual", "-"),
                    "and": what.removeprefix("residual, "),
                    "in the kernel": ratios.get("epilogue, norm", ratios["epilogue"]),
                    "compiled": ratios["compiled"],
                    "eager": ratios["eager"],
                }
            )
    return rows


def layers(name: str) -> list[dict[str, str]]:
    """Returns times of the projections of a layer, in milliseconds."""
    rows = []
    for result in report(name)["results"]:
        seconds = {name: timed["seconds"] for name, timed in result["ways"].items()}
        rows.append(
            {
                "layer, tokens, pass": f"{result['model']}, {result['rows']}, {result['passes']}",
                **{
                    f"{name} (ms)": f"{1e3 * time:.3g}"
                    for name, time in seconds.items()
                    if name != "block, compiled"
                },
                **{
                    f"ours / {name}": f"{to['ratio']:.2f}"
                    for name, to in result["ours_against"].items()
                    if name in ("torch", "async-tp")
                },
            }
        )
    return rows


def scattered(name: str) -> list[dict[str, str]]:
    """Returns times of the fused reduce-scatter and of `torch`, from results in an older format."""
    shapes: dict[str, dict[str, Row]] = {}
    for result in report(name)["results"]:
        shapes.setdefault(shape(result), {})[result["backend"]] = result
    rows = []
    for where, by in shapes.items():
        torch, fused = (by[way]["seconds"]["overlapped"] for way in ("torch", "fused"))
        rows.append(
            {
                "M, N, K": where,
                "product": microseconds(by["fused"]["seconds"]["gemm"]),
                "torch": microseconds(torch),
                "fused": microseconds(fused),
                "fused / torch": f"{fused / torch:.2f}",
            }
        )
    return rows


def decomposed(*names: str) -> list[dict[str, str]]:
    """Returns the speed of `decomposed` relative to `sequential`."""
    return [
        {
            "M,N,K": shape(result),
            "op": result["op"],
            "sequential / decomposed (quartiles)": "{:.2f} ({:.2f}-{:.2f})".format(
                result["speedup"], *result["speedup_quartiles"]
            ),
        }
        for name in names
        for result in report(name)["results"]
    ]


def emulator() -> list[dict[str, str]]:
    """Returns times of the emulator, with and without checks."""
    return [
        {
            "workload": result["name"],
            "CPU s": f"{result['cpu_seconds']:.2f}",
            "no checks": f"{result['cpu_seconds_unchecked']:.2f}",
            "warp instructions per s": f"{result['warp_instructions_per_cpu_second']:,}",
        }
        for result in report("emulator-speed")["results"]
    ]


TABLES: dict[str, Callable[..., list[dict[str, str]]]] = {
    one.__name__: one
    for one in (backends, auto, promises, epilogues, layers, scattered, decomposed, emulator)
}

if __name__ == "__main__":
    if sys.argv[1:]:
        print(table(*sys.argv[1:]), end="")
    else:
        README.write_text(rendered(README.read_text()))
