"""Runs the server with less of something: python -m tests.server.limited_server NUM_FILES FILE_BYTES UNREAD_S [flags].

NUM_FILES: that it may open, until it asks for more. FILE_BYTES: no file gets longer; a write beyond is an OSError, as
on a full disk; -1: no such limit. UNREAD_S: so long a client may take nothing. $PAXPAGE_TEST_LOOKS, if set: the file
in which looks at the event loop are counted (see own_lag).
"""

import os
import resource
import sys
from pathlib import Path

from paxpage import serve
from paxpage.server import listen
from paxpage.server.signals import end_process
from tests.server.own_lag import count_looks


def limit(kind: int, number: int) -> None:
    """Sets a soft limit."""
    resource.setrlimit(kind, (number, resource.getrlimit(kind)[1]))


if __name__ == "__main__":
    limit(resource.RLIMIT_NOFILE, int(sys.argv[1]))
    limit(resource.RLIMIT_FSIZE, int(sys.argv[2]))
    listen.UNREAD_LIMIT_S = float(sys.argv[3])
    if "PAXPAGE_TEST_LOOKS" in os.environ:
        count_looks(Path(os.environ["PAXPAGE_TEST_LOOKS"]))
    end_process(serve.main([sys.argv[0], *sys.argv[4:]]))
