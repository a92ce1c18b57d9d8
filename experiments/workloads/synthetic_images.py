"""Images that are made up, for training without a data set: a striped shape on a plain ground, at random places and in noise.

The class says which shape it is, how its stripes run and which colours it has. All else is drawn: place, size and angle of the
shape, width of the stripes, light and noise.
"""

import math

import numpy as np

_PALETTES = np.array([  # the ground's colour and those of both stripes, from 16 to 207, which leaves room for light and noise
    [[24, 24, 40], [200, 60, 40], [200, 180, 60]],
    [[180, 180, 170], [30, 60, 150], [60, 170, 200]],
    [[40, 90, 40], [200, 200, 190], [120, 40, 130]],
    [[150, 110, 60], [20, 20, 20], [60, 180, 90]],
    [[110, 40, 60], [90, 110, 200], [200, 150, 170]],
])
_ORIENTATIONS = 5
_SHAPES = 4  # disc, square, triangle, cross
LARGEST = len(_PALETTES) * _ORIENTATIONS * _SHAPES
_JITTER = 0.25  # of a step from one orientation to the next, so that they stay apart
_LIGHT, _NOISE = 16, 32


class SyntheticImages:
    """Images by number.

    Args:
        classes: from 2 to 100; class c has palette c % 5, stripes across c // 5 % 5 fifths of half a turn, and shape c // 25.
        size: pixels of a side.
        seed: of what is drawn.
    """

    def __init__(self, classes: int, size: int, seed: int):
        self.classes, self.size, self.seed = classes, size, seed
        self._along = np.linspace(-1, 1, size, dtype=np.float32)

    def image(self, number: int) -> tuple[np.ndarray, int]:
        """Pixels, (size, size, 3) uint8, and their class."""
        random = np.random.default_rng([self.seed, number])
        label = int(random.integers(self.classes))
        rest, palette = divmod(label, len(_PALETTES))
        shape, orientation = divmod(rest, _ORIENTATIONS)

        turn, radius = random.uniform(0, 2 * math.pi), random.uniform(0.5, 0.8)
        u, v = (self._coordinate(turn + quarter, 1 / radius, random.uniform(-0.3, 0.3)) for quarter in (0, math.pi / 2))
        angle = math.pi / _ORIENTATIONS * (orientation + random.uniform(-_JITTER, _JITTER))
        stripe = np.floor(self._coordinate(angle, random.uniform(3, 5), random.random())).astype(np.int8) & 1
        part = np.where(_inside(shape, u, v), 1 + stripe, 0)

        colours = (_PALETTES[palette] + random.integers(-_LIGHT, _LIGHT, 3, endpoint=True)).astype(np.uint8)
        noise = np.frombuffer(random.bytes(3 * self.size**2), np.uint8).reshape(self.size, self.size, 3)
        return colours.take(part, 0) + noise % _NOISE, label

    def _coordinate(self, angle: float, scale: float, shift: float) -> np.ndarray:
        """(size, size) fp32, which grows in the direction of the angle, by `scale` from the image's middle to its side."""
        x, y = (np.float32(scale * part) * self._along for part in (math.cos(angle), math.sin(angle)))
        return (x + np.float32(shift)) + y[:, None]


def _inside(shape: int, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Where the shape is, in coordinates in which it reaches from about -1 to 1."""
    if shape == 0:
        return u * u + v * v < 0.9
    if shape == 1:
        return np.maximum(abs(u), abs(v)) < 0.8
    if shape == 2:
        return np.maximum(v, np.float32(0.75**0.5) * abs(u) - v / 2) < 0.6
    return (np.minimum(abs(u), abs(v)) < 0.35) & (np.maximum(abs(u), abs(v)) < 1)
