"""Commands whose process begins in a state that the test chooses.

subprocess's preexec_fn would do it too, but its code runs between fork and exec, where a process
with threads, as JAX and Arrow start, may crash or hang.
"""

import resource
import signal
import sys
from collections.abc import Sequence

_BEGIN = """
import os, resource, signal, sys
signal.signal(signal.SIGINT, signal.Handlers(int(sys.argv[1])))
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
os.execv(sys.argv[3], sys.argv[3:])
"""


def beginning(
    command: Sequence[str],
    sigint: signal.Handlers = signal.SIG_DFL,
    address_space: int = resource.RLIM_INFINITY,
) -> list[str]:
    """Returns a command that runs `command` with a handler of SIGINT and a limit on its memory."""
    begin = [sys.executable, "-ISc", _BEGIN]
    return [*begin, str(int(sigint)), str(address_space), *map(str, command)]
