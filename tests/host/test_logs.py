"""How servers log the warnings of libraries."""

from __future__ import annotations

import json
import subprocess
import sys

COMPLAINTS = """
import logging
from grpc._cython.cygrpc import ExecuteBatchError
from omnistage.host.logs import configure_logs
configure_logs("info", "json")
for what in ("SendStatusFromServerOperation", "SendMessageOperation"):
    try:
        raise ExecuteBatchError(f'Failed "execute_batch": (<grpc._cython.cygrpc.{what} object>,)')
    except ExecuteBatchError:
        logging.getLogger("grpc._cython.cygrpc").exception("raised in core")
logging.getLogger("grpc._cython.cygrpc").error("SendStatusFromServerOperation, without an exception")
"""


def test_a_status_that_nobody_waited_for_is_no_error_and_all_else_is() -> None:
    ended = subprocess.run([sys.executable, "-c", COMPLAINTS], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    with_traceback, without = map(json.loads, ended.stderr.splitlines())
    assert "SendMessageOperation" in with_traceback["exception"] and with_traceback["level"] == "error"
    assert without["event"] == "SendStatusFromServerOperation, without an exception"
