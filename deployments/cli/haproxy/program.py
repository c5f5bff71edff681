"""The program that Serve starts as HAProxy: edits the files that Serve wrote, then becomes HAProxy.

Before each start and reload, Serve writes HAProxy's configuration, an error page and the Lua script
of the routing hook (`routing/haproxy_hook.py`). It has no settings for what EDITS changes. An edit
whose expected text is missing changes nothing; its `otherwise` says how remora behaves then.
`tests/deployments/test_ray_private.py` compares the expected texts with the installed Ray.

Beyond EDITS the program overwrites the error page 500.http, which Serve's configuration names for
502, 503 and 504, and puts the function that ADD_HEADERS calls at the top of the Lua script. Where
HAProxy has died, it keeps the routes of that one until Serve reloads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from remora.deployments.cli.haproxy.certificates import BUNDLE, bind_options, write_certificates
from remora.deployments.cli.haproxy.choice import BINARY, find_binary
from remora.deployments.cli.haproxy.watch import RUNNING, STOP_GAP
from remora.deployments.http.core.http_protocol import HEAD_TIMEOUT_S
from remora.deployments.routing.haproxy_hook import PATH_HEADER, TRUNCATED_HEADER
from remora.deployments.tls import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One edit of the lines that match `expected`.

    reason:     why Serve's text does not do
    expected:   sed's basic regular expression
    command:    sed's command; may contain {folder}, {host}, {https}, {head_ms}, {body_ms},
                {status}, {hints}
    otherwise:  what happens where no line matches
    """

    reason: str
    expected: str
    command: str
    otherwise: str

    def sed(self, **values: object) -> str:
        """Return the edit as a line of a sed script."""
        return f"/{self.expected}/{self.command.format(**values)}\n"


CONFIG_EDITS = (
    Edit(
        reason="A request that could not be routed is served by fewest connections, not refused.",
        expected="http-request return .*ingress_request_router_failed",
        command="d",
        otherwise="Such a request gets 503 in plain text.",
    ),
    Edit(
        reason="So is one routed to a replica that HAProxy does not know yet or any more.",
        expected="use_backend .*ingress_request_router_failed",
        command="d",
        otherwise="Such a request passes through Serve's Python proxy.",
    ),
    Edit(
        reason="A body that is routed by has limits.body_timeout_s to arrive; uploads have more.",
        expected="wait-for-body time [0-9]*s if METH_POST",
        command="s#time [0-9]*s if#time {body_ms}ms if !{{ path_end /files }}#",
        otherwise="A body, uploads included, has Serve's 5 s to arrive.",
    ),
    Edit(
        reason="Heads that never end would take all connections.",
        expected="timeout client [0-9]*s",
        command=r"s#^\( *\)timeout client .*#&\n\1timeout http-request {head_ms}ms#",
        otherwise="A head has the hour that an answer has.",
    ),
    Edit(
        reason="HAProxy 2.8 does not notice that a client has left whose body came after its head.",
        expected="option splice-request",
        command="d",
        otherwise="The whole answers of such clients run on to their last token.",
    ),
    Edit(
        reason="A request that arrives too slowly gets an error in JSON.",
        expected="errorfile 503 .*",
        command=r"s#^\( *\)errorfile 503 .*#&\n\1errorfile 408 {folder}/slow.http#",
        otherwise="It gets HAProxy's HTML page.",
    ),
    Edit(
        reason="Counters for Prometheus need not reach further than the server itself.",
        expected="bind :[0-9]",
        command="s#bind :#bind {host}:#",
        otherwise="They can be read on all interfaces.",
    ),
    Edit(
        reason="Nor need the page of statistics.",
        expected="bind [*]:[0-9]",
        command="s#bind [*]:#bind {host}:#",
        otherwise="It can be read on all interfaces.",
    ),
)
# Applied only to a server with HTTPS: the program does not start HAProxy without it.
HTTPS = Edit(
    reason="Serve's HAProxy speaks plain HTTP only.",
    expected="^frontend http_frontend",
    command=r",/^ *bind /s#^\( *\)bind .*#& {https}\n"
    r"\1http-request set-header x-forwarded-proto https#",
    otherwise="The server does not start.",
)
# Applied with status 503 while no application has a route, with 404 afterwards.
NO_ROUTE = Edit(
    reason="A path without a backend gets an error in JSON.",
    expected="http-request return status 404 content-type text[/]plain",
    command="s#http-request .*#http-request return status {status} content-type application/json "
    "file {folder}/{status}.json {hints}#",
    otherwise="It gets Serve's 404 in plain text.",
)
# The request to the routing service ends with the request's id, so lines after it are headers.
ADD_HEADERS = Edit(
    reason="The routing service needs the path and the client's headers.",
    expected="response = call_router",
    command='s#request_id)#(request_id or "-") .. further_headers(txn))#',
    otherwise="Policies that read prompts route by load, and the routing service logs that.",
)

