"""An example or two for the help of each command; its module has the rest."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "tour": ("perdure tour", "perdure tour my-tour"),
    "init": ("perdure init", "perdure init my-agent --force"),
    "doctor": ("perdure doctor", "perdure doctor --store sqlite:///sessions.db --json"),
    "completion": ("perdure completion bash", "perdure completion fish"),
    "chat": (
        "perdure chat",
        "perdure chat -c",
        "perdure chat --agent assistant.md --tools tools.py --model openai:gpt-5",
    ),
    "send": (
        "perdure send --new 'What is 19 * 21?' --model offline",
        "perdure send @ 'And half of it?'",
        "perdure send order-7 - --key request-12 --tools tools.py",
    ),
    "approve": ("perdure approve @ --tools tools.py", "perdure approve order-7 --call call_1 --tools tools.py"),
    "deny": ("perdure deny @ 'Not on a Sunday.' --tools tools.py",),
    "cancel": ("perdure cancel order-7",),
    "recover": ("perdure recover --tools tools.py", "perdure recover order-7 --tools tools.py"),
    "inject": ("perdure inject @ 'The parcel has arrived.'", "perdure inject order-7 'Be brief.' --role system"),
    "ls": ("perdure ls", "perdure ls --status suspended --since 2d", "perdure ls --all --json"),
    "show": ("perdure show @", "perdure show 0192f --all", "perdure show order-7 --version 3 --json"),
    "tree": ("perdure tree @", "perdure tree order-7 --svg tree.svg"),
    "events": ("perdure events @ --last 20", "perdure events order-7 --follow --json"),
    "diff": ("perdure diff order-7 order-7-again",),
    "search": ("perdure search 'refund order*'", "perdure search '\"two words\"' --limit 5"),
    "stats": ("perdure stats", "perdure stats --by model --since 30d"),
    "fork": ("perdure fork @", "perdure fork order-7 order-7-again --at 4"),
    "trim": ("perdure trim @ 6",),
    "compact": ("perdure compact @", "perdure compact order-7 --strategy truncate --keep-last 4"),
    "uncompact": ("perdure uncompact @",),
    "reset": ("perdure reset order-7",),
    "rewind": ("perdure rewind @ 3",),
    "undo": ("perdure undo @",),
    "suspend": ("perdure suspend order-7",),
    "resume": ("perdure resume order-7",),
    "rename": ("perdure rename @ 'Ada and her parcel'",),
    "tag": ("perdure tag @ urgent north", "perdure tag order-7 --remove urgent"),
    "delete": ("perdure delete order-7",),
    "export": ("perdure export -o all.jsonl", "perdure export order-7 -o order-7.jsonl"),
    "import": ("perdure import all.jsonl", "perdure import - --store sqlite:///sessions.db"),
    "copy": ("perdure copy sqlite:///sessions.db postgresql://localhost/agents",),
    "fsck": ("perdure fsck", "perdure fsck order-7 --json"),
    "purge": ("perdure purge order-7", "perdure purge --status deleted --older-than 30d --yes"),
    "redact": ("perdure redact order-7 0192f0c1-22d4-7e61-8f00-5a1b2c3d4e5f",),
    "gc": ("perdure gc",),
}


def epilog(name: str) -> str:
    """The examples of a command as its help shows them: each on a line of its own, whatever the width."""
    return "\b\nExamples:\n" + "\n".join(f"  {example}" for example in EXAMPLES[name])
