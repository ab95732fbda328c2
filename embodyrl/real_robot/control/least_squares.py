"""A step of damped least squares for seven joints, written out in plain floats.

For so few numbers numpy's overhead costs more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence


def damped_step(
    columns: Sequence[tuple[float, float, float, float, float, float]],
    rest: Sequence[float],
    error: Sequence[float],
    damping: float,
) -> list[float]:
    """The step x nearest to ``rest`` with J x nearest to ``error``.

    x = rest + J' y, where y solves (J J' + damping^2 I) y = error - J rest (Nakamura and Hanafusa,
    1986).

    Args:
        columns: of J (6, n).
        rest: (n,).
        error: (6,).
        damping: bounds x where J is singular.

    Returns:
        x (n,).
    """
    # The lower triangle of A = J J' + damping^2 I, and b = error - J rest.
    a10 = a20 = a30 = a40 = a50 = a21 = a31 = a41 = a51 = a32 = a42 = a52 = a43 = a53 = a54 = 0.0
    a00 = a11 = a22 = a33 = a44 = a55 = damping * damping
    b0, b1, b2, b3, b4, b5 = error
    for (u, v, w, x, y, z), share in zip(columns, rest, strict=True):
        a00 += u * u
        a10 += v * u
        a11 += v * v
        a20 += w * u
        a21 += w * v
        a22 += w * w
        a30 += x * u
        a31 += x * v
        a32 += x * w
        a33 += x * x
        a40 += y * u
        a41 += y * v
        a42 += y * w
        a43 += y * x
        a44 += y * y
        a50 += z * u
        a51 += z * v
        a52 += z * w
        a53 += z * x
        a54 += z * y
        a55 += z * z
        b0 -= u * share
        b1 -= v * share
        b2 -= w * share
        b3 -= x * share
        b4 -= y * share
        b5 -= z * share
    # Cholesky's decomposition without roots, A = L D L': the rows of L, and d = 1 / D; c is L D.
    d0 = 1.0 / a00
    l10 = a10 * d0
    d1 = 1.0 / (a11 - l10 * a10)
    l20 = a20 * d0
    c21 = a21 - l20 * a10
    l21 = c21 * d1
    d2 = 1.0 / (a22 - l20 * a20 - l21 * c21)
    l30 = a30 * d0
    c31 = a31 - l30 * a10
    l31 = c31 * d1
    c32 = a32 - l30 * a20 - l31 * c21
    l32 = c32 * d2
    d3 = 1.0 / (a33 - l30 * a30 - l31 * c31 - l32 * c32)
    l40 = a40 * d0
    c41 = a41 - l40 * a10
    l41 = c41 * d1
    c42 = a42 - l40 * a20 - l41 * c21
    l42 = c42 * d2
    c43 = a43 - l40 * a30 - l41 * c31 - l42 * c32
    l43 = c43 * d3
    d4 = 1.0 / (a44 - l40 * a40 - l41 * c41 - l42 * c42 - l43 * c43)
    l50 = a50 * d0
    c51 = a51 - l50 * a10
    l51 = c51 * d1
    c52 = a52 - l50 * a20 - l51 * c21
    l52 = c52 * d2
    c53 = a53 - l50 * a30 - l51 * c31 - l52 * c32
    l53 = c53 * d3
    c54 = a54 - l50 * a40 - l51 * c41 - l52 * c42 - l53 * c43
    l54 = c54 * d4
    d5 = 1.0 / (a55 - l50 * a50 - l51 * c51 - l52 * c52 - l53 * c53 - l54 * c54)
    # Solve L D L' y = b, first by the rows of L and then by its columns.
    b1 -= l10 * b0
    b2 -= l20 * b0 + l21 * b1
    b3 -= l30 * b0 + l31 * b1 + l32 * b2
    b4 -= l40 * b0 + l41 * b1 + l42 * b2 + l43 * b3
    b5 -= l50 * b0 + l51 * b1 + l52 * b2 + l53 * b3 + l54 * b4
    y5 = b5 * d5
    y4 = b4 * d4 - l54 * y5
    y3 = b3 * d3 - l43 * y4 - l53 * y5
    y2 = b2 * d2 - l32 * y3 - l42 * y4 - l52 * y5
    y1 = b1 * d1 - l21 * y2 - l31 * y3 - l41 * y4 - l51 * y5
    y0 = b0 * d0 - l10 * y1 - l20 * y2 - l30 * y3 - l40 * y4 - l50 * y5
    return [
        share + u * y0 + v * y1 + w * y2 + x * y3 + y * y4 + z * y5
        for (u, v, w, x, y, z), share in zip(columns, rest, strict=True)
    ]
