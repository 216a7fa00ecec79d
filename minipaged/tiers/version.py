"""Which minipaged this is."""

from __future__ import annotations

from importlib import metadata


def own_version() -> str:
    """Its version; "a checkout" where its files are here and it is not installed."""
    try:
        return metadata.version("minipaged")
    except metadata.PackageNotFoundError:
        return "a checkout"
