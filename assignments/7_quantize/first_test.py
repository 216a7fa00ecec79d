"""A first test of your quantizer: `pytest`, in this folder. More of them are yours to write."""

import numpy as np
from quantize import Quantizer


def test_what_is_packed_comes_back():
    quantizer = Quantizer(bits=3, symmetric=False)
    codes = np.array([[0, 7, 5, 2, 1]], dtype=np.uint8)  # [rows, count]
    packed = quantizer.pack(codes)
    assert packed.shape == (1, 2)  # 15 bits
    assert (quantizer.unpack(packed, 5) == codes).all()
