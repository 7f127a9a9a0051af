"""The tables of benchmarks/README.md, made from the data in `results/`: each below a comment that names it.

python benchmarks/tables.py     # writes them anew
<!-- table: ways h200x4 gemm_reduce_scatter -->     a function of this file, and its arguments
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
COMMENT = re.compile(r"(<!-- table: ([^>]+) -->\n\n)(?:\|.*\n)*")
Row = dict[str, Any]


def report(name: str) -> Any:
    """A file of results."""
    return json.loads((FOLDER / "results" / f"{name}.json").read_text())


def rendered(text: str) -> str:
    """A page with its tables made anew."""

    def table(found: re.Match[str]) -> str:
        function, *arguments = found[2].split()
        rows = TABLES[function](*arguments)
        head, *body = (f"| {' | '.join(line)} |\n" for line in (rows[0], *(row.values() for row in rows)))
        return found[1] + head + "|---" * len(rows[0]) + "|\n" + "".join(body)

    return COMMENT.sub(table, text)


def microseconds(seconds: float | None) -> str:
    """Three digits."""
    if seconds is None:
        return "-"
    us = seconds * 1e6
    return f"{us:.0f}" if us >= 99.95 else f"{us:.1f}"


def shape(result: Row) -> str:
    """M, N, K over all ranks."""
    return f"{result['m']},{result['n']},{result['k']}"


def ways(name: str, op: str, only: str = "") -> list[dict[str, str]]:
    """Times of all ways of an op, captured; `auto` relative to the fastest of torch's ways, also eagerly.

    Args:
        name: File of results.
        op: Op.
        only: Text that the names of the table's shapes contain.
    """
    results = [
        result for result in report(name)["results"] if result["op"] == op and only in (result["name"] or "")
    ]
    others = [
        way
        for way in ("torch", "torch-symm", "one-shot", "two-shot", "quack")
        if any(way in result["graph"]["seconds"] for result in results)
    ]
    return [_ways(result, others) for result in results]


def _ways(result: Row, others: Sequence[str]) -> dict[str, str]:
    graph, auto = result["graph"], result["graph"]["ours"]["auto"]
    times = {way: microseconds(graph["seconds"].get(way)) for way in ("product", *others, "fused")}
    return {
        "M,N,K": shape(result),
        **times,
        "of bound": f"{graph['ours']['fused']['of_bound']:.2f}",
        "auto": f"{microseconds(graph['seconds']['auto'])} ({auto['taken']})",
        "auto / best": f"{auto['against']:.2f}",
        "eagerly": f"{result['eager']['ours']['auto']['against']:.2f}",
    }


def promises(name: str) -> list[dict[str, str]]:
    """Returns the time of the default, ratios to it, and how many elements have other bits."""
    return [
        {
            "op": result["op"],
            "M": str(result["m"]),
            "default": microseconds(result["us"]["default"] / 1e6),
            **{way: f"{ratio:.2f}" for way, ratio in result["ratio"].items() if way != "default"},
            "differ": str(sum(result["differing"][way][way] for way in ("batch", "ranks"))),
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
    """The projections of a layer, in milliseconds."""
    rows = []
    for result in report(name)["results"]:
        seconds = {way: found["seconds"] for way, found in result["ways"].items()}
        rows.append(
            {
                "layer, tokens, pass": f"{result['model']}, {result['rows']}, {result['passes']}",
                **{f"{way} (ms)": f"{1e3 * time:.3g}" for way, time in seconds.items()},
                **{f"ours / {way}": f"{found['ratio']:.2f}" for way, found in result["ours_against"].items()},
            }
        )
    return rows


def scattered(name: str) -> list[dict[str, str]]:
    """The fused reduce-scatter and what there was before it; the older form of results."""
    found: dict[str, dict[str, Row]] = {}
    for result in report(name)["results"]:
        found.setdefault(shape(result), {})[result["backend"]] = result
    rows = []
    for where, by in found.items():
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
    """Speed of `decomposed` relative to `sequential`."""
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
    """Time of the emulator, with and without checks."""
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
    one.__name__: one for one in (ways, promises, epilogues, layers, scattered, decomposed, emulator)
}

if __name__ == "__main__":
    README.write_text(rendered(README.read_text()))
