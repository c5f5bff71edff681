"""The program that Serve starts as HAProxy: edits what Serve has written for it, then becomes it.

Serve writes the configuration, an error page and the routing hook (`routing/haproxy_hook.py`)
anew each time before it starts the program, and has no settings for what is edited here:

- HAProxy's own errors (no replica, one that died, no such path, a slow body) look like all others.
- A chooser is shown the path and the client's headers too.
- Where a chooser does not answer, or names a replica that HAProxy does not know, the request goes
  on as if there were none, instead of being refused.
- A body that a chooser is to be shown has the time that bodies have. Uploads have more, and are
  nothing to choose by.

An edit that finds nothing to edit is none: later versions of Ray may write other things.
"""

from __future__ import annotations

import os
from http import HTTPStatus
from pathlib import Path

from remora.deployments.cli.haproxy import BINARY, find_binary
from remora.deployments.routing.haproxy_hook import CUT_HEADER, PATH_HEADER

_SCRIPT = """\
#!/bin/sh
ours='{folder}'
config="$3"  # of: -db -f CONFIG
folder="$(dirname "$config")"
cp "$ours/failed.http" "$folder/500.http"
if grep -q '^ *use_backend ' "$config"; then answer=unknown; else answer=nobody; fi
sed -i -f "$ours/$answer.sed" -f "$ours/config.sed" "$config"
lua="$folder/ingress_request_router.lua"
if [ -f "$lua" ] && ! grep -q further_headers "$lua"; then
  sed -i -f "$ours/lua.sed" "$lua"
  cat "$ours/asking.lua" "$lua" > "$lua.ours"
  mv "$lua.ours" "$lua"
fi
exec '{binary}' "$@"
"""

_CONFIG = r"""
/http-request return .*ingress_request_router_failed/d
/use_backend .*ingress_request_router_failed/d
/wait-for-body/s#time [0-9]*s if METH_POST#time {body_ms}ms if !{{ path_end /v1/files }} METH_POST#
s#^\( *\)errorfile 503 .*#&\n\1errorfile 408 {folder}/slow.http#
"""

# Serve's question ends with the request's id: what is written behind that are further headers.
_LUA = """
/response = call_router/s#request_id)#(request_id or "-") .. further_headers(txn))#
"""
_FURTHER = """\
local LEFT_OUT = {{
  ["host"] = true, ["connection"] = true, ["content-length"] = true, ["content-type"] = true,
  ["transfer-encoding"] = true, ["expect"] = true, ["upgrade"] = true, ["te"] = true,
  ["trailer"] = true, ["keep-alive"] = true, ["x-request-id"] = true,
  ["{cut_header}"] = true, ["{path_header}"] = true,
}}
local function further_headers(txn)
  local lines = {{ "", "{path_header}: " .. (txn.sf:path() or "") }}
  for name, values in pairs(txn.http:req_get_headers()) do
    if not LEFT_OUT[name] then
      for _, value in pairs(values) do lines[#lines + 1] = name .. ": " .. value end
    end
  end
  return table.concat(lines, "\\r\\n")
end
"""


def use_our_program(folder: Path, *, body_timeout_s: float) -> None:
    """Make the program, and tell Serve of it.

    folder:          of this run
    body_timeout_s:  in which the part of a body that a chooser is shown must have come
    """
    body_ms = round(body_timeout_s * 1000)
    slow = f"The body did not arrive in {body_timeout_s:g} s; send it faster, or in parts."
    files = {
        "failed.http": _page(503, "No replica could answer. Please try again."),
        "slow.http": _page(408, slow),
        "nobody.sed": _answer(folder, 503, "No model is served yet. Please try again."),
        "unknown.sed": _answer(folder, 404, "There is nothing at this path."),
        "config.sed": _CONFIG.format(folder=folder, body_ms=body_ms),
        "lua.sed": _LUA,
        "asking.lua": _FURTHER.format(cut_header=CUT_HEADER, path_header=PATH_HEADER),
        "haproxy": _SCRIPT.format(folder=folder, binary=find_binary()),
    }
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    program = folder / "haproxy"
    program.chmod(0o700)
    os.environ[BINARY] = str(program)


_HINTS = {
    404: {"x-should-retry": "false"},
    408: {"x-should-retry": "false"},
    503: {"retry-after": "1", "x-should-retry": "true"},
}


def _error(status: int, message: str) -> str:
    """Return the body of an error of ours."""
    from remora.deployments.http.core.errors import answer_to_status, shape
    from remora.deployments.http.core.wire import dumps

    return dumps(shape(message, answer_to_status(status))).decode()


def _page(status: int, message: str) -> str:
    """Return a whole answer, as HAProxy sends it byte by byte."""
    body = _error(status, message)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body.encode())),
        **_HINTS[status],
        "cache-control": "no-cache",
        "connection": "close",
    }
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join((*lines, "", body))


def _answer(folder: Path, status: int, message: str) -> str:
    """Return the edit that puts an answer of ours in the place of Serve's for unknown paths."""
    (folder / f"{status}.json").write_text(_error(status, message))
    hints = " ".join(f"hdr {name} {value}" for name, value in _HINTS[status].items())
    return (
        "s#http-request return status 404 content-type text/plain.*#http-request return status "
        f"{status} content-type application/json file {folder}/{status}.json {hints}#\n"
    )
