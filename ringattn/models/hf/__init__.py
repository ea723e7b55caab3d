"""Models of the transformers library over sequences that are spread over ranks, in loops and trainers of all kinds."""

from ringattn.models.hf.generate import RanksCache
from ringattn.models.hf.memory import in_pieces
from ringattn.models.hf.model import plan_of, prepare, prepared, unprepare, whole
from ringattn.models.hf.trainer import OverRanks, over_ranks
from ringattn.models.pieces import keep_attention

__all__ = [
    "OverRanks", "RanksCache", "in_pieces", "keep_attention", "over_ranks", "plan_of", "prepare", "prepared",
    "unprepare", "whole",
]  # fmt: skip
