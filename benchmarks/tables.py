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
        lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
        return found[1] + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    return COMMENT.sub(table, text)


def microseconds(seconds: float | None) -> str:
    """Three digits."""
    if seconds is None:
        return "-"
    us = seconds * 1e6
    return f"{us:.0f}" if us >= 99.95 else f"{us:.1f}"


def shape(result: Row) -> str:
    """Who has it, and M, N, K."""
    name = result["name"].replace("Llama-", "")
    return f"{name} {result['m']}, {result['n']}, {result['k']}"


def ways(name: str, op: str) -> list[dict[str, str]]:
    """An op's shapes: every way that was timed, captured, and `auto` and the best other eagerly."""
    results = [result for result in report(name)["results"] if result["op"] == op]
    others = [
        way
        for way in ("torch", "torch-symm", "one-shot", "two-shot", "quack")
        if any(way in result["graph"]["seconds"] for result in results)
    ]
    return [_ways(result, others) for result in results]


def _ways(result: Row, others: Sequence[str]) -> dict[str, str]:
    graph, eager = result["graph"], result["eager"]
    ours = graph["ours"].get("fused", graph["ours"]["auto"])
    against, best = graph["ours"]["auto"]["against"], eager["best_other"]
    columns = {
        "shape (M, N, K)": shape(result),
        "product": microseconds(graph["seconds"]["product"]),
        **{way: microseconds(graph["seconds"].get(way)) for way in others},
    }
    if "fused" in graph["ours"]:
        columns["fused"] = microseconds(graph["seconds"]["fused"])
    return {
        **columns,
        "of bound": f"{ours['of_bound']:.2f}",
        "model error": "-" if ours["error"] is None else f"{ours['error']:+.0%}".replace("%", " %"),
        "/ best other": "-" if against is None else f"{against:.2f}",
        "auto": _auto(graph),
        "auto, eager": _auto(eager),
        "best other, eager": "-" if best is None else f"{microseconds(eager['seconds'][best])} ({best})",
    }


def _auto(mode: Row) -> str:
    return f"{microseconds(mode['seconds']['auto'])} ({mode['ours']['auto']['taken']})"


def times(name: str, captured: str, eager: str) -> list[dict[str, str]]:
    """Some ways, captured and eagerly."""
    return [
        {
            "shape (M, N, K)": shape(result),
            **{way: microseconds(result["graph"]["seconds"][way]) for way in captured.split(",")},
            **{f"{way}, eager": microseconds(result["eager"]["seconds"][way]) for way in eager.split(",")},
        }
        for result in report(name)["results"]
    ]


def float8(name: str) -> list[dict[str, str]]:
    """Fused and torch's ways with 16-bit and with 8-bit operands, side by side."""
    results = report(name)["results"]
    of = {(one["float8"], *(one[key] for key in ("op", "m", "n", "k"))): one["us"] for one in results}
    rows = []
    for (float8, op, m, n, k), bytes_ in of.items():
        if float8:
            halves = of[False, op, m, n, k]
            ways = {"bf16": halves, "e4m3": bytes_}
            rows.append(
                {
                    "op": op,
                    "M, N, K": f"{m}, {n}, {k}",
                    **{
                        f"{dtype} {way}": microseconds(us[name] / 1e6)
                        for dtype, us in ways.items()
                        for way, name in (("fused", "now"), ("torch", "torch"))
                    },
                    **{
                        f"e4m3 {way}": microseconds(bytes_[way] / 1e6) if way in bytes_ else ""
                        for way in ("torch fast", "torch-symm")
                    },
                    "e4m3: fused / torch": f"{bytes_['now'] / bytes_['torch']:.2f}",
                    "fused: e4m3 / bf16": f"{bytes_['now'] / halves['now']:.2f}",
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


def scattered(*names: str) -> list[dict[str, str]]:
    """The fused reduce-scatter beside what there was before it; the older form of results."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for name in names:
        for result in report(name)["results"]:
            case = (shape(result), result["ranks"])
            found.setdefault(case, {})[result["backend"]] = result
    rows = []
    for (where, ranks), by in sorted(found.items(), key=lambda item: item[0][1]):
        torch, fused = (by[way]["seconds"]["overlapped"] for way in ("torch", "fused"))
        rows.append(
            {
                "shape (M, N, K)": where,
                "P": str(ranks),
                "product": microseconds(by["fused"]["seconds"]["gemm"]),
                "torch": microseconds(torch),
                "fused": microseconds(fused),
                "torch / fused": f"{torch / fused:.2f}",
                "sequential / fused": f"{by['fused']['speedup']:.2f}",
            }
        )
    return rows


def decomposed(*names: str) -> list[dict[str, str]]:
    """What decomposing gains over `sequential`."""
    return [
        {
            "shape (M, N, K)": shape(result),
            "op": result["op"],
            "sequential / decomposed (quartiles)": "{:.2f} ({:.2f}-{:.2f})".format(
                result["speedup"], *result["speedup_quartiles"]
            ),
        }
        for name in names
        for result in report(name)["results"]
    ]


def emulator() -> list[dict[str, str]]:
    """How long the emulator takes, beside an older one in another hour."""
    then = {result["name"]: result["cpu_seconds"] for result in report("emulator-speed-29307b6")["results"]}
    return [
        {
            "workload": result["name"],
            "CPU s": f"{result['cpu_seconds']:.2f}",
            "no checks": f"{result['cpu_seconds_unchecked']:.2f}",
            "29307b6, another hour": f"{then[result['name']]:.2f}",
            "warp instructions": f"{result['warp_instructions']:,}",
            "per s": f"{result['warp_instructions_per_cpu_second']:,}",
        }
        for result in report("emulator-speed")["results"]
    ]


TABLES: dict[str, Callable[..., list[dict[str, str]]]] = {
    one.__name__: one for one in (ways, times, float8, layers, scattered, decomposed, emulator)
}

if __name__ == "__main__":
    README.write_text(rendered(README.read_text()))
