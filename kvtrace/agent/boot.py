"""Which clock this process has: two with the same name have the same one.

On Linux ``perf_counter_ns`` counts from the boot of the kernel, in every container alike, but for time
namespaces with offsets of their own.
"""

from __future__ import annotations

import os

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_TIME_NAMESPACE = "/proc/self/ns/time"
_INITIAL = 0xEFFFFFFA
"""The inode of the time namespace that a kernel starts with (PROC_TIME_INIT_INO)."""


def boot() -> str:
    """The kernel's boot id, with the time namespace where that is another than the first one; "" unknown."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            ident = file.read(100).strip()
    except (OSError, ValueError):
        return ""
    return ident and ident + _namespace()


def _namespace() -> str:
    try:
        inode = os.stat(_TIME_NAMESPACE).st_ino
    except OSError:  # kernels before 5.6 have one clock
        return ""
    return "" if inode == _INITIAL else f"/{inode}"
