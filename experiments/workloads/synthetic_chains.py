"""Graphs that are made up like peptides: a chain of residues with side chains, whose labels ask for pairs that are far apart.

Residues of types 2 c and 2 c + 1 are the motifs of label c, and partners like to be neighbours. So neither a motif nor a pair
says what the label is; how far apart the pair is says it, which is more than messages of a few layers reach.
"""

import numpy as np

HOPS = 15  # a label's pair is farther apart
_HOPS_PER_RESIDUE = 3
_BACKBONE, _ALPHA, _CARBONYL = 4, 1, 2  # N, the carbon that the side chain hangs on, the one that goes on, and O
_PARTNERS = 0.5  # of residues that could be, are the partner of the one before

# OGB's numbers of elements, hybridisations and bonds
_CARBON, _NITROGEN, _OXYGEN = 5, 6, 7
_VALENCE = np.array([0, 0, 0, 0, 0, 4, 3, 2])
_SP2, _SP3 = 1, 2
_SINGLE, _DOUBLE, _AROMATIC = 0, 1, 3

_STEMS = (1, 2, 3, 4)
_FORKS = ((), (_CARBON, _CARBON), (_CARBON, _NITROGEN, _OXYGEN))
_RINGS = ((_CARBON,) * 4, (_NITROGEN,) + (_CARBON,) * 4)


class SyntheticChains:
    """Chains by number, the same whoever asks.

    A side chain is a stem of one to four atoms that ends as it is, in two or three leaves, or in a ring of five or six: twenty
    types, of which the last residue type, glycine, has none.

    Args:
        labels: at most ten.
        nodes: of a graph, the fewest and the most.
        seed: of the chains.
    """

    def __init__(self, labels: int, nodes: tuple[int, int], seed: int):
        self.labels, self.nodes, self.seed = labels, nodes, seed
        residues = [_residue(stem, ending, ending in _RINGS) for stem in _STEMS for ending in (*_FORKS, *_RINGS)]
        residues.append(_residue(0, (), False))
        self.sizes = np.array([len(residue["element"]) for residue in residues])
        self.tables = {name: np.array([residue[name] + [0] * (self.sizes.max() - len(residue[name])) for residue in residues])
                       for name in ("element", "parent", "bond", "ring")}  # [types, atoms]
        # each motif twice in a chain, or, where there is no room for that, as often as any other type
        motif = min(1 / len(residues), 2 * self.sizes.mean() / np.mean(nodes))
        motifs, others = 2 * labels, len(residues) - 2 * labels
        self.shares = np.repeat([motif, (1 - motifs * motif) / others], [motifs, others])

    def types(self, number: int) -> np.ndarray:
        """(residues,), the type of each along the chain."""
        random = np.random.default_rng([self.seed, number])
        fewest, most = self.nodes
        atoms = random.integers(fewest + self.sizes.max(), most + 1)
        types = random.choice(len(self.shares), size=atoms // _BACKBONE, p=self.shares)
        follows = (types[:-1] < 2 * self.labels) & (random.random(len(types) - 1) < _PARTNERS)
        types[1:] = np.where(follows, types[:-1] ^ 1, types[1:])
        return types[self.sizes[types].cumsum() <= atoms]

    def spans(self, types: np.ndarray) -> np.ndarray:
        """(labels,), the most hops from a motif of each label to its partner, both at their alpha carbons; 0 without a pair."""
        found = types == np.arange(2 * self.labels)[:, None]  # [motifs, residues]
        first, last = found.argmax(1), len(types) - 1 - found[:, ::-1].argmax(1)
        apart = np.maximum(last[::2] - first[1::2], last[1::2] - first[::2])
        return _HOPS_PER_RESIDUE * np.where(found.any(1).reshape(-1, 2).all(1), apart, 0)

    def graph(self, number: int) -> dict[str, np.ndarray]:
        """A chain's x (nodes, 9), edge_index (2, edges) and edge_attr (edges, 3), and its spans (labels,), all int64.

        Columns and categories are those of OGB's molecules; a bond is two edges, one each way.
        """
        types = self.types(number)
        sizes = self.sizes[types]
        start = sizes.cumsum() - sizes  # of each residue
        residue = np.repeat(np.arange(len(types)), sizes)
        place = np.arange(len(residue)) - start[residue]
        element, parent, bond, ring = (table[types[residue], place] for table in self.tables.values())
        before = np.where(place == 0, start[residue - 1] + _CARBONYL, start[residue] + parent)
        (closing,) = np.nonzero(ring > 1)  # the last atoms of rings
        bonds = np.concatenate([np.stack([before, np.arange(len(residue))])[:, 1:],
                                np.stack([closing, closing + 1 - ring[closing]])], 1)
        edges = np.concatenate([bonds, bonds[::-1]], 1)

        degree = np.bincount(edges[0], minlength=len(residue))
        in_plane = (ring > 0) | ((place < _BACKBONE) & (place != _ALPHA))
        x = np.zeros((len(residue), 9), np.int64)
        x[:, 0], x[:, 1], x[:, 2] = element, (place == _ALPHA) & (sizes[residue] > _BACKBONE), degree  # the second: chirality
        x[:, 4] = np.maximum(_VALENCE[element] - degree - in_plane, 0)  # hydrogens
        x[:, 6], x[:, 7], x[:, 8] = np.where(in_plane, _SP2, _SP3), ring > 0, ring > 0
        edge_attr = np.zeros((bonds.shape[1], 3), np.int64)
        edge_attr[:, 0] = np.append(bond[1:], np.full(len(closing), _AROMATIC))
        edge_attr[:, 2] = in_plane[bonds].all(0)  # conjugated
        return {"x": x, "edge_index": edges, "edge_attr": np.tile(edge_attr, (2, 1)), "spans": self.spans(types)}


def _residue(stem: int, ending: tuple[int, ...], is_ring: bool) -> dict[str, list[int]]:
    """The backbone, the stem and what ends it, atom by atom: its element, the atom that it hangs on and by which bond, and of a
    ring 1, or if it closes the ring that one's size.
    """
    tip = _BACKBONE + stem - 1
    of_ending = range(tip, tip + len(ending)) if is_ring else [tip] * len(ending)
    in_ring = [0] * (tip + 1) + [int(is_ring)] * len(ending)
    if is_ring:
        in_ring[tip], in_ring[-1] = 1, len(ending) + 1
    return {
        "element": [_NITROGEN, _CARBON, _CARBON, _OXYGEN] + [_CARBON] * stem + list(ending),
        "parent": [0, 0, _ALPHA, _CARBONYL, *[_ALPHA, *range(_BACKBONE, tip)][:stem], *of_ending],
        "bond": [_SINGLE, _SINGLE, _SINGLE, _DOUBLE] + [_SINGLE] * stem + [_AROMATIC if is_ring else _SINGLE] * len(ending),
        "ring": in_ring}
