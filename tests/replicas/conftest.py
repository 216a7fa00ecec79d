"""Clients as those of a single server."""

from tests.serve.harness import no_certificates

__all__ = ["no_certificates"]
