"""The tiers by name. This is the only package that chooses between the two tiers, `reference/` and `fast/`.

All packages above get a tier's parts here, and the weights and the runner that compute on a device.
"""

from __future__ import annotations

from minipaged.tiers.choose import check_names, choose_tier, missing_for_fast
from minipaged.tiers.device_tier import DeviceTier, has_static_scales, kept_as
from minipaged.tiers.fast import FastTier, fast_tier, give_back_unused
from minipaged.tiers.reference import (
    ReferenceTier,
    plain_parts,
    reference_draw,
    reference_logprobs,
    reference_penalties,
    reference_quantizer,
    reference_tier,
)

__all__ = [
    "DeviceTier",
    "FastTier",
    "ReferenceTier",
    "check_names",
    "choose_tier",
    "fast_tier",
    "give_back_unused",
    "has_static_scales",
    "kept_as",
    "missing_for_fast",
    "plain_parts",
    "reference_draw",
    "reference_logprobs",
    "reference_penalties",
    "reference_quantizer",
    "reference_tier",
]