# A new HAProxy of Serve's knows no routes at first; if another one died, those of that one hold.
# It takes the port over from a stop-gap (`cli/haproxy/watch.py`).
_SCRIPT = """\
#!/bin/sh
ours='{folder}'
config="$3"  # of: -db -f CONFIG
folder="$(dirname "$config")"
cp "$ours/failed.http" "$folder/500.http"
has_routes() {{ grep -q '^ *use_backend ' "$config"; }}
case " $* " in *" -sf "*) is_reload=1 ;; *) is_reload= ;; esac
if [ -z "$is_reload" ] && [ -f "$ours/routed.cfg" ] && ! has_routes; then
  cp "$ours/routed.cfg" "$config"
else
  if has_routes; then status=404; else status=503; fi
  sed -i -f "$ours/$status.sed" -f "$ours/config.sed" "$config"
  if has_routes; then cp "$config" "$ours/routed.cfg"; fi
fi
if [ -f "$ours/{bundle}" ] && ! grep -q "ssl crt $ours" "$config"; then
  echo "remora: HTTPS cannot be added to this version of Serve's configuration" >&2
  exit 1
fi
lua="$folder/ingress_request_router.lua"
if [ -f "$lua" ] && ! grep -q further_headers "$lua"; then
  sed -i -f "$ours/lua.sed" "$lua"
  cat "$ours/headers.lua" "$lua" > "$lua.ours"
  mv "$lua.ours" "$lua"
fi
printf '%s %s' "$$" "$config" > "$ours/{running}.draft"
mv "$ours/{running}.draft" "$ours/{running}"
if [ -f "$ours/{stop_gap}" ]; then set -- "$@" -sf "$(cat "$ours/{stop_gap}")"; fi
exec '{binary}' "$@"
"""

_HEADERS_LUA = """\
local LEFT_OUT = {{
  ["host"] = true, ["connection"] = true, ["content-length"] = true, ["content-type"] = true,
  ["transfer-encoding"] = true, ["expect"] = true, ["upgrade"] = true, ["te"] = true,
  ["trailer"] = true, ["keep-alive"] = true, ["x-request-id"] = true,
  ["{truncated_header}"] = true, ["{path_header}"] = true,
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

_ERRORS = {
    404: "There is nothing at this path.",
    503: "No model is served: the server is starting or stopping. Please try again.",
}
_HINTS = {
    404: {"x-should-retry": "false"},
    408: {"x-should-retry": "false"},
    503: {"retry-after": "1", "x-should-retry": "true"},
}


def install_haproxy_program(
    folder: Path, *, host: str, body_timeout_s: float, tls: Tls | None = None
) -> str:
    """Write the program and its files into a folder, and make Serve start it as HAProxy.

    Returns the path of HAProxy itself.

    folder:          of this run
    host:            address that the server listens on
    body_timeout_s:  time that HAProxy waits for the part of a body that requests are routed by
    tls:             None = plain HTTP
    """
    edits: tuple[Edit, ...] = CONFIG_EDITS
    https = ""
    if tls is not None:
        write_certificates(folder, tls)
        edits, https = (*edits, HTTPS), bind_options(folder, tls)
    values = {
        "https": https,
        "host": host,
        "head_ms": round(HEAD_TIMEOUT_S * 1000),
        "body_ms": round(body_timeout_s * 1000),
    }
    slow = (
        f"The request did not arrive in time: its headers have {HEAD_TIMEOUT_S:g} s and its body "
        f"{body_timeout_s:g} s; send it faster, or in parts."
    )
    binary = find_binary()
    assert binary is not None  # `choose_proxy` has found it
    names = {"running": RUNNING, "stop_gap": STOP_GAP, "bundle": BUNDLE}
    files = {
        "failed.http": _page(503, "No replica could answer. Please try again."),
        "slow.http": _page(408, slow),
        "config.sed": "".join(edit.sed(folder=folder, **values) for edit in edits),
        "lua.sed": ADD_HEADERS.sed(),
        "headers.lua": _HEADERS_LUA.format(
            truncated_header=TRUNCATED_HEADER, path_header=PATH_HEADER
        ),
        "haproxy": _SCRIPT.format(folder=folder, binary=binary, **names),
    }
    for status, message in _ERRORS.items():
        hints = " ".join(f"hdr {name} {value}" for name, value in _HINTS[status].items())
        files[f"{status}.json"] = _error(status, message)
        files[f"{status}.sed"] = NO_ROUTE.sed(folder=folder, status=status, hints=hints)
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    program = folder / "haproxy"
    program.chmod(0o700)
    os.environ[BINARY] = str(program)
    return binary


def _error(status: int, message: str) -> str:
    """Return an error's JSON body."""
    from remora.deployments.http.core.errors import answer_to_status, shape
    from remora.deployments.http.core.wire import dumps

    return dumps(shape(message, answer_to_status(status))).decode()


def _page(status: int, message: str) -> str:
    """Return a whole HTTP response, which HAProxy sends byte by byte."""
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
