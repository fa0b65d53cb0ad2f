"""How many files a process may have open: all that the system allows, not what it begins with.

A partition takes two, a connection one. Many systems let a process begin with 1024, for programs
that use select(2), and have it ask for more; past that number the log of any partition that begins
a segment would stop, since somebody else opened connections.
"""

import logging
import resource
from typing import Final

FEW: Final = 10_000
"""Fewer than this are worth a word: limits of partitions and connections promise more."""
log = logging.getLogger(__name__)


def allow_open_files() -> int:
    """Raise the soft limit to the hard one; return what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (OSError, ValueError) as error:
        log.warning("the limit of open files stays at %s: %s", soft, error)
    if 0 <= soft < FEW:
        log.warning("no more than %s files may be open: partitions take two, connections one", soft)
    return soft
