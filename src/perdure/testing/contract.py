"""The promises of a store, as test classes. Apply them to yours in three lines:

    class TestMyStore(StoreContract):
        def open_store(self, where):
            return MyStore(where / "sessions")

`where` is an empty directory (pytest's `tmp_path`), and `open_store` returns an async context manager. Set
`shared = True` if several processes may open the store there at once. The tests will do so.

If your store is also a `Journal`, add `JournalContract`: `class TestMyStore(StoreContract, JournalContract)`. Each
further port has a contract of its own: `SearchContract`, `ErasureContract`, `ArchiveContract`, `CheckContract`,
`AttachmentsContract`, `NamesContract`, `ChronicleContract`, `SketchContract`, `PreviewsContract`, `HeadsContract`,
`FindContract`, `VersionsContract`, `ForgetContract`, `RetentionContract`, `SaveAllContract`, `BulkErasureContract`,
`QueueContract` and `TokenContract`.

`HistoryContract` lets many clients use the store at once, and checks that their answers fit together.

The tests are plain functions and need no plugin. Each test checks that no thread outlives the store.
"""

from __future__ import annotations

from perdure.testing.parts.archiving import Archiving
from perdure.testing.parts.attaching import Attaching
from perdure.testing.parts.checking import Checking
from perdure.testing.parts.chronicles import Chronicles
from perdure.testing.parts.claims import Claims
from perdure.testing.parts.concurrency import Concurrency
from perdure.testing.parts.erasure import Erasure
from perdure.testing.parts.finding import Finding
from perdure.testing.parts.forgetting import Forgetting
from perdure.testing.parts.grouping import Grouping
from perdure.testing.parts.heading import Heading
from perdure.testing.parts.listing import Listing
from perdure.testing.parts.logs import Logs
from perdure.testing.parts.naming import Naming
from perdure.testing.parts.notes import Notes
from perdure.testing.parts.payloads import Payloads
from perdure.testing.parts.previewing import Previewing
from perdure.testing.parts.records import Records
from perdure.testing.parts.redaction import Redaction
from perdure.testing.parts.retaining import Retaining
from perdure.testing.parts.search import Searching
from perdure.testing.parts.sketches import Sketches
from perdure.testing.parts.timers import Timers
from perdure.testing.parts.together import Together
from perdure.testing.parts.tokens import Tokens
from perdure.testing.parts.trees import Trees
from perdure.testing.parts.version_lists import VersionLists
from perdure.testing.parts.versions import Versions
from perdure.testing.parts.views import Views
from perdure.testing.parts.waiting import Runners, Waits


class StoreContract(Versions, Views, Payloads, Listing, Erasure, Together):
    """The contract of `perdure.protocols.SessionStore`."""


class JournalContract(Claims, Records, Notes, Logs):
    """The contract of `perdure.protocols.Journal`, and of the logs to which a run writes ahead."""


class SearchContract(Searching):
    """The contract of `perdure.protocols.Search`, for a store with a journal."""


class ErasureContract(Redaction):
    """The contract of `perdure.protocols.Erasure`, for a store with a journal and a search."""


class ArchiveContract(Archiving):
    """The contract of `perdure.protocols.Archive`, for a store with a journal."""


class CheckContract(Checking):
    """The contract of `perdure.protocols.Checkable`, for a store with a journal."""


class AttachmentsContract(Attaching):
    """The contract of `perdure.protocols.Attachments`, for a store with a journal, erasure, archive and check."""


class NamesContract(Naming):
    """The contract of `perdure.protocols.Names`."""


class ChronicleContract(Chronicles):
    """The contract of `perdure.protocols.Chronicle` and `Lineage`, for a store with a journal."""


class SketchContract(Sketches):
    """The contract of `perdure.protocols.Sketchbook`, for a store with a journal, an erasure and an archive."""


class PreviewsContract(Previewing):
    """The contract of `perdure.protocols.Previews`, for a store with a journal and an erasure."""


class VersionsContract(VersionLists):
    """The contract of `perdure.protocols.Versions`."""


class HeadsContract(Heading):
    """The contract of `perdure.protocols.Heads`, for a store with a journal."""


class SaveAllContract(Grouping):
    """The contract of `perdure.protocols.SavesTogether`, for a store with a journal."""


class ForgetContract(Forgetting):
    """The contract of `perdure.protocols.Forgets`, for a store that also has the other ports."""


class RetentionContract(Retaining):
    """The contract of `perdure.protocols.Retains`: rules and holds, for a store that also has the other ports."""


class FindContract(Finding):
    """The contract of `perdure.protocols.FindsMessages`, for a store with a journal, an erasure and an archive."""


class BulkErasureContract(Trees):
    """The contract of `perdure.protocols.BulkErasure`, for a store with a journal and a check."""


class QueueContract(Waits, Runners, Timers):
    """The contract of `perdure.protocols.Queue`, for a store with a journal, an archive, a check and an erasure."""


class TokenContract(Tokens):
    """The contract of `perdure.protocols.TokenBook`, for a store with an erasure and a check."""


class HistoryContract(Concurrency):
    """The contract of linearizability: many clients get the answers that they would get one after the other."""
