"""A first test of your part: `pytest`, in this folder. More of them are yours to write."""

from speculative import Speculative


def test_a_token_stands_and_the_next_is_replaced():
    speculative = Speculative(4)
    p = [[0.5, 0.25, 0.25], [0.0, 0.25, 0.75], [1.0, 0.0, 0.0]]
    q = [[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]
    # u[0] = 0.375 is below 0.25 / 0.5; p[1] never has token 0, and has only token 2 more often than q[1].
    assert list(speculative.verify(p, q, [1, 0], [0.375, 0.0], [0.1, 0.1, 0.1])) == [1, 2]
