"""The former import path of the Serve proxy callback, accepted for one version.

The path is now `remora.deployments.http.core.serve_proxy:middlewares`.
"""

from remora.deployments.http.core.serve_proxy import middlewares

__all__ = ["middlewares"]
