"""State pruning: low-activity states or heads are measured, removed for good, bridged and saved; see docs/pruning.md."""

from .blocks import KINDS, Block, find_blocks
from .bridge import Bridge
from .files import is_pruned, load, load_language_model, save
from .score import SCORES, Activity, score_magnitude, score_random
from .structure import Kept, choose, cut, prune

__all__ = ["KINDS", "SCORES", "Activity", "Block", "Bridge", "Kept", "choose", "cut", "find_blocks", "is_pruned", "load",
           "load_language_model", "prune", "save", "score_magnitude", "score_random"]
