"""Assignment 7: quantize. Write the four methods; everything you need is in handout.md.

minipaged grade quantize starter.py
"""

import numpy as np  # noqa: F401  (you will need it)


class Quantizer:
    """Quantizes weights to codes of a few bits. In a group with scale s and zero z, a code q means (q - z) * s."""

    def __init__(self, bits, symmetric):
        """bits: the bits of a code, 2 to 8. symmetric: whether the middle code means 0 in every group."""
        self.bits = bits
        self.symmetric = symmetric

    def pack(self, codes):
        """Pack codes [rows, count] uint8 into bytes [rows, count * bits / 8, rounded up] uint8, without gaps between
        codes."""
        raise NotImplementedError

    def unpack(self, packed, count):
        """Unpack bytes [rows, bytes] uint8 into codes [rows, count] uint8."""
        raise NotImplementedError

    def round_to_nearest(self, groups):
        """Round each weight of groups [rows, groups, size] float32 to the grid of its group.

        Returns codes [rows, groups, size] uint8, scales [rows, groups] float16, zeros [rows, groups] uint8.
        """
        raise NotImplementedError

    def round_column(self, weights, U, scales, zeros):
        """Round the first column of weights [rows, columns] float32, and compensate in the other columns.

        U [columns, columns] float32 is upper triangular; U.T @ U is the inverse of the inputs' X.T @ X. The grid of row
        r has scales[r] (float16) and zeros[r] (uint8).

        Returns codes [rows] uint8 of the first column, and the other columns [rows, columns - 1] float32.
        """
        raise NotImplementedError
