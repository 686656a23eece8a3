"""Two directions in which the rows of a matrix differ most (PCA), by sums of integers alone.

The picture of an embedding is then as reproducible as the embedding: no library's eigenvectors,
whose last bits and signs differ from machine to machine.
"""

from math import inf

import numpy as np

from minigen.exact.arithmetic import (
    Floats,
    exact_matmul,
    exact_sum,
    grid_bits,
    largest_magnitude,
    round_to_grid,
)

_SQUARINGS = 16  # C^65536: a direction with 0.1 % more variance than the next still wins


def principal_coordinates(rows: Floats) -> tuple[Floats, tuple[float, float]]:
    """Coordinates of rows (U, D) along their two principal directions.

    Returns (coordinates (U, 2), the share of the variance along each). Where there is no second
    direction its coordinates are 0. Source: K. Pearson 1901; the largest eigenvector of C is what
    the columns of C², C⁴, C⁸, … turn to (power iteration by squaring).
    """
    count, width = rows.shape
    bits = grid_bits(max(count, width))
    integers, unit = round_to_grid(rows, bits)  # (U, D)
    totals = exact_sum(integers, axis=0)  # (D,)
    centered, fine_unit = round_to_grid(integers - np.rint(totals / count), bits)  # (U, D)
    covariance = exact_matmul(centered.T, centered)  # (D, D)
    trace = float(exact_sum(np.rint(np.diagonal(covariance) / width)) * width)
    coordinates, shares = np.zeros((count, 2)), []
    for axis in range(2):
        direction = _largest_direction(covariance, bits)  # (D,)
        grid, grid_step = round_to_grid(direction, bits)
        along = exact_matmul(centered, grid) * grid_step  # (U,)
        coordinates[:, axis] = along * (unit * fine_unit)
        squares, square_unit = round_to_grid(along * along, bits)
        variance = float(exact_sum(squares) * square_unit)
        shares.append(variance / trace if trace else 0.0)
        covariance = covariance - variance * direction[:, None] * direction
        if largest_magnitude(covariance) < trace * 2.0**-16:
            covariance = np.zeros_like(covariance)  # what was left is rounding
    return coordinates, (shares[0], shares[1])


def _largest_direction(matrix: Floats, bits: int) -> Floats:
    """Return the unit eigenvector (D,) of the largest eigenvalue; its largest entry is positive."""
    power = matrix
    for _ in range(_SQUARINGS):
        integers, _ = round_to_grid(power, bits)
        power = exact_matmul(integers, integers)
    column = power[:, int(np.argmax(np.diagonal(power)))]
    largest = largest_magnitude(column)
    if not 0 < largest < inf:
        return np.zeros(len(column))
    column = column / largest
    squares, unit = round_to_grid(column * column, bits)
    direction: Floats = column / np.sqrt(exact_sum(squares) * unit)
    sign: Floats = np.sign(direction[int(np.argmax(np.abs(direction)))])
    return direction * sign
