"""Every figure that the benchmarks measure, with its bound and its aim. One page, no code.

A bar's key is its topic, a dot, and its own name: `python -m benchmarks save` measures all that begin with `save.`
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """A figure: an operation, what it is compared with, and the bound. A ratio has no unit."""

    key: str
    operation: str
    compared_with: str
    must: float
    aim: float | None = None
    unit: str = ""
    at_least: bool = False

    @property
    def topic(self) -> str:
        return self.key.partition(".")[0]

    def is_met_by(self, value: float) -> bool:
        return value >= self.must if self.at_least else value <= self.must


def adapter_bars(key: str, framework: str, theirs: str, slowest: float | None, most: float) -> tuple[Bar, ...]:
    """Return the bars of a framework's turns. A store that writes without fsync and reads nothing has no time bar."""
    times = tuple(
        Bar(f"adapters.{key}_{name}", f"{framework}: processor time of a turn at {size} messages", theirs, slowest)
        for name, size in (("1k", "1,000"), ("10k", "10,000"))
        if slowest is not None
    )
    return *times, Bar(f"adapters.{key}_bytes", f"{framework}: bytes on disk of a turn", theirs, most)


BARS = (
    # The cost of a turn. A turn is a question, a tool call, its result and an answer.
    Bar("save.bare", "save of a turn", "the same rows in a bare transaction, through one thread", 1.35, 1.2),
    Bar("save.in_loop", "save of a turn with `commit_in_loop`", "the bare transaction, through one thread", 1.35, 1.2),
    Bar("save.wal", "save of a turn, pages written to the write-ahead log", "", 7, 6, unit="pages"),
    Bar("save.10k", "save of a turn at 10,000 messages", "the same at none", 1.2),
    Bar("save.100k", "save of a turn at 100,000 messages", "the same at none", 1.2),
    Bar("save.bytes", "bytes on disk of a turn", "the JSON of its messages", 1.5),
    Bar("execute.100k", "warm `runtime.execute` of a turn at 100,000 messages", "the same at none", 1.25),
    Bar("execute.rows", "messages read after another process has saved a turn, of 100,000", "", 4, unit="messages"),
    Bar(
        "crowd.openai",
        "turns a second, 64 sessions at once",
        "OpenAI Agents, one `add_items` a turn",
        8,
        12,
        at_least=True,
    ),
    Bar(
        "crowd.disk",
        "turns a second, 64 sessions at once, on a disk whose fsync takes 1 ms",
        "OpenAI Agents, one `add_items` a turn, on the same disk",
        8,
        12,
        at_least=True,
    ),
    Bar("crowd.cpu", "processor time of a turn, 64 sessions at once", "", 0.15, unit="ms"),
    Bar("crowd.in_loop", "processor time of a turn, 64 sessions at once, with `commit_in_loop`", "", 0.15, unit="ms"),
    Bar(
        "crowd.execute",
        "turns a second by `runtime.execute`, 64 sessions at once",
        "the store alone",
        0.85,
        at_least=True,
    ),
    Bar(
        "bounded.warm",
        "speed of a turn with a view of 50 messages",
        "OpenAI Agents with `limit=50`, in one call",
        1.5,
        2,
        at_least=True,
    ),
    Bar(
        "bounded.cold",
        "speed of a turn with a view of 50 messages, read from the file",
        "OpenAI Agents with `limit=50`, in one call",
        1.0,
        1.3,
        at_least=True,
    ),
    Bar("cold.agno", "a new process until its first turn is durable", "the same with Agno", 0.33, 0.25),
    Bar("memory.loaded", "resident memory of a loaded session of 10,000 messages", "", 12, 10, unit="MB"),
    # The cost of a run beside its model and its tools.
    Bar("loop.alone", "a step of a run, the loop alone, processor time", "", 0.2, 0.1, unit="ms"),
    Bar("loop.recorded", "a step of a run with its record, in memory, processor time", "", 0.35, 0.15, unit="ms"),
    Bar("loop.run", "a run with one tool call, every step durable", "one save of its messages", 4, 3),
    Bar("loop.prompt", "`send` at 10,000 messages, its prompt compiled and not read", "the same at 100", 3, 1.2),
    Bar("loop.10k", "a step of a run at 10,000 messages", "the same at none", 1.5),
    Bar("loop.bytes", "bytes on disk of a run with one tool call", "the JSON of its messages", 1.8),
    Bar("telemetry.on", "a run with one tool call, every step durable, traced and measured", "the same untraced", 1.05),
    Bar("telemetry.on_cpu", "the processor time of the same", "the same untraced", 1.05),
    Bar("telemetry.off", "what a run asks of telemetry that is off", "the processor time of the run", 0.01),
    # PostgreSQL.
    Bar("postgres.bare", "PostgreSQL: save of a turn", "one bare statement (psycopg)", 1.6, 1.3),
    Bar(
        "postgres.crowd",
        "PostgreSQL: turns a second, 64 sessions at once",
        "the bare statement on a pool of 16",
        3,
        6,
        at_least=True,
    ),
    Bar("postgres.100k", "PostgreSQL: save of a turn at 100,000 messages", "the same at none", 1.33),
    # Workers, in processes of their own. On PostgreSQL procrastinate assigns the runs.
    *(
        bar
        for key, store, start in (("", "", 250), ("postgres_", "PostgreSQL: ", 50))
        for bar in (
            Bar(f"workers.{key}two", f"{store}runs a second of two workers", "of one", 1.6, at_least=True),
            Bar(f"workers.{key}dispatch", f"{store}a run by `enqueue` and a worker", "less `send`", 5, unit="ms"),
            Bar(f"workers.{key}enqueue", f"{store}processor time of `enqueue`", "a bare `post`", 6),
            Bar(f"workers.{key}start", f"{store}median from `enqueue` to the model's call", "", start, unit="ms"),
            Bar(f"workers.{key}timers", f"{store}p99 of how late 1,000 timers ring within 10 s", "", 1, unit="s"),
            Bar(f"workers.{key}idle", f"{store}a worker that has nothing to do", "", 1, unit="% of a core"),
            Bar(
                f"workers.{key}sweep",
                f"{store}processor time of a look for killed runs while 5,000 run",
                "",
                50,
                unit="ms",
            ),
            Bar(f"workers.{key}fetch", f"{store}a look at what waits in 100,000 sessions", "in 100", 1.5),
        )
    ),
    Bar("workers.files_idle", "files: a worker that has nothing to do", "", 1, unit="% of a core"),
    Bar("workers.postgres_jobs", "PostgreSQL: a fetch of one of 100,000 jobs", "of 100", 1.5),
    Bar(
        "workers.postgres_commits",
        "PostgreSQL: transactions of a run, from `enqueue` to its answer",
        "",
        30,
        unit="transactions",
    ),
    Bar(
        "workers.postgres_crowd",
        "PostgreSQL: messages posted a second, 64 at once, with a job each",
        "the same without jobs",
        0.4,
        at_least=True,
    ),
    Bar("workers.postgres_dead", "PostgreSQL: dead rows that such a run leaves to vacuum", "", 20, unit="rows"),
    Bar("workers.postgres_bytes", "PostgreSQL: bytes on disk of such a run", "", 8_000, unit="bytes"),
    Bar("workers.postgres_wal", "PostgreSQL: write-ahead log of such a run", "", 24_000, unit="bytes"),
    Bar("workers.postgres_server", "PostgreSQL: the server's processor time of such a run", "", 10, unit="ms"),
    # The longest stall of an event loop, with a session of 100,000 messages.
    *(
        Bar(
            f"stalls.{key}", f"longest stall of the event loop while 100,000 messages are {done}", "", 50, 20, unit="ms"
        )
        for key, done in {
            "load": "loaded from the file",
            "compact": "compacted",
            "history": "read by `history()`",
            "export": "exported",
            "redact": "in a session of which one is redacted",
            "check": "checked by `fsck`",
            "import": "imported",
            "search": "searched for the first time",
        }.items()
    ),
    # Costs that should not grow. A verb that returns more for a longer past is counted for each thing that it returns.
    Bar("growth.undo", "`undo()` behind very many versions that change no view", "the same behind 200", 1.5),
    Bar("growth.record", "`record()` of very many runs, each", "the same of 100", 1.5),
    Bar("growth.history", "`history()` of very many runs, each", "the same of 100", 1.5),
    Bar("growth.adoptions", "`history()` with very many adoptions, each", "the same with 30", 1.5),
    Bar("growth.page", "a page of 20 runs of very many", "the same of 100", 1.5),
    Bar("growth.loop", "one run of very many", "the same of 100", 1.5),
    Bar("growth.events", "the last 50 events of very many runs", "the same of 100", 1.5),
    Bar("growth.fork", "a fork of a fork of a fork …, very deep", "the same at depth 6", 1.5),
    Bar("growth.fork_bytes", "bytes on disk of a fork of a fork of a fork …, very deep", "the same at depth 6", 1.5),
    # It returns the whole line that leads to the session.
    Bar("growth.ancestry", "`ancestry()` of a fork of a fork of …, very deep, each in its line", "the same of 6", 1.5),
    Bar("together.streams", "one of very many streams at once, 20 pieces each", "one of 10", 1.5),
    Bar("together.queued", "one of very many messages queued behind a run", "one of 20", 1.5),
    *(
        Bar(f"nested.{key}", f"`{key}` of a session with hundreds of nested compactions, each", "the same with 20", 1.5)
        for key in ("dump", "restore", "check", "redact")
    ),
    *(
        Bar(f"lists.{key}", f"a page of a very large list, {by}", "the same of 1,000 sessions", 1.5)
        for key, by in {
            "none": "all sessions",
            "agent": "by agent",
            "owner": "by owner",
            "tag": "by tag",
            "parent": "by parent",
            "status": "by status",
            "created_before": "by `created_before`",
            "created_after": "by `created_after`",
            "updated_before": "by `updated_before`",
            "metadata": "by metadata",
            "owner_metadata": "by owner and metadata of all sessions",
            "owner_tag": "by owner and tag",
            "owner_created": "by owner and `created_before`",
            "common_tag": "by owner and a tag of all sessions",
            "no_owner": "without an owner",
            "top_level": "without sub-agents",
            "order": "in the order of updates, by any filter",
        }.items()
    ),
    Bar("retention.nothing", "a round of retention by times that finds nothing, of 100,000", "the same of 1,000", 1.5),
    Bar("retention.nothing_page", "such a round in 100,000 sessions", "a page of 50 headers", 2.0, 1.0),
    Bar("retention.versions", "a worker's round by versions that finds nothing, of 100,000", "the same of 1,000", 1.5),
    Bar("retention.versions_page", "such a round in 100,000 sessions", "a page of 50 headers", 2.0, 1.0),
    Bar("retention.erase", "a round that erases 20 sessions of 100,000", "`delete_many` of 20 there", 1.5),
    Bar("lists.previews", "a page with titles and last words of a very large list", "the same of 1,000 sessions", 1.5),
    Bar("lists.postgres_previews", "PostgreSQL: such a page of a very large list", "the same of 1,000 sessions", 1.5),
    Bar(
        "lists.postgres_metadata",
        "PostgreSQL: a page of a very large list, by metadata, in either order",
        "the same of 1,000 sessions",
        1.5,
    ),
    Bar("lists.postgres", "PostgreSQL: a page of a very large list, by any filter", "the same of 1,000 sessions", 1.5),
    Bar(
        "lists.postgres_order",
        "PostgreSQL: a page of a very large list in the order of updates, by any filter",
        "the same of 1,000 sessions",
        1.5,
    ),
    # The longest waits during another session's maintenance.
    Bar("waits.load", "longest load of a short session beside `history()` of 100,000 messages", "", 20, unit="ms"),
    Bar("waits.save", "longest save while a small session of a large file is erased", "", 20, unit="ms"),
    Bar(
        "waits.postgres", "PostgreSQL: longest `send` while a message of another session is redacted", "", 20, unit="ms"
    ),
    # Forks, loads, compactions, searches, the command line.
    # A store with keys, on SQLite, compared with the same store without.
    Bar("encryption.save", "save of a turn, sealed", "the same, not sealed", 1.15),
    Bar("encryption.save_processor", "processor time of a save of a turn, sealed", "the same, not sealed", 1.3, 1.15),
    Bar("encryption.load", "processor time of a cold load of 100 messages, sealed", "the same, not sealed", 1.75),
    Bar("encryption.bytes", "bytes on disk of a turn, sealed", "the same, not sealed", 1.25),
    Bar("fork.100k", "a fork at 100,000 messages", "the same at 12", 1.3),
    Bar("fork.bytes", "bytes on disk of a fork at 100,000 messages", "", 1024, unit="bytes"),
    Bar("fork.load", "load of 10,000 messages from the file", "one SELECT and a msgspec decoder", 1.5),
    Bar("fork.view", "load of a view of 12 messages of 100,000 from the file", "the same of 12", 1.5),
    Bar("compaction.bytes", "bytes on disk of a compaction of 100,000 messages", "", 4096 + 310, unit="bytes"),
    Bar("compaction.cold", "open and `send` after 100,000 messages were compacted to 12", "the same with 12", 1.5),
    Bar("compaction.say", "save of a message over 500 nested compactions", "the same over 1", 1.3),
    Bar("compaction.nested", "compaction over 500 nested ones", "the same over 1", 1.3),
    Bar("compaction.nested_bytes", "bytes on disk of a compaction over 500 nested ones", "", 4096 + 256, unit="bytes"),
    Bar("search.save", "save of a turn where people search", "the same where nobody does", 1.1),
    *(
        Bar(f"search{store}{key}", f"{name}search for {what}", "", 50, unit="ms")
        for store, name in ((".", ""), (".postgres_", "PostgreSQL: "))
        for key, what in {
            "word": "a word in up to 10,000 messages",
            "words": "that word and one in all messages",
            "phrase": "the two as a phrase",
            "prefix": "a word that begins so, in up to 10,000 messages",
            "common": "a word in all messages",
            "session": "a word in all messages, in one session",
        }.items()
    ),
    # Other frameworks' turns on perdure, beside the framework's own store.
    *(
        bar
        for key, framework, theirs, slowest, most in (
            ("openai", "OpenAI Agents, as a run, view of 50", "`SQLiteSession`", 1.2, 1.5),
            ("openai_calls", "OpenAI Agents, calls of a run, view of 50", "`SQLiteSession`", 1.2, 1.5),
            ("langgraph", "LangGraph, as a run", "`AsyncSqliteSaver`", 0.3, 0.05),
            ("adk", "Google ADK", "`DatabaseSessionService`", 0.3, 1.5),
            ("adk_sqlite", "Google ADK", "`SqliteSessionService`", 0.3, 1.5),
            ("claude", "Claude Agent SDK", "Claude's own file of lines, without fsync", None, 1.5),
            ("pydantic", "Pydantic AI", "one JSON file, without fsync", 1, 1.5),
            ("strands", "Strands", "`FileSessionManager`, without fsync", 2, 1.5),
        )
        for bar in adapter_bars(key, framework, theirs, slowest, most)
    ),
    # The service, in one process, with its clients on the same machine.
    Bar("service.p99", "99 of 100 requests, at 200 a second beside 500 open streams", "", 150, unit="ms"),
    Bar("service.memory", "memory of the server after that", "the same before", 1.15),
    Bar("service.open", "a session of 100,000 messages and its first page over HTTP", "the same of 100", 1.5),
    Bar("service.page", "the page of a fork of 100,000 messages, as the model sees it", "the same of 100", 1.5),
    Bar("service.page_said", "the page of a fork of 100,000 messages, all that was said", "the same of 100", 1.5),
    Bar("service.page_own", "the page of a session of 100,000 messages, all that was said", "the same of 100", 1.5),
    Bar("redact.send", "send of 1 KB on SQLite with the default redactors", "the same without", 1.05),
    # Backups of a SQLite file.
    Bar("backup.full", "a first backup of a SQLite store", "a copy of the file, synced", 2, 1.5),
    Bar("backup.increment", "a backup after one turn", "a full one", 0.25, 0.15),
    Bar("backup.anew", "the same, when the write-ahead log was restarted since the last backup", "a full one", 0.75),
    Bar("backup.bytes", "bytes that a backup after one turn adds", "those of the first backup", 0.02),
    Bar("backup.beside", "a save while backups are made in the same process, median", "a save at other times", 1.5),
    Bar("cli.help", "`perdure --help`", "`python -c 'import click'`", 1.5),
    Bar("cli.list", "`perdure ls` of 10,000 sessions", "the same of 10", 1.5),
)
