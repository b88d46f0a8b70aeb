"""The findings as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.others.measure import Findings, Sizes


def lines(
    everything: Sequence[Findings], sizes: Sizes, machine: Mapping[str, Any], missing: Mapping[str, str]
) -> Iterator[str]:
    yield ", ".join(f"{name}: {value}" for name, value in machine.items())
    yield f"times: medians of {sizes.rounds} rounds (loads and forks: {sizes.slow_rounds}); bytes: means of the same"
    yield ""
    measured = [findings for findings in everything if findings.append]
    yield from columns(
        [_head(sizes), *(_row(findings, sizes) for findings in measured)] if measured else [],
    )
    for findings in everything:
        yield ""
        yield f"{findings.name}  ({', '.join(f'{name} {version}' for name, version in findings.versions.items())})"
        yield f"  writes       {findings.durability}"
        for what, rounds in findings.rounds.items():
            if rounds < (sizes.rounds if what.startswith("append") else sizes.slow_rounds):
                yield f"  fewer rounds {what}: {rounds}, because it takes long"
        if findings.two_writers:
            yield f"  two writers  {findings.two_writers}"
        for setting, outcome in findings.killed.items():
            yield f"  killed       {'' if setting == 'default' else f'[{setting}] '}{outcome}"
        if findings.power_cuts is not None:
            yield f"  power cuts   {findings.power_cuts} lost what was acknowledged"
            yield f"  flipped bits {', '.join(f'{number} {what}' for what, number in sorted(findings.flips.items()))}"
        for error in findings.errors:
            yield f"  NOT MEASURED {error}"
    for name, reason in missing.items():
        yield f"\n{name}: not installed ({reason})"


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Align the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells])


def _head(sizes: Sizes) -> list[str]:
    largest = f"{max(sizes.histories):,}"
    appends = [f"turn at {messages:,}" for messages in sizes.histories]
    return [
        "",
        *appends,
        f"processor at {largest}",
        f"bytes at {largest}",
        f"load {largest}",
        f"fork {largest}",
        "fork bytes",
    ]


def _row(findings: Findings, sizes: Sizes) -> list[str]:
    appends = [ms(findings.append.get(messages)) for messages in sizes.histories]
    fork = [ms(findings.fork), size(findings.fork_bytes)] if findings.fork is not None else ["no", ""]
    cpu = ms(findings.append_cpu.get(max(sizes.histories)))
    return [findings.name, *appends, cpu, size(findings.append_bytes), ms(findings.load), *fork]


def ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:,.1f} ms"


def size(written: float | None) -> str:
    return "" if written is None else f"{written / 1024:,.0f} KB"
