"""The findings as the tables of docs/comparison.md, and of attacks in docs/reliability.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.documents import TableOf, markdown
from benchmarks.others.attacks import Attacks
from benchmarks.others.measure import PATIENCE, Findings, Sizes


def tables(everything: Sequence[Findings], sizes: Sizes, times: Attacks, machine: Mapping[str, Any]) -> TableOf:
    """Return the functions that write the tables of the pages, by name."""
    made = {
        "figures": markdown(_figures(everything, sizes)) + _circumstances(sizes, machine),
        "behaviour": markdown(_behaviour(everything)),
        "attacks": markdown(_attacks(everything, times)),
        "versions": markdown(_versions(everything)),
    }
    return made.__getitem__


def _figures(everything: Sequence[Findings], sizes: Sizes) -> list[list[str]]:
    first, *others = (f"{messages:,}" for messages in sizes.histories)
    largest = f"{max(sizes.histories):,}"
    turns = [f"turn at {first}, ms", *(f"at {messages}" for messages in others)]
    costs = [f"processor, at {largest}", f"KB written, at {largest}", f"load {largest}, ms", "fork, ms", "fork, KB"]
    return [["", *turns, *costs], *(_row(findings, sizes) for findings in everything)]


def _row(findings: Findings, sizes: Sizes) -> list[str]:
    if findings.errors:
        return [findings.name, f"not measured: {findings.errors[0]}", *[""] * (len(sizes.histories) + 4)]
    turns = [_ms(findings.append.get(messages)) for messages in sizes.histories]
    cpu = _ms(findings.append_cpu.get(max(sizes.histories)))
    fork = ["no", ""] if findings.fork is None else [_ms(findings.fork), _kb(findings.fork_bytes)]
    return [findings.name, *turns, cpu, _kb(findings.append_bytes), _ms(findings.load), *fork]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:,.1f}"


def _kb(written: float | None) -> str:
    return "" if written is None else f"{written / 1024:,.0f}"


def _circumstances(sizes: Sizes, machine: Mapping[str, Any]) -> str:
    versions = f"Python {machine['python']} and SQLite {machine['sqlite3']}"
    rounds = f"medians of {sizes.rounds} rounds for turns and {sizes.slow_rounds} for loads and forks"
    return f"""
Measured with {versions} on a machine with {machine["cores"]} cores, load
{machine["load"]}: compare the rows with each other, not with figures from elsewhere.
Times are {rounds}, fewer where that takes
more than {PATIENCE:g} seconds; every round measures each library once. Bytes are means.
"""


def _behaviour(everything: Sequence[Findings]) -> list[list[str]]:
    header = ["", "a second writer on the same loaded state", "killed in the second step of a run"]
    return [header, *([findings.name, findings.two_writers, _killed(findings)] for findings in everything)]


def _killed(findings: Findings) -> str:
    """Return what is left of a killed run. A second way to write with the same library is not killed again."""
    told = [what if setting == "default" else f"with `{setting}`: {what}" for setting, what in findings.killed.items()]
    return "<br>".join(told) or "as above"


def _attacks(everything: Sequence[Findings], times: Attacks) -> list[list[str]]:
    header = [
        "",
        f"acknowledged turns lost, of {times.cuts:,} power cuts",
        f"silently wrong, of {times.flips:,} flipped bits",
        "refused with an error",
    ]
    return [header, *(_attacked(findings) for findings in everything if findings.power_cuts is not None)]


def _attacked(findings: Findings) -> list[str]:
    counts = [findings.power_cuts or 0, findings.flips.get("wrong", 0), findings.flips.get("refused", 0)]
    return [findings.name, *(f"{count:,}" for count in counts)]


def _versions(everything: Sequence[Findings]) -> list[list[str]]:
    rows = [
        [each.name, ", ".join(f"{name} {version}" for name, version in each.versions.items()), each.durability]
        for each in everything
    ]
    return [["", "version", "before a write counts as done"], *rows]
