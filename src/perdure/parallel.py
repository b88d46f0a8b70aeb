"""Several branches of one session at a time, and the strategies that choose one of them."""

from perdure.actions.adopt import AdoptBranch
from perdure.actions.parallel import SendParallel
from perdure.loop.strategies import Branch, Chosen, FewestTokens, First, Judge, LongestAnswer

__all__ = ["AdoptBranch", "Branch", "Chosen", "FewestTokens", "First", "Judge", "LongestAnswer", "SendParallel"]
