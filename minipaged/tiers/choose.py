"""Chooses the tier that computes, by name or by what is installed."""

from __future__ import annotations

import importlib.util
import sys

from minipaged.errors import InvalidRequest
from minipaged.tiers import devices
from minipaged.tiers.device_tier import DeviceTier
from minipaged.tiers.fast import FastTier
from minipaged.tiers.reference import ReferenceTier

NEEDED_BY_FAST = ("torch", "numba")
"""Packages that the fast tier needs. With a GPU it needs triton as well."""
HOW_TO_GET_FAST = (
    "install minipaged with its extra 'fast' "
    f"(in a clone: {sys.executable} -m pip install -c constraints.txt -e '.[fast]')"
)


def choose_tier(name: str, device: str = "auto", dtype: str = "auto") -> DeviceTier:
    """Return the tier `name`, computing on `device` in `dtype`. Raises InvalidRequest if that is impossible here.

    "auto" is the fast tier if its packages are installed and it supports the dtype, else the reference tier.
    """
    check_names(name, dtype)
    missing = missing_for_fast()
    if name == "fast" or (name == "auto" and not missing and dtype in (*FastTier.DTYPES, "auto")):
        return FastTier.on(device, dtype)
    try:
        chosen = ReferenceTier.on(device, dtype)
    except InvalidRequest as error:
        if name == "reference" or not missing:
            raise
        raise InvalidRequest(f"{error}; the fast tier, not installed here, supports more: {HOW_TO_GET_FAST}") from None
    if name == device == "auto" and missing and dtype in (*FastTier.DTYPES, "auto") and devices.has_nvidia_gpu():
        print(f"the GPU is not used: the fast tier is not installed; {HOW_TO_GET_FAST}", file=sys.stderr)
    return chosen


def check_names(name: str, dtype: str) -> None:
    """Raise InvalidRequest for an unknown tier or dtype, or for a tier that is not installed."""
    if name not in ("auto", "reference", "fast"):
        raise InvalidRequest(f"tier is {name!r}; choose 'reference', 'fast' or 'auto'")
    missing = missing_for_fast()
    if name == "fast" and missing:
        raise InvalidRequest(
            f"the fast tier needs {' and '.join(missing)}, not installed here; {HOW_TO_GET_FAST}, "
            "or use tier='reference'"
        )
    if dtype not in ("auto", *FastTier.DTYPES, *ReferenceTier.DTYPES):
        known = sorted({*FastTier.DTYPES, *ReferenceTier.DTYPES})
        raise InvalidRequest(f"dtype is {dtype!r}; choose auto, {', '.join(known)}")


def missing_for_fast() -> list[str]:
    """The packages that the fast tier needs and that are missing here."""
    return [package for package in NEEDED_BY_FAST if importlib.util.find_spec(package) is None]
