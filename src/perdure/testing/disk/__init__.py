"""A disk that can be watched, made to fail, and cut off from its power. It needs Linux and a C compiler.

environment = preloaded(directory, log)       # for a process that writes below the directory
operations = read_recording(log)              # what it has written and synced, in order
disk = Disk()                                 # the same disk, simulated
for operation in operations[:cut]: disk.apply(operation)
write_files(disk.after_cut(random.Random(seed)), elsewhere)
"""

from perdure.testing.disk.library import SHORT, Switch, is_available, preloaded
from perdure.testing.disk.recording import Kind, Operation, read_recording
from perdure.testing.disk.simulated import Disk, Ignored, write_files

__all__ = [
    "SHORT",
    "Disk",
    "Ignored",
    "Kind",
    "Operation",
    "Switch",
    "is_available",
    "preloaded",
    "read_recording",
    "write_files",
]
