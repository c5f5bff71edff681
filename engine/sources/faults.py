"""Why files of a source cannot be had. Users of the room turn these into errors of their own.

SourceFault        the files are at fault, or access is; another attempt does not help
  SourceMissing    there is nothing under this name
SourceUnreachable  a network, a limit or another process is in the way; try again later
  SourceOffline    the environment forbids the network
"""

from __future__ import annotations


class SourceFault(Exception):
    """Another attempt does not help."""


class SourceMissing(SourceFault):
    """There is nothing under this name."""


class SourceUnreachable(Exception):
    """Another attempt may help."""


class SourceOffline(SourceUnreachable):
    """The environment forbids the network."""
