"""Graphs that are made up like superpixels of pictures: points all over drawn digits, each with edges from its nearest.

A digit has the segments of a seven-segment display, turned, sheared, scaled and moved at random.
"""

import numpy as np
import torch

STYLES = 2  # palettes of objects in colour: a digit's class is 1 + digit + 10 style
_SEGMENTS = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")  # of digits 0 to 9
_ENDS = {"a": (-1, 2, 1, 2), "b": (1, 2, 1, 0), "c": (1, 0, 1, -2), "d": (-1, -2, 1, -2), "e": (-1, 0, -1, -2),
         "f": (-1, 2, -1, 0), "g": (-1, 0, 1, 0)}
_GLYPHS = [np.array([_ENDS[segment] for segment in segments]).reshape(-1, 2, 2) / 2 for segments in _SEGMENTS]
_STROKE = 0.2  # half of its width, of a digit that is 1 wide and 2 high
_STEPS = np.array([0.7548776662466927, 0.5698402909980532])  # fill a square evenly: Roberts 2018, R2
_COLOURS = np.array([[0.8, 0.5, 0.2], [0.2, 0.5, 0.8]])  # of the styles
_NOISE, _JITTER = 0.1, 0.2  # of colours; of places, in distances between neighbours


class SyntheticSuperpixels:
    """Pictures by number, the same whoever asks.

    Args:
        nodes: of a picture, the fewest and the most.
        neighbours: from which each node has edges.
        seed: of the pictures.
    """

    def __init__(self, nodes: tuple[int, int], neighbours: int, seed: int):
        self.nodes, self.neighbours, self.seed = nodes, neighbours, seed

    def digit(self, number: int) -> dict[str, np.ndarray]:
        """A grey picture of one digit, as MNIST's superpixels.

        Returns:
            x: (nodes, 1), the intensity, and pos: (nodes, 2), both fp32; edge_index: (2, edges) int64; edge_attr: (edges,)
            fp32, how near nodes are; y: (1,) int64, the digit.
        """
        random = np.random.default_rng([self.seed, number])
        pos = self._points(random)
        digit = random.integers(10)
        off = _distances(pos, _place_digit(random, digit, (0.5, 0.5), 0.35))
        intensity = np.clip(1.5 - off, 0, 1) + _NOISE * random.standard_normal(len(pos))
        edges, squares = self._edges(pos)
        return {"x": intensity[:, None].astype(np.float32), "pos": pos.astype(np.float32), "edge_index": edges,
                "edge_attr": np.exp(-squares / squares.mean()).astype(np.float32), "y": np.array([digit])}

    def scene(self, number: int) -> dict[str, np.ndarray]:
        """A coloured picture of one to four digits, as PascalVOC's superpixels in the LRGB benchmark.

        Returns:
            x: (nodes, 14) fp32, mean, deviation, maximum and minimum of red, green and blue, and the place; edge_index:
            (2, edges) int64; edge_attr: (edges, 2) fp32, the colours' difference and how near nodes are; y: (nodes,) int64, 0
            for the ground, or the class of the object, of which later ones hide earlier ones.
        """
        random = np.random.default_rng([self.seed, number])
        pos = self._points(random)
        y, colour = np.zeros(len(pos), np.int64), np.tile(random.random(3), (len(pos), 1))
        for _ in range(random.integers(1, 5)):
            digit, style = random.integers(10), random.integers(STYLES)
            on = _distances(pos, _place_digit(random, digit, random.uniform(0.2, 0.8, 2), random.uniform(0.1, 0.3))) < 1
            y[on], colour[on] = 1 + digit + 10 * style, _COLOURS[style]
        colour += _NOISE * random.standard_normal(colour.shape)
        deviation = _NOISE * random.random(colour.shape)
        edges, squares = self._edges(pos)
        difference = np.abs(colour[edges[0]] - colour[edges[1]]).mean(1)
        x = np.concatenate([colour, deviation, colour + 2 * deviation, colour - 2 * deviation, pos], 1)
        edge_attr = np.stack([difference, np.exp(-squares / squares.mean())], 1)
        return {"x": x.astype(np.float32), "edge_index": edges, "edge_attr": edge_attr.astype(np.float32), "y": y}

    def _points(self, random: np.random.Generator) -> np.ndarray:
        """(nodes, 2), in the unit square."""
        count = random.integers(self.nodes[0], self.nodes[1] + 1)
        jitter = _JITTER / np.sqrt(count) * random.standard_normal((count, 2))
        return (random.random(2) + np.arange(count)[:, None] * _STEPS + jitter) % 1

    def _edges(self, pos: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(2, edges), from a neighbour to the node, and the square of each one's length."""
        x, y = torch.from_numpy(pos.T)
        squares = ((x[:, None] - x).square_() + (y[:, None] - y).square_()).fill_diagonal_(np.inf)
        nearest = squares.topk(self.neighbours, largest=False)  # five times as fast as numpy's partition
        target = np.repeat(np.arange(len(pos)), self.neighbours)
        return np.stack([nearest.indices.flatten().numpy(), target]), nearest.values.flatten().numpy()


def _place_digit(random: np.random.Generator, digit: int, centre: tuple[float, float], size: float) -> tuple[np.ndarray, float]:
    """The digit's segments, (segments, 2, 2), in the square, and half the width of its stroke there."""
    turn, shear, scale = random.uniform(-0.3, 0.3), random.uniform(-0.2, 0.2), size * random.uniform(0.8, 1.2)
    pose = scale * np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]) @ np.array([[1, shear], [0, 1]])
    return _GLYPHS[digit] @ pose.T + centre + 0.05 * random.standard_normal(2), _STROKE * scale


def _distances(pos: np.ndarray, glyph: tuple[np.ndarray, float]) -> np.ndarray:
    """(nodes,), of each to the nearest segment, in half widths of the stroke."""
    segments, width = glyph
    begin, along = segments[:, 0], segments[:, 1] - segments[:, 0]
    offset = pos[:, None] - begin  # [nodes, segments, 2]
    fraction = np.clip((offset * along).sum(-1) / (along**2).sum(-1), 0, 1)
    return np.sqrt(((offset - fraction[..., None] * along) ** 2).sum(-1)).min(1) / width
