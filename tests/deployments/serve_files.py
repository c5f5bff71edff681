"""The files that the installed Serve writes for HAProxy, rendered from its own templates."""

from __future__ import annotations

import string
from importlib.resources import files

from jinja2 import Environment
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE


def haproxy_config() -> str:
    """Return Serve's configuration of HAProxy for an application with a routing service."""
    server = {"name": "s", "host": "127.0.0.1", "port": 30001}
    backend = {
        "name": "http-app",
        "path_prefix": "/",
        "app_name": "app",
        "servers": [server],
        "ingress_request_router_servers": [server],
        "fallback_server": {"name": "p", "host": "127.0.0.1", "port": 8500},
    }
    environment = Environment()
    environment.filters["haproxy_fmt"] = str
    return environment.from_string(HAPROXY_CONFIG_TEMPLATE).render(
        config={
            "error_file_path": "/x/500.http",
            "timeout_connect_s": 1,
            "timeout_client_s": 3600,
            "frontend_host": "127.0.0.1",
            "frontend_port": 8000,
            "metrics_port": 9101,
            "stats_port": 8404,
        },
        backends=[backend],
        backends_with_health_config=[{"backend": backend, "health_config": {}}],
        route_info={},
        has_ingress_request_router=True,
        ingress_request_router_forward_body=True,
        ingress_request_router_timeout_s=5,
    )


def routing_script() -> str:
    """Return the Lua script of the routing hook."""
    template = files("ray.serve._private").joinpath("ingress_request_router.lua.tmpl").read_text()
    return string.Template(template).safe_substitute()
