"""Keys for encryption at rest, in a file of their own: data keys, each wrapped by a master key.

The file is not part of any store, nor of its backups. When an owner's data key is destroyed here, all that was sealed
with it is erased everywhere.
"""

from perdure.keys.ciphers import cipher
from perdure.keys.masters import new_master
from perdure.keys.ring import FileKeyRing, KeyInfo, ring_at

__all__ = ["FileKeyRing", "KeyInfo", "cipher", "new_master", "ring_at"]
